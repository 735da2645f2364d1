"""Checkpointing: what keeps checkpoints of a training and lets it go on from them.

`BackupAndRestore` and the command line are two ways to ask for it. The training loop calls it itself, after all hooks
of all callbacks, so that a checkpoint holds what every one of them has come to.
"""

import json
import platform
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
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
from dptrain.runtime import terminal
from dptrain.runtime.failure import warn
from dptrain.runtime.files import output_error
from dptrain.runtime.locks import LOCK, locked
from dptrain.runtime.text import short
from dptrain.saving import safetensors_file
from dptrain.saving.checkpoints import Checkpoint, CheckpointDirectory, Content, located, memory, newest
from dptrain.saving.manifest import Entries, PartOf, StoredArray
from dptrain.saving.parts import Part, read_part
from dptrain.saving.reading import joined, portable_dtype, reading
from dptrain.saving.state import Arrays, array_reference, extract_arrays, insert_arrays, variables
from dptrain.saving.weights import architecture_of
from dptrain.version import __version__

_MODEL, _REST, _STATE = "model.safetensors", "training.safetensors", "state.json"
# Of callbacks' states, beside those of the model's variables.
_OF_CALLBACKS = "callbacks"
_NOTHING = object()
# Copies of a weight that callbacks hold: they need not fit into the memory of one machine.
_MAX_COPIES = 16
# Steps and epochs that can be counted.
_MAX_COUNT = 2**53
_SAME = "start with the same settings, or name those that may differ (--resume-anyway, BackupAndRestore.resume_anyway)"


@dataclass(frozen=True)
class Position:
    """Where a training stands between two steps.

    Attributes:
        epoch: counted from 0, the one at hand or the next.
        step: steps of it that are done.
        made: steps since the training began, over all epochs.
        rate_at_begin: the learning rate with which the epoch began; of several optimizers a list.
        skipped_at_begin: steps that had been left out then; None where none are.
        ended: whether no epoch is to follow, whatever their number.
        stops: whether no step of the epoch at hand is to follow: its validation was interrupted.
        logs: of the epoch that has just ended.
    """

    epoch: int
    step: int
    made: int
    rate_at_begin: Any = 0.0
    ended: bool = False
    logs: Logs = field(default_factory=dict)
    stops: bool = False
    skipped_at_begin: int | None = None


@dataclass(frozen=True)
class _Pending:
    """A checkpoint that several ranks are writing.

    Attributes:
        temporary: name of the folder in which they do.
        name: what it becomes.
        position: that it holds.
    """

    temporary: str
    name: str
    position: Position


