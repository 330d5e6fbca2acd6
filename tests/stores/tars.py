"""Small tars of samples, and what is in them."""

import io
import json
import tarfile

import cv2
import numpy as np


def npy(array):
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def png(image):
    return cv2.imencode(".png", np.ascontiguousarray(image.transpose(1, 2, 0)[..., ::-1]))[1].tobytes()


def write_tar(path, members, mode="w", **options):
    with tarfile.open(path, mode, **options) as tar:
        for name, data in members:
            info = name if isinstance(name, tarfile.TarInfo) else tarfile.TarInfo(name)
            info.size = info.size or len(data)
            tar.addfile(info, io.BytesIO(data))
    return str(path)


def samples(prefix, count, seed=0, size=(4, 5)):
    rng = np.random.default_rng(seed)
    members, items = [], []
    for step in range(count):
        image = rng.integers(0, 256, (3, *size), np.uint8)
        pose = rng.standard_normal(6).astype(np.float32)
        members += [
            (f"{prefix}{step:06d}.png", png(image)),
            (f"{prefix}{step:06d}.pose.npy", npy(pose)),
            (f"{prefix}{step:06d}.cls", str(step).encode()),
            (f"{prefix}{step:06d}.json", json.dumps({"x": step / 2, "ok": True}).encode()),
        ]
        items.append(
            {
                "png": image,
                "pose.npy": pose,
                "cls": np.int64(step),
                "json": {"x": np.float64(step / 2), "ok": np.bool_(True)},
            }
        )
    return members, items
