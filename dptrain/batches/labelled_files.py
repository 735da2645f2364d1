"""Datasets of files with one folder per class: what pictures, texts and sounds share.

Rank 0 lists the files; each rank reads its own rows of a batch shortly before they are needed. The order is
f(seed, pass), so that any number of ranks trains on the same batches.
"""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dptrain import comm as comms
from dptrain.batches.py_dataset import PassDataset
from dptrain.comm.parts import cut
from dptrain.data.readers.pictures import MOST_PICTURES, require_inside
from dptrain.errors import ConfigError, DataError, printable
from dptrain.random import Purpose, default_seed, stream
from dptrain.runtime.failure import phase
from dptrain.runtime.launch.launcher import share_of_cores
from dptrain.runtime.output import terminal

Array = npt.NDArray[Any]
# Advice for links out of a folder.
FOLLOW = "follow_links=True"
_LABEL_MODES = ("int", "categorical", "binary", None)
_SUBSETS = ("training", "validation", "both", None)


@dataclass(frozen=True)
class FileKind:
    """A kind of files."""

    noun: str  # in Keras' messages, such as "images"
    word: str  # in ours, such as "pictures"
    suffixes: tuple[str, ...]  # of the file names


@dataclass(frozen=True)
class FileSelection:
    """Which files and labels to read: the arguments of Keras' functions."""

    kind: FileKind  # of the files
    labels: Any  # "inferred", a list or None
    label_mode: str | None  # "int", "categorical", "binary" or None
    class_names: Sequence[str] | None  # folders to take, or None
    batch_size: Any  # of a global batch
    follow_links: bool  # whether links may lead out of the folder

    def __post_init__(self) -> None:
        labels, label_mode, class_names = self.labels, self.label_mode, self.class_names
        if (isinstance(labels, str) and labels != "inferred") or not isinstance(labels, str | list | tuple | None):
            noun = self.kind.noun.split()[0].removesuffix("s")
            raise ConfigError(
                "`labels` argument should be a list/tuple of integer labels, of the same size as the number of "
                f'{noun} files in the target directory; "inferred"; or None for {self.kind.noun} alone. '
                f"Received: labels={labels}"
            )
        if class_names and not isinstance(labels, str):
            raise ConfigError(
                f'You can only pass `class_names` if `labels="inferred"`. Received: labels={labels}, and '
                f"class_names={class_names}"
            )
        if label_mode not in _LABEL_MODES:
            raise ConfigError(
                '`label_mode` argument must be one of "int", "categorical", "binary", or None. Received: '
                f"label_mode={label_mode}"
            )
        if not isinstance(self.batch_size, int) or self.batch_size < 1:
            raise ConfigError(f"not supported: batch_size={self.batch_size}; expected an integer >= 1")


@dataclass(frozen=True)
class SplitOptions:
    """How files are split and shuffled: the arguments of Keras' functions."""

    shuffle: bool
    seed: int | None
    validation_split: float | None
    subset: str | None
    verbose: bool

    def __post_init__(self) -> None:
        shuffle, seed, validation_split, subset = self.shuffle, self.seed, self.validation_split, self.subset
        if seed is not None and seed < 0:
            raise ConfigError(f"`seed` must be 0 or greater. Received: seed={seed}")
        if validation_split is not None and not 0 < validation_split < 1:
            raise ConfigError(f"`validation_split` must be between 0 and 1, received: {validation_split}")
        if subset not in _SUBSETS:
            raise ConfigError(f'`subset` must be either "training", "validation" or "both", received: {subset}')
        if (validation_split is None) != (subset is None):
            raise ConfigError("If `subset` is set, `validation_split` must be set, and inversely.")
        if validation_split is not None and shuffle and seed is None:
            raise ConfigError(
                "If using `validation_split` and shuffling the data, you must provide a `seed` argument, to make sure "
                "that there is no overlap between the training and validation subset."
            )


class FileDataset(PassDataset):
    """Batches of files' contents; `seed` is None where they are not shuffled."""

    def __init__(
        self,
        root: Path,
        files: Sequence[str],
        labels: Array | None,
        class_names: list[str] | None,
        batch_size: int,
        seed: int | None,
        ahead: int,
    ) -> None:
        super().__init__(workers=min(ahead, share_of_cores(comms.current().local_size)), max_queue_size=ahead)
        self._root, self._files, self._labels = root, files, labels
        self._batch_size, self._seed = batch_size, seed
        self.class_names, self.file_paths = class_names, [str(root / file) for file in files]
        self.on_pass_begin(0)

    def __len__(self) -> int:
        return math.ceil(len(self._files) / self._batch_size)

    def on_pass_begin(self, number: int) -> None:
        """Draw the order of pass `number`."""
        places = np.arange(len(self._files))
        self._order = places if self._seed is None else stream(self._seed, Purpose.SHUFFLE, number).permutation(places)

    def shard(self, index: int, part: int, parts: int) -> Any:
        """Read and return one part of a batch."""
        raise NotImplementedError

    def _files_of_part(self, index: int, part: int, parts: int) -> Array:
        places = self._order[index * self._batch_size : (index + 1) * self._batch_size]
        return np.asarray(places[slice(*cut(0, len(places), parts)[part])])


# Creates a data set from files, their labels, the labels' names and the seed of the order.
DatasetFactory = Callable[[Sequence[str], Array | None, list[str] | None, int | None], Any]


