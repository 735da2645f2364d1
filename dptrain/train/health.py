"""Health checks of a training every so many steps: is its state finite, and do all ranks have the same.

Where something is wrong, the last steps are made again, one by one, from a copy of the state as it was before them: so
the step is found, and in it the samples, or the op and its layer, where the first NaN comes from.
"""

import math
import os
import struct
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from dptrain.batches.base import Batches
from dptrain.batches.feed import BatchRows
from dptrain.batches.sampling import Shard
from dptrain.errors import AgreedError, ConfigError, DivergenceError, ExitCode
from dptrain.program.tensor import Tensor, Variable, watching
from dptrain.train.programs import Programs, Step, Trained
from dptrain.train.replicas import deviating, differing, gathered, number_of, refuse_difference

Array = npt.NDArray[Any]
OnNonfinite = Literal["stop", "skip", "ignore"]

# Steps between two looks of several ranks, which must agree on when; a process alone looks when some time has passed.
_EVERY = 100
# Of several ranks' looks one in so many is followed by a new copy of the state, which costs more than the look.
_COPIES = 10
_SECONDS = 0.5
# What batches may take of all ranks' memory that a user's code has made and that are kept to make steps again.
_KEPT_BYTES = 64 << 20

_ADVICE = "try a smaller learning rate, clip gradients, or skip such steps (on_nonfinite='skip', --on-nonfinite skip)"


def digest_every(given: int | None = None) -> int:
    """Return the steps between two comparisons of the replicas, 0 for none: DPTRAIN_DIGEST_EVERY if nobody says.

    Raises:
        ConfigError: the variable is no such number.
    """
    if given is not None:
        return given
    text = os.environ.get("DPTRAIN_DIGEST_EVERY", str(_EVERY))
    if not text.isdecimal():
        raise ConfigError(f"DPTRAIN_DIGEST_EVERY = {text!r}: expected a number of steps, or 0 to compare nothing")
    return int(text)


@dataclass(frozen=True)
class _Bad:
    """The first step that leaves something behind that is not finite.

    Attributes:
        step: of the epoch, from 1.
        shards: this rank's.
        rows: their samples.
    """

    step: int
    shards: Sequence[Shard]
    rows: BatchRows


