"""Checkpointing: saves checkpoints of a training and resumes from them, for `BackupAndRestore` and the command line.

The training loop calls it after all hooks of all callbacks, so that a checkpoint holds the result of each.
"""

import json
import platform
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dptrain.callbacks.base import Callback, CallbackList, Logs, is_of_the_package, method_of
from dptrain.callbacks.ranks import on_all, on_rank_0, ranks_of
from dptrain.comm import Communicator
from dptrain.comm.mesh import BATCH, MeshCommunicator
from dptrain.errors import AgreedError, ConfigError, DataError, ExitCode, OutputError
from dptrain.program.shapes import size
from dptrain.program.tensor import Array, Variable
from dptrain.registry.serialization import plain
from dptrain.runtime.failure import warn
from dptrain.runtime.output import terminal
from dptrain.runtime.storage.files import output_error
from dptrain.runtime.storage.locks import LOCK, locked
from dptrain.runtime.text import short
from dptrain.saving import safetensors_file
from dptrain.saving.checkpoints import (
    Checkpoint,
    CheckpointDirectory,
    Content,
    located,
    memory,
    newest,
    newest_name,
    read,
)
from dptrain.saving.manifest import Entries, PartOf, StoredArray
from dptrain.saving.parts import Part, read_part
from dptrain.saving.reading import joined, portable_dtype, reading
from dptrain.saving.state import Arrays, array_reference, extract_arrays, insert_arrays, variables
from dptrain.saving.weights import architecture_of
from dptrain.utils import check_seed
from dptrain.version import __version__

_MODEL, _REST, _STATE = "model.safetensors", "training.safetensors", "state.json"
# Prefix of arrays in callbacks' states, beside the model's variables.
_OF_CALLBACKS = "callbacks"
_NOTHING = object()
# Greatest number of copies of a weight in callbacks: all might not fit into one machine's memory.
_MAX_COPIES = 16
# Greatest number of steps or epochs.
_MAX_COUNT = 2**53
_SAME = "start with the same settings, or name those that may differ (--resume-anyway, BackupAndRestore.resume_anyway)"


@dataclass(frozen=True)
class Position:
    """Position of a training between two steps."""

    epoch: int  # from 0, the current one or the next
    step: int  # steps of this epoch made so far
    made: int  # steps over all epochs
    rate_at_begin: Any = 0.0  # learning rate at the begin of the epoch; a list of several optimizers'
    ended: bool = False  # no epoch follows, whatever their number
    logs: Logs = field(default_factory=dict)  # of the epoch that has just ended
    stops: bool = False  # no step of this epoch follows: its validation was interrupted
    skipped_at_begin: int | None = None  # steps skipped before the epoch; None if none are skipped


@dataclass(frozen=True)
class _Pending:
    """A checkpoint that several ranks are writing."""

    temporary: str  # name of the folder while it is written
    name: str  # final name
    position: Position


