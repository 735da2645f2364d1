"""IDX files as tests write them."""

import gzip
from pathlib import Path

import numpy as np


def idx_bytes(code: int, shape: tuple[int, ...], payload: bytes) -> bytes:
    return bytes((0, 0, code, len(shape))) + np.array(shape, ">u4").tobytes() + payload


def packed(data: bytes) -> bytes:
    """By gzip, without the time of day, which would be in the tests' names."""
    return gzip.compress(data, mtime=0)


def write_idx(path: Path, array: np.ndarray) -> None:
    """Write bytes as an IDX file, gzip-compressed where the name ends in `.gz`."""
    data = idx_bytes(0x08, array.shape, array.astype(np.uint8).tobytes())
    path.write_bytes(packed(data) if path.suffix == ".gz" else data)
