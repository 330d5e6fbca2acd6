"""Pickling of functions, classes and objects for other processes, with cloudpickle where pickle fails.

Guarantees: an object that cannot be pickled raises where it is sent. A class that was sent to a worker, by fork or by
value, is the same class when it comes back.

Functions and classes that a new process would not find go by value: local ones, those of an interactive session, and
those under `if __name__ == "__main__":`. Everything else goes by reference, as with pickle.
"""

from __future__ import annotations

import collections
import contextlib
import gc
import io
import pickle
import secrets
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import ForkingPickler
from types import FunctionType
from typing import Any

import cloudpickle
import numpy as np
import torch

from stream_dataloader._engine.memory import main_module
from stream_dataloader._engine.memory.mapped_arrays import reduce_map
from stream_dataloader.errors import shorten

_tokens: weakref.WeakKeyDictionary[type, str] = weakref.WeakKeyDictionary()  # of classes that another process also has
_classes: weakref.WeakValueDictionary[str, type] = weakref.WeakValueDictionary()
_namespaces: dict[int, dict[str, Any]] = {}  # of functions that arrived by value when this process was started
_here = threading.local()
_forked = False  # whether this process is a forked worker, which has its parent's objects


@contextlib.contextmanager
def for_other_machine() -> Iterator[None]:
    """Return a context in which pickles are for a process that neither ran the script nor shares memory with this one.

    So all of `__main__` goes by value.
    """
    before, _here.for_other_machine = _for_other_machine(), True
    try:
        yield
    finally:
        _here.for_other_machine = before


def _for_other_machine() -> bool:
    return getattr(_here, "for_other_machine", False)


def dumps(content: Any) -> bytes:
    """Pickle for a new process; objects that it would not find go by value."""
    if _for_other_machine():
        return dumps_by_value(content)
    try:
        pickled = _forking_dumps(content)
    except Exception:  # if the second way fails, too, its error explains why
        return dumps_by_value(content)
    if mentions_hidden(pickled):
        return dumps_by_value(content)
    return pickled


def dumps_home(content: Any) -> bytes:
    """Pickle for the process that started this one, and for its other workers; objects they have go by reference."""
    try:
        return _forking_dumps(content)
    except Exception:
        return dumps_by_value(content, home=True)


def dumps_by_value(content: Any, *, home: bool = False, buffer_callback: Any = None) -> bytes:
    """Pickle with local or hidden objects by value; `home`: for the process that started this one."""
    file = io.BytesIO()
    _ValuePickler(file, home=home, buffer_callback=buffer_callback).dump(content)
    return file.getvalue()


def mentions_hidden(pickled: bytes | memoryview) -> bool:
    """Return whether a pickle may refer to objects that a newly started process would not find."""
    return main_module.hides_names() and b"__main__" in bytes(pickled)


def _forking_dumps(content: Any) -> bytes:
    return bytes(_TensorPickler.dumps(content))


class _TensorPickler(ForkingPickler):
    """multiprocessing's pickler. Quantized tensors go by value: in shared memory torch loses their quantizer."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        table: Any = self.dispatch_table
        if (usual := table.get(torch.Tensor)) is not None:
            table[torch.Tensor] = lambda tensor: tensor.__reduce_ex__(2) if tensor.is_quantized else usual(tensor)


class _ValuePickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle's pickler, which by itself sends all of `__main__` by value, and duplicates classes that return."""

    def __init__(self, file: io.BytesIO, *, home: bool, buffer_callback: Any = None) -> None:
        known: Any = cloudpickle.Pickler.dispatch_table
        maps: Any = {} if home else {np.memmap: reduce_map}  # items are sent home with their current content
        if buffer_callback is not None:
            maps = {**maps, torch.Tensor: _as_array}
        # This must be set before pickle's constructor, which reads it.
        self.dispatch_table = collections.ChainMap(maps, known, _handles() if spawning() else {})
        super().__init__(file, buffer_callback=buffer_callback)
        self._home = home

    def reducer_override(self, obj: Any) -> Any:
        is_class = isinstance(obj, type)
        if is_class and self._home and (token := _token(obj)) is not None:
            return _class_of, (token, obj.__qualname__)
        is_named = (is_class or isinstance(obj, FunctionType)) and not _for_other_machine()
        if is_named and main_module.finds(obj, here=self._home):
            return NotImplemented  # by reference
        if is_class and self._home and _is_hidden(obj) and _is_inherited(obj):
            return _class_at, (id(obj), obj.__module__, obj.__qualname__)
        reduced = super().reducer_override(obj)
        if isinstance(obj, FunctionType) and spawning():
            return _with_shared_globals(obj, reduced)
        if not is_class or self._home or not isinstance(reduced, tuple) or len(reduced) != 6:
            return reduced
        make, arguments, state, _, _, complete = reduced
        return make, arguments, (_share(obj), complete, state), None, None, _complete


def _handles() -> dict[type, Callable[[Any], Any]]:
    """Return multiprocessing's reducers for its connections, without those for tensors, which go by value."""
    table: Any = ForkingPickler(io.BytesIO()).dispatch_table
    return {kind: reduce for kind, reduce in table.items() if not kind.__module__.startswith("torch")}


def _as_array(tensor: torch.Tensor) -> Any:
    """Reduce a tensor to an array, whose memory goes out of band, if it is equal to one."""
    try:
        return torch.from_numpy, (tensor.numpy(),)
    except (RuntimeError, TypeError):  # it needs a gradient, or has another device, layout or dtype
        return tensor.__reduce_ex__(5)  # type: ignore[no-untyped-call]