class Checkpointing(Callback):
    """Saves checkpoints in a directory, and resumes a training from the newest good one.

    Args:
        path: the directory.
        epochs: save after every epoch.
        steps: steps between saves, counted across epochs; None for never.
        seconds: seconds between saves; None for never.
        keep: number of latest checkpoints to keep.
        keeps_best: also keep the one with the best validation loss, or loss.
        source: a checkpoint, or a directory of them, to resume from instead.
        resumes: resume from existing checkpoints.
        delete: delete the checkpoints after a complete training.
        owns: the caller holds the directory's lock.
        facts: settings that must equal the checkpoint's besides the model; by default the arguments of `fit`.
        advice: end of messages about a directory that cannot be written.

    Attributes:
        resume_anyway: fields of the training that may differ from the checkpoint's, such as "batch_size".
    """

    _same_on_all_ranks = ("epochs", "steps", "seconds", "resumes", "delete")

    def __init__(
        self,
        path: str | Path,
        *,
        epochs: bool = False,
        steps: int | None = None,
        seconds: float | None = None,
        keep: int = 3,
        keeps_best: bool = True,
        source: Path | None = None,
        resumes: bool = True,
        delete: bool = False,
        owns: bool = False,
        facts: Mapping[str, Any] | None = None,
        advice: str,
    ) -> None:
        super().__init__()
        self.path = Path(path)
        self.epochs, self.steps, self.seconds = epochs, steps, seconds
        self.keep, self.keeps_best = keep, keeps_best
        self.source, self.resumes, self.delete = source, resumes, delete
        self.resume_anyway: Collection[str] = ()
        self._owns, self._user_facts, self._advice = owns, facts, advice
        self._directory: CheckpointDirectory | None = None
        self._lock_scope = ExitStack()
        self._identity: dict[str, Any] = {}
        self._architecture: list[dict[str, Any]] = []
        self._saved_at = 0.0
        self._restored: list[tuple[str, Any]] = []
        self._rate = 0.0
        self._parts: dict[str, Part] = {}  # of a training's variables, by unique paths
        self._names: dict[str, str] = {}  # the model's weights by these paths, in order
        self._pending: _Pending | None = None

    # Called by the training loop

    def _resume(self, hooks: CallbackList) -> Position | None:
        """Open the directory and restore the newest good checkpoint; None if there is none. Collective.

        DataError names all checkpoints if none is good, ConfigError what differs from another training's.
        """
        if self.model.compiled:  # its slots are in the checkpoint
            self.model._compiled_optimizer.build(self.model.trainable_weights)
        self._saved_at, self._restored = time.monotonic(), []
        self._parts, self._pending = {}, None
        self._identity = plain(self._facts(hooks))
        on_all(self, "checkpoint", self._open)
        candidates, rejected = on_rank_0(self, "checkpoint", self._candidates), list[str]()
        while True:
            chosen = on_rank_0(self, "checkpoint", partial(self._next, candidates, rejected))
            facts = ranks_of(self).broadcast_fact(None if chosen is None else [chosen[0].as_json(), chosen[1]])
            if facts is None:
                return None
            checkpoint, state = Checkpoint.from_json(facts[0]), facts[1]
            parts = self._parts_of(variables(self.model))
            copies = {name: parts[path] for name, path in state["copies"].items()}
            try:
                arrays = on_all(self, "checkpoint", partial(self._read, checkpoint, parts | copies))
                break
            except (AgreedError, DataError) as error:  # nothing has changed so far
                if error.exit_code != ExitCode.DATA:
                    raise
                rejected.append(str(error))
        for path, part in (parts | copies).items():
            value = arrays.get(path)
            if value is None:
                value = np.empty(part.variable.shape, portable_dtype(part.variable.dtype))
            part.ranks.broadcast(value)
            if path in copies:
                arrays[path] = value
            else:
                part.variable.assign(value)
        stored = {
            name: array for name, array in checkpoint.manifest.arrays.items() if _is_of_callbacks(name, parts | copies)
        }
        for name, array in stored.items():
            arrays.setdefault(name, np.empty(array.shape, array.dtype))
            ranks_of(self).broadcast(arrays[name])
        self._restored = [(name, insert_arrays(content, arrays)) for name, content in state["callbacks"]]
        on_all(self, "checkpoint", lambda: self._trainer.backend.choose(state.get("kernels", {})))
        self._rate = state["rate"]
        on_rank_0(self, "checkpoint", lambda: self._announce(checkpoint, state, rejected))
        return Position(**state["position"])

    def _load(self, hooks: CallbackList, position: Position, *, begun: bool) -> None:
        """Restore the callbacks' states and the learning rate; `begun` after its begin hooks. Collective."""
        by_key = {key: callback for key, callback in _numbered(hooks)}
        for key, state in zip(_keys(name for name, _ in self._restored), self._restored, strict=True):
            if key in by_key and state[1]:
                _load(by_key[key], state[1])
        # In the middle of an epoch its begin hooks run again, and see the same learning rate as then.
        again = position.step and not begun
        if not again:
            self._restored = []
        self.model._compiled_optimizer._resume_learning_rate(position.rate_at_begin if again else self._rate)

    @property
    def last_saved(self) -> float | None:
        """When the last good checkpoint was complete, in seconds since 1970; None before. On rank 0."""
        name = None if self._directory is None else self._directory.last_good
        with suppress(OSError):
            return None if name is None else (self.path / name).stat().st_mtime
        return None

    def _steps_left(self, steps: int) -> int | None:
        """Return the steps before the next checkpoint; None if steps do not decide."""
        return None if self.steps is None else self.steps - steps % self.steps

    @property
    def _is_due(self) -> bool:
        """Whether it is time to save, or an error is to be raised. On rank 0."""
        if self._directory is not None and self._directory.has_failed:
            return True
        return self.seconds is not None and time.monotonic() - self._saved_at >= self.seconds

    def _save(self, hooks: CallbackList, position: Position) -> None:
        """Copy the state and begin to write it. Collective."""
        self._wait()  # for the previous checkpoint
        comm = ranks_of(self)
        if position.step == 0 or not self._parts:  # searches the whole model, which an epoch's end may extend
            by_path = variables(self.model)
            paths = {id(variable): path for path, variable in by_path.items()}
            self._parts = self._parts_of(by_path)
            self._names = {paths[id(variable)]: name for name, variable in self.model._weights_by_path().items()}
        if all(part.ranks.size == comm.size for part in self._parts.values()):
            on_rank_0(self, "checkpoint", lambda: self._write(hooks, position))
        else:
            temporary, name = comm.broadcast_fact(on_rank_0(self, "checkpoint", lambda: self._begin(position)))
            self._pending = _Pending(temporary, name, position)
            on_all(self, "checkpoint", lambda: self._write(hooks, position))
        self._saved_at = time.monotonic()

    @property
    def _is_written(self) -> bool:
        """Whether this rank's part is written and waits for `join`."""
        return self._pending is not None and self._directory is not None and self._directory.is_idle

    def _join(self) -> None:
        """Complete a checkpoint of several ranks once all parts are written. Collective."""
        if self._pending is None:
            return
        pending, self._pending, directory = self._pending, None, self._directory
        assert directory is not None
        comm = ranks_of(self)
        try:
            described = on_all(self, "checkpoint", directory.written)
        except AgreedError:
            if comm.rank == 0:
                directory.discard(pending.temporary)
            raise
        facts = comm.allgather(described.as_json())

        def join() -> None:
            parts = [Entries.from_json(fact) for fact in facts]
            value, steps = self._value(pending.position), pending.position.made
            directory.join(pending.temporary, pending.name, parts, steps, value=value, mesh=_mesh(comm))

        on_rank_0(self, "checkpoint", join)

    def _wait(self) -> str:
        """Return the path of the last checkpoint once it is on the disk. Collective."""
        self._join()

        def wait() -> None:
            if self._directory is not None:
                self._directory.wait()

        on_all(self, "checkpoint", wait)
        name = None if self._directory is None else self._directory.last_good
        return str(self.path if name is None else self.path / name)

    # Hooks

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Wait for the last checkpoint, or delete them all. Collective."""
        self._wait()
        if self.delete:
            on_rank_0(self, "checkpoint", self._delete)

    def _release(self) -> None:
        if self._directory is not None:
            self._directory.close()
            self._directory = None
        self._lock_scope.close()

    # On every rank

    def _open(self) -> None:
        """Open the directory, locked by rank 0."""
        options: dict[str, Any] = {"keep": self.keep, "advice": self._advice, "follow": not self._owns}
        leads = ranks_of(self).rank == 0
        if leads:
            try:
                self.path.mkdir(parents=True, exist_ok=True)
                if not self._owns:
                    self._lock_scope.enter_context(locked(self.path, "training", self._advice))
            except OutputError:
                raise
            except (OSError, NotImplementedError) as error:
                failure = error if isinstance(error, OSError) else OSError(str(error))
                raise output_error(self.path, failure, advice=self._advice) from error
        self._directory = CheckpointDirectory(self.path, leads=leads, **options)
        if leads:
            self._architecture = architecture_of(self.model)
            # Room for the kept checkpoint and the next.
            nbytes = (size(variable.shape) * variable.dtype.itemsize for variable in variables(self.model).values())
            self._directory.probe(2 * sum(nbytes))

    def _parts_of(self, by_path: Mapping[str, Variable]) -> dict[str, Part]:
        """Return this rank's parts of variables. Collective."""
        return {path: self.model._part_of(variable, ranks_of(self)) for path, variable in by_path.items()}

    def _read(self, checkpoint: Checkpoint, parts: Mapping[str, Part]) -> Arrays:
        """Return this rank's arrays of a checkpoint, for itself and the ranks that share them."""
        listed = checkpoint.manifest.arrays
        mine = {path: part for path, part in parts.items() if part.ranks.rank == 0 and part.is_here}
        ranges = {path: (part.start, part.variable.shape) for path, part in mine.items()}
        if ranks_of(self).rank == 0:
            shapes = {name: array.shape for name, array in listed.items() if _is_of_callbacks(name, parts)}
            ranges |= {name: ((0,) * len(shape), shape) for name, shape in shapes.items()}
        if not ranges:
            return {}
        with reading(str(checkpoint.path)), checkpoint.open() as folder:
            return {path: read_part(folder, listed[path], start, shape) for path, (start, shape) in ranges.items()}

    # On rank 0

    def _candidates(self) -> tuple[Iterator[Path], bool]:
        """Return the checkpoints to resume from, best first, and whether they may be links."""
        assert self._directory is not None
        candidates, follow = (self._directory.candidates(), False) if self.source is None else located(self.source)
        return iter(candidates if self.resumes else ()), follow

    def _next(
        self, candidates: tuple[Iterator[Path], bool] | None, rejected: list[str]
    ) -> tuple[Checkpoint, dict[str, Any]] | None:
        """Return the next good checkpoint and its state, None if there are none; adds to `rejected`."""
        assert candidates is not None
        checkpoint = newest(candidates[0], rejected, follow=candidates[1])
        if checkpoint is None:
            return None
        with reading(str(checkpoint.path)):
            state = _checked(json.loads(checkpoint.files[_STATE]))
            by_path = variables(self.model)
            there = {name: np.empty(0) for name in checkpoint.manifest.arrays if _is_of_callbacks(name, by_path)}
            insert_arrays(state["callbacks"], there)  # raises unless every array is there
        differing = dict(_differences("", state["identity"], self._identity))
        refused = [line for name, line in differing.items() if not self._may_differ(name)]
        # Slots follow from optimizer and weights, whose differences are shorter to report.
        if refused := [line for line in refused if not line.startswith("state.")] or refused:
            raise ConfigError(f"{checkpoint.path} is the checkpoint of another training: {joined(refused)}; {_SAME}")
        _require_arrays(str(checkpoint.path), checkpoint.manifest.arrays, by_path, state["copies"])
        if any(name.endswith("learning_rate") for name in differing):  # the new learning rate was requested
            state["rate"] = state["position"]["rate_at_begin"] = self.model._compiled_optimizer._resumed_rate
        return checkpoint, state

    def _announce(self, checkpoint: Checkpoint, state: Mapping[str, Any], rejected: Sequence[str]) -> None:
        """Print where the training resumes."""
        assert self._directory is not None
        if self.source is None:
            self._directory.note(checkpoint)
        if rejected:
            warn(f"{'; '.join(rejected)}; resuming from {checkpoint.path.name}")
        if terminal.verbosity(self.params.get("verbose", 0)):
            position, epochs = state["position"], self.params["epochs"]
            epoch = min(position["epoch"] + 1, epochs)
            terminal.say(f"Resuming from step {position['made']:,}, in epoch {epoch}/{epochs} ({checkpoint.path})")

    def _may_differ(self, name: str) -> bool:
        """Return whether a field is in `resume_anyway`: by its path, a group, or its last word."""
        allowed = {name.replace("-", "_") for name in self.resume_anyway}
        parts = name.split(".")
        groups = {".".join(parts[:end]) for end in range(1, len(parts) + 1)}
        return parts[0] not in ("weights", "state") and bool(allowed & {*groups, parts[-1]})

    def _facts(self, hooks: CallbackList) -> dict[str, Any]:
        """Return what must be the same for a training to resume."""
        model = self.model
        return {
            "dtype": model.dtype_policy.name,
            "seed": model._model_seed,
            "steps": self.params.get("steps"),
            **(hooks.facts() if self._user_facts is None else self._user_facts),
            "weights": {path: list(weight.shape) for path, weight in model._weights_by_path().items()},
            "state": {path: [list(variable.shape), str(variable.dtype)] for path, variable in variables(model).items()},
        }

    def _value(self, position: Position) -> float | None:
        """Return the value that decides which checkpoint is best."""
        value = position.logs.get("val_loss", position.logs.get("loss")) if self.keeps_best else None
        return None if value is None else float(value)

    def _begin(self, position: Position) -> tuple[str, str]:
        assert self._directory is not None
        return self._directory.begin(position.made)

    def _write(self, hooks: CallbackList, position: Position) -> None:
        """Copy this rank's arrays, and begin to write them."""
        assert self._directory is not None
        comm, files = ranks_of(self), dict[str, Content]()
        copies = self._copies(hooks)
        parts = self._parts | {name: self._parts[path] for name, (path, _) in copies.items()}
        of_all = {name for name, part in parts.items() if part.ranks.size == comm.size}
        mine = {name: part for name, part in parts.items() if part.ranks.rank == 0 and part.is_here}
        # All are copies: the training continues while they are written.
        values = {
            name: part.of(copies[name][1]) if name in copies else part.variable.numpy() for name, part in mine.items()
        }
        if partial_names := mine.keys() - of_all:
            arrays = {name: values[name] for name in partial_names}
            stored = {name: PartOf(name, mine[name].start, mine[name].whole) for name in partial_names}
            name = f"shard-{comm.rank}-of-{comm.size}.safetensors"
            files[name] = Content(lambda: safetensors_file.pieces(arrays), stored)
        if comm.rank == 0:
            whole = {name: values[name] for name in mine if name in of_all}
            files |= self._shared_files(hooks, position, whole, {name: path for name, (path, _) in copies.items()})
        if self._pending is None:
            self._directory.save(position.made, files, value=self._value(position), mesh=_mesh(comm))
        else:
            self._directory.write(self._pending.temporary, self._pending.name, files)

    def _copies(self, hooks: CallbackList) -> dict[str, tuple[str, Array]]:
        """Return callbacks' copies of weights by array name, each with the path of its weight."""
        return {
            name: (path, value)
            for key, callback in _numbered(hooks)
            for copies in _copies_of(key, callback).values()
            for path, (name, value) in zip(self._names, copies.items(), strict=True)
        }

    def _shared_files(
        self, hooks: CallbackList, position: Position, values: Arrays, copies: Mapping[str, str]
    ) -> dict[str, Content]:
        """Return the files that one rank writes for all: weights, other state, and the position."""
        model, architecture = self.model, self._architecture
        names = {path: name for path, name in self._names.items() if path in values}
        weights = {name: values[path] for path, name in names.items()}
        arrays: Arrays = {path: value for path, value in values.items() if path not in names}
        states = []
        for key, callback in _numbered(hooks):
            by_part = {
                name: list(map(array_reference, of_weights)) for name, of_weights in _copies_of(key, callback).items()
            }
            rest = {name: value for name, value in method_of(callback, "state_dict")().items() if name not in by_part}
            states.append([key[0], extract_arrays(rest, _prefix(key), arrays) | by_part])
        state = {
            "position": plain(asdict(position)),
            "rate": model._compiled_optimizer._resumed_rate if model.compiled else 0.0,
            "callbacks": states,
            "copies": dict(copies),
            "identity": self._identity,
            **({"kernels": dict(chosen)} if (chosen := self._trainer.backend.chosen) else {}),
            "world_size": ranks_of(self).size,
            "versions": {"dptrain": __version__, "numpy": np.__version__, "python": platform.python_version()},
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        }
        of_model = {name: _whole(path, weights[name]) for path, name in names.items()}
        of_rest = {path: _whole(path, array) for path, array in arrays.items()}
        return {
            _MODEL: Content(lambda: safetensors_file.pieces_of_model(weights, architecture), of_model),
            _REST: Content(lambda: safetensors_file.pieces(arrays), of_rest),
            _STATE: Content(lambda: [json.dumps(state).encode()]),
        }

    def _delete(self) -> None:
        assert self._directory is not None
        self._directory.delete()
        self._lock_scope.close()
        try:
            if not self._owns:
                (self.path / LOCK).unlink(missing_ok=True)
            if self.path.is_dir() and not any(self.path.iterdir()):
                self.path.rmdir()
        except OSError as error:
            raise output_error(self.path, error, advice="delete it by hand") from error


