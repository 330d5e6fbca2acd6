"""A stand-in for CUDA devices that runs what it is told late, in any order that streams and events allow.

Copies and kernels are queued on their streams. When one runs, it reads what lies in memory *then*. So a slot that is
written again too early, a kernel that does not wait for its copy and memory that is handed out too early all end in
wrong numbers, which `Machine.faults` lists. Memory comes from an allocator with torch's rules: it is the stream's that
was current, and is handed out again at once there; `record_stream` adds that what another stream does must be done.

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

from stream_dataloader._engine import device as _device
from stream_dataloader._engine.memory import copies

LOST = "CUDA error: the device is lost"
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


class Stream:
    def __init__(self, machine, number):
        self.machine, self.number, self.device = machine, number, torch.device("cuda", number)
        self.queue = deque()  # what is done, and the mark that must be passed before
        machine.streams.append(self)

    def add(self, does, behind=None):
        self.queue.append((does, behind))

    def mark(self):
        self.add(mark := Mark())
        return mark

    def wait_event(self, event):
        self.machine.called()
        self.add(int, behind=event.at)

    def synchronize(self):
        self.machine.run_until(self.mark())

    def ready(self):
        """Whether its first entry can run now."""
        return bool(self.queue) and (self.queue[0][1] is None or self.queue[0][1].passed)


class Event:
    def __init__(self, machine):
        self.machine = machine

    def record(self, stream):
        self.machine.called()
        self.machine.contexts.add(stream.number)
        self.at = stream.mark()

    def query(self):
        self.machine.called()
        return self.at.passed

    def synchronize(self):
        self.machine.called()
        if not self.at.passed:
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
        begun: Copies that are under way: address, number of bytes.
        room: Bytes that a device has; None: enough.
        refuses: What `cudaHostRegister` returns.
        lost: All calls raise.
        capturing: A graph is being captured.
    """

    def __init__(self, seed=0, devices=1, pace=0.0):
        self.random, self.pace, self.devices = random.Random(seed), pace, devices
        self.streams, self.blocks, self.faults, self.begun = [], [], [], []
        self.locked, self.pinned, self.contexts = {}, weakref.WeakValueDictionary(), set()
        self.staged = self.waited = self.number = self.refuses = self.last_error = 0
        self.room, self.lost, self.capturing = None, False, False
        self.classes = [type("OnDevice", (OnDevice,), {"machine": self, "number": n}) for n in range(devices)]
        self.defaults = [Stream(self, n) for n in range(devices)]
        self.current = list(self.defaults)

    # what torch.cuda has

    def install(self, monkeypatch):
        """Be `torch.cuda` until the test is over."""
        names = ["is_available", "is_initialized", "current_device", "memory_reserved", "current_stream", "stream"]
        for name in [*names, "cudart", "device", "is_current_stream_capturing"]:
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(self, torch.device(device).index))
        monkeypatch.setattr(torch.cuda, "Event", lambda blocking=False: Event(self))
        for name in ("record_stream", "is_pinned", "pin_memory"):
            method = getattr(self, name)
            monkeypatch.setattr(torch.Tensor, name, lambda tensor, *args, method=method: method(tensor, *args))
        to, empty, ones = torch.Tensor.to, torch.empty, torch.ones

        def empty_here(*shape, pin_memory=False, **options):
            found = empty(*shape, **options)
            return self.pin_memory(found) if pin_memory else found

        monkeypatch.setattr(torch.Tensor, "to", lambda tensor, *args, **options: self.to(to, tensor, *args, **options))
        monkeypatch.setattr(torch, "empty", empty_here)
        monkeypatch.setattr(torch, "ones", lambda *shape, device=None, **k: self.launch() or ones(*shape, **k))
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
        return self.current[device if isinstance(device, int) else self.number_of(device)]

    def number_of(self, device):
        number = None if device is None else torch.device(device).index
        return self.number if number is None else number

    @contextlib.contextmanager
    def device(self, device):
        before, self.number = self.number, self.number_of(device)
        try:
            yield
        finally:
            self.number = before

    @contextlib.contextmanager
    def stream(self, stream):
        before, self.current[stream.number] = self.current[stream.number], stream
        with self.device(stream.device):
            try:
                yield
            finally:
                self.current[stream.number] = before

    def cudart(self):
        return self

    def cudaHostRegister(self, address, size, flags):
        self.called()
        self.contexts.add(self.number)
        self.last_error = self.refuses
        if not self.last_error:
            assert not self.in_locked(address)
            self.locked[address] = size
        return self.last_error

    def cudaHostUnregister(self, address):
        size = self.locked.pop(address)
        ctypes.string_at(address, 1)  # the program would end here if it were unmapped
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
        target = torch.device(target) if isinstance(target, str) else target
        to_device = isinstance(target, torch.device) and target.type == "cuda"
        if isinstance(tensor, OnDevice):
            if to_device or not isinstance(target, torch.device):
                return tensor
            self.current_stream(tensor.number).synchronize()
            return tensor.as_subclass(torch.Tensor).clone()
        if not to_device:
            return original(tensor, *args, non_blocking=non_blocking, **options)
        self.called()
        number = self.number_of(target)
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
        return _tensor_over(memory, source).as_subclass(self.classes[number])

    def copy(self, source, block, stream):
        address, size = source.data_ptr(), source.nbytes
        kept = self.pinned.get(address)
        if kept is None and not self.in_locked(address):
            self.staged += 1
            data = ctypes.string_at(address, size)
            stream.add(lambda: block.memory.__setitem__(slice(0, size), data))
            return
        self.begun.append((address, size))

        def run(kept=kept):
            self.begun.remove((address, size))
            if kept is None and not self.in_locked(address):
                self.faults.append("a copy read memory that was unlocked before")
            else:
                block.memory[:size] = ctypes.string_at(address, size)

        stream.add(run)

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
        return _tensor_over(memory, tensor).copy_(tensor)

    def allocate(self, size, stream):
        size = max(size, 1)
        own = [block for block in self.blocks if block.free and block.owner is stream and len(block.memory) == size]
        if fits := [block for block in own if all(mark.passed for mark in block.marks)]:
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
        """The memory in which a tensor on a device lies, and where."""
        for block in self.blocks:
            begin = tensor.data_ptr() - ctypes.addressof(ctypes.c_char.from_buffer(block.memory))
            if 0 <= begin < len(block.memory):
                return block, begin
        raise AssertionError("the tensor is on no device")

    def kernel(self, tensor, expected):
        """Have the tensor's current stream look at a tensor, later, and see whether it is as expected."""
        self.launch()
        block, begin = self.block_of(tensor)
        wanted = np.ascontiguousarray(expected).tobytes()
        assert len(wanted) == tensor.nbytes

        def run():
            if block.memory[begin : begin + len(wanted)] != wanted:
                self.faults.append(f"a kernel read {bytes(block.memory[begin : begin + 8])}, not {wanted[:8]}")

        self.current[tensor.number].add(run)

    # time

    def called(self):
        """Something is asked of CUDA; the devices may get on."""
        if self.lost:
            raise RuntimeError(LOST)
        if self.pace:
            self.run(self.random.randrange(round(2 * self.pace) + 1))

    def run(self, entries=1 << 62):
        """Run so many entries, or all; returns whether there were so many."""
        for _ in range(entries):
            ready = [stream for stream in self.streams if stream.ready()]
            if not ready:
                return False
            self.random.choice(ready).queue.popleft()[0]()
        return True

    def run_until(self, mark):
        while not mark.passed:
            assert self.run(1), "nothing can run: a deadlock"


def _tensor_over(memory, like):
    return torch.from_numpy(memory)[: like.nbytes].view(like.dtype).view(like.shape)
