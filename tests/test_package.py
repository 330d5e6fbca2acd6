"""What the package is made of: names, rooms, imports."""

import ast
import functools
import importlib
import pathlib
import re
import subprocess
import sys

import pytest
from helpers import PATIENCE

import stream_dataloader

PACKAGE = pathlib.Path(stream_dataloader.__file__).parent

ROOMS = [
    *("_engine", "_engine.own_folder", "_engine.hints", "errors", "protocols", "stream_info"),
    *("_engine.html", "_engine.notices", "_engine.descriptors", "_engine.memory"),
    *("_engine.schedule", "_engine.advice", "stats", "_engine.options", "anchors", "sectioning"),
    *("_engine.items", "_engine.kept_fields", "batch", "_engine.assembly"),
    *(
        "_engine.reading",
        "_engine.torch_dataset",
        "_engine.map_style",
        "dataset",
        "interleaved",
        "_engine.torch_loader",
    ),
    *("_engine.workers", "_engine.remote", "_engine.ranks", "batch_sampler"),
    *("_engine.progress", "_engine.device", "_engine.loader", "dataloader", "combine", "recurrent", "_engine.merging"),
    *("streams", "stores", "visualize", "testing", "integrations", "__init__", "cli", "__main__"),
]
STREAM_ROOMS = [
    "_media",
    "cache",
    "images",
    "array",
    "text",
    "video",
    "audio",
    "audiovisual",
    "camera",
    "background",
    "__init__",
]

#: Rooms whose `__init__` lists what is public.
LISTED = ["recurrent", "streams", "stores"]

#: What users import beside what `docs/reference/api.txt` has: these paths stay.
PUBLIC = {
    "stream_dataloader.batch_sampler": ["LaneBatchSampler", "LaneIndex", "collate_lanes", "lane_dataset"],
    "stream_dataloader.errors": ["StreamError", "WorkerError"],
    "stream_dataloader.stores.lmdb": ["LmdbPacker", "LmdbStore"],
    "stream_dataloader.streams.array": ["ArrayStream"],
    "stream_dataloader.streams.audio": ["AudioStream"],
    "stream_dataloader.streams.audiovisual": ["AudioVisualStream"],
    "stream_dataloader.streams.cache": ["FileCache"],
    "stream_dataloader.streams.camera": ["CameraStream"],
    "stream_dataloader.streams.images": ["ImageFolderStream"],
    "stream_dataloader.streams.text": ["TextStream"],
    "stream_dataloader.streams.video": ["VideoStream"],
}


def room_of(module):
    """A dotted module's room, or the module's own name if it stands by itself; the engine has rooms of its own."""
    first, *more = module.split(".")
    return f"{first}.{more[0]}" if first == "_engine" and more else first or "__init__"