class HealthCheck:
    """Checks the health of a training: looks at its state.

    Args:
        model: this rank's replica.
        programs: runs its steps.
        batches: that it is trained on.
        every: steps between two comparisons of the replicas; 0 for none.
        on_nonfinite: "ignore" goes on with a state that is not finite.
    """

    def __init__(
        self, model: Trained, programs: Programs, batches: Batches, *, every: int, on_nonfinite: OnNonfinite
    ) -> None:
        self._model, self._programs, self._batches = model, programs, batches
        self._comm, self._compares, self._judges = programs.comm, every > 0, on_nonfinite != "ignore"
        self._every = every or _EVERY
        self._meant: set[int] = set()
        self._take_in(model._variables_on_device())
        # Weights that are not finite before the training are meant to be so.
        weights = {id(one) for one in programs.local(model.weights)}
        found = zip(self._variables, self._snapshot.digests()[:, 1], strict=True)
        self._meant = {id(one) for one, wrong in found if wrong and id(one) in weights}
        self._epoch = self._done = 0
        self._steps: list[Sequence[Shard]] = []
        self._looked, self._looks, self._seen = 0.0, 0, True
        self._settled = False

    def _take_in(self, variables: Sequence[Variable]) -> None:
        """Look at these variables from now on."""
        self._count = len(variables)
        metrics, variables = self._model.metrics, self._programs.local(variables)
        totals = {id(one) for metric in metrics for one in metric.variables}
        losses = {id(one) for metric in metrics if _is_loss(metric.name) for one in metric.variables}
        weights = {id(one) for one in self._programs.local(self._model.weights)}
        self._variables, self._snapshot = list(variables), self._programs.backend.snapshot(variables)
        self._common = np.array([id(one) not in totals and one.aggregation == "none" for one in variables], bool)
        numbers = np.flatnonzero(self._common)
        self._groups: list[tuple[list[list[int]], Any]] = [([list(range(self._comm.size))], numbers)]
        sharding = self._programs.sharding
        if sharding is not None:  # who has the same of what
            found = sharding.groups([self._variables[number] for number in numbers])
            self._groups = [(ranks, numbers[own]) for ranks, own in found]
        self._judged = np.array([id(one) in weights | losses for one in variables], bool)
        self._kept = False
        self._agreed: npt.NDArray[np.uint64] | None = None  # digests of the last look, the same on all ranks
        self._changed: set[str] = set()  # since then, before the epoch's first step

    @property
    def left(self) -> int | None:
        """How many steps may be made before the next look; None for any number."""
        return None if self._comm.size == 1 else self._every - self._done % self._every

    def begin(self, epoch: int, step: int) -> None:
        """Begin an epoch, counted from 0, of which some steps are done."""
        self._epoch, self._done = epoch, step
        self._looks = 0
        if self._agreed is not None:
            changed = (self._snapshot.digests()[:, 0] != self._agreed) & self._common
            self._changed = {one.path for one, is_other in zip(self._variables, changed, strict=True) if is_other}
        self.keep()

    def after(self, steps: Sequence[Sequence[Shard]]) -> None:
        """Note steps that have been made, and look at the state if it is time to. Collective on several ranks."""
        self._steps += steps
        self._done += len(steps)
        self._seen = False
        due = time.perf_counter() - self._looked > _SECONDS if self._comm.size == 1 else self.left == self._every
        anew = self._batches.replay_bytes >= _KEPT_BYTES
        if not self._settled:  # the first steps may have made variables
            self._settled, anew = True, anew or len(self._model._variables_on_device()) != self._count
        if due or anew:
            self.look()
            self._looks += due
            if self._comm.size == 1 or self._looks % _COPIES == 0 or anew:
                self.keep()

    def after_callbacks(self) -> None:
        """Note that callbacks may have changed the state since the last look. Called on all ranks or on none."""
        self._seen = False

    def look(self) -> None:
        """Look at the state. Collective.

        Raises:
            DivergenceError: it is not finite; an AgreedError with its exit code on several ranks.
            AgreedError: the ranks have different states.
        """
        if self._seen:
            return
        self._seen = True
        variables = self._model._variables_on_device()
        if len(variables) != self._count:  # the first step has made some
            self._take_in(variables)
        found = self._snapshot.digests()
        wrong = self._judges and bool(self._wrong(found).any())
        if self._comm.size == 1:
            if wrong:
                self._explain(found)
            return
        # NaNs need not have the same bits everywhere: a state that is not finite, and may be so, is not compared.
        clean = not (self._not_finite(found) & self._common).any()
        rates = self._rates()
        about = struct.pack(f"<{len(rates)}dq", *rates, self._done)
        digests = [number_of(found[numbers, 0].tobytes(), about) for _, numbers in self._groups]
        facts = gathered(self._comm, wrong, clean, *digests)
        differ = any(
            (facts[ranks, column] != facts[ranks[0], column]).any()
            for column, (groups, _) in enumerate(self._groups, 2)
            for ranks in groups
        )
        if facts[:, 0].all() or (facts[:, 0].any() and not (differ and self._compares)):
            self._explain(found)
        elif differ and self._compares and (facts[:, 1].all() or facts[:, 0].any()):
            self._compare(found)
        elif self._compares and not differ:
            self._agreed, self._changed = found[:, 0], set()

    def keep(self) -> None:
        """Copy the state, to come back to, and keep the samples from now on."""
        self._steps, self._looked = [], time.perf_counter()
        sharded = self._programs.sharding is not None  # to save memory, which a copy would take again
        self._kept = not sharded and self._batches.keep() and self._snapshot.take()

    def _wrong(self, found: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
        """Return which variables are not finite and should be."""
        wrong: npt.NDArray[np.bool_] = self._not_finite(found) & self._judged
        return wrong

    def _not_finite(self, found: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
        meant = np.array([id(one) in self._meant for one in self._variables], bool)
        wrong: npt.NDArray[np.bool_] = (found[:, 1] != 0) & ~meant
        return wrong

    def _rates(self) -> list[float]:
        """Return the learning rates, if a schedule says one of them, which is no variable."""
        optimizer = self._model._compiled_optimizer
        return list(optimizer._rates.values()) if optimizer._follows_schedule else []

    @property
    def _step(self) -> Step:
        found: Step = self._model._make_step("train")
        return found

    def _where(self, step: int) -> str:
        return f"step {step} of epoch {self._epoch + 1}"

    # Ranks that differ

    def _compare(self, found: npt.NDArray[np.uint64]) -> None:
        """Name who differs, and in what. Collective."""
        own = {
            self._name(one): f"{int(digest):016x}"
            for one, digest, common in zip(self._variables, found[:, 0], self._common, strict=True)
            if common
        }
        own["learning rate"] = ", ".join(map(str, self._rates()))
        facts = self._comm.allgather(own)
        away: list[dict[str, float]] = []
        if deviating(facts, []) is None:
            names = differing(facts)
            # Between epochs callbacks may change something on all ranks, but not on some. The copy has it already.
            changed = [set(one) for one in self._comm.allgather(sorted(self._changed))]
            alone = [bool(one - set.intersection(*changed)) for one in changed]
            if any(alone):
                away = [dict.fromkeys(names, math.inf if one else 0.0) for one in alone]
            elif self._all(self._kept and not self._step.eager):
                away = self._comm.allgather(self._away(names))
        refuse_difference(self._comm, self._where(self._done), facts, away)

    def _away(self, names: Collection[str]) -> dict[str, float]:
        """Return how far variables are from what the same steps make of them when they are made again. Collective."""
        chosen = [one for one in self._variables if self._name(one) in names]
        values = [one.numpy().astype(np.float64) for one in chosen]
        self._snapshot.restore()
        for shards in self._steps:
            rows = self._batches.rows([shards])
            self._programs.run(self._step, self._batches.spec, rows, [shards])
        again = [one.numpy().astype(np.float64) for one in chosen]
        distances = [
            np.nan_to_num(np.abs(a - b), nan=np.inf).max(initial=0) for a, b in zip(values, again, strict=True)
        ]
        return {self._name(one): float(distance) for one, distance in zip(chosen, distances, strict=True)}

    def _name(self, variable: Variable) -> str:
        sharding = self._programs.sharding
        return variable.path if sharding is None else sharding.name(variable)

    # A state that is not finite

    def _explain(self, found: npt.NDArray[np.uint64]) -> None:
        """End the training, naming what is wrong and where it comes from. Collective."""
        wrong = [one for one, wrong in zip(self._variables, self._wrong(found), strict=True) if wrong]
        counts = [[one.path, int(np.count_nonzero(~np.isfinite(one.numpy())))] for one in wrong]
        # Of sharded variables only some ranks may have such values.
        found_first = next((one[0] for one in self._comm.allgather(counts) if one), ["", 0])
        path, count = str(found_first[0]), found_first[1]
        logs = {key: value for key, value in self._programs.logs("train").items() if not math.isfinite(value)}
        bad = self._first_bad()
        own = self._cause(bad) if bad is not None else None
        told = self._comm.allgather([self._comm.process, own])
        causes = [(rank, process, *cause) for rank, (process, cause) in enumerate(told) if cause is not None]
        if causes:  # samples say more than what is made of them
            rank, process, worst, text = min(causes, key=lambda one: one[2])
            text += "" if self._comm.size == 1 else f" (rank {rank}, {process})"
            text += f"; {_ADVICE}" if worst else ""
            message = f"training diverged in {self._where(bad.step if bad else self._done)}: {text}"
        elif path and not _is_loss(path.partition("/")[0]):
            values = "1 value that is not finite" if count == 1 else f"{count} values that are not finite"
            after = self._where(bad.step if bad else self._done)
            message = f"training diverged: parameter {path!r} has {values} after {after}; {_ADVICE}"
        else:
            values = ", ".join(f"{key} = {value}" for key, value in logs.items()) or "the loss is not finite"
            message = f"training diverged: {values} after {self._where(self._done)}; {_ADVICE}"
        refuse(self._comm.size, message)

    def _first_bad(self) -> _Bad | None:
        """Return the first step that leaves behind what is not finite; the state is then that before it. Collective.

        None if nobody can tell: the state of before or the samples are gone, or callbacks have made the difference.
        """
        steps = list(self._steps)
        if not self._all(self._kept and not self._step.eager):
            return None
        self._snapshot.restore()
        for number, shards in enumerate(steps):
            if not self._all(self._snapshot.take()):
                return None
            rows = self._batches.rows([shards])
            self._programs.run(self._step, self._batches.spec, rows, [shards])
            if not self._all(not self._wrong(self._snapshot.digests()).any()):
                self._snapshot.restore()
                return _Bad(self._done - len(steps) + number + 1, shards, rows)
        return None

    def _cause(self, bad: _Bad) -> list[Any] | None:
        """Return how much a finding of this rank says, 0 for most, and the finding; None for nothing."""
        order = self._host(bad.rows.order)
        arrays = dict(zip(self._batches.spec.names, map(self._host, bad.rows.arrays), strict=True))
        parts = [
            (shard, order[start : start + shard.rows]) for shard, start in zip(bad.shards, bad.rows.starts, strict=True)
        ]
        for name, array in arrays.items():
            if array.dtype.kind not in "fV":
                continue
            for shard, numbers in parts:
                finite = np.isfinite(array[numbers]).reshape(len(numbers), -1).all(axis=1)
                if not finite.all():
                    return [0, f"{name} is not finite in {self._samples(shard, numbers[~finite])}"]
        for worst, test in ((1, np.isnan), (2, np.isinf)):
            for shard, numbers in parts:
                first = self._first_op(test, shard, arrays, numbers)
                if first is not None:
                    return [worst, first]
        return None

    def _first_op(self, test: Any, shard: Shard, arrays: Mapping[str, Array], numbers: Array) -> str | None:
        """Return which op of this rank's part of a step is the first to make a NaN, or an infinity."""
        if self._programs.sharding is not None:  # a step alone lacks what the others have
            return None
        found: list[Tensor] = []

        def check(made: Tensor) -> None:
            if made.dtype.kind in "fV" and test(made.value).any():
                found.append(made)
                raise _FoundError

        try:
            with watching(check), np.errstate(all="ignore"):
                self._programs.evaluate_alone(self._step, self._batches.spec, arrays, numbers, shard)
        except _FoundError:
            pass
        if not found:
            return None
        made = found[0]
        assert made.op is not None
        assert made.value is not None
        place = np.argwhere(test(made.value))[0].tolist()
        layer = _layer(made)
        of = f" of layer {made.name!r}" if made.name else f" behind layer {layer!r}" if layer else ""
        what = "a NaN" if test is np.isnan else "an infinity"
        by_rows = made.value.ndim > 0 and len(made.value) == len(numbers) and len(numbers) > 1
        sample = f", of {self._samples(shard, numbers[place[:1]])}" if by_rows else ""
        return f"op {made.op.name!r}{of} is the first to make {what}, at {place} of shape {made.value.shape}{sample}"

    def _samples(self, shard: Shard, numbers: Array, most: int = 5) -> str:
        """Return samples of a shard in words: by their numbers, or by those in the batch where they have no others."""
        by_batch = self._batches.numbered_by_batch
        found = sorted((numbers + (shard.first_row if by_batch else 0)).tolist())
        more = f" and {len(found) - most} more" if len(found) > most else ""
        where = " of its batch" if by_batch else ""
        return f"sample{'s' * (len(found) > 1)} {', '.join(map(str, found[:most]))}{more}{where}"

    def _host(self, buffer: Any) -> Array:
        return buffer if isinstance(buffer, np.ndarray) else self._programs.backend.download(buffer)

    def _all(self, mine: bool) -> bool:
        """Return whether it is true on all ranks. Collective."""
        return mine if self._comm.size == 1 else bool(gathered(self._comm, mine).all())


class _FoundError(Exception):
    """What was looked for is found."""


def refuse(ranks: int, message: str) -> None:
    """Raise that a training has diverged, of which all ranks know.

    Raises:
        DivergenceError: on one rank; on several an AgreedError with its exit code.
    """
    if ranks == 1:
        raise DivergenceError(message)
    raise AgreedError("training", ExitCode.DIVERGED, message, [])


def refuse_validation(ranks: int, epoch: int, logs: Mapping[str, float]) -> None:
    """Refuse losses of a validation, the same on all ranks, that are not finite; as `refuse`.

    Args:
        ranks: how many there are.
        epoch: counted from 0.
        logs: of the validation.
    """
    wrong = [f"val_{key} = {value}" for key, value in logs.items() if _is_loss(key) and not math.isfinite(value)]
    if wrong:
        refuse(ranks, f"training diverged: {', '.join(wrong)} in epoch {epoch + 1}; {_ADVICE}")


def _layer(tensor: Tensor) -> str:
    """Return the layer that a tensor was made in, or the nearest of those that made its inputs."""
    level = [tensor]
    while level:
        for one in level:
            if one.op is not None and one.name:
                return one.name
        level = [parent for one in level for parent in one.inputs][:64]
    return ""


def _is_loss(name: str) -> bool:
    return name == "loss" or name.endswith("_loss")
