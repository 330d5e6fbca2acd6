"""Folders of images are read as videos: in order, whole, from anywhere; what is broken is named."""

import base64
import os
import struct

import cv2
import numpy as np
import pytest

from stream_dataloader import StreamDataLoader, StreamDataset
from stream_dataloader.errors import ReadError, StoreError
from stream_dataloader.streams import Limits
from stream_dataloader.streams.images import ImageFolderStream
from stream_dataloader.testing import StreamContract

HEIGHT, WIDTH = 24, 32


def picture(number, height=HEIGHT, width=WIDTH):
    """An image that tells its number: BGR, its red is ten times it."""
    image = np.empty((height, width, 3), np.uint8)
    image[...] = (50, 100, number * 10 % 256)
    return image


def write(path, image):
    path.parent.mkdir(parents=True, exist_ok=True)
    ok, data = cv2.imencode(path.suffix, image)
    assert ok
    path.write_bytes(bytes(data))
    return path


def write_folder(folder, numbers, name="frame{}.png"):
    for number in numbers:
        write(folder / name.format(number), picture(number))
    return folder


def numbers_of(stream):
    return [round(float(image[0].mean()) / 10) for image in stream]


class TestFolders(StreamContract):
    @pytest.fixture(params=[{}, {"layout": "HWC"}, {"dtype": "float32"}, {"frame_step": 3}, {"color": "gray"}])
    def open_stream(self, request):
        return ImageFolderStream(size=(12, 20), fit="letterbox", **request.param)

    @pytest.fixture
    def sources(self, tmp_path):
        clip = write_folder(tmp_path / "clip", range(9, 22))
        write(clip / "frame12.png", picture(12, 50, 40))
        return [clip, (clip, 2, 8), str(write_folder(tmp_path / "ünï", range(1, 3), "{:03}.jpg")), (clip, 5, 5)]


@pytest.mark.parametrize("name", ["link.png", "up.png"])
def test_links_lead_nowhere_else(tmp_path, name):
    (folder := write_folder(tmp_path / "data" / "clip", range(2))).joinpath("kept.png").symlink_to("frame1.png")
    write(tmp_path / "data" / "private.png", picture(9))
    assert numbers_of(ImageFolderStream()(folder)) == [0, 1, 1]
    (folder / name).symlink_to({"link.png": tmp_path / "data/private.png", "up.png": "../private.png"}[name])
    for read in (ImageFolderStream(), ImageFolderStream().length):
        with pytest.raises(StoreError, match=rf"{name}, a link to .*private.png, outside of .*files='anywhere'"):
            read(folder)
    assert numbers_of(ImageFolderStream(files="anywhere")(folder)) == [0, 1, 1, 9]
    assert numbers_of(ImageFolderStream()(str(folder / "frame*"))) == [0, 1]  # nothing is asked of others
    (tmp_path / "named").symlink_to(folder)  # by the user
    assert numbers_of(ImageFolderStream(pattern="frame*")(tmp_path / "named")) == [0, 1]
    with pytest.raises(ValueError, match="files is 'all'"):
        ImageFolderStream(files="all")


class TestOwnSize(StreamContract):
    """Without a size, the source's first image decides, wherever reading starts."""

    num_workers = (0,)

    @pytest.fixture
    def open_stream(self):
        return ImageFolderStream(on_corrupt="keep", dtype="float32", layout="HWC")

    @pytest.fixture
    def sources(self, tmp_path):
        clip = write_folder(tmp_path / "clip", range(8))
        write(clip / "frame3.png", picture(3, 50, 40))
        for number in (4, 5):
            (clip / f"frame{number}.png").write_bytes(b"no image")
        return [clip]


def test_numbers_are_sorted_as_numbers_and_others_left_out(tmp_path):
    clip = write_folder(tmp_path / "clip", [0, 1, 2, 9, 10, 11, 20])
    (clip / "notes.txt").write_text("about")
    (clip / ".frame3.png").write_bytes(b"a leftover")
    (clip / "old.png").mkdir()
    assert numbers_of(ImageFolderStream()(clip)) == [0, 1, 2, 9, 10, 11, 20]
    assert numbers_of(ImageFolderStream()(clip, start=5)) == [11, 20]
    assert list(ImageFolderStream()(clip, start=7)) == []
    assert ImageFolderStream(frame_step=3).length((clip, 1, None)) == 2
    assert numbers_of(ImageFolderStream(frame_step=3)((clip, 1, None))) == [1, 10]


