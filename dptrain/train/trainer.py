"""The one training loop."""

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from dptrain.batches.base import Batches
from dptrain.batches.feed import BatchRows, FeedPool, padded_rows
from dptrain.batches.sampling import Shard
from dptrain.callbacks import CallbackList, Logs, StepLogs
from dptrain.comm.mesh import BATCH
from dptrain.errors import ConfigError
from dptrain.program.shapes import size
from dptrain.program.sharding.messages import all_reduced
from dptrain.program.tensor import Variable
from dptrain.program.turns import TURNS
from dptrain.runtime import heap
from dptrain.runtime.failure import phase
from dptrain.runtime.signals import EndlessStepError
from dptrain.runtime.types import type_of
from dptrain.train.health import HealthCheck, OnNonfinite, digest_every, refuse_validation
from dptrain.train.programs import Programs, Step, Trained
from dptrain.train.replicas import Shared
from dptrain.train.sync_points import SyncPoints

T = TypeVar("T")
# Work that yields after each queued step, so that other work can interleave.
StepIterator = Generator[None, None, T]

# Time limit and largest number of steps of an execution: progress and Ctrl-C wait for its end.
_CHUNK_SECONDS, _MOST_STEPS = 0.04, 1024


@dataclass(frozen=True)
class Timing:
    """Duration of an epoch's steps, without validation and what follows."""

    seconds: float  # since the epoch began
    samples: int  # of all ranks
    steps: int
    preparing: float = 0.0  # seconds of tracing and compiling

    @property
    def samples_per_second(self) -> float:
        """Samples of all ranks a second, once steps are compiled."""
        seconds = self.seconds - self.preparing
        return self.samples / seconds if seconds > 0 else 0.0


