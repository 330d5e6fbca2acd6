"""Writes what tensordict 0.15 writes; a test in an environment with tensordict compares them byte by byte."""

import json
import pathlib

import numpy as np
import torch

KIND = {"_format_version": 1, "_class": "tensordict:TensorDict"}
ENCODED = {"a/b": "a%2Fb", "..": "%2E%2E", "white space": "white%20space"}


class Texts(list):
    """One a step, as `NonTensorStack` holds them."""


class Constant:
    """What holds for all steps, as `NonTensorData` does."""

    def __init__(self, data):
        self.data = data


def write_json(folder, content, **options):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "meta.json").write_text(json.dumps(content, **options))


def save(folder, tree, batch):
    folder, meta = pathlib.Path(folder), {}
    folder.mkdir(parents=True, exist_ok=True)
    for key, value in tree.items():
        place = folder / ENCODED.get(key, key)
        if isinstance(value, dict):
            save(place, value, batch)
            meta[key] = {"type": "TensorDict"}
        elif isinstance(value, Texts):
            content = {"_type": "<class 'tensordict.tensorclass.NonTensorStack'>", "_format_version": 1}
            content |= {"_class": "tensordict:NonTensorStack", "stack_dim": 0, "device": None, "data": list(value)}
            write_json(place, content, separators=(",", ":"))
            meta[key] = {"type": "NonTensorStack"}
        elif isinstance(value, Constant):
            content = {"_type": "<class 'tensordict.tensorclass.NonTensorData'>", "data": value.data}
            write_json(place, content | {"_metadata": None, "_is_non_tensor": True})
            meta[key] = {"type": "NonTensorData"}
        else:
            tensor = torch.as_tensor(value)
            meta[key] = {"device": "cpu", "shape": list(tensor.shape), "dtype": str(tensor.dtype), "is_nested": False}
            if tensor.numel():
                flat = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
                pathlib.Path(f"{place}.memmap").write_bytes(flat.tobytes())
    meta |= {"shape": list(batch), "device": "cpu", "_type": "<class 'tensordict._td.TensorDict'>"}
    write_json(folder, meta | KIND)
    return folder


def recording(steps=61, seed=0):
    """A TensorDict of episodes, as torchrl collects them: numbers of many dtypes, nested, texts."""
    rng = np.random.default_rng(seed)
    done = np.zeros((steps, 1), bool)
    done[[19, 19, 26, steps - 4]] = True
    return {
        "pixels": rng.integers(0, 256, (steps, 3, 4, 5), np.uint8),
        "action": torch.arange(steps * 2, dtype=torch.bfloat16).reshape(steps, 2),
        "nothing": np.zeros((steps, 0), np.float32),
        "next": {"reward": rng.standard_normal((steps, 1)), "done": done, "deep": {"a/b": np.arange(steps)}},
        "collector": {"traj_ids": 7 - np.cumsum(np.concatenate(([0], done[:-1, 0])))},
        "task": Texts(f"step {step}, é" for step in range(steps)),
        "robot": Constant("arm"),
    }


def steps_of(tree, steps):
    def item(value, step):
        if isinstance(value, dict):
            return {key: item(child, step) for key, child in value.items() if not isinstance(child, Constant)}
        return value[step]

    return [item(tree, step) for step in range(steps)]