def _whole(path: str, array: Array) -> PartOf:
    return PartOf(path, (0,) * array.ndim, array.shape)


def _prefix(key: tuple[str, int]) -> str:
    """Return the prefix of names of a callback's arrays."""
    return f"{_OF_CALLBACKS}/{key[0]}/{key[1]}"


def _names_of_copies(callback: Callback) -> tuple[str, ...]:
    """Return `copies_of_weights` of a class; a user's attribute of that name does not count."""
    names = getattr(type(callback), "copies_of_weights", ())
    return names if isinstance(names, tuple) and all(isinstance(name, str) for name in names) else ()


def _copies_of(key: tuple[str, int], callback: Callback) -> dict[str, Arrays]:
    """Return a callback's copies of weights by attribute, each by array name."""
    by_attribute = {name: getattr(callback, name) for name in _names_of_copies(callback)}
    return {
        attribute: {f"{_prefix(key)}/{attribute}/{number}": array for number, array in enumerate(values)}
        for attribute, values in by_attribute.items()
        if values is not None
    }


def _is_of_callbacks(name: str, model_paths: Collection[str]) -> bool:
    """Return whether an array of a checkpoint is a callback's, not the model's."""
    return name not in model_paths and name.startswith(f"{_OF_CALLBACKS}/")