def test_patterns_in_the_source_and_the_factory(tmp_path, monkeypatch):
    clip = write_folder(tmp_path / "clip", range(3), "left_{:04}.png")
    write_folder(clip, range(3, 8), "right_{:04}.png")
    write_folder(clip, [9], "right_{}.png")
    assert numbers_of(ImageFolderStream()(clip / "left_*.png")) == [0, 1, 2]
    assert numbers_of(ImageFolderStream()(f"{clip}/right_%04d.png")) == [3, 4, 5, 6, 7]
    assert sorted(numbers_of(ImageFolderStream()(f"{clip}/right_%d.png"))) == [3, 4, 5, 6, 7, 9]
    assert numbers_of(ImageFolderStream(pattern="left_*")((clip, 1, 3))) == [1, 2]
    monkeypatch.chdir(clip)
    assert numbers_of(ImageFolderStream()("left_*.png")) == [0, 1, 2]
    write_folder(tmp_path / "100%d[x]", [5])  # a folder's name is taken as it is
    assert numbers_of(ImageFolderStream()(tmp_path / "100%d[x]")) == [5]


#: 2 x 2 indexed pixels: red, green, blue, white.
PALETTE = base64.b64decode(
    b"iVBORw0KGgoAAAANSUhEUgAAAAIAAAACCAMAAABFaP0WAAAADFBMVEX/AAAA/wAA"
    b"AP/////7AGD2AAAADklEQVR4nGNgYGRgYgYAABEAB56iKhIAAAAASUVORK5CYII="
)


def jpeg_turned(image, orientation=6):
    """A JPEG whose EXIF says how to hold it."""
    entry = struct.pack("<HHIHH", 0x0112, 3, 1, orientation, 0)
    exif = b"Exif\0\0" + b"II*\0" + struct.pack("<IH", 8, 1) + entry + struct.pack("<I", 0)
    data = bytes(cv2.imencode(".jpg", image)[1])
    return data[:2] + b"\xff\xe1" + struct.pack(">H", len(exif) + 2) + exif + data[2:]


def test_pixel_formats(tmp_path):
    deep = (np.arange(256, dtype=np.uint16) * 257).reshape(16, 16)
    write(tmp_path / "deep.png", deep)
    write(tmp_path / "deep.tif", cv2.merge([deep, deep, deep]))
    write(tmp_path / "clear.png", cv2.merge([*cv2.split(picture(7)), np.zeros((HEIGHT, WIDTH), np.uint8)]))
    write(tmp_path / "gray.png", picture(3)[..., 2])
    (tmp_path / "palette.png").write_bytes(PALETTE)
    (tmp_path / "turned.jpg").write_bytes(jpeg_turned(picture(7)))

    def read(name, **options):
        return next(iter(ImageFolderStream(**options)(tmp_path / f"{name}*")))

    for image in ImageFolderStream()(tmp_path / "deep*"):
        assert image.tolist() == [(deep >> 8).tolist()] * 3
    assert read("clear")[:, 0, 0].tolist() == [70, 100, 50]
    assert read("gray")[:, 0, 0].tolist() == [30, 30, 30]
    assert read("gray", color="gray").shape == (1, HEIGHT, WIDTH)
    assert read("palette", layout="HWC").tolist() == [[[255, 0, 0], [0, 255, 0]], [[0, 0, 255], [255, 255, 255]]]
    turned = read("turned")
    assert turned.shape == (3, WIDTH, HEIGHT)
    assert np.abs(turned[:, 5, 5].astype(int) - [70, 100, 50]).max() <= 3


@pytest.mark.parametrize("suffix", [".jpg", ".png", ".bmp", ".webp", ".tif"])
def test_a_truncated_image_is_named(tmp_path, suffix):
    noise = np.random.default_rng(0).integers(0, 256, (HEIGHT, WIDTH, 3), np.uint8)
    path = write(tmp_path / f"1{suffix}", noise)
    for part in (0.99, 0.6, 0.2):
        os.truncate(path, int(path.stat().st_size * part))
        with pytest.raises(ValueError, match=str(path)):
            next(iter(ImageFolderStream()(tmp_path)))


def test_jpegs_are_judged_by_their_own_end(tmp_path):
    """A thumbnail in EXIF has an end too, and cameras append to the end of the image."""
    image = np.random.default_rng(0).integers(0, 256, (HEIGHT, WIDTH, 3), np.uint8)
    data, thumbnail = (bytes(cv2.imencode(".jpg", one)[1]) for one in (image, image[:8, :8]))
    with_thumbnail = data[:2] + b"\xff\xe1" + struct.pack(">H", len(thumbnail) + 2) + thumbnail + data[2:]
    progressive = bytes(
        cv2.imencode(".jpg", image, [cv2.IMWRITE_JPEG_PROGRESSIVE, 1, cv2.IMWRITE_JPEG_RST_INTERVAL, 1])[1]
    )
    (tmp_path / "0.jpg").write_bytes(with_thumbnail)
    (tmp_path / "1.jpg").write_bytes(progressive)
    (tmp_path / "2.jpg").write_bytes(data + b"\xff\xda a film that belongs to it")
    assert len(list(ImageFolderStream()(tmp_path))) == 3
    for whole in (with_thumbnail, progressive):
        for cut in (1, 2, 100):
            (tmp_path / "1.jpg").write_bytes(whole[:-cut])
            with pytest.raises(ValueError, match=r"1.jpg is cut short"):
                list(ImageFolderStream()(tmp_path))


