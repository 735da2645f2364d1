"""What `--data` names for a model that is there already: arrays in its own form, targets where they are known."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy.typing as npt

from dptrain.comm import Communicator
from dptrain.data.catalog import DEFAULT_MAX_BYTES
from dptrain.data.loading import load_dataset, read_shared
from dptrain.data.npy_pair import read_targets
from dptrain.data.npz import map_npy, open_arrays
from dptrain.data.pictures import PICTURES
from dptrain.data.preprocessing import Preprocessing, Unseen
from dptrain.data.samples import is_raw, read_samples
from dptrain.errors import ConfigError, DataError

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class GivenSamples:
    """Samples as a model takes them.

    Attributes:
        name: of the data, for people.
        x: (rows, ...), or a dictionary of such by the names of the model's inputs.
        y: targets, or None where the data has none.
        files: of pictures, in the order of the rows.
        notes: what was left out, a line each.
    """

    name: str
    x: Any
    y: Array | None
    files: Sequence[str] = ()
    notes: Sequence[str] = ()

    def __len__(self) -> int:
        """Return the number of rows."""
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
    """Bring samples into memory, one copy a node. Collective.

    Args:
        name_or_path: an .npy file of features; an .npz file with x, and y where it is known, or with x_test and y_test
            (x_train and y_train), or with an array for each input of the model; or a data set as for a training; or raw
            data as the model was trained on.
        comm: the ranks.
        target: of an .npy file of features, that of the targets.
        part: "test" or "train", where the data has both.
        inputs: names of the model's inputs, where it has several.
        data_dir: where the user keeps the files of a named set.
        max_bytes: the largest that each array may be.
        preprocessing: the model's, of its raw data.
        bad: as `read_samples`.
        unseen: as `read_samples`.

    Raises:
        AgreedError: on every rank, whatever was wrong on any: the file is missing, damaged, or has no such arrays; or a
            target is named of data that has its own.
    """
    path = Path(name_or_path.removeprefix(PICTURES)).expanduser()
    if target is not None:
        comm.agree("data", lambda: _require_npy(path, str(target)))
    if is_raw(str(path), preprocessing):
        raw = read_samples(str(path), preprocessing, comm, max_bytes=max_bytes, bad=bad, unseen=unseen)
        return GivenSamples(str(path), raw.x, raw.y, raw.files, raw.notes)
    if path.suffix == ".npy":
        x, y = comm.agree("data", lambda: _npy(path, target, max_bytes))
        headers = {key: [list(one.shape), str(one.dtype)] for key, one in (("x", x), ("y", y)) if one is not None}
        comm.require_same("the ranks see different data", headers)
        return GivenSamples(str(path), x, y)
    if path.suffix == ".npz":
        sources = comm.agree(
            "data", lambda: open_arrays(path, lambda names: _chosen(path, names, part, inputs), max_bytes=max_bytes)
        )
        headers = {key: [list(one.shape), str(one.dtype)] for key, one in sources.items()}
        comm.require_same("the ranks see different data", headers)
        found = {key: read_shared(one, comm) for key, one in sources.items()}
        y = next((found.pop(key) for key in ("y", f"y_{part}") if key in found and key not in inputs), None)
        return GivenSamples(str(path), found if set(found) == set(inputs) else next(iter(found.values())), y)
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
    """Return which arrays of an archive hold the features, and last the targets, where they are there.

    Raises:
        DataError: none can be told to be the features.
    """
    if len(inputs) > 1 and all(name in names for name in inputs):
        return [*inputs, *(["y"] if "y" in names and "y" not in inputs else [])]
    for x, y in ((f"x_{part}", f"y_{part}"), ("x", "y")):
        if x in names:
            return [x, *([y] if y in names else [])]
    if len(names) == 1:
        return list(names)
    wanted = f"x_{part} or x" if len(inputs) < 2 else f"{', '.join(inputs)}, or x"
    raise DataError(f"{path}: no features in the archive; expected {wanted}, found {', '.join(sorted(names)[:10])}")