def _mesh(comm: Communicator) -> dict[str, int]:
    """Return the length of each axis of the ranks' mesh."""
    return comm.lengths if isinstance(comm, MeshCommunicator) else {BATCH: comm.size}


def stored_seed(callbacks: Iterable[Callback]) -> int | None:
    """Return the seed of the newest checkpoint that a callback resumes from, on rank 0; None where there is none.

    What cannot be read is reported when the training resumes.
    """
    keepers = (callback for callback in callbacks if isinstance(callback, Checkpointing))
    for keeper in keepers:
        if not keeper.resumes or keeper.source is not None or ranks_of(keeper).rank:
            continue
        with suppress(DataError, LookupError, RecursionError, TypeError, ValueError):
            if (name := newest_name(keeper.path)) is not None:
                return check_seed(json.loads(read(keeper.path / name, follow=False).files[_STATE])["identity"]["seed"])
    return None


def _checked(state: Any) -> dict[str, Any]:
    """Validate state.json: its hash shows damage, not who wrote it."""
    position = state["position"]
    numbers = [position[name] for name in ("epoch", "step", "made")]
    skipped, kernels = position.get("skipped_at_begin"), state.get("kernels", {})
    copies = state.setdefault("copies", {})  # older checkpoints do not mark them
    right = (
        position.keys() <= {entry.name for entry in fields(Position)}
        and all(type(number) is int and 0 <= number < _MAX_COUNT for number in (*numbers, skipped or 0))
        and all(_is_rate(rate) for rate in (state["rate"], position.get("rate_at_begin", 0)))
        and isinstance(position.get("logs", {}), dict)
        and isinstance(state["identity"], dict)
        and isinstance(copies, dict)
        and all(isinstance(path, str) for path in copies.values())
        and isinstance(kernels, dict)
        and isinstance(kernels.get("chosen", {}), dict)
        and isinstance(kernels.get("libraries", []), list)
        and all(isinstance(name, str) for name, _ in state["callbacks"])
    )
    if not right:
        raise DataError(f"{_STATE} does not describe a checkpoint")
    return dict(state)