@functools.cache
def imported_modules(path):
    """The modules of the package that a file imports, below `stream_dataloader`."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "stream_dataloader":
            below = ".".join(node.module.split(".")[1:])
            inner = PACKAGE / pathlib.Path(*below.split("."))
            for alias in node.names:  # `from room import module` imports that module
                is_module = (inner / f"{alias.name}.py").exists() or (inner / alias.name / "__init__.py").exists()
                found.append(f"{below}.{alias.name}".strip(".") if is_module else below or "__init__")
    return found


def modules():
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        yield ".".join(parts if parts[-1] != "__init__" or len(parts) == 1 else parts[:-1]), path


def test_rooms_import_only_what_stands_before_them():
    for module, path in modules():
        room = room_of(module)
        for imported in imported_modules(path):
            other = room_of(imported)
            assert other == room or ROOMS.index(other) < ROOMS.index(room), f"{module} imports {imported}"


GROUND = {"_engine.hints", "errors", "protocols", "stream_info", "_engine.descriptors"}


@pytest.mark.parametrize(
    ("room", "allowed"),
    [
        ("streams", {"streams", "_engine.items", "_engine.notices", "_engine.memory", *GROUND}),
        ("stores", {"stores", "streams", "_engine.items", "_engine.memory", *GROUND}),
    ],
)
def test_streams_and_stores_import_no_engine(room, allowed):
    for module, path in modules():
        if room_of(module) == room and "_packing" not in module:  # that stands above the loader
            rooms = {room_of(imported) for imported in imported_modules(path)}
            assert rooms <= allowed, (module, rooms)


def test_kinds_of_streams_import_only_what_stands_before_them():
    for module, path in modules():
        if room_of(module) == "streams" and module != "streams":
            room = module.split(".")[1]
            for imported in imported_modules(path):
                other = imported.split(".")[1] if imported.startswith("streams.") else room
                assert {room, other} <= set(STREAM_ROOMS), f"enter {room} in STREAM_ROOMS, behind what it imports"
                assert STREAM_ROOMS.index(other) <= STREAM_ROOMS.index(room), f"{module} imports {imported}"


def test_no_module_imports_itself_in_a_circle():
    files = {module: path for module, path in modules() if path.name != "__init__.py"}
    graph = {module: set(imported_modules(path)) & set(files) - {module} for module, path in files.items()}
    done = set()
    while ready := {name for name, imported in graph.items() if name not in done and imported <= done}:
        done |= ready
    assert done == set(graph), f"in a circle: {set(graph) - done}"


def test_every_room_says_what_is_in_it():
    for path in PACKAGE.rglob("__init__.py"):
        text = ast.get_docstring(ast.parse(path.read_text()))
        assert text, path
        if path.parent.parent.name == "_engine":
            told = " ".join(text.split())
            assert "imports" in told, path
            assert "Open `" in told, path


def test_the_map_of_the_engine_names_all_rooms_and_files_that_exist():
    text = (PACKAGE / "_engine" / "README.md").read_text()
    rooms = {path.stem for path in (PACKAGE / "_engine").iterdir() if path.is_dir() and path.stem != "__pycache__"}
    assert rooms <= set(re.findall(r"`(\w+)`", text)), "each folder is in the first table"
    for name in re.findall(r"\b(\w+/(?:\w+/)*\w+\.py)\b", text):
        assert any((root / name).exists() for root in (PACKAGE / "_engine", PACKAGE, PACKAGE.parent)), name


def test_the_schedule_is_pure():
    impure = {"torch", "time", "threading", "multiprocessing", "os", "fcntl"}
    for path in PACKAGE.glob("_engine/schedule/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            assert not {name.split(".")[0] for name in names} & impure, path


@pytest.mark.parametrize("module", PUBLIC)
def test_public_names_are_where_they_were(module):
    assert set(PUBLIC[module]) <= set(dir(importlib.import_module(module)))


@pytest.mark.parametrize("module", ["stream_dataloader", *(f"stream_dataloader.{room}" for room in LISTED)])
def test_all_names_are_sorted_and_documented(module):
    package = importlib.import_module(module)
    assert package.__all__ == sorted(package.__all__, key=lambda name: (not name.isupper(), name))
    for name in package.__all__:
        assert getattr(package, name).__doc__


def test_importing_the_package_loads_no_room_and_no_library_that_is_not_needed(programs):
    code = (
        "import sys, stream_dataloader.streams; print('stream_dataloader.stores' in sys.modules);"
        "import stream_dataloader.cli.main; print([m for m in ('av', 'cv2', 'tensordict') if m in sys.modules])"
    )
    done = programs(code)
    assert done.stdout == "False\n[]\n", done.stderr


WITHOUT_DISTRIBUTED = """
import sys
import torch
import torch.distributed as dist
for name in ("FileStore", "PrefixStore", "TCPStore", "Store"):
    delattr(dist, name)
dist.is_available = lambda: False
del dist.is_initialized
sys.modules["torch.distributed.distributed_c10d"] = None
from stream_dataloader import StreamDataLoader, StreamDataset
loader = StreamDataLoader(StreamDataset([3, 4], range, 2, time_steps=2))
batches = iter(loader)
next(batches)
loader.load_state_dict(loader.state_dict())
print([batch.batch_index for batch in loader])
"""


@pytest.mark.slow
def test_a_torch_without_distributed_will_do():
    command = [sys.executable, "-c", WITHOUT_DISTRIBUTED]
    told = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert told.stdout == "[1]\n", told.stderr
