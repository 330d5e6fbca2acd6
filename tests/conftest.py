"""No test leaves a process, thread or file descriptor behind; `--full` runs all there is.

Without `--full`, tests marked `slow` are left out and random cases are few: that is what a change must pass each time.
Tests over random cases are marked `random`, so that `--full -m "slow or random"` runs what the quick run has not.
"""

import os
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tensors are small, and threads that wait for each other take cores
if "--full" in sys.argv:
    os.environ["STREAM_DATALOADER_FULL"] = "1"  # for `helpers`, here and in workers

import gc
import importlib
import io
import itertools
import json
import logging
import multiprocessing
import pathlib
import subprocess
import tempfile
import threading
import time
from collections import defaultdict
from contextlib import suppress

import pytest
import torch
from _pytest.doctest import DoctestModule
from file_server import serving
from helpers import FULL, random_cases, soon
from huge_pages import use_huge_pages
from hypothesis import HealthCheck, settings
from ledger import Ledger
from skips import judge_skip

from stream_dataloader import visualize
from stream_dataloader._engine.memory.shared_memory import BLOCKS
from stream_dataloader.testing import StoreContract
from stream_dataloader.testing import streams as contract

#: What tests share is found by the programs they start, too; as `pythonpath` in pyproject.toml is for tests.
SHARED = [str(pathlib.Path(__file__).parent / folder) for folder in ("support", "ranks", "streams")]
os.environ["PYTHONPATH"] = os.pathsep.join([*SHARED, *filter(None, [os.environ.get("PYTHONPATH")])])

#: Folders of the tests that need trainers, and the packages that made the formats of stores.
OTHERS_PACKAGES = ("integrations", "peers")

settings.register_profile(
    "default",
    random_cases(100, 20),
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("default")

if not FULL:
    contract._PLACES = 3  # of dozens of formats and stores; the first, one inside, the last and the end are among them


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="slow tests too, and random cases in full number")


def pytest_configure(config):
    if not config.getoption("--full") and not config.option.markexpr:
        config.option.markexpr = "not slow"


def pytest_ignore_collect(collection_path, config):
    """Those packages take long to import, and change seldom: whoever names the folder runs its tests."""
    folder = collection_path.name
    if folder not in OTHERS_PACKAGES or not collection_path.is_dir() or config.getoption("--full"):
        return None
    return True if not any(folder in argument for argument in config.args) else None


@pytest.hookimpl(wrapper=True)
def pytest_collect_file():
    """Examples in docstrings are the package's: to look for some in tests takes a second."""
    return [found for found in (yield) if not isinstance(found, DoctestModule)]


#: Of the streams' contracts, these start workers again and again. Of two streams they are run always.
CONTRACT_WITH_WORKERS = ("test_resumes", "test_workers_do_not_matter")
CONTRACTS_ALWAYS_WHOLE = ("TestInMemory[mapping]", "TestStrings[characters]")


def takes_seconds(item):
    """Where workers are started anew they take seconds to come: `--full` does that, the quick run has them forked."""
    case = item.callspec.id if hasattr(item, "callspec") else ""
    if "spawn" in case or "forkserver" in case:
        return item.get_closest_marker("any_start_method") is None
    owner = item.getparent(pytest.Class)
    if owner is None or item.originalname not in CONTRACT_WITH_WORKERS:
        return False
    return f"{owner.name}[{case}]" not in CONTRACTS_ALWAYS_WHOLE


def beyond_one_of_each(items):
    """Of tests that are marked so, the cases beyond those in which each value of each parameter comes once."""
    cases = defaultdict(list)
    for item in items:
        if item.get_closest_marker("one_of_each") and not item.get_closest_marker("slow"):
            cases[item.nodeid.partition("[")[0]].append(item)
    for found in cases.values():
        columns = [list(dict.fromkeys(ids)) for ids in zip(*(item.callspec._idlist for item in found), strict=True)]
        kept = {tuple(ids[n % len(ids)] for ids in columns) for n in range(max(map(len, columns)))}
        yield from (item for item in found if tuple(item.callspec._idlist) not in kept)