class Trainer:
    """Trains a model together with the other ranks."""

    def __init__(
        self,
        model: Trained,
        programs: Programs,
        *,
        steps_per_execution: int | None = None,
        data_bytes: int | None = None,
    ) -> None:
        self.model, self.programs = model, programs
        self.backend, self.comm = programs.backend, programs.comm
        self._steps_per_execution, self._data_bytes = steps_per_execution, data_bytes
        self._chunk = 1
        self._started = self._prepared_before = 0.0
        self._steps = self._samples = self.steps_done = 0
        self._finished: Timing | None = Timing(0.0, 0, 0)
        self._first: tuple[int, int] = (0, 0)
        self._health: HealthCheck | None = None
        self._shared: list[Shared] = []
        self._kept_feeds = FeedPool(self.backend)

    @property
    def timing(self) -> Timing:
        """Timing of the current epoch or evaluation, or of the last one."""
        if self._finished is not None:
            return self._finished
        preparing = self.programs.preparing_seconds - self._prepared_before
        return Timing(time.perf_counter() - self._started, self._samples, self._steps, preparing)

    def go_to(self, epoch: int, step: int = 0) -> None:
        """Start the training there, to resume an interrupted one; until `on_train_begin` has returned."""
        self._first = epoch, step

    def training(
        self,
        train: Batches,
        hooks: CallbackList,
        *,
        epochs: int,
        initial_epoch: int = 0,
        validation: Batches | None = None,
        validation_freq: int | Sequence[int] = 1,
        on_nonfinite: OnNonfinite = "stop",
        compare_every: int | None = None,
    ) -> StepIterator[None]:
        """Train, and yield whenever steps have been queued. Collective.

        Raises:
            DivergenceError: the state or a loss is not finite; on several ranks an AgreedError with its exit code.
            AgreedError: the ranks have different states, with exit code 76.
        """
        every = digest_every(compare_every)
        if self.comm.size > 1:
            facts = {"on_nonfinite": on_nonfinite, "digest_every": every}
            self.comm.require_same("the ranks check their states differently", facts)
        self.share(self.model._variables_on_device)
        data = {"train": train} | ({} if validation is None else {"test": validation})
        meeting = SyncPoints(self.comm, hooks, self._check_health, self.programs.local)
        with self._opened(data), self._checking(), meeting as sync_points:
            hooks._set_trainer(self)
            hooks.model.stop_training = False
            logs: Logs = {}
            resumed = sync_points.resume()
            self.go_to(initial_epoch)
            if resumed is not None:
                self.go_to(epochs if resumed.ended else resumed.epoch, resumed.step)
                logs, hooks.model.stop_training = resumed.logs, resumed.stops
            hooks.on_train_begin()
            sync_points.load()
            self._health = self._health_check(train, on_nonfinite, every)
            first_epoch, first_step = self._first
            if (first_epoch, first_step) != (initial_epoch, 0) and first_epoch < epochs:
                train.resume(first_epoch - initial_epoch, first_step)
            for epoch in range(first_epoch, epochs):
                begin = first_step if epoch == first_epoch else 0
                sync_points.begin_epoch(epoch)
                hooks.on_epoch_begin(epoch)
                if begin:
                    sync_points.load(begun=True)
                ended = resumed is not None and resumed.stops and epoch == first_epoch
                logs = yield from self._train_epoch(train, epoch, hooks, sync_points, begin, ended=ended)
                if validation is not None and _is_due(epoch, validation_freq):
                    mine = (validation.steps or 0) if validation.alone else None
                    stops = hooks.model.stop_training
                    sync_points.begin_validation(epoch, begin + self._steps, stops=stops, steps=mine)
                    try:
                        with phase.during("validation"):
                            validated = yield from self._evaluate(validation, hooks, sync_points)
                    except EndlessStepError as error:
                        sync_points.abandon_validation(error)
                        raise
                    if on_nonfinite != "ignore":
                        refuse_validation(self.comm.size, epoch, validated)
                    logs |= {f"val_{key}": value for key, value in validated.items()}
                hooks.on_epoch_end(epoch, logs)
                stopped = self._stopped(hooks.model, "stop_training")
                sync_points.after_epoch(epoch, logs, ended=stopped, ahead=self._steps_at_once)
                if stopped:
                    break
            self.model._finalize_weights()
            hooks.on_train_end(logs)

    @contextmanager
    def _opened(self, data: Mapping[str, Batches], step: Step | None = None) -> Iterator[None]:
        """Open the data, with memory left for the model's state and its steps; `step` is that of a prediction."""
        self.programs.settle(
            (step or self.model._make_step(name), batches.spec, batches.first)
            for name, batches in data.items()
            if batches.first
        )
        reserved = 0
        if self._data_bytes is None and self.backend.room_for_data() is not None:
            self.programs.adopt(self.model, trains="train" in data)
            steps = [(step or self.model._make_step(name), batches) for name, batches in data.items() if batches.first]
            needs = [(step, batches.spec, batches.first, batches.alone) for step, batches in steps]
            reserved = sum(self.programs.arena_bytes(*need[:3], alone=need[3]) for need in needs)
        with ExitStack() as stack:
            for batches in data.values():
                stack.enter_context(batches.open(self.backend, self._data_bytes, reserved))
            yield

    def evaluate(self, batches: Batches, hooks: CallbackList) -> Logs:
        """Return the mean loss and metrics over all ranks' samples. Collective."""
        self.share(lambda: self.model.variables)
        hooks._set_trainer(self)
        with self._opened({"test": batches}):
            return run_to_end(self._evaluate(batches, hooks))

    def predict(self, batches: Batches, hooks: CallbackList, step: Step | None = None) -> dict[str, npt.NDArray[Any]]:
        """Return the outputs of all samples by name, (rows, ...), on every rank. Collective."""
        self.share(lambda: self.model.variables)
        hooks._set_trainer(self)
        if not self._any(hooks._has_batch_hooks("predict")):
            return self._predict(batches, hooks, step or self.model._make_step("predict"), watched=False)
        with TURNS.of(writes={("stop_predicting", id(self.model))}):  # a hook sets this for its own thread
            hooks.model.stop_predicting = False
            return self._predict(batches, hooks, step or self.model._make_step("predict"), watched=True)

    def _predict(
        self, batches: Batches, hooks: CallbackList, step: Step, *, watched: bool
    ) -> dict[str, npt.NDArray[Any]]:
        outputs: list[tuple[Shard, dict[str, npt.NDArray[Any]]]] = []
        hooks.on_predict_begin()
        batches.use_pool(self._kept_feeds)
        with self._opened({"predict": batches}, step), ExitStack() as stack:
            for number, (shard,) in enumerate(batches.epoch(0)):
                hooks.on_predict_batch_begin(number)
                step = self._current(step)
                rows = batches.rows([[shard]])
                padded = self._padded(step, batches, shard)
                if not number and batches.steps != 1 and batches.looks_ahead and not watched and self.comm.size == 1:
                    # All rows use the same weights, whatever other threads do. Not if a user's code runs between the
                    # batches, which may wait for these threads, or if batches change what the next one reads.
                    stack.enter_context(self.programs.turn(step, batches.spec, padded.batch_rows))
                mine = _arrays(self.programs.run(step, batches.spec, rows, [[padded]], alone=batches.alone))
                if padded.rows != shard.rows:
                    mine = {name: output[: shard.rows] for name, output in mine.items()}
                outputs.append((shard, mine))
                nested = self.model._as_outputs(mine) if step.name == "predict" else mine
                hooks.on_predict_batch_end(number, {"outputs": nested})
                if watched and self._stopped(hooks.model, "stop_predicting"):
                    break
            if not outputs:  # shapes and types without rows
                nothing = Shard(0, 0, 0, step.rows or 1)
                empty = self.programs.run(step, batches.spec, batches.rows([[nothing]]), [[nothing]], alone=True)
                outputs.append((nothing, _arrays(empty)))
        hooks.on_predict_end()
        return self._gathered(outputs)

    def _padded(self, step: Step, batches: Batches, shard: Shard) -> Shard:
        """Return a shard padded to few sizes if rows are independent, so that few programs are needed."""
        rows = padded_rows(shard.rows)
        if not batches.pads or not self.programs.computes_rows(step, batches.spec, rows):
            return shard
        return Shard(0, rows, 0, rows)

    def _gathered(self, parts: list[tuple[Shard, dict[str, npt.NDArray[Any]]]]) -> dict[str, npt.NDArray[Any]]:
        """Return all ranks' outputs in the order of the samples. Collective."""
        if _differing_shapes(parts) is not None:  # on all ranks
            self.comm.agree("predict", lambda: _check_shapes(parts))
        if self.comm.size == 1:
            return {name: np.concatenate([mine[name] for _, mine in parts]) for name in parts[0][1]}
        replicas = self.comm.along(BATCH)
        last = max(replicas.allgather(max([0, *(shard.stop for shard, mine in parts if shard.rows)])))
        kinds: list[list[Any]] = [
            [name, list(output.shape[1:]), output.dtype.str] for name, output in parts[0][1].items()
        ]
        outputs: dict[str, npt.NDArray[Any]] = {}
        for name, shape, dtype in kinds:
            outputs[name] = np.zeros((last, *shape), np.uint8 if dtype == "|b1" else dtype)
            for shard, mine in parts:
                outputs[name][shard.start : shard.stop] = mine[name]
            replicas.allreduce_sum(outputs[name])  # every row is zero on all of them but one
            outputs[name] = outputs[name].astype(dtype, copy=False)
        return outputs

    def train_on_batch(self, batches: Batches) -> Logs:
        """Run one training step; return its loss and metrics. Collective."""
        self.share(self.model._variables_on_device)
        return self._on_batch("train", batches)

    def test_on_batch(self, batches: Batches) -> Logs:
        """Return the loss and metrics of `batches`. Collective."""
        return self._on_batch("test", batches)

    def _on_batch(self, name: str, batches: Batches) -> Logs:
        step = self.model._make_step(name)
        self.model.reset_metrics()
        with self._opened({name: batches}):
            for shards in batches.epoch(0):
                rows = batches.rows([shards])
                self.programs.run(step, batches.spec, rows, [shards])
        self._sum_totals(step)
        return self.programs.logs(name)

    @property
    def nbytes(self) -> int:
        """Device memory of the model: its state, a copy of it, and its steps without samples."""
        state = self.programs.local(self.model._variables_on_device())
        return 2 * sum(size(variable.shape) * variable.dtype.itemsize for variable in state) + self.programs.nbytes

    def wait(self) -> None:
        """Wait for the device."""
        for variable in self.programs.local(self.model._variables_on_device()[:1]):
            variable.numpy()

    def share(self, variables_of: Callable[[], Sequence[Variable]]) -> None:
        """Broadcast rank 0's values of the variables that `variables_of` returns. Collective."""
        if self.comm.size == 1:
            return
        variables, sharding = variables_of(), self.programs.sharding
        groups = {self.comm: list(variables)}
        if sharding is not None:
            sharding.take(variables)
            groups = sharding.by_group(variables)
        ids = [id(variable) for members in groups.values() for variable in members]
        if ids != [id(variable) for shared in self._shared for variable in shared.variables]:
            self._shared = [Shared(self.backend, group, members) for group, members in groups.items()]
            if sharding is not None:
                heap.trim()  # of the whole values, which lay there one after the other
        for shared in self._shared:
            shared.give()

    def _health_check(self, batches: Batches, on_nonfinite: OnNonfinite, every: int) -> HealthCheck | None:
        if on_nonfinite == "ignore" and (self.comm.size == 1 or not every):
            return None
        if not self.model._has_custom_steps:  # so that copies of the state include the slots from the first step on
            self.model._compiled_optimizer.build(self.model.trainable_weights)
        return HealthCheck(self.model, self.programs, batches, every=every, on_nonfinite=on_nonfinite)

    def _train_epoch(
        self,
        batches: Batches,
        epoch: int,
        hooks: CallbackList,
        sync_points: SyncPoints,
        first_step: int,
        *,
        ended: bool,
    ) -> StepIterator[Logs]:
        phase.enter("training")
        phase.epoch = epoch + 1
        step = self.model._make_step("train")
        if not first_step:
            self.model.reset_metrics()
        self._begin()
        skipped = sync_points.skipped_at_begin
        # A step's hooks may stop the training on one rank; where no rank has any, there is nothing to agree on.
        watched = self._any(hooks._has_batch_hooks("train"))
        step_number = first_step
        if self._health is not None:
            self._health.begin(epoch, first_step)
        for shards, rows in self._chunks(
            batches, batches.epoch(epoch), watched, lambda most: self._most(sync_points, hooks._most_steps(most))
        ):
            if ended:  # before the interruption
                break
            phase.step = step_number + 1
            hooks.on_train_batch_begin(step_number)
            step = self._current(step)
            begun = time.perf_counter()
            try:
                self.programs.run(step, batches.spec, rows, shards)
            except EndlessStepError as error:
                finished = shards[: error.finished]
                self._count(finished)
                sync_points.count(len(finished))
                sync_points.abandon(epoch, step_number + len(finished), error)
                raise
            seconds = time.perf_counter() - begun
            step_number += len(shards)
            self.steps_done += len(shards)
            self._count(shards)
            yield  # before anything is read: others may queue the same, to be executed with it
            # A pack is launched when all its runs have had their turn, not in `run`.
            self._adapt(len(shards), time.perf_counter() - begun if self.programs.backend.joins_packs else seconds)
            if self._health is not None:
                self._health.after(shards)
            hooks.on_train_batch_end(step_number - 1, StepLogs(lambda: self.programs.logs("train")))
            if watched and self._health is not None:
                self._health.after_callbacks()
            sync_points.count(len(shards))
            if watched and self._stopped(hooks.model, "stop_training"):
                break
            sync_points.after_steps(epoch, step_number, ahead=self._steps_at_once)
        self._check_health()
        if first_step and not self._steps:  # all were done before the interruption
            self.programs.note(step, batches.spec)
        # As Keras, an epoch for which no data was left has no logs.
        logs = self.programs.logs("train") if self._steps or first_step else {}
        if logs and skipped is not None:
            logs["skipped_steps"] = (self.model._skipped_steps or 0) - skipped
        self._finished = self.timing
        return logs

    def _current(self, step: Step) -> Step:
        """Return a step, traced anew if something it reads, such as a layer's attribute, has changed."""
        if step.reads.hold:
            return step
        if self._health is not None:
            self._health.take_copy()  # earlier steps cannot be repeated
        return self.model._make_step(step.name)

    @contextmanager
    def _checking(self) -> Iterator[None]:
        """Drop the health check in the end, and with it its device memory."""
        try:
            yield
        finally:
            self._health = None

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Let a callback change the state between two steps, on all ranks alike. Collective."""
        self._check_health()
        yield
        if self._health is not None:
            self._health.take_copy()

    def _check_health(self) -> None:
        if self._health is not None:
            self._health.check()

    def _most(self, sync_points: SyncPoints, steps: int) -> int:
        """Return how many of so many steps may run before the next sync point or health check."""
        left = None if self._health is None else self._health.steps_left
        return sync_points.most(steps if left is None else min(steps, left))

    def _begin(self) -> None:
        self._started, self._steps, self._samples, self._finished = time.perf_counter(), 0, 0, None
        self._prepared_before = self.programs.preparing_seconds

    def _count(self, steps: Sequence[Sequence[Shard]]) -> None:
        self._steps += len(steps)
        self._samples += sum(shards[0].batch_rows for shards in steps)

    @property
    def _steps_at_once(self) -> int:
        return self._steps_per_execution or self._chunk

    def _chunks(
        self,
        batches: Batches,
        epoch: Iterator[Sequence[Shard]],
        watched: bool,
        limited: Callable[[int], int] = lambda most: most,
    ) -> Iterator[tuple[list[Sequence[Shard]], BatchRows]]:
        """Yield the steps of an epoch, grouped where they are alike, in memory and unobserved."""
        ahead: list[Sequence[Shard]] = []
        while True:
            most = limited(self._steps_per_execution or (1 if watched else self._chunk))
            while len(ahead) < (most if batches.looks_ahead else 1) and (more := next(epoch, None)) is not None:
                ahead.append(more)
            if not ahead:
                return
            same, kind = 1, _kind(ahead[0])
            while same < min(len(ahead), most) and _kind(ahead[same]) == kind:
                same += 1
            rows = batches.rows(ahead[:same])
            together = len(rows.starts) // len(ahead[0])
            if not together:  # the shards of a step are in two chunks of a streamed feed
                raise AssertionError("a feed's chunk is smaller than a step")
            yield ahead[:together], rows
            ahead = ahead[together:]

    def _adapt(self, steps: int, seconds: float) -> None:
        """Adapt the steps of an execution to the time it may take; at most twice those of the last."""
        if self._steps_per_execution is None and steps >= self._chunk:
            fitting = int(_CHUNK_SECONDS * steps / seconds) if seconds > 0 else _MOST_STEPS
            self._chunk = max(1, min(2 * steps, fitting, _MOST_STEPS))

    def _evaluate(
        self, batches: Batches, hooks: CallbackList, sync_points: SyncPoints | None = None
    ) -> StepIterator[Logs]:
        batches.resume(0, 0)  # with validation_steps each validation sees the same first batches, as in Keras
        self.model.reset_metrics()
        step = self.model._make_step("test")
        watched = self._any(hooks._has_batch_hooks("test"))
        if watched:
            hooks.model.stop_evaluating = False
        hooks.on_test_begin()
        timing = self._finished
        self._begin()
        step_number = 0
        limited = (lambda most: most) if sync_points is None else sync_points.most
        for shards, rows in self._chunks(batches, batches.epoch(0), watched, limited):
            hooks.on_test_batch_begin(step_number)
            step = self._current(step)
            self.programs.run(step, batches.spec, rows, shards, alone=batches.alone)
            step_number += len(shards)
            self._count(shards)
            if watched:
                logs = self._logs_so_far(step)
                hooks.on_test_batch_end(step_number - 1, logs)
                if self._stopped(hooks.model, "stop_evaluating"):
                    break
            if sync_points is not None:
                sync_points.after_evaluated(len(shards), ahead=self._steps_at_once)
            yield
        if sync_points is not None:
            sync_points.end_validation(ahead=self._steps_at_once)
        has_samples = self._any(self._samples > 0)
        if has_samples and not self._samples:  # this rank had no samples, and did not run the step
            self.programs.note(step, batches.spec)
        self._sum_totals(step)
        # As Keras, an evaluation without samples has no logs: a loss of 0 would look like a perfect one.
        logs = self.programs.logs("test") if has_samples else {}
        if self.comm.size > 1 and batches.alone:
            self._samples = sum(self.comm.along(BATCH).allgather(self._samples))
        self._finished = self.timing
        hooks.on_test_end(logs)
        self._finished = timing if timing is not None and timing.steps else self._finished
        return logs

    def _sum_totals(self, step: Step) -> None:
        """Sum the totals over the ranks, each of which has a summand. Collective."""
        if self.comm.size == 1:
            return
        totals, replicas = self.programs.summed(step), self.comm.along(BATCH)
        for variable, value in zip(totals, all_reduced([total.numpy() for total in totals], replicas), strict=True):
            variable.assign(value)

    def _logs_so_far(self, step: Step) -> Logs:
        """Return the means over all ranks, and leave the totals as they are. Collective."""
        summands = [(variable, variable.numpy()) for variable in self.programs.summed(step)]
        self._sum_totals(step)
        logs = self.programs.logs("test")
        for variable, value in summands:
            variable.assign(value)
        return logs

    def _stopped(self, model: Trained, flag: str) -> bool:
        """Return whether any rank's model has a flag such as "stop_training", and set it here. Collective."""
        stop = self._any(bool(getattr(model, flag)))
        setattr(model, flag, stop)
        return stop

    def _any(self, mine: bool) -> bool:
        if self.comm.size == 1:
            return mine
        flag = np.array([mine], np.int32)
        self.comm.allreduce_sum(flag)
        return bool(flag[0])


