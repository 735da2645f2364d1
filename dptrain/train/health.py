"""Periodic health checks of a training: its state is finite, and the same on all ranks.

A failed check repeats the last steps, one by one, from a copy of the state before them: it finds the step, and in it
the samples, or the op and its layer, that the first NaN comes from.
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
from dptrain.runtime.types import is_floating
from dptrain.train.programs import Programs, Step, Trained
from dptrain.train.replicas import deviating, differing, gathered, number_of, refuse_difference

Array = npt.NDArray[Any]
OnNonfinite = Literal["stop", "skip", "ignore"]

# Steps between two checks of several ranks, which must agree on when; a single process checks after some time.
_EVERY = 100
# One in so many checks of several ranks is followed by a new copy of the state, which costs more than the check.
_CHECKS_PER_COPY = 10
_SECONDS = 0.5
# Part of all ranks' memory for batches of users' code that are kept to repeat steps.
_MAX_BATCH_BYTES = 64 << 20

_SKIP = "skip such steps (on_nonfinite='skip', --on-nonfinite skip)"
_ADVICE = f"try a smaller learning rate, clip gradients, or {_SKIP}"
_ADVICE_ON_INPUT = f"keep its input where it is defined, such as by ops.maximum(x, 1e-7), or {_SKIP}"


def digest_every(steps: int | None = None) -> int:
    """Return the steps between two comparisons of the replicas, 0 for none, by default DPTRAIN_DIGEST_EVERY."""
    if steps is not None:
        return steps
    text = os.environ.get("DPTRAIN_DIGEST_EVERY", str(_EVERY))
    if not text.isdecimal():
        raise ConfigError(f"DPTRAIN_DIGEST_EVERY = {text!r}: expected a number of steps, or 0 to compare nothing")
    return int(text)


@dataclass(frozen=True)
class _DivergedStep:
    """The first step whose state is not finite."""

    step: int  # of the epoch, from 1
    shards: Sequence[Shard]  # of this rank
    rows: BatchRows  # of these shards


class HealthCheck:
    """Checks the state of a training."""

    def __init__(
        self, model: Trained, programs: Programs, batches: Batches, *, every: int, on_nonfinite: OnNonfinite
    ) -> None:
        self._model, self._programs, self._batches = model, programs, batches
        self._comm, self._compares, self._checks_finite = programs.comm, every > 0, on_nonfinite != "ignore"
        self._every = every or _EVERY
        self._allowed: set[int] = set()
        self._watch(model._variables_on_device())
        # Weights that are not finite before the training are intended.
        weights = {id(weight) for weight in programs.local(model.weights)}
        digested = zip(self._variables, self._snapshot.digests()[:, 1], strict=True)
        self._allowed = {id(variable) for variable, wrong in digested if wrong and id(variable) in weights}
        self._epoch = self._steps_done = 0
        self._steps: list[Sequence[Shard]] = []
        self._checked_at, self._checks, self._is_checked = 0.0, 0, True
        self._settled = False

    def _watch(self, variables: Sequence[Variable]) -> None:
        self._count = len(variables)
        metrics, variables = self._model.metrics, self._programs.local(variables)
        totals = {id(total) for metric in metrics for total in metric.variables}
        losses = {id(total) for metric in metrics if _is_loss(metric.name) for total in metric.variables}
        weights = {id(weight) for weight in self._programs.local(self._model.weights)}
        self._variables, self._snapshot = list(variables), self._programs.backend.snapshot(variables)
        self._common = np.array(
            [id(variable) not in totals and variable.aggregation == "none" for variable in variables], bool
        )
        numbers = np.flatnonzero(self._common)
        self._groups: list[tuple[list[list[int]], Any]] = [([list(range(self._comm.size))], numbers)]
        sharding = self._programs.sharding
        if sharding is not None:  # ranks that share variables, and which ones
            groups = sharding.groups([self._variables[number] for number in numbers])
            self._groups = [(ranks, numbers[members]) for ranks, members in groups]
        self._checked = np.array([id(variable) in weights | losses for variable in variables], bool)
        self._has_copy = False
        self._agreed: npt.NDArray[np.uint64] | None = None  # digests of the last check, the same on all ranks
        self._changed: set[str] = set()  # since then, before the epoch's first step

    @property
    def steps_left(self) -> int | None:
        """Steps before the next check; None for any number."""
        return None if self._comm.size == 1 else self._every - self._steps_done % self._every

    def begin(self, epoch: int, step: int) -> None:
        """Begin an epoch, counted from 0, after `step` of its steps."""
        self._epoch, self._steps_done = epoch, step
        self._checks = 0
        if self._agreed is not None:
            changed = (self._snapshot.digests()[:, 0] != self._agreed) & self._common
            self._changed = {
                variable._path for variable, is_other in zip(self._variables, changed, strict=True) if is_other
            }
        self.take_copy()

    def after(self, steps: Sequence[Sequence[Shard]]) -> None:
        """Count steps, and check the state if it is due. Collective on several ranks."""
        self._steps += steps
        self._steps_done += len(steps)
        self._is_checked = False
        due = (
            time.perf_counter() - self._checked_at > _SECONDS
            if self._comm.size == 1
            else self.steps_left == self._every
        )
        anew = self._batches.replay_bytes >= _MAX_BATCH_BYTES
        if not self._settled:  # the first steps may have created variables
            self._settled, anew = True, anew or len(self._model._variables_on_device()) != self._count
        if due or anew:
            self.check()
            self._checks += due
            if self._comm.size == 1 or self._checks % _CHECKS_PER_COPY == 0 or anew:
                self.take_copy()

    def after_callbacks(self) -> None:
        """Note that callbacks may have changed the state since the last check. Called on all ranks or on none."""
        self._is_checked = False

    def check(self) -> None:
        """Raise if the state is not finite, or differs between the ranks. Collective."""
        if self._is_checked:
            return
        self._is_checked = True
        variables = self._model._variables_on_device()
        if len(variables) != self._count:  # the first step has created some
            self._watch(variables)
        state_digests = self._snapshot.digests()
        wrong = self._checks_finite and bool(self._diverged(state_digests).any())
        if self._comm.size == 1:
            if wrong:
                self._raise_divergence(state_digests)
            return
        # NaNs need not have the same bits everywhere: a state that is not finite, and may be so, is not compared.
        clean = not (self._not_finite(state_digests) & self._common).any()
        rates = self._rates()
        progress = struct.pack(f"<{len(rates)}dq", *rates, self._steps_done)
        digests = [number_of(state_digests[numbers, 0].tobytes(), progress) for _, numbers in self._groups]
        facts = gathered(self._comm, wrong, clean, *digests)
        differ = any(
            (facts[ranks, column] != facts[ranks[0], column]).any()
            for column, (groups, _) in enumerate(self._groups, 2)
            for ranks in groups
        )
        if facts[:, 0].all() or (facts[:, 0].any() and not (differ and self._compares)):
            self._raise_divergence(state_digests)
        elif differ and self._compares and (facts[:, 1].all() or facts[:, 0].any()):
            self._raise_difference(state_digests)
        elif self._compares and not differ:
            self._agreed, self._changed = state_digests[:, 0], set()

    def take_copy(self) -> None:
        """Copy the state, and keep the samples from now on, to repeat the steps from here."""
        self._steps, self._checked_at = [], time.perf_counter()
        sharded = self._programs.sharding is not None  # a copy would take the memory that sharding saves
        self._has_copy = not sharded and self._batches.keep() and self._snapshot.take()

    def _diverged(self, digests: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
        wrong: npt.NDArray[np.bool_] = self._not_finite(digests) & self._checked
        return wrong

    def _not_finite(self, digests: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
        allowed = np.array([id(variable) in self._allowed for variable in self._variables], bool)
        wrong: npt.NDArray[np.bool_] = (digests[:, 1] != 0) & ~allowed
        return wrong

    def _rates(self) -> list[float]:
        """Return the learning rates of a schedule, which are no variables."""
        optimizer = self._model._compiled_optimizer
        return list(optimizer._rates.values()) if optimizer._follows_schedule else []

    @property
    def _step(self) -> Step:
        step: Step = self._model._make_step("train")
        return step

    def _where(self, step: int) -> str:
        return f"step {step} of epoch {self._epoch + 1}"

    # Differing ranks

    def _raise_difference(self, digests: npt.NDArray[np.uint64]) -> None:
        """Raise with the deviating ranks and variables. Collective."""
        hexdigests = {
            self._name(variable): f"{int(digest):016x}"
            for variable, digest, common in zip(self._variables, digests[:, 0], self._common, strict=True)
            if common
        }
        hexdigests["learning rate"] = ", ".join(map(str, self._rates()))
        facts = self._comm.allgather(hexdigests)
        away: list[dict[str, float]] = []
        if deviating(facts, []) is None:
            names = differing(facts)
            # Between epochs callbacks may change something on all ranks, but not on some. The copy has it already.
            changed = [set(paths) for paths in self._comm.allgather(sorted(self._changed))]
            alone = [bool(paths - set.intersection(*changed)) for paths in changed]
            if any(alone):
                away = [dict.fromkeys(names, math.inf if deviates else 0.0) for deviates in alone]
            elif self._all(self._has_copy and not self._step.eager):
                away = self._comm.allgather(self._distances(names))
        refuse_difference(self._comm, self._where(self._steps_done), facts, away)

    def _distances(self, names: Collection[str]) -> dict[str, float]:
        """Return how far variables are from the result of repeating the same steps. Collective."""
        chosen = [variable for variable in self._variables if self._name(variable) in names]
        values = [variable.numpy().astype(np.float64) for variable in chosen]
        self._snapshot.restore()
        for shards in self._steps:
            rows = self._batches.rows([shards])
            self._programs.run(self._step, self._batches.spec, rows, [shards])
        again = [variable.numpy().astype(np.float64) for variable in chosen]
        distances = [
            np.nan_to_num(np.abs(a - b), nan=np.inf).max(initial=0) for a, b in zip(values, again, strict=True)
        ]
        return {self._name(variable): float(distance) for variable, distance in zip(chosen, distances, strict=True)}

    def _name(self, variable: Variable) -> str:
        sharding = self._programs.sharding
        return variable._path if sharding is None else sharding.name(variable)

    # A non-finite state

    def _raise_divergence(self, digests: npt.NDArray[np.uint64]) -> None:
        """Raise with the cause of the first non-finite value. Collective."""
        wrong = [variable for variable, wrong in zip(self._variables, self._diverged(digests), strict=True) if wrong]
        counts = [[variable._path, int(np.count_nonzero(~np.isfinite(variable.numpy())))] for variable in wrong]
        # Of sharded variables only some ranks may have such values.
        found_first = next((rank_counts[0] for rank_counts in self._comm.allgather(counts) if rank_counts), ["", 0])
        path, count = str(found_first[0]), found_first[1]
        logs = {key: value for key, value in self._programs.logs("train").items() if not math.isfinite(value)}
        bad = self._first_diverged()
        cause = self._cause(bad) if bad is not None else None
        rank_causes = self._comm.allgather([self._comm.process, cause])
        causes = [(rank, process, *cause) for rank, (process, cause) in enumerate(rank_causes) if cause is not None]
        if causes:  # samples tell more than ops
            rank, process, _, text, advice = min(causes, key=lambda ranked: ranked[2])
            text += "" if self._comm.size == 1 else f" (rank {rank}, {process})"
            text += f"; {advice}" if advice else ""
            message = f"training diverged in {self._where(bad.step if bad else self._steps_done)}: {text}"
        elif path and not _is_loss(path.partition("/")[0]):
            values = "1 value that is not finite" if count == 1 else f"{count} values that are not finite"
            after = self._where(bad.step if bad else self._steps_done)
            message = f"training diverged: parameter {path!r} has {values} after {after}; {_ADVICE}"
        else:
            values = ", ".join(f"{key} = {value}" for key, value in logs.items()) or "the loss is not finite"
            message = f"training diverged: {values} after {self._where(self._steps_done)}; {_ADVICE}"
        refuse(self._comm.size, message)

    def _first_diverged(self) -> _DivergedStep | None:
        """Return the first step with a non-finite state, None if unknown, and restore the state before. Collective."""
        steps = list(self._steps)
        if not self._all(self._has_copy and not self._step.eager):
            return None
        self._snapshot.restore()
        for number, shards in enumerate(steps):
            if not self._all(self._snapshot.take()):
                return None
            rows = self._batches.rows([shards])
            self._programs.run(self._step, self._batches.spec, rows, [shards])
            if not self._all(not self._diverged(self._snapshot.digests()).any()):
                self._snapshot.restore()
                return _DivergedStep(self._steps_done - len(steps) + number + 1, shards, rows)
        return None

    def _cause(self, bad: _DivergedStep) -> list[Any] | None:
        """Return a priority, 0 for the highest, what this rank found, and advice; None for nothing."""
        order = self._host(bad.rows.order)
        arrays = dict(zip(self._batches.spec.names, map(self._host, bad.rows.arrays), strict=True))
        parts = [
            (shard, order[start : start + shard.rows]) for shard, start in zip(bad.shards, bad.rows.starts, strict=True)
        ]
        for name, array in arrays.items():
            if not is_floating(array.dtype):
                continue
            for _, numbers in parts:
                finite = np.isfinite(array[numbers]).all(axis=tuple(range(1, array.ndim)))
                if not finite.all():
                    return [0, f"{name} is not finite in {self._samples(bad.rows, numbers[~finite])}", ""]
        for worst, test in ((1, np.isnan), (2, np.isinf)):
            for shard, numbers in parts:
                first = self._first_op(test, bad.rows, shard, arrays, numbers)
                if first is not None and first.of_infinities:  # such as 0 times the logarithm of 0
                    earlier = self._first_op(np.isinf, bad.rows, shard, arrays, numbers)
                    first = earlier if earlier is not None and earlier.advice == _ADVICE_ON_INPUT else first
                if first is not None:
                    return [worst, first.text, first.advice]
        return None

    def _first_op(
        self, test: Any, rows: BatchRows, shard: Shard, arrays: Mapping[str, Array], numbers: Array
    ) -> "_FirstOp | None":
        """Return the first op of this rank's part of a step that makes a NaN, or an infinity."""
        if self._programs.sharding is not None:  # a single rank lacks the others' parts
            return None
        nonfinite: list[Tensor] = []

        def check(tensor: Tensor) -> None:
            if is_floating(tensor.dtype) and test(tensor.value).any():
                nonfinite.append(tensor)
                raise _StopSearchError

        try:
            with watching(check), np.errstate(all="ignore"):
                self._programs.evaluate_alone(self._step, self._batches.spec, arrays, numbers, shard)
        except _StopSearchError:
            pass
        if not nonfinite:
            return None
        tensor = nonfinite[0]
        assert tensor.op is not None
        assert tensor.value is not None
        place = np.argwhere(test(tensor.value))[0].tolist()
        layer = _layer(tensor)
        of = f" of layer {tensor.name!r}" if tensor.name else f" behind layer {layer!r}" if layer else ""
        what = "a NaN" if test is np.isnan else "an infinity"
        by_rows = tensor.value.ndim > 0 and len(tensor.value) == len(numbers) and len(numbers) > 1
        sample = f", of {self._samples(rows, numbers[place[:1]])}" if by_rows else ""
        shape = f"{tensor.value.shape}{sample}"
        text = f"op {tensor.op.name!r}{of} is the first to produce {what}, at {place} of shape {shape}"
        values = [np.asarray(parent.value) for parent in tensor.inputs if parent.value is not None]
        of_infinities = test is np.isnan and any(np.isinf(value).any() for value in values if is_floating(value.dtype))
        inputs = _inputs_at(tensor, tuple(place))
        if inputs is None:
            return _FirstOp(text, _ADVICE, of_infinities)
        is_undefined = np.isfinite(inputs).all() and (test is np.isnan or 0 in inputs)
        shown = (
            f"input is {inputs[0]:g}" if len(inputs) == 1 else f"inputs are {' and '.join(f'{x:g}' for x in inputs)}"
        )
        return _FirstOp(f"{text}; its {shown} there", _ADVICE_ON_INPUT if is_undefined else _ADVICE, of_infinities)

    def _samples(self, rows: BatchRows, numbers: Array, most: int = 5) -> str:
        """Describe the samples in some stored rows by number, or by place in the batch if they have no other."""
        by_batch = self._batches.numbered_by_batch
        samples = sorted((numbers if rows.samples is None else np.asarray(rows.samples)[numbers]).tolist())
        more = f" and {len(samples) - most} more" if len(samples) > most else ""
        where = " of its batch" if by_batch else ""
        return f"sample{'s' * (len(samples) > 1)} {', '.join(map(str, samples[:most]))}{more}{where}"

    def _host(self, buffer: Any) -> Array:
        return buffer if isinstance(buffer, np.ndarray) else self._programs.backend.download(buffer)

    def _all(self, mine: bool) -> bool:
        return mine if self._comm.size == 1 else bool(gathered(self._comm, mine).all())