def _is_rate(rate: Any) -> bool:
    """Return whether a value may be a learning rate, or a list of several optimizers'."""
    return all(isinstance(value, int | float) for value in (rate if isinstance(rate, list) else [rate]))


def _require_arrays(
    where: str, arrays: Mapping[str, StoredArray], by_path: Mapping[str, Variable], copies: Mapping[str, str]
) -> None:
    """Check a checkpoint's arrays against the model's variables, and that callbacks' fit into memory."""
    for name, path in copies.items():
        if path not in by_path or not _is_of_callbacks(name, by_path):
            raise DataError(f"{where}: damaged: {short(name)} is not a callback's copy of {short(path)}")
    if max(Counter(copies.values()).values(), default=0) > _MAX_COPIES:
        raise DataError(f"{where}: damaged: more than {_MAX_COPIES} copies of a weight")
    expected = {**by_path, **{name: by_path[path] for name, path in copies.items()}}
    for path, variable in expected.items():
        array = arrays.get(path)
        dtype = portable_dtype(variable.dtype)
        if array is None or array.shape != variable.shape or array.dtype != dtype.name:
            there = "not there" if array is None else f"{array.dtype} {array.shape}"
            raise DataError(f"{where}: damaged: {path} is {there}, expected {dtype} {variable.shape}")
    of_callbacks = [array for name, array in arrays.items() if _is_of_callbacks(name, expected)]
    nbytes = sum(size(array.shape) * np.dtype(array.dtype).itemsize for array in of_callbacks)
    if nbytes > memory():
        raise DataError(f"{where}: {nbytes} bytes of callbacks' arrays, more than the memory of this machine")


