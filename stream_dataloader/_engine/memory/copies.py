"""CUDA devices and streams with copies of batches, which may still read host memory.

Guarantee: a device or stream is recorded here before the memory of its first copy can be released.
"""

from __future__ import annotations

from typing import Any

devices: set[int] = set()  # devices that batches are copied to on the device's current stream
streams: set[Any] = set()  # other streams, which may not be current when batches are released
