"""What the package is made of: names, layers, imports."""

import ast
import pathlib
import subprocess
import sys

import stream_dataloader

PACKAGE = pathlib.Path(stream_dataloader.__file__).parent
LEVELS = [
    {"errors", "protocols", "batch", "structure", "stream_info", "pickling"},
    {"groups", "mixing", "permutation", "order", "rules", "schedule", "options", "device", "state", "progress"},
    {
        "source_queue",
        "sources",
        "lane",
        "opening",
        "opened_stream",
        "board",
        "shared_memory",
        "ring",
        "pace",
        "block",
        "transport",
        "regroup",
        "workers",
        "distributed",
        "store_line",
        "fingerprint",
        "session",
        "agreement",
    },
    {"part_reader", "dataset", "interleaved"},
    {"feed", "worker_pool", "rescue", "ranks", "iteration", "dataloader"},
    {"resume_contract", "stream_contract", "testing", "visualize", "demo", "cli", "__main__", "__init__"},
]
LEVEL = {name: level for level, names in enumerate(LEVELS) for name in names}


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "stream_dataloader":
            yield from (alias.name if alias.name in LEVEL else "__init__" for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("stream_dataloader."):
            yield node.module.split(".")[1]


def test_streams_import_nothing_above_the_lowest_level():
    for path in PACKAGE.glob("streams/*.py"):
        above = [name for name in imports(path) if name != "streams" and LEVEL[name] > 0]
        assert not above, (path, above)
    for name, level in LEVEL.items():
        assert level == 5 or "streams" not in imports(PACKAGE / f"{name}.py")


def test_modules_import_only_their_own_level_or_lower_ones_and_never_in_a_circle():
    graph = {path.stem: set(imports(path)) - {"streams"} for path in PACKAGE.glob("*.py")}
    assert set(graph) == set(LEVEL)
    for name, imported in graph.items():
        assert all(LEVEL[other] <= LEVEL[name] for other in imported), (name, imported)
    done = set()
    while ready := {name for name, imported in graph.items() if name not in done and imported <= done}:
        done |= ready
    assert done == set(graph), f"in a circle: {set(graph) - done}"


def test_the_schedule_is_pure():
    for name in ("groups", "mixing", "options", "order", "permutation", "rules", "schedule"):
        modules = {
            alias.name.split(".")[0]
            for node in ast.walk(ast.parse((PACKAGE / f"{name}.py").read_text()))
            if isinstance(node, (ast.Import, ast.ImportFrom))
            for alias in (node.names if isinstance(node, ast.Import) else [ast.alias(node.module)])
        }
        assert not modules & {"torch", "time", "threading", "multiprocessing", "os", "fcntl"}


def test_all_names_are_sorted_and_there():
    assert stream_dataloader.__all__ == sorted(stream_dataloader.__all__)
    for name in stream_dataloader.__all__:
        assert getattr(stream_dataloader, name).__doc__


def test_importing_the_package_loads_neither_av_nor_cv2():
    code = "import sys, stream_dataloader; print([m for m in ('av', 'cv2') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
