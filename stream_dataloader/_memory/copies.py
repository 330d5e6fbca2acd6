"""Where copies of batches to CUDA devices are begun: what lies in host memory may still be read from there.

Guarantee: a device or stream is known here before the first copy to it, or on it, can be let go of.
"""

from __future__ import annotations

from typing import Any

devices: set[int] = set()  # numbers of those that batches are copied to on their current stream
streams: set[Any] = set()  # which may not be the current ones when batches are let go
