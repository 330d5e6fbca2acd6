"""A stand-in for CUDA devices that runs what it is told late, in any order that streams and events allow.

Copies and kernels are queued on their streams. When one runs, it reads what lies in memory *then*. So a slot that is
written again too early, a kernel that does not wait for its copy and memory that is handed out too early all end in
wrong numbers, which `Machine.faults` lists. Memory comes from an allocator with torch's rules: it is the stream's that
was current, and is handed out again at once there; `record_stream` adds that what another stream does with it must be
done.

What is simpler than on a device: a copy from pageable memory is done at once (counted in `staged`), and an operation on
a tensor "on the device" other than `kernel` waits for the current stream. A tensor on the device is one in host memory
whose class says that it is not.
"""

import contextlib
import ctypes
import random
import weakref
from collections import deque

import numpy as np
import torch

LOST = "CUDA error: the device is lost"
_PAGE_ALREADY_LOCKED = 712
_WITHOUT_DATA = {"__get__", "__getitem__", "as_subclass", "data_ptr", "is_contiguous"}  # nothing waits for these


class OnDevice(torch.Tensor):
    """A tensor on a device: what is done with it waits for the current stream, as `tolist` would."""

    machine = None
    number = 0

    @property
    def device(self):
        return torch.device("cuda", self.number)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") not in _WITHOUT_DATA:
            cls.machine.current_stream(cls.number).synchronize()
        return super().__torch_function__(func, types, args, kwargs or {})


class Mark:
    """A place in a stream's queue."""

    passed = False

    def __call__(self):
        self.passed = True


class Waits:
    """An entry that holds a stream up until a mark is passed."""

    def __init__(self, mark):
        self.mark = mark

    def __call__(self):
        pass


class Stream:
    def __init__(self, machine, number):
        self.machine, self.number, self.device = machine, number, torch.device("cuda", number)
        self.queue = deque()
        machine.streams.append(self)

    def mark(self):
        mark = Mark()
        self.queue.append(mark)
        return mark

    def wait_event(self, event):
        self.machine.called()
        if event.at is not None:
            self.queue.append(Waits(event.at))

    def wait_stream(self, other):
        self.queue.append(Waits(other.mark()))

    def synchronize(self):
        self.machine.run_until(self.mark())

    def ready(self):
        """Whether its first entry can run now."""
        return bool(self.queue) and not (isinstance(self.queue[0], Waits) and not self.queue[0].mark.passed)


class Event:
    def __init__(self, machine):
        self.machine, self.at = machine, None

    def record(self, stream=None):
        self.machine.called()
        stream = stream or self.machine.current_stream()
        self.machine.contexts.add(stream.number)
        self.at = stream.mark()

    def query(self):
        self.machine.called()
        return self.at is None or self.at.passed

    def synchronize(self):
        self.machine.called()
        if self.at is not None and not self.at.passed:
            self.machine.waited += 1
            self.machine.run_until(self.at)


class Block:
    """Memory on a device, of the stream it was allocated for."""

    def __init__(self, size, owner):
        self.memory, self.owner, self.marks, self.uses, self.free = bytearray(size), owner, [], set(), False