@dataclass(frozen=True)
class _FirstOp:
    """The first op with a result that is not finite."""

    text: str
    advice: str
    of_infinities: bool  # its NaN comes from an infinity


class _StopSearchError(Exception):
    """Ends an evaluation at the first non-finite value."""


def _inputs_at(tensor: Tensor, place: tuple[int, ...]) -> list[float] | None:
    """Return what an elementwise op has read for an element of its result; None of other ops."""
    values = [np.asarray(parent.value) for parent in tensor.inputs if parent.value is not None]
    are_numbers = all(value.dtype.kind in "iu" or is_floating(value.dtype) for value in values)
    if not values or len(values) < len(tensor.inputs) or not are_numbers:
        return None
    shape = tensor.value.shape if tensor.value is not None else ()
    try:
        if np.broadcast_shapes(*(value.shape for value in values)) != shape:
            return None
    except ValueError:
        return None
    return [float(np.broadcast_to(value, shape)[place]) for value in values]


def refuse(ranks: int, message: str) -> None:
    """Raise that a training has diverged: DivergenceError on one rank, AgreedError on several."""
    if ranks == 1:
        raise DivergenceError(message)
    raise AgreedError("training", ExitCode.DIVERGED, message, [])


def refuse_validation(ranks: int, epoch: int, logs: Mapping[str, float]) -> None:
    """Refuse non-finite losses of a validation, the same on all ranks; epoch counted from 0."""
    wrong = [f"val_{key} = {value}" for key, value in logs.items() if _is_loss(key) and not math.isfinite(value)]
    if wrong:
        refuse(ranks, f"training diverged: {', '.join(wrong)} in epoch {epoch + 1}; {_ADVICE}")


def _layer(tensor: Tensor) -> str:
    """Return the layer of a tensor, or of the nearest tensor before it."""
    level = [tensor]
    while level:
        for candidate in level:
            if candidate.op is not None and candidate.name:
                return candidate.name
        level = [parent for tensor in level for parent in tensor.inputs][:64]
    return ""


def _is_loss(name: str) -> bool:
    return name == "loss" or name.endswith("_loss")
