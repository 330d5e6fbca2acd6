"""`SentBatch`: a part as torch's own `DataLoader` sends it from a worker to the main process.

Guarantee: what cannot be pickled raises in the worker's own thread, and no tensor is freed in the thread of a queue.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from stream_dataloader._memory.pickling import Message
from stream_dataloader.batch import StreamBatch


class SentBatch(StreamBatch):
    """A batch that is pickled where it is made, and unpickled when it is first used.

    A queue pickles what is put into it in a background thread, and frees it there. An error would be lost in that
    thread. A worker that ends while the thread frees a tensor crashes (torch takes the interpreter's lock in between).
    """

    @classmethod
    def of(cls, batch: StreamBatch) -> SentBatch:
        """`batch`, pickled.

        Raises:
            Exception: Something in it cannot be pickled.
        """
        sent = object.__new__(cls)
        sent.__dict__["_message"] = Message(batch)
        return sent

    def __getattr__(self, name: str) -> Any:
        if name not in {field.name for field in fields(self)}:
            raise AttributeError(name)
        self.__dict__.update(self._message.read().__dict__)
        return self.__dict__[name]

    def __reduce__(self) -> tuple[Any, ...]:
        message = self.__dict__.get("_message")  # not of one that was made of this, by `dataclasses.replace`
        return super().__reduce__() if message is None else (_same, (message,))


def _same(batch: StreamBatch) -> StreamBatch:
    return batch