def _arrays(outputs: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
    """Return a step's outputs; bfloat16, which NumPy lacks, as float32, like Keras on PyTorch."""
    return {name: output.astype(type_of(output.dtype).portable, copy=False) for name, output in outputs.items()}


Outputs = Sequence[tuple[Shard, Mapping[str, npt.NDArray[Any]]]]


def _differing_shapes(parts: Outputs) -> tuple[str, int] | None:
    """Return an output and a batch in which its samples have another shape than in the first; None without one."""
    first = parts[0][1]
    for batch, (_, outputs) in enumerate(parts):
        for name, output in outputs.items():
            if output.shape[1:] != first[name].shape[1:]:
                return name, batch
    return None


def _check_shapes(parts: Outputs) -> None:
    """Raise a ConfigError if outputs of several batches cannot be joined, as those of all pairs of rows."""
    differing = _differing_shapes(parts)
    if differing is not None:
        name, batch = differing
        (first, outputs), (shard, others) = parts[0], parts[batch]
        shapes = [tuple(map(int, arrays[name].shape[1:])) for arrays in (outputs, others)]
        raise ConfigError(
            f"predict: {name!r} has the shape {shapes[0]} for each of the {first.batch_rows} samples of the first "
            f"batch and {shapes[1]} in one of {shard.batch_rows}, so its batches cannot be joined: pass a batch_size "
            "that divides the number of samples, or use predict_on_batch"
        )


def _kind(shards: Sequence[Shard]) -> list[tuple[int, int, int]]:
    return [(shard.stop - shard.start, shard.first_row, shard.batch_rows) for shard in shards]


def run_to_end(steps: Generator[Any, None, T]) -> T:
    """Run a step iterator to its end and return its result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result


def _is_due(epoch: int, frequency: int | Sequence[int]) -> bool:
    return epoch + 1 in frequency if isinstance(frequency, Sequence) else (epoch + 1) % frequency == 0
