"""Files of tokens, written by what others say of their formats."""

import struct

import numpy as np

#: Megatron's codes for dtypes.
CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "float64": 6, "float32": 7, "uint16": 8}


def documents(lengths, seed=0, dtype="uint16", end=None):
    """Random tokens below 100, document after document, each with the token `end` behind it."""
    rng = np.random.default_rng(seed)
    ends = [] if end is None else [end]
    return [np.append(rng.integers(0, 100, length), ends).astype(dtype) for length in lengths]


def write_megatron(path, found, sequences=1, modes=False):
    """`path`.bin and `path`.idx; each document has as many sequences, of which the last has most tokens."""
    pieces = [
        piece for tokens in found for piece in np.split(tokens, [min(n, len(tokens)) for n in range(1, sequences)])
    ]
    np.concatenate(found).tofile(f"{path}.bin")
    lengths = np.array([len(piece) for piece in pieces], "<i4")
    dtype = found[0].dtype
    places = (np.cumsum(lengths) - lengths) * dtype.itemsize
    bounds = np.arange(0, len(pieces) + 1, sequences)
    with open(f"{path}.idx", "wb") as file:
        file.write(b"MMIDIDX\x00\x00" + struct.pack("<QB", 1, CODES[dtype.name]))
        file.write(struct.pack("<QQ", len(pieces), len(bounds)))
        file.write(lengths.tobytes() + places.astype("<i8").tobytes() + bounds.astype("<i8").tobytes())
        file.write(bytes(len(pieces)) if modes else b"")
    return path.with_suffix(".bin") if hasattr(path, "with_suffix") else f"{path}.bin"


def write_headed(path, tokens, magic=20240520, version=1):
    """A file of modded-nanogpt; with 20240801 and 7, of llm.c for Llama 3."""
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(tokens)
    with open(path, "wb") as file:
        file.write(header.tobytes() + tokens.tobytes())
    return path