class Checkpointing(Callback):
    """Keeps checkpoints in a directory, and lets the next training go on from the newest good one.

    Args:
        path: the directory.
        epochs: save after every epoch.
        steps: save after so many steps, counted on from epoch to epoch; None for never.
        seconds: save when so many have passed since the last time; None for never.
        keep: how many of the last checkpoints stay.
        keeps_best: whether the one with the best validation loss, or loss, stays as well.
        source: a checkpoint, or a directory of them, to go on from instead.
        resumes: whether to go on from what is there.
        delete: whether checkpoints go when the training has come to its end.
        owns: whether the directory is nobody else's by a lock that somebody holds already.
        facts: what a checkpoint must have in common with the training besides the model; by default what `fit` was
            given.
        advice: what to do where it cannot be written, the end of messages.

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
        self._owns, self._given_facts, self._advice = owns, facts, advice
        self._directory: CheckpointDirectory | None = None
        self._held = ExitStack()
        self._identity: dict[str, Any] = {}
        self._architecture: list[dict[str, Any]] = []
        self._saved_at = 0.0
        self._restored: list[tuple[str, Any]] = []
        self._rate = 0.0
        self._parts: dict[str, Part] = {}  # of what a training changes, by unique paths
        self._names: dict[str, str] = {}  # of weights in the model, by these paths and in the model's order
        self._pending: _Pending | None = None

    # Called by the training loop

    def resume(self, hooks: CallbackList) -> Position | None:
        """Open the directory, and give the model the state of the newest good checkpoint. Collective.

        Of what several ranks have, one reads its part, and the others get it from that one.

        Args:
            hooks: all callbacks, and in `facts` what else must be as it was.

        Returns:
            Where the training goes on; None where it begins.

        Raises:
            DataError: there are checkpoints, and none is good; names them all.
            ConfigError: the checkpoint is another training's; lists the differences.
            OutputError: somebody else works in the directory, or it cannot be written, or too little room is left.
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
            found, state = Checkpoint.from_json(facts[0]), facts[1]
            parts = self._parts_of(variables(self.model))
            copies = {name: parts[path] for name, path in state["copies"].items()}
            try:
                arrays = on_all(self, "checkpoint", partial(self._read, found, parts | copies))
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
        held = {name: one for name, one in found.manifest.arrays.items() if _is_of_callbacks(name, parts | copies)}
        for name, one in held.items():
            arrays.setdefault(name, np.empty(one.shape, one.dtype))
            ranks_of(self).broadcast(arrays[name])
        self._restored = [(name, insert_arrays(one, arrays)) for name, one in state["callbacks"]]
        on_all(self, "checkpoint", lambda: self._trainer.backend.choose(state.get("kernels", {})))
        self._rate = state["rate"]
        on_rank_0(self, "checkpoint", lambda: self._tell(found, state, rejected))
        return Position(**state["position"])

    def load(self, hooks: CallbackList, position: Position, *, begun: bool) -> None:
        """Give callbacks what they held, and the optimizer its learning rate. Collective.

        Args:
            hooks: all callbacks.
            position: as `resume` returned it.
            begun: whether the hooks of the epoch's begin have been called.

        Raises:
            DataError: one of dptrain's callbacks cannot go on with what the checkpoint holds.
        """
        own = {key: callback for key, callback in _numbered(hooks)}
        for key, state in zip(_keys(name for name, _ in self._restored), self._restored, strict=True):
            if key in own and state[1]:
                _load(own[key], state[1])
        # In the middle of an epoch the hooks of its begin come again, and get the learning rate that they got.
        again = position.step and not begun
        if not again:
            self._restored = []
        self.model._compiled_optimizer._resume_learning_rate(position.rate_at_begin if again else self._rate)

    def steps_left(self, made: int) -> int | None:
        """Return after how many steps to save; None where steps do not say it."""
        return None if self.steps is None else self.steps - made % self.steps

    @property
    def is_due(self) -> bool:
        """Whether the clock says that it is time to save, or there is an error to be told of. On rank 0."""
        if self._directory is not None and self._directory.has_failed:
            return True
        return self.seconds is not None and time.monotonic() - self._saved_at >= self.seconds

    def save(self, hooks: CallbackList, position: Position) -> None:
        """Take a snapshot and begin to write it. Collective.

        Raises:
            OutputError: the checkpoint before could not be written.
        """
        self.wait()  # for the one before
        comm = ranks_of(self)
        if position.step == 0 or not self._parts:  # a look through the whole model; an epoch's end may bring more
            found = variables(self.model)
            paths = {id(one): path for path, one in found.items()}
            self._parts = self._parts_of(found)
            self._names = {paths[id(one)]: name for name, one in self.model._weights_by_path().items()}
        if all(part.ranks.size == comm.size for part in self._parts.values()):
            on_rank_0(self, "checkpoint", lambda: self._save(hooks, position))
        else:
            temporary, name = comm.broadcast_fact(on_rank_0(self, "checkpoint", lambda: self._begin(position)))
            self._pending = _Pending(temporary, name, position)
            on_all(self, "checkpoint", lambda: self._save(hooks, position))
        self._saved_at = time.monotonic()

    @property
    def is_written(self) -> bool:
        """Whether this rank's part of a checkpoint is, and waits for `join`."""
        return self._pending is not None and self._directory is not None and self._directory.is_idle

    def join(self) -> None:
        """Let a checkpoint be there that several ranks write, once all have written their parts. Collective.

        Raises:
            OutputError: one of them could not.
        """
        if self._pending is None:
            return
        pending, self._pending, directory = self._pending, None, self._directory
        assert directory is not None
        comm = ranks_of(self)
        try:
            own = on_all(self, "checkpoint", directory.written)
        except AgreedError:
            if comm.rank == 0:
                directory.discard(pending.temporary)
            raise
        found = comm.allgather(own.as_json())

        def join() -> None:
            parts = [Entries.from_json(one) for one in found]
            value, made = self._value(pending.position), pending.position.made
            directory.join(pending.temporary, pending.name, parts, made, value=value, mesh=_mesh(comm))

        on_rank_0(self, "checkpoint", join)

    def wait(self) -> str:
        """Return where the last checkpoint is, once it is on the disk. Collective.

        Raises:
            OutputError: it could not be written.
        """
        self.join()

        def wait() -> None:
            if self._directory is not None:
                self._directory.wait()

        on_all(self, "checkpoint", wait)
        name = None if self._directory is None else self._directory.last_good
        return str(self.path if name is None else self.path / name)

    # Hooks

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Wait for the last checkpoint, or delete them all. Collective.

        Raises:
            OutputError: it cannot be written, or deleted.
        """
        self.wait()
        if self.delete:
            on_rank_0(self, "checkpoint", self._delete)

    def _release(self) -> None:
        """Let go of the directory."""
        if self._directory is not None:
            self._directory.close()
            self._directory = None
        self._held.close()

    # On every rank

    def _open(self) -> None:
        """Open the directory, on rank 0 so that nobody else can."""
        about: dict[str, Any] = {"keep": self.keep, "advice": self._advice, "follow": not self._owns}
        leads = ranks_of(self).rank == 0
        if leads:
            try:
                self.path.mkdir(parents=True, exist_ok=True)
                if not self._owns:
                    self._held.enter_context(locked(self.path, "training", self._advice))
            except OutputError:
                raise
            except (OSError, NotImplementedError) as error:
                failure = error if isinstance(error, OSError) else OSError(str(error))
                raise output_error(self.path, failure, advice=self._advice) from error
        self._directory = CheckpointDirectory(self.path, leads=leads, **about)
        if leads:
            self._architecture = architecture_of(self.model)
            # One that stays, and the next.
            nbytes = (size(one.shape) * one.dtype.itemsize for one in variables(self.model).values())
            self._directory.probe(2 * sum(nbytes))

    def _parts_of(self, found: Mapping[str, Variable]) -> dict[str, Part]:
        """Return what this rank has of variables. Collective."""
        return {path: self.model._part_of(one, ranks_of(self)) for path, one in found.items()}

    def _read(self, found: Checkpoint, parts: Mapping[str, Part]) -> Arrays:
        """Return what this rank reads of a checkpoint: for itself, and for those that have the same."""
        listed = found.manifest.arrays
        mine = {path: part for path, part in parts.items() if part.ranks.rank == 0 and part.is_here}
        own = {path: (part.start, part.variable.shape) for path, part in mine.items()}
        if ranks_of(self).rank == 0:
            held = {name: one.shape for name, one in listed.items() if _is_of_callbacks(name, parts)}
            own |= {name: ((0,) * len(shape), shape) for name, shape in held.items()}
        if not own:
            return {}
        with reading(str(found.path)), found.open() as folder:
            return {path: read_part(folder, listed[path], start, shape) for path, (start, shape) in own.items()}

    # On rank 0

    def _candidates(self) -> tuple[Iterator[Path], bool]:
        """Return the checkpoints to go on from, the best of them first, and whether they may be links."""
        assert self._directory is not None
        found, follow = (self._directory.candidates(), False) if self.source is None else located(self.source)
        return iter(found if self.resumes else ()), follow

    def _next(
        self, candidates: tuple[Iterator[Path], bool] | None, rejected: list[str]
    ) -> tuple[Checkpoint, dict[str, Any]] | None:
        """Return the next checkpoint that may be good, and its state; None where there is none at all.

        Args:
            candidates: as `_candidates` returned them.
            rejected: why others are not good.

        Raises:
            DataError: none is good.
            ConfigError: it is another training's.
        """
        assert candidates is not None
        found = newest(candidates[0], rejected, follow=candidates[1])
        if found is None:
            return None
        with reading(str(found.path)):
            state = _checked(json.loads(found.files[_STATE]))
            own = variables(self.model)
            there = {name: np.empty(0) for name in found.manifest.arrays if _is_of_callbacks(name, own)}
            insert_arrays(state["callbacks"], there)  # every array is
        differing = dict(_differences("", state["identity"], self._identity))
        refused = [line for name, line in differing.items() if not self._may_differ(name)]
        # Slots follow from the optimizer and the weights, which say it in fewer words.
        if refused := [line for line in refused if not line.startswith("state.")] or refused:
            raise ConfigError(f"{found.path} is the checkpoint of another training: {joined(refused)}; {_SAME}")
        _require_arrays(str(found.path), found.manifest.arrays, own, state["copies"])
        if any(name.endswith("learning_rate") for name in differing):  # which was asked for, and so holds
            state["rate"] = state["position"]["rate_at_begin"] = self.model._compiled_optimizer._resumed_rate
        return found, state

    def _tell(self, found: Checkpoint, state: Mapping[str, Any], rejected: Sequence[str]) -> None:
        """Say where the training goes on."""
        assert self._directory is not None
        if self.source is None:
            self._directory.note(found)
        if rejected:
            warn(f"{'; '.join(rejected)}; going on from {found.path.name}")
        if terminal.verbosity(self.params.get("verbose", 0)):
            done, epochs = state["position"], self.params["epochs"]
            epoch = min(done["epoch"] + 1, epochs)
            terminal.say(f"Going on from step {done['made']:,}, in epoch {epoch}/{epochs} ({found.path})")

    def _may_differ(self, name: str) -> bool:
        """Whether a field was named as one that may differ: by its path, a group of its, or its last word."""
        said = {one.replace("-", "_") for one in self.resume_anyway}
        parts = name.split(".")
        groups = {".".join(parts[:end]) for end in range(1, len(parts) + 1)}
        return parts[0] not in ("weights", "state") and bool(said & {*groups, parts[-1]})

    def _facts(self, hooks: CallbackList) -> dict[str, Any]:
        """Return what must be the same for a training to go on."""
        model = self.model
        return {
            "dtype": model.dtype_policy.name,
            "seed": model._model_seed,
            "steps": self.params.get("steps"),
            **(hooks.facts() if self._given_facts is None else self._given_facts),
            "weights": {path: list(one.shape) for path, one in model._weights_by_path().items()},
            "state": {path: [list(one.shape), str(one.dtype)] for path, one in variables(model).items()},
        }

    def _value(self, position: Position) -> float | None:
        """Return what says which checkpoint is the best."""
        value = position.logs.get("val_loss", position.logs.get("loss")) if self.keeps_best else None
        return None if value is None else float(value)

    def _begin(self, position: Position) -> tuple[str, str]:
        assert self._directory is not None
        return self._directory.begin(position.made)

    def _save(self, hooks: CallbackList, position: Position) -> None:
        """Copy what this rank is to write, and begin to."""
        assert self._directory is not None
        comm, files = ranks_of(self), dict[str, Content]()
        copies = self._copies(hooks)
        parts = self._parts | {name: self._parts[path] for name, (path, _) in copies.items()}
        of_all = {name for name, part in parts.items() if part.ranks.size == comm.size}
        mine = {name: part for name, part in parts.items() if part.ranks.rank == 0 and part.is_here}
        # Copies, all of them: the training goes on while they are written.
        values = {
            name: part.of(copies[name][1]) if name in copies else part.variable.numpy() for name, part in mine.items()
        }
        if own := mine.keys() - of_all:
            arrays = {name: values[name] for name in own}
            stored = {name: PartOf(name, mine[name].start, mine[name].whole) for name in own}
            name = f"shard-{comm.rank}-of-{comm.size}.safetensors"
            files[name] = Content(lambda: safetensors_file.pieces(arrays), stored)
        if comm.rank == 0:
            whole = {name: values[name] for name in mine if name in of_all}
            files |= self._of_all(hooks, position, whole, {name: path for name, (path, _) in copies.items()})
        if self._pending is None:
            self._directory.save(position.made, files, value=self._value(position), mesh=_mesh(comm))
        else:
            self._directory.write(self._pending.temporary, self._pending.name, files)

    def _copies(self, hooks: CallbackList) -> dict[str, tuple[str, Array]]:
        """Return callbacks' copies of weights, each with the path of its weight, by the names of arrays."""
        return {
            name: (path, value)
            for key, callback in _numbered(hooks)
            for copies in _copies_of(key, callback).values()
            for path, (name, value) in zip(self._names, copies.items(), strict=True)
        }

    def _of_all(
        self, hooks: CallbackList, position: Position, values: Arrays, copies: Mapping[str, str]
    ) -> dict[str, Content]:
        """Return the files of what every rank has: weights, what else a training changes, and where it stands.

        Args:
            hooks: all callbacks.
            position: where it stands.
            values: of what every rank has.
            copies: the paths of weights of which callbacks hold copies, by the names of these.
        """
        model, architecture = self.model, self._architecture
        names = {path: name for path, name in self._names.items() if path in values}
        weights = {name: values[path] for path, name in names.items()}
        arrays: Arrays = {path: one for path, one in values.items() if path not in names}
        held = []
        for key, callback in _numbered(hooks):
            by_part = {name: list(map(array_reference, found)) for name, found in _copies_of(key, callback).items()}
            rest = {name: one for name, one in method_of(callback, "state_dict")().items() if name not in by_part}
            held.append([key[0], extract_arrays(rest, _prefix(key), arrays) | by_part])
        state = {
            "position": plain(asdict(position)),
            "rate": model._compiled_optimizer._resumed_rate if model.compiled else 0.0,
            "callbacks": held,
            "copies": dict(copies),
            "identity": self._identity,
            **({"kernels": dict(chosen)} if (chosen := self._trainer.backend.chosen) else {}),
            "world_size": ranks_of(self).size,
            "versions": {"dptrain": __version__, "numpy": np.__version__, "python": platform.python_version()},
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        }
        of_model = {name: _whole(path, weights[name]) for path, name in names.items()}
        of_rest = {path: _whole(path, one) for path, one in arrays.items()}
        return {
            _MODEL: Content(lambda: safetensors_file.pieces_of_model(weights, architecture), of_model),
            _REST: Content(lambda: safetensors_file.pieces(arrays), of_rest),
            _STATE: Content(lambda: [json.dumps(state).encode()]),
        }

    def _delete(self) -> None:
        assert self._directory is not None
        self._directory.delete()
        self._held.close()
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
    """Return how names of arrays begin that a callback holds."""
    return f"{_OF_CALLBACKS}/{key[0]}/{key[1]}"


