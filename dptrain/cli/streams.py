"""Streams of shards on the command line: which `--data` names them, and what a network must know of them."""

import os
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from dptrain.batches.sharded_dataset import SampleDataset, ShardedDataset
from dptrain.cli.options.config import DataConfig
from dptrain.comm import Communicator
from dptrain.data.checks import is_zero_or_one
from dptrain.data.loading import LoadedData, Split
from dptrain.data.shards.shard_set import SUFFIXES
from dptrain.data.shards.stores import is_local, is_pattern
from dptrain.data.tasks import Task
from dptrain.errors import ConfigError, DataError
from dptrain.runtime.text import counted

# Samples that tell shapes, types, classes, means and variances.
_PEEKED = 4096
_OF_TOKENS = (".npy", ".bin")


@dataclass(frozen=True)
class StreamSplit(Split):
    """A part of a stream; x and y are its first samples, which show what all of them are."""

    dataset: SampleDataset | None = None

    def __len__(self) -> int:
        return self.stream.num_samples

    @property
    def stream(self) -> SampleDataset:
        """The batches."""
        assert self.dataset is not None
        return self.dataset

    def selected(self) -> "StreamSplit":
        """Return all rows."""
        return self

    def first(self, rows: int) -> "StreamSplit":
        """Return the first rows."""
        return replace(self, dataset=self.stream.take(rows))


def is_stream(data: DataConfig) -> bool:
    """Whether --data names shards: a glob or range, an address, a tar, ids of tokens, or a folder of such files."""
    name = data.name
    if is_pattern(name) and not os.path.exists(name):
        return True
    if not is_local(name) or name.lower().endswith((".tar", ".bin")):
        return True
    if name.lower().endswith(".npy"):
        return data.sequence_length is not None
    return _is_shard_folder(os.path.expanduser(name))


def _is_shard_folder(path: str) -> bool:
    """Whether a folder has shards, and neither folders nor files of other kinds beside an index."""
    if not os.path.isdir(path):
        return False
    with os.scandir(path) as entries:
        names = [(entry.name, entry.is_dir()) for entry in entries if not entry.name.startswith(".")]
    files = [name for name, is_folder in names if not is_folder and not name.endswith(".json")]
    return bool(files) and all(name.lower().endswith(SUFFIXES) for name in files)


def load_stream(
    data: DataConfig, comm: Communicator, task: Task | None, *, batch_size: int, seed: int, shuffle: bool
) -> LoadedData:
    """Return a stream's training and test parts; the last shards are held out unless --test-data names others."""
    comm.agree("configuration", lambda: _refuse_others(data))
    options: dict[str, Any] = {
        "batch_size": batch_size,
        "seed": seed,
        "sequence_length": data.sequence_length,
        "target": data.target,
        "columns": _columns(data),
        "image_size": None if data.image_size is None else tuple(map(int, data.image_size.split("x"))),
        "token_dtype": data.token_dtype,
        "vocabulary_size": None if data.sequence_length is None else data.classes,
        "bad_shards": data.bad_shards,
        "max_bytes": data.max_bytes,
        "cache_bytes": data.cache_bytes,
        "cache_dir": data.cache_dir,
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "skipped")  # the notes say so
        train = ShardedDataset(data.name, shuffle=shuffle, **options)
        test = None if data.test_data is None else ShardedDataset(data.test_data, shuffle=False, **options)
    skipped = [*train.skipped, *(() if test is None else test.skipped)]
    if test is None:
        whole = train
        train, test = comm.agree("configuration", lambda: whole.split_off(data.test_split))
    parts = comm.agree("data", lambda: [_split(part, data) for part in (train, test)])
    loaded = comm.agree("data", lambda: _described(data, train, parts, task))
    notes = [f"skipped {counted(len(skipped), 'shard')}: {skipped[0]}"] if skipped else []
    return replace(loaded, notes=(*loaded.notes, *notes))


def _columns(data: DataConfig) -> list[str] | None:
    if not data.columns:
        return None
    return [*data.columns, *([data.target] if data.target and data.target not in data.columns else [])]


def _split(dataset: ShardedDataset, data: DataConfig) -> StreamSplit:
    """Return a part with its first samples."""
    rows = min(dataset.num_samples, _PEEKED)
    batch = dataset._staged(0, np.arange(rows))[0]
    if not isinstance(batch, tuple):
        advice = "--target COLUMN names the targets" if data.target is None else "choose columns of one type"
        raise DataError(f"{data.name}: its samples have no targets; {advice}")
    x, y = batch
    if not isinstance(x, np.ndarray) or x.dtype.kind not in "uifb":
        found = ", ".join(f"{name} ({_type(array)})" for name, array in x.items()) if isinstance(x, dict) else _type(x)
        raise DataError(
            f"{data.name}: x is {found}; expected columns of numbers, or pictures of one size (--columns, "
            "--image-size); other samples need a script with utils.ShardedDataset and map"
        )
    return StreamSplit(x, y, dataset=dataset)


def _type(array: Any) -> str:
    return "texts" if array.dtype.kind in "UO" else f"{array.dtype} {array.shape[1:]}"


def _described(data: DataConfig, train: ShardedDataset, parts: list[StreamSplit], task: Task | None) -> LoadedData:
    y = np.concatenate([part.y for part in parts])
    if task is None:
        single = y.ndim == 1 or y.shape[1:] == (1,)
        task = "multiclass" if y.dtype.kind in "iu" else "binary" if single and is_zero_or_one(y) else "regression"
    if y.dtype.kind not in "iufb" or (task == "multiclass" and y.dtype.kind not in "iu"):
        raise DataError(f"{data.name}: targets are {_type(y)}; expected numbers, for classes integers from 0")
    notes = [f"{train.num_shards:,} shards for training, shuffled in blocks of {train.shards_per_block}"]
    if data.test_data is None:
        notes.append("the last shards are the test part; --test-data names others")
    classes = 0 if task == "regression" else 2 if task == "binary" else data.classes or int(y.max(initial=0)) + 1
    if task == "multiclass" and data.classes is None:
        notes.append(f"{classes} classes, by the first {len(y):,} samples; --classes overrides it")
    name = Path(data.name.rstrip("/")).name.split("*")[0].strip("-_.{") or Path(data.name).parent.name or "shards"
    x = parts[0].x
    columns = x.shape[1] if x.ndim == 2 and x.dtype.kind == "f" else 0
    return LoadedData(name, parts[0], parts[1], classes, task, notes=tuple(notes), columns=columns)


def _refuse_others(data: DataConfig) -> None:
    refused = {
        "--sharding static": data.sharding == "static",
        "--categorical": data.categorical,
        "--numbers": data.numbers,
        "--text": data.text,
        "--drop": data.drop,
        "--unseen": data.unseen,
        "--missing": data.missing != "stop",
    }
    for flag, is_set in refused.items():
        if is_set:
            raise ConfigError(f"{flag}: not supported for streams of shards; leave it out, or use a single table")
    if data.name.lower().endswith(_OF_TOKENS) and data.sequence_length is None:
        raise ConfigError(f"{data.name}: shards of token ids need --sequence-length, the ids of a sample")