#: Of the streams' contracts, these say the same of any kind of items: of the kinds of a class they have the first.
CONTRACT_OF_ANY_KIND = {"test_closes", "test_is_picklable", "test_items_are_alike", "test_length_is_right"}
CONTRACT_OF_ANY_KIND |= {"test_marks_starts", "test_opens_early", "test_two_at_once"}
#: And these of a store, whichever way it was written in: what is read from it, and its damage, is another matter.
CONTRACT_OF_ANY_STORE = {"test_can_be_used_after_it_was_closed", "test_costs_little_to_send", "test_cuts_sections"}
CONTRACT_OF_ANY_STORE |= {"test_gives_one_item_by_its_place", "test_goes_on_with_its_state", "test_keys_name_streams"}
CONTRACT_OF_ANY_STORE |= {"test_knows_its_lengths", "test_refuses_what_is_no_stream", "test_tells_what_it_holds"}
CONTRACT_OF_ANY_STORE |= {"test_the_same_twice", *CONTRACT_OF_ANY_KIND}


def beyond_the_first_kind(items):
    """Classes of a file that have a base in that file are kinds of it."""
    seen = set()
    for item in items:
        kind = getattr(item, "cls", None) or object
        if not issubclass(kind, contract.StreamContract):
            continue
        of_any = CONTRACT_OF_ANY_STORE if issubclass(kind, StoreContract) else CONTRACT_OF_ANY_KIND
        if item.originalname in of_any:
            base = kind.__base__
            owner = base if base.__module__ == kind.__module__ else kind
            if (test := (owner, item.originalname)) in seen:
                yield item
            seen.add(test)


gc.disable()  # it would look at what is collected again and again, and find nothing


def pytest_collection_finish():
    gc.enable()


def pytest_collection_modifyitems(items):
    for item in items:
        if takes_seconds(item):
            item.add_marker("slow")
    for item in itertools.chain(beyond_one_of_each(items), beyond_the_first_kind(items)):
        item.add_marker("slow")
    for item in items:
        if getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
            item.add_marker("random")
            if item.path.parent.name == "promises":
                item.add_marker("promise")


# multiprocessing's own helpers, and fsspec's thread, live as long as the interpreter: start them before anything is
# counted
_HELPERS = ("forkserver", "resource_tracker")


def descriptors():
    """The open descriptors, but for those of the event loop's and multiprocessing's own machinery.

    Small blocks of memory share files, of which the newest lives as long as the process.
    """
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        try:
            found[fd] = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
    return {fd: target for fd, target in found.items() if "/proc/" not in target and BLOCKS not in target}


def is_fsspecs(thread):
    """The threads in which its event loop looks up names and reads files stay with it."""
    return thread.name.startswith("asyncio_")


_KINDS = ("processes", "threads", "descriptors")


def leaks(processes, threads, fds):
    new_processes = [process for process in multiprocessing.active_children() if process not in processes]
    new_threads = [thread for thread in threading.enumerate() if thread not in threads and not is_fsspecs(thread)]
    return new_processes, new_threads, descriptors().items() - fds.items()


#: Imported by the forkserver before it forks the first worker.
PRELOADED = ["stream_dataloader"]


@pytest.fixture(scope="session", autouse=True)
def _helpers_running():
    multiprocessing.set_forkserver_preload(PRELOADED)
    multiprocessing.get_context("forkserver").Process(target=int).start()
    multiprocessing.get_context("spawn").Process(target=int).start()
    with suppress(ImportError):
        importlib.import_module("fsspec.asyn").get_loop()
    while multiprocessing.active_children():
        time.sleep(0.01)
    gc.collect()
    gc.freeze()
    use_huge_pages()
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("torch"):  # pytest adds its handlers to each that does not propagate, six times a test
            logger.propagate = True


@pytest.fixture(scope="module", autouse=True)
def _frozen(_helpers_running):
    """What modules made when they were imported stays: to look at all of it around each test takes most of the time."""
    gc.collect()
    gc.freeze()