def _names_of_copies(callback: Callback) -> tuple[str, ...]:
    """Return what the class names; another attribute of that name, which a user may have, is none."""
    names = getattr(type(callback), "copies_of_weights", ())
    return names if isinstance(names, tuple) and all(isinstance(name, str) for name in names) else ()


def _copies_of(key: tuple[str, int], callback: Callback) -> dict[str, Arrays]:
    """Return a callback's copies of weights by name of the attribute, each by the names of the arrays."""
    found = {name: getattr(callback, name) for name in _names_of_copies(callback)}
    return {
        attribute: {f"{_prefix(key)}/{attribute}/{number}": one for number, one in enumerate(values)}
        for attribute, values in found.items()
        if values is not None
    }


def _is_of_callbacks(name: str, own: Collection[str]) -> bool:
    """Whether an array of a checkpoint is one that callbacks hold, and none of the model's own."""
    return name not in own and name.startswith(f"{_OF_CALLBACKS}/")


def _mesh(comm: Communicator) -> dict[str, int]:
    """Return the length of each axis of the ranks' mesh."""
    return comm.lengths if isinstance(comm, MeshCommunicator) else {BATCH: comm.size}


def _checked(state: Any) -> dict[str, Any]:
    """Return what state.json holds, if it is what `_save` writes: its hash tells damage, not who has written it.

    Raises:
        DataError: it is not.
    """
    position = state["position"]
    numbers = [position[name] for name in ("epoch", "step", "made")]
    skipped, kernels = position.get("skipped_at_begin"), state.get("kernels", {})
    copies = state.setdefault("copies", {})  # which older checkpoints do not tell from other arrays
    right = (
        position.keys() <= {one.name for one in fields(Position)}
        and all(type(one) is int and 0 <= one < _MAX_COUNT for one in (*numbers, skipped or 0))
        and all(_is_rate(one) for one in (state["rate"], position.get("rate_at_begin", 0)))
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
        raise DataError(f"{_STATE} is none of a checkpoint")
    return dict(state)


def _is_rate(rate: Any) -> bool:
    """Whether this may be a learning rate, or a list of those of several optimizers."""
    return all(isinstance(one, int | float) for one in (rate if isinstance(rate, list) else [rate]))


def _require_arrays(
    where: str, arrays: Mapping[str, StoredArray], own: Mapping[str, Variable], copies: Mapping[str, str]
) -> None:
    """Check that the arrays of a checkpoint are those of the model's variables, and that callbacks' fit into memory.

    Args:
        where: it is, for messages.
        arrays: of the checkpoint.
        own: the variables.
        copies: of variables that callbacks hold: the path of each one's.

    Raises:
        DataError: one is missing, or has another shape or dtype.
    """
    for name, path in copies.items():
        if path not in own or not _is_of_callbacks(name, own):
            raise DataError(f"{where}: damaged: {short(name)} is no callback's copy of {short(path)}")
    if max(Counter(copies.values()).values(), default=0) > _MAX_COPIES:
        raise DataError(f"{where}: damaged: more than {_MAX_COPIES} copies of a weight")
    expected = {**own, **{name: own[path] for name, path in copies.items()}}
    for path, one in expected.items():
        found = arrays.get(path)
        wanted = portable_dtype(one.dtype)
        if found is None or found.shape != one.shape or found.dtype != wanted.name:
            there = "not there" if found is None else f"{found.dtype} {found.shape}"
            raise DataError(f"{where}: damaged: {path} is {there}, expected {wanted} {one.shape}")
    held = [one for name, one in arrays.items() if _is_of_callbacks(name, expected)]
    nbytes = sum(size(one.shape) * np.dtype(one.dtype).itemsize for one in held)
    if nbytes > memory():
        raise DataError(f"{where}: {nbytes} bytes of callbacks' arrays, more than the memory of this machine")


def _load(callback: Callback, state: dict[str, Any]) -> None:
    """Let a callback go on with what a checkpoint holds; what ours cannot read is the checkpoint's fault."""
    if is_of_the_package(type(callback)):
        with reading(f"the checkpoint's state of {type(callback).__name__}"):
            method_of(callback, "load_state_dict")(state)
    else:
        method_of(callback, "load_state_dict")(state)


def _numbered(hooks: CallbackList) -> list[tuple[tuple[str, int], Callback]]:
    """Return the callbacks by class and number among those of the class: ranks may have other callbacks besides."""
    return list(zip(_keys(type(one).__name__ for one in hooks.callbacks), hooks.callbacks, strict=True))


def _keys(names: Iterable[str]) -> Iterator[tuple[str, int]]:
    seen: Counter[str] = Counter()
    for name in names:
        yield name, seen[name]
        seen[name] += 1


def _differences(name: str, there: Any, here: Any) -> Iterator[tuple[str, str]]:
    """Yield the names of values that are not the same in a checkpoint and in this training, each with a line."""
    if isinstance(there, dict) and isinstance(here, dict):
        for key in there | here:
            inner = f"{name}.{key}" if name else key
            yield from _differences(inner, there.get(key, _NOTHING), here.get(key, _NOTHING))
    elif there is _NOTHING or here is _NOTHING or there != here:
        other, own = ("nothing" if one is _NOTHING else short(one) for one in (there, here))
        yield name, f"{name}: it has {other}, this one {own}"