def make_datasets(root: Path, selection: FileSelection, parts: SplitOptions, make: DatasetFactory) -> Any:
    """Return the dataset of a folder, or two for subset "both". Collective."""
    files, numbers, names = _listed(root, selection)
    chosen = default_seed() if parts.seed is None else parts.seed
    _announce(
        f"Found {len(files)} files" + ("." if names is None else f" belonging to {len(names)} classes."), parts.verbose
    )
    order = np.arange(len(files))
    if parts.shuffle:
        np.random.RandomState(chosen % 2**32).shuffle(order)  # Keras' parts for this seed
    targets = None if numbers is None else _encoded(numbers, selection.label_mode, len(names or ()))

    def part(places: npt.NDArray[np.int64], name: str, shuffled: bool) -> Any:
        if not len(places):
            kind = selection.kind
            raise ConfigError(f"No {name}{kind.noun} found in directory {root}. Allowed formats: {kind.suffixes}")
        targets_of = None if targets is None else targets[places]
        return make([files[place] for place in places], targets_of, names, chosen if shuffled else None)

    if parts.validation_split is None:
        return part(order, "", parts.shuffle)
    cut_at = len(order) - int(parts.validation_split * len(order))
    _announce(f"Using {cut_at} files for training.", parts.verbose and parts.subset != "validation")
    _announce(f"Using {len(order) - cut_at} files for validation.", parts.verbose and parts.subset != "training")
    if parts.subset == "training":
        return part(order[:cut_at], "training ", parts.shuffle)
    if parts.subset == "validation":
        return part(order[cut_at:], "validation ", parts.shuffle)
    return [part(order[:cut_at], "training ", parts.shuffle), part(order[cut_at:], "validation ", False)]


def _listed(root: Path, selection: FileSelection) -> tuple[list[str], Array | None, list[str] | None]:
    """Return the files, their class numbers and the class names; None for these where no labels are wanted."""
    comm, labels = comms.current(), None if selection.label_mode is None else selection.labels
    inferred = isinstance(labels, str)

    def scan() -> list[tuple[str, list[str]]]:
        if comm.rank != 0:
            return []
        return list(_scanned(root, selection, selection.class_names if inferred else (), inferred))

    with phase.during("data"):
        listed = comm.broadcast_fact(comm.agree("data", scan) if comm.size > 1 else scan())
    files = [name for _, names in listed for name in names]
    numbers: Array | None = None
    names: list[str] | None = None
    if inferred:
        names = [name for name, _ in listed]
        numbers = np.repeat(np.arange(len(listed), dtype=np.int32), [len(names) for _, names in listed])
    elif labels is not None:
        if len(labels) != len(files):
            raise ConfigError(
                "Expected the lengths of `labels` to match the number of files in the target directory. len(labels) is "
                f"{len(labels)} while we found {len(files)} files in directory {root}."
            )
        names, numbers = [str(label) for label in sorted(set(labels))], np.asarray(labels, np.int32)
    if labels is not None and selection.label_mode == "binary" and len(names or ()) != 2:
        raise ConfigError(
            f'When passing `label_mode="binary"`, there must be exactly 2 class_names. Received: class_names={names}'
        )
    return files, numbers, names


def _announce(line: str, verbose: bool) -> None:
    if verbose and comms.current().rank == 0:
        terminal.say(line)


def _encoded(numbers: Array, label_mode: str | None, classes: int) -> Array:
    """Return labels in the form of `label_mode`."""
    if label_mode == "binary":
        return numbers.astype(np.float32)[:, None]
    return np.eye(classes, dtype=np.float32)[numbers] if label_mode == "categorical" else numbers


def _scanned(
    root: Path, selection: FileSelection, class_names: Sequence[str] | None, inferred: bool
) -> Iterator[tuple[str, list[str]]]:
    """Yield (class, its files relative to the root); one unnamed class where labels are not inferred."""
    if not root.is_dir():
        raise DataError(f"{root}: not found, or not a folder; expected a folder of {selection.kind.word}")
    if not inferred:
        yield "", list(_files(root, root, selection))
        return
    folders = sorted(entry.name for entry in root.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    if class_names is not None and not set(class_names) <= set(folders):
        raise ConfigError(
            "The `class_names` passed did not match the names of the subdirectories of the target directory. Expected: "
            f"{folders} (or a subset of it), but received: class_names={list(class_names)}"
        )
    for name in folders if class_names is None else class_names:
        files = list(_files(root / name, root, selection))
        if not files:
            raise DataError(
                f"{printable(str(root / name))}: no {selection.kind.word} ({', '.join(selection.kind.suffixes)}); "
                "remove the folder, or fill it"
            )
        yield name, files


def _files(folder: Path, root: Path, selection: FileSelection) -> Iterator[str]:
    """Yield the files below a folder, sorted, relative to the root; refuse links that lead out of it."""
    visited: set[str] = set()  # a link may lead to an enclosing folder
    matches: list[tuple[str, str]] = []
    for where, folders, names in os.walk(folder, followlinks=selection.follow_links):
        real = os.path.realpath(where)
        if real in visited:
            folders.clear()
            continue
        visited.add(real)
        matching = [name for name in names if name.lower().endswith(selection.kind.suffixes)]
        for path in (where, *(os.path.join(where, name) for name in matching)):
            if not selection.follow_links:
                require_inside(Path(path), root, FOLLOW)
        matches += [(where, name) for name in matching]
        if len(matches) > MOST_PICTURES:
            raise DataError(f"{folder}: more than {MOST_PICTURES} {selection.kind.word}")
    for where, name in sorted(matches):
        yield os.path.relpath(os.path.join(where, name), root)