def let_clients_go():
    """Clients of servers, which a process keeps for good, end with the test that had them."""
    if (remote := sys.modules.get("stream_dataloader.streams.cache.remote")) is not None:
        for kind in {type(client) for client in remote._held.values()}:
            kind.clear_instance_cache()
        remote._held.clear()


_passed = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    judge_skip(report)
    if report.when == "call":
        item.stash[_passed] = report.passed
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    report = yield
    judge_skip(report)
    return report


@pytest.fixture(autouse=True)
def _no_leaks(_frozen, request):
    processes = multiprocessing.active_children()  # of a module's fixtures
    threads, fds = set(threading.enumerate()), descriptors()
    yield
    if not request.node.stash.get(_passed, False):
        return  # its traceback holds what it was at, and is what there is to read
    let_clients_go()
    deadline = time.monotonic() + 60
    while any(left := leaks(processes, threads, fds)) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    some = [f"{len(kind)} {name}, such as {list(kind)[:5]}" for name, kind in zip(_KINDS, left, strict=True) if kind]
    assert not some, f"left behind: {'; '.join(some)}"


@pytest.fixture
def ledger(tmp_path):
    """Counts what the test's own factory opens: all of it is closed once, at the latest when the test ends."""
    ledger = Ledger(tmp_path / "ledger")
    yield ledger
    assert soon(lambda: not ledger.problems(), 30), "\n".join(ledger.problems())


@pytest.fixture(scope="session")
def programs(tmp_path_factory):
    """Runs a program, a file or its text, in a process of its own: what `subprocess.run` returns, and much sooner.

    `alone`: it may send signals to its group of processes.
    """
    command = [sys.executable, pathlib.Path(__file__).parent / "support" / "run_programs.py"]
    given = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUTF8": "1"}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=given) as process:

        def run(program, *arguments, flags=(), alone=False, **environment):
            folder = tmp_path_factory.mktemp("program")
            output, errors = folder / "output", folder / "errors"
            if isinstance(program, str):
                (folder / "program.py").write_text(program, encoding="utf-8")
                program = folder / "program.py"
            command = list(map(str, [program, *arguments]))
            asked = str(output), str(errors), alone, command, str(folder), flags, environment
            print(json.dumps(asked), file=process.stdin, flush=True)
            status = int(process.stdout.readline())
            return subprocess.CompletedProcess(command, status, output.read_text("utf-8"), errors.read_text("utf-8"))

        yield run
        process.stdin.close()


@pytest.fixture
def two_cores():
    """torch computes in two threads, as it does in programs."""
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


@pytest.fixture
def folder_of_nobody(tmp_path):
    """A folder of a user who may not read what is locked, as whom the test runs: root may read everything."""
    if os.geteuid() != 0:
        yield tmp_path
        return
    os.seteuid(65534)
    try:
        with tempfile.TemporaryDirectory() as folder:
            yield pathlib.Path(folder)
    finally:
        os.seteuid(0)


@pytest.fixture
def tries_follow_at_once(monkeypatch):
    monkeypatch.setattr("stream_dataloader.streams.cache.remote._WAIT_SECONDS", (0.01, 0.02, 0.03))


@pytest.fixture
def server(tries_follow_at_once):
    with serving() as server:
        yield server


@pytest.fixture(scope="module")
def own_cache(tmp_path_factory):
    """Indexes of videos and copies of files are kept in a folder of the module's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STREAM_DATALOADER_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def no_zarr_threads(own_cache, _no_leaks):
    """zarr keeps threads until it is told."""
    yield
    if zarr := sys.modules.get("zarr"):
        zarr.core.sync.cleanup_resources()


@pytest.fixture(scope="module")
def fonts():
    """matplotlib keeps the files of its fonts open once it has drawn something."""
    pytest.importorskip("matplotlib", reason="install the extra plot")
    visualize.Timeline((), 1, 1, 1, (range(1),)).save(io.BytesIO())
