"""Shards for tests: token ids, tars and Parquet files."""

import io
import tarfile
from pathlib import Path

import numpy as np


def write_tokens(folder: Path, lengths, vocabulary: int = 100) -> list[np.ndarray]:
    """Write `t0.bin`, `t1.bin`, ... of uint16 ids; return the ids."""
    rng = np.random.default_rng(0)
    shards = [rng.integers(0, vocabulary, length).astype(np.uint16) for length in lengths]
    for index, ids in enumerate(shards):
        ids.tofile(folder / f"t{index}.bin")
    return shards


def windows(shards, length: int) -> list[tuple[list[int], list[int]]]:
    """Return all windows of shards and their targets, in order."""
    return [
        (ids[start : start + length].tolist(), ids[start + 1 : start + length + 1].tolist())
        for ids in shards
        for start in range(0, (len(ids) - 1) // length * length, length)
    ]


def write_tar(path: Path, samples) -> None:
    """Write samples, dictionaries of bytes by ending, as WebDataset does."""
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as archive:
        for index, sample in enumerate(samples):
            for ending, content in sample.items():
                member = tarfile.TarInfo(f"{index:05d}.{ending}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))


def write_parquet(path: Path, columns, **options) -> None:
    """Write a Parquet file."""
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table(columns), path, **options)