class Machine:
    """Some devices.

    Args:
        seed: Decides when they get on.
        devices: How many there are.
        pace: How many entries run on average each time something is asked of CUDA.

    Attributes:
        faults: What went wrong on the devices.
        staged: How many copies were from pageable memory: each makes the host wait.
        waited: How often the host waited for an event that was not passed.
        contexts: The devices that something was done on.
        room: Bytes that a device has; None: enough.
        refuses: What `cudaHostRegister` returns.
        lost: All calls raise.
        capturing: A graph is being captured.
    """

    def __init__(self, seed=0, devices=1, pace=0.0):
        self.random, self.pace, self.devices = random.Random(seed), pace, devices
        self.streams, self.blocks, self.faults, self.locked, self.pinned = [], [], [], {}, weakref.WeakValueDictionary()
        self.staged = self.waited = self.number = self.refuses = self.last_error = 0
        self.room, self.lost, self.capturing, self.contexts = None, False, False, set()
        self.begun = []  # copies that are under way: address, number of bytes
        self.classes = [type("OnDevice", (OnDevice,), {"machine": self, "number": n}) for n in range(devices)]
        self.defaults = [Stream(self, n) for n in range(devices)]
        self.current = list(self.defaults)

    # what torch.cuda has

    def install(self, monkeypatch):
        """Be `torch.cuda` until the test is over."""
        from stream_dataloader import _device
        from stream_dataloader._memory import copies

        for name in (
            *("is_available", "is_initialized", "current_device", "memory_reserved", "current_stream", "stream"),
            *("cudart", "device", "is_current_stream_capturing"),
        ):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(self, torch.device(device).index))
        monkeypatch.setattr(torch.cuda, "Event", lambda blocking=False: Event(self))
        original, empty, ones = torch.Tensor.to, torch.empty, torch.ones
        monkeypatch.setattr(torch.Tensor, "to", lambda tensor, *a, **k: self.to(original, tensor, *a, **k))
        for name, function in (
            ("record_stream", self.record_stream),
            ("is_pinned", self.is_pinned),
            ("pin_memory", self.pin_memory),
        ):
            monkeypatch.setattr(torch.Tensor, name, _as_method(function))
        monkeypatch.setattr(
            torch,
            "empty",
            lambda *a, pin_memory=False, **k: self.pin_memory(empty(*a, **k)) if pin_memory else empty(*a, **k),
        )
        monkeypatch.setattr(torch, "ones", lambda *a, device=None, **k: self.launch() or ones(*a, **k))
        monkeypatch.setattr(copies, "devices", set())
        monkeypatch.setattr(copies, "streams", set())
        _device._copy_stream.cache_clear()
        return self

    def is_available(self):
        return True

    is_initialized = is_available

    def current_device(self):
        return self.number

    def memory_reserved(self, number):
        return sum(len(block.memory) for block in self.blocks if block.owner.number == number)

    def is_current_stream_capturing(self):
        self.contexts.add(self.number)
        return self.capturing

    def current_stream(self, device=None):
        if device is None:
            return self.current[self.number]
        number = device if isinstance(device, int) else torch.device(device).index
        return self.current[self.number if number is None else number]

    @contextlib.contextmanager
    def device(self, device):
        before = self.number
        if device is not None and torch.device(device).index is not None:
            self.number = torch.device(device).index
        try:
            yield
        finally:
            self.number = before

    @contextlib.contextmanager
    def stream(self, stream):
        number, before = self.number, self.current[stream.number]
        self.number, self.current[stream.number] = stream.number, stream
        try:
            yield
        finally:
            self.number, self.current[stream.number] = number, before

    def cudart(self):
        return self

    def cudaHostRegister(self, address, size, flags):
        self.called()
        self.contexts.add(self.number)
        overlaps = any(begin < address + size and address < begin + length for begin, length in self.locked.items())
        self.last_error = self.refuses or (_PAGE_ALREADY_LOCKED if overlaps else 0)
        if not self.last_error:
            self.locked[address] = size
        return self.last_error

    def cudaHostUnregister(self, address):
        size = self.locked.pop(address)
        if not _is_mapped(address):
            self.faults.append("memory was unmapped before it was unlocked")
        if any(address <= begin < address + size for begin, _ in self.begun):
            self.faults.append("memory was unlocked while it was copied from")
        return 0

    def launch(self):
        """torch's check of a kernel."""
        error, self.last_error = self.last_error, 0
        if error:
            raise RuntimeError(f"CUDA error: {error}, left behind by another call")

    # tensors

    def to(self, original, tensor, *args, non_blocking=False, **options):
        target = args[0] if args else options.get("device")
        if isinstance(target, str):
            target = torch.device(target)
        if isinstance(tensor, OnDevice):
            if not isinstance(target, torch.device) or target.type == "cuda":
                return tensor
            tensor.machine.current_stream(tensor.number).synchronize()
            return tensor.as_subclass(torch.Tensor).clone()
        if not isinstance(target, torch.device) or target.type != "cuda":
            return original(tensor, *args, non_blocking=non_blocking, **options)
        self.called()
        number = self.number if target.index is None else target.index
        self.contexts.add(number)
        stream = self.current[number]
        if tensor.layout is not torch.strided:  # not modelled: it stays what it is
            stream.synchronize()
            return tensor
        source = tensor.contiguous()
        block = self.allocate(source.nbytes, stream)
        self.copy(source, block, stream)
        if not non_blocking:
            stream.synchronize()
        memory = np.ndarray(max(source.nbytes, 1), np.uint8, block.memory)
        weakref.finalize(memory, self.free, block)
        there = torch.from_numpy(memory)[: source.nbytes].view(source.dtype).view(source.shape)
        return there.as_subclass(self.classes[number])

    def copy(self, source, block, stream):
        address, size = source.data_ptr(), source.nbytes
        kept = self.pinned.get(address)
        if kept is None and not self.is_pinned(source):
            self.staged += 1
            data = bytes(ctypes.string_at(address, size)) if size else b""
            stream.queue.append(lambda: block.memory.__setitem__(slice(0, size), data))
            return
        entry = address, size
        self.begun.append(entry)

        def run(kept=kept):
            self.begun.remove(entry)
            if kept is None and not self.in_locked(address):
                self.faults.append("a copy read memory that was unlocked before")
            else:
                block.memory[:size] = ctypes.string_at(address, size)

        stream.queue.append(run)

    def in_locked(self, address):
        return any(begin <= address < begin + size for begin, size in self.locked.items())

    def is_pinned(self, tensor):
        return self.in_locked(tensor.data_ptr()) or tensor.data_ptr() in self.pinned

    def pin_memory(self, tensor):
        if self.is_pinned(tensor):
            return tensor
        if not self.contexts:  # as torch does, it takes a context that there is
            self.contexts.add(self.number)
        memory = np.ndarray(max(tensor.nbytes, 1), np.uint8)
        self.pinned[memory.ctypes.data] = memory
        there = torch.from_numpy(memory)[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        return there.copy_(tensor)

    def allocate(self, size, stream):
        size = max(size, 1)
        fits = [
            block
            for block in self.blocks
            if block.free and block.owner is stream and len(block.memory) == size and all(m.passed for m in block.marks)
        ]
        if fits:
            block = self.random.choice(fits)
            block.free, block.marks, block.uses = False, [], set()
            return block
        if self.room is not None and self.memory_reserved(stream.number) + size > self.room:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        self.blocks.append(Block(size, stream))
        return self.blocks[-1]

    def free(self, block):
        block.marks, block.free = [stream.mark() for stream in block.uses], True

    def record_stream(self, tensor, stream):
        self.block_of(tensor)[0].uses.add(stream)

    def block_of(self, tensor):
        address = tensor.data_ptr()
        for block in self.blocks:
            begin = ctypes.addressof(ctypes.c_char.from_buffer(block.memory))
            if begin <= address < begin + len(block.memory):
                return block, address - begin
        raise AssertionError("the tensor is on no device")

    def kernel(self, tensor, expected):
        """Have the tensor's current stream look at a tensor, later, and see whether it is as expected."""
        self.launch()
        block, begin = self.block_of(tensor)
        size, wanted = tensor.nbytes, np.ascontiguousarray(expected).tobytes()
        assert len(wanted) == size

        def run():
            if block.memory[begin : begin + size] != wanted:
                self.faults.append(f"a kernel read {bytes(block.memory[begin : begin + 8])}, not {wanted[:8]}")

        self.current[tensor.number].queue.append(run)

    # time

    def called(self):
        """Something is asked of CUDA; the devices may get on."""
        if self.lost:
            raise RuntimeError(LOST)
        if self.pace:
            self.run(self.random.randrange(round(2 * self.pace) + 1))

    def run(self, entries=None):
        """Run so many entries, or all."""
        while entries is None or entries > 0:
            ready = [stream for stream in self.streams if stream.ready()]
            if not ready:
                return
            self.random.choice(ready).queue.popleft()()
            entries = None if entries is None else entries - 1

    def run_until(self, mark):
        while not mark.passed:
            before = sum(len(stream.queue) for stream in self.streams)
            self.run(1)
            assert sum(len(stream.queue) for stream in self.streams) < before, "nothing can run: a deadlock"


def _as_method(function):
    def method(tensor, *args):
        return function(tensor, *args)

    return method


def _is_mapped(address):
    with open("/proc/self/maps") as maps:
        for line in maps:
            begin, end = (int(bound, 16) for bound in line.split()[0].split("-"))
            if begin <= address < end:
                return True
    return False
