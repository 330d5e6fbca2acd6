"""Small episodes as robots' data sets have them, and HDF5 files of them."""

import h5py
import numpy as np

from stream_dataloader import StreamDataLoader, StreamDataset
from stream_dataloader.testing._items import assert_same


def episodes(lengths, seed=0, size=(4, 5, 3)):
    """Streams of dicts, nested: an image, a pose, an action and a flag."""
    rng = np.random.default_rng(seed)
    return [
        [
            {
                "actions": rng.standard_normal(7),
                "dones": np.int64(step == length - 1),
                "obs": {
                    "image": rng.integers(0, 256, size, np.uint8),
                    "pose": rng.standard_normal(3).astype(np.float32),
                },
            }
            for step in range(length)
        ]
        for length in lengths
    ]


def columns(items, like):
    """The items of a stream as arrays, by name; `like` is an item for when there is none."""
    found = {}
    for name, leaf in like.items():
        rows = [item[name] for item in items]
        if isinstance(leaf, dict):
            found |= {f"{name}/{key}": rows_ for key, rows_ in columns(rows, leaf).items()}
        else:
            found[name] = np.array(rows, np.asarray(leaf).dtype).reshape(len(rows), *np.shape(leaf))
    return found


def write_group(group, items, like, **options):
    for name, rows in columns(items, like).items():
        group.create_dataset(name, data=rows, **options)


def write_robomimic(path, streams, masks=None, **options):
    """A file as robomimic writes it: a group a demonstration, filter keys beside."""
    like = next(items[0] for items in streams if items)
    with h5py.File(path, "w") as file:
        data = file.create_group("data")
        data.attrs["total"] = sum(map(len, streams))
        data.attrs["env_args"] = '{"env_name": "Lift"}'
        for number, items in enumerate(streams):
            demo = data.create_group(f"demo_{number}")
            demo.attrs["num_samples"] = len(items)
            write_group(demo, items, like, **(options if items else {}))
        for name, numbers in (masks or {}).items():
            file[f"mask/{name}"] = np.array([f"demo_{number}" for number in numbers], "S8")
    return str(path)


def check_read_beside_workers(store, streams):
    """Read a stream in this process, while workers that it forked read all."""
    here = store(3)
    items = [next(here)]
    dataset = StreamDataset(store.sources, store, 2, time_steps=8, seed=0, lengths=store.lengths)
    found = {}
    for batch in StreamDataLoader(dataset, 2):
        items += [next(here)]
        for place in zip(*batch.mask.nonzero(as_tuple=True), strict=True):
            key = int(batch.source_index[place]), int(batch.position[place])
            found[key] = batch.data["obs"]["image"][place].numpy()
    assert_same([*items, *here], streams[3], 3, "read while workers did")
    expected = {(n, t): item["obs"]["image"] for n, items in enumerate(streams) for t, item in enumerate(items)}
    assert found.keys() == expected.keys()
    differing = [key for key in expected if not np.array_equal(found[key], expected[key])]
    assert not differing, "these keys have other values than were written"
    here.close()
    store.close()
