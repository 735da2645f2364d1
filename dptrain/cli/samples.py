"""Opens the samples that `--data` names for a trained model: arrays in its form, and targets if there are any."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy.typing as npt

from dptrain.comm import Communicator
from dptrain.data.catalog import DEFAULT_MAX_BYTES
from dptrain.data.loading import load_dataset, read_shared
from dptrain.data.preprocessing import Preprocessing, Unseen
from dptrain.data.readers.npy_pair import read_targets
from dptrain.data.readers.npz import map_npy, open_arrays
from dptrain.data.readers.pictures import PICTURES
from dptrain.data.samples import is_raw, read_samples
from dptrain.errors import ConfigError, DataError

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class GivenSamples:
    """Samples for a model."""

    name: str  # of the data, for people
    x: Any  # (rows, ...), or a dictionary by input name
    y: Array | None  # targets, or None
    files: Sequence[str] = ()  # of pictures, in the order of the rows
    notes: Sequence[str] = ()  # what was skipped

    def __len__(self) -> int:
        return len(next(iter(self.x.values())) if isinstance(self.x, Mapping) else self.x)


def load_samples(
    name_or_path: str,
    comm: Communicator,
    *,
    target: str | None = None,
    part: str = "test",
    inputs: Sequence[str] = (),
    data_dir: Path | None = None,
    max_bytes: int = DEFAULT_MAX_BYTES,
    preprocessing: Preprocessing | None = None,
    bad: str = "stop",
    unseen: Unseen | None = None,
) -> GivenSamples:
    """Load samples, one copy a node. Collective.

    `name_or_path` is an .npy file of features, with targets in `target`; an .npz file with x and y, x_test and y_test
    (or x_train and y_train, by `part`), or an array for each of the model's `inputs`; a data set as for a training; or
    raw data for `preprocessing`.
    """
    path = Path(name_or_path.removeprefix(PICTURES)).expanduser()
    if target is not None:
        comm.agree("data", lambda: _require_npy(path, str(target)))
    if is_raw(str(path), preprocessing):
        raw = read_samples(str(path), preprocessing, comm, max_bytes=max_bytes, bad=bad, unseen=unseen)
        return GivenSamples(str(path), raw.x, raw.y, raw.files, raw.notes)
    if path.suffix == ".npy":
        x, y = comm.agree("data", lambda: _npy(path, target, max_bytes))
        headers = {
            key: [list(array.shape), str(array.dtype)] for key, array in (("x", x), ("y", y)) if array is not None
        }
        comm.require_same("the ranks see different data", headers)
        return GivenSamples(str(path), x, y)
    if path.suffix == ".npz":
        sources = comm.agree(
            "data", lambda: open_arrays(path, lambda names: _chosen(path, names, part, inputs), max_bytes=max_bytes)
        )
        headers = {key: [list(source.shape), str(source.dtype)] for key, source in sources.items()}
        comm.require_same("the ranks see different data", headers)
        arrays = {key: read_shared(source, comm) for key, source in sources.items()}
        y = next((arrays.pop(key) for key in ("y", f"y_{part}") if key in arrays and key not in inputs), None)
        return GivenSamples(str(path), arrays if set(arrays) == set(inputs) else next(iter(arrays.values())), y)
    data = load_dataset(name_or_path, comm, data_dir=data_dir, max_bytes=max_bytes)
    split = data.test if part == "test" else data.train
    return GivenSamples(f"{data.name} ({part} part)", split.x, split.y)


def _require_npy(path: Path, target: str) -> None:
    if path.suffix != ".npy" or not target.endswith(".npy"):
        raise ConfigError(f"--target {target}: expected --data X.npy --target Y.npy; {path} has its own targets")


def _npy(path: Path, target: str | None, max_bytes: int) -> tuple[Array, Array | None]:
    x = map_npy(path)
    return x, None if target is None else read_targets(target, str(path), len(x), max_bytes)


def _chosen(path: Path, names: Collection[str], part: str, inputs: Sequence[str]) -> list[str]:
    """Return which arrays of an archive are features, and last the targets if there are any."""
    if len(inputs) > 1 and all(name in names for name in inputs):
        return [*inputs, *(["y"] if "y" in names and "y" not in inputs else [])]
    for x, y in ((f"x_{part}", f"y_{part}"), ("x", "y")):
        if x in names:
            return [x, *([y] if y in names else [])]
    if len(names) == 1:
        return list(names)
    expected = f"x_{part} or x" if len(inputs) < 2 else f"{', '.join(inputs)}, or x"
    raise DataError(f"{path}: no features in the archive; expected {expected}, found {', '.join(sorted(names)[:10])}")