def _with_shared_globals(function: FunctionType, reduced: Any) -> Any:
    """Change a function's reduction so that all functions of its module share one namespace in the worker, as here.

    Otherwise a global name that `worker_init_fn` assigns would not be visible to any other function.
    """
    if not isinstance(reduced, tuple) or len(reduced) != 6 or not isinstance(reduced[1][1], dict):
        return reduced
    make, (code, names, *others), state, _, _, fill = reduced
    namespace = _Namespace(id(function.__globals__), names)
    return make, (code, namespace, *others), (fill, state), None, None, _fill_function


class _Namespace:
    def __init__(self, key: int, names: dict[str, Any]) -> None:
        self._key = key
        self._names = names

    def __reduce__(self) -> Any:
        return _namespace_of, (self._key, self._names)


def _namespace_of(key: int, names: dict[str, Any]) -> dict[str, Any]:
    return _namespaces.setdefault(key, names)


def _fill_function(function: FunctionType, filled: tuple[Callable[[FunctionType, Any], Any], Any]) -> None:
    """Fill in a function that was made by value; global names that exist already keep their values."""
    fill, (attributes, slots) = filled
    there = function.__globals__
    new = {name: value for name, value in slots["__globals__"].items() if name not in there}
    fill(function, (attributes, slots | {"__globals__": new}))


def _token(kind: type) -> str | None:
    try:
        return _tokens.get(kind)
    except TypeError:  # a metaclass without a hash
        return None


def _share(kind: type, token: str | None = None) -> str | None:
    """Return the token of a class, which this process and the receiver share; None if the class cannot have one."""
    if (known := _token(kind)) is not None:
        return known
    token = token or secrets.token_hex(8)
    try:
        _tokens[kind] = token
    except TypeError:
        return None
    _classes[token] = kind
    return token


def note_fork() -> None:
    """Note, in a newly forked worker, the classes that it inherited, as opposed to those that it makes itself.

    Inherited classes are sent home by their address, which is the same there. They are marked by freezing all objects.
    The garbage collector does not touch frozen objects, so their memory also stays shared with the parent.
    """
    global _forked
    gc.freeze()
    _forked = True


def _is_hidden(kind: type) -> bool:
    return "<locals>" in kind.__qualname__ or kind.__module__ == "__main__"


def _is_inherited(kind: type) -> bool:
    """Return whether this worker inherited a class by fork."""
    return _forked and not any(made is kind for made in gc.get_objects())  # `get_objects` leaves frozen objects out


def _class_at(address: int, module: str, name: str) -> type:
    """Find a class that a forked worker inherited, by its address."""
    key = f"{address:x} {module} {name}"
    if (known := _classes.get(key)) is not None:
        return known
    seen: set[int] = set()
    waiting: list[type] = [object]
    while waiting:
        kinds: list[type] = type.__subclasses__(waiting.pop())
        for kind in kinds:
            if id(kind) == address and (kind.__module__, kind.__qualname__) == (module, name):
                _classes[key] = kind
                return kind
            if id(kind) not in seen:
                seen.add(id(kind))
                waiting.append(kind)
    raise _gone(name)


def _class_of(token: str, name: str) -> type:
    try:
        return _classes[token]
    except KeyError:
        raise _gone(name) from None


def _gone(name: str) -> pickle.UnpicklingError:
    return pickle.UnpicklingError(f"the class {name} is no longer here; keep a reference to it")


def _complete(kind: type, shared: tuple[str | None, Callable[[type, Any], Any], Any]) -> None:
    """Fill in a class that was made by value, unless it is known here already."""
    token, complete, state = shared
    if token is None or _classes.get(token) is not kind:
        complete(kind, state)
        if token is not None:
            _share(kind, token)


def spawning() -> bool:
    """Return whether the current pickling is for a process that is being started."""
    return get_spawning_popen() is not None


class ByValue:
    """Wrapper of a value that pickle may not be able to send; unpickles to another wrapper."""

    def __init__(self, value: Any, name: str = "") -> None:
        self.value = value
        self.name = name

    def __reduce__(self) -> tuple[Callable[[bytes], ByValue], tuple[bytes]]:
        try:
            return _by_value, (dumps(self.value),)
        except Exception as error:
            if not self.name:
                raise
            what = f"{self.name} ({shorten(self.value, 80)}) cannot be pickled ({error}); create locks, open files and"
            raise TypeError(f'{what} connections in the worker, or pass multiprocessing_context="fork"') from error


def _by_value(pickled: bytes) -> ByValue:
    return ByValue(pickle.loads(pickled))


def by_value(state: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return a state with some of its values wrapped in `ByValue`."""
    return state | {name: ByValue(state[name], name) for name in names}


class Message:
    """Carries any object through a queue: it is pickled here, and `arrive` restores it there."""

    def __init__(self, content: Any, arrive: Callable[[bytes], Any] = pickle.loads) -> None:
        self._pickled = dumps_home(content)
        self._arrive = arrive

    def __len__(self) -> int:
        return len(self._pickled)

    def read(self) -> Any:
        """Unpickle the content, a new object each time."""
        return pickle.loads(self._pickled)

    def __reduce__(self) -> tuple[Callable[[bytes], Any], tuple[bytes]]:
        return self._arrive, (self._pickled,)