def test_broken_images_are_named_also_when_written_in_place(tmp_path):
    clip = write_folder(tmp_path / "clip", range(6))
    (clip / "frame4.png").write_bytes(b"")
    dataset = StreamDataset([clip], ImageFolderStream(), batch_size=1, time_steps=3)
    for workers in (0, 1):
        batches = iter(StreamDataLoader(dataset, num_workers=workers))
        assert next(batches).mask.all()
        with pytest.raises(ReadError, match=r"item 4, lane 0.*frame4.png is empty, a file of zero bytes"):
            next(batches)


def test_keep_delivers_the_image_before(tmp_path):
    clip = write_folder(tmp_path / "clip", range(6))
    for number in (2, 3):
        (clip / f"frame{number}.png").write_bytes(b"no image")
    keep = ImageFolderStream(on_corrupt="keep")
    assert numbers_of(keep(clip)) == [0, 1, 1, 1, 4, 5]
    assert numbers_of(keep(clip, start=3)) == [1, 4, 5]
    with pytest.raises(ValueError, match=r"frame2.png cannot be decoded.*no image before it"):
        list(keep((clip, 2, None)))
    (clip / "frame4.png").unlink()
    stream = keep(clip)
    (clip / "frame5.png").unlink()
    with pytest.raises(FileNotFoundError, match=r"frame5.png was there when its folder was listed, and is gone"):
        list(stream)


def test_gaps_are_allowed_or_refused(tmp_path):
    clip = write_folder(tmp_path / "clip", [8, 9, 11], "shot2_{:02}.png")
    assert numbers_of(ImageFolderStream()(clip)) == [8, 9, 11]
    with pytest.raises(ValueError, match=r"10 is missing before .*shot2_11.png; gaps='allow'"):
        ImageFolderStream(gaps="raise")(clip)
    assert ImageFolderStream(gaps="raise").length(write_folder(tmp_path / "whole", range(8, 12))) == 4
    write(tmp_path / "whole" / "title.png", picture(0))
    with pytest.raises(ValueError, match=r"title.png has no number"):
        ImageFolderStream(gaps="raise")(tmp_path / "whole")


def test_bad_sources(tmp_path):
    clip = write_folder(tmp_path / "clip", range(3))
    (tmp_path / "empty").mkdir()
    missing, wrong = ("nowhere", "nowhere/*.png"), ("empty", "clip/*.jpg", "clip/%05d.png")
    kinds = dict.fromkeys(missing, FileNotFoundError) | dict.fromkeys(wrong, ValueError)
    for source, error in (kinds | {"clip/frame0.png": NotADirectoryError}).items():
        for ask in (ImageFolderStream(), ImageFolderStream().length):
            with pytest.raises(error, match=source.partition("/")[0]):
                ask(tmp_path / source)
    for section in ((clip, 1, 4), (clip, 5, None)):
        with pytest.raises(ValueError, match=f"images {section[1]} to"):
            ImageFolderStream()(section)


def test_unreadable(folder_of_nobody):
    clip = write_folder(folder_of_nobody / "clip", range(3))
    (clip / "frame1.png").chmod(0)
    with pytest.raises(PermissionError, match=r"frame1.png"):
        list(ImageFolderStream()(clip))


def test_images_that_opencv_would_change_are_refused(tmp_path):
    floats = np.linspace(0, 1, HEIGHT * WIDTH, dtype=np.float32).reshape(HEIGHT, WIDTH)
    for suffix in (".pfm", ".tiff"):
        write(tmp_path / f"depth{suffix}", floats)
        with pytest.raises(ValueError, match=f"depth{suffix} .*float32|32 bits"):
            list(ImageFolderStream()(tmp_path / f"*{suffix}"))
    small = write_folder(tmp_path / "small", range(2))
    assert len(list(ImageFolderStream(limits=Limits(picture_pixels=HEIGHT * WIDTH))(small))) == 2
    with pytest.raises(ValueError, match=r"Limits\(picture_pixels"):
        list(ImageFolderStream(limits=Limits(picture_pixels=HEIGHT * WIDTH - 1))(small))
    header = b"P5\n100000 100000\n255\n"
    (tmp_path / "huge.pgm").write_bytes(header + bytes(100))
    with pytest.raises(ValueError, match=r"huge.pgm is 100000 x 100000"):
        list(ImageFolderStream()(tmp_path / "*.pgm"))
