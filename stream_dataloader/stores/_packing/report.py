"""What packing came to."""

from __future__ import annotations

from dataclasses import dataclass

from stream_dataloader.errors import StreamError

__all__ = ["PackReport", "size_text"]


@dataclass(frozen=True)
class PackReport:
    """What `stores.pack` has packed.

    Attributes:
        path: The store.
        format: Its format.
        streams: How many streams it holds.
        steps: Their time steps, all together.
        bytes: What the store takes on the disk.
        seconds: How long this run took.
        packed_before: Streams that an earlier run, which was interrupted, had packed.
        skipped: Why streams were left out, in the order of their sources.
    """

    path: str
    format: str
    streams: int
    steps: int
    bytes: int
    seconds: float
    packed_before: int = 0
    skipped: tuple[StreamError, ...] = ()

    def __str__(self) -> str:
        before = f", {self.packed_before:,} of them before" if self.packed_before else ""
        lines = [
            f"packed {self.streams:,} streams{before}, {self.steps:,} steps, {size_text(self.bytes)}, in "
            f"{self.seconds:.1f} s into {self.path} ({self.format})"
        ]
        return "\n".join(lines + [f"skipped {error}" for error in self.skipped])


def size_text(size: float) -> str:
    """A number of bytes, as people write it."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} bytes" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