def _load(callback: Callback, state: dict[str, Any]) -> None:
    """Restore a callback's state; if a callback of ours cannot read it, the checkpoint is at fault."""
    if is_of_the_package(type(callback)):
        with reading(f"the checkpoint's state of {type(callback).__name__}"):
            method_of(callback, "load_state_dict")(state)
    else:
        method_of(callback, "load_state_dict")(state)


def _numbered(hooks: CallbackList) -> list[tuple[tuple[str, int], Callback]]:
    """Return the callbacks keyed by class and number in the class: ranks may have others besides."""
    return list(zip(_keys(type(callback).__name__ for callback in hooks.callbacks), hooks.callbacks, strict=True))


def _keys(names: Iterable[str]) -> Iterator[tuple[str, int]]:
    counts: Counter[str] = Counter()
    for name in names:
        yield name, counts[name]
        counts[name] += 1


def _differences(name: str, there: Any, here: Any) -> Iterator[tuple[str, str]]:
    """Yield the names of values that differ between a checkpoint and this training, each with a line."""
    if isinstance(there, dict) and isinstance(here, dict):
        for key in there | here:
            inner = f"{name}.{key}" if name else key
            yield from _differences(inner, there.get(key, _NOTHING), here.get(key, _NOTHING))
    elif there is _NOTHING or here is _NOTHING or there != here:
        other, stored = ("nothing" if value is _NOTHING else short(value) for value in (there, here))
        yield name, f"{name}: it has {other}, this one {stored}"
