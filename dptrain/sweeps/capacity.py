"""How many runs a rank trains at once: as many as make its device faster and fit into its memory, both measured."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import TypeVar

from dptrain.backend.cpu.backend import CpuBackend
from dptrain.callbacks.monitor import direction_of
from dptrain.errors import ConfigError
from dptrain.sweeps.records import Run, Segment, Setting
from dptrain.sweeps.round_robin import RoundRobin, threads_for
from dptrain.sweeps.training import MEASURED, Recipe, Slot, Training, is_of_the_device, is_out_of_memory

T = TypeVar("T")

# Seconds that are measured for a number of runs, and advances at most.
_SECONDS, _TURNS = 0.3, 200
# Runs for each core of a CPU, where one on each computes.
_PER_CORE = 2
# Another doubling of the runs must make the device faster by this factor to be worth it.
_GAIN = 1.1
# The part of the free memory that runs may take: ops keep some for themselves.
_USABLE = 0.9


@dataclass(frozen=True)
class Capacity:
    """What a rank can train.

    Attributes:
        places: runs at once.
        device: in words.
        run_bytes: memory of a run on the device, samples aside.
        free_bytes: memory that was free beside the samples and one run; None where it is the host's own.
        steps: of a run; None where nobody knows.
        steps_per_second: of all places together, the evaluation aside.
        threads: of the CPU; None on a GPU.
        at_once: threads that train runs beside each other, see `RoundRobin`.
        packs: on a GPU, into which runs of one program are divided; 0 for none.
        directions: "up" or "down" for what is better of each metric; None where nobody knows.
    """

    places: int
    device: str
    run_bytes: int
    free_bytes: int | None
    steps: int | None
    steps_per_second: float
    threads: int | None
    at_once: int
    packs: int
    directions: Mapping[str, str | None]

    @property
    def seconds(self) -> float | None:
        """What a run takes of this rank's time, the evaluation aside; None where nobody knows."""
        return None if self.steps is None or not self.steps_per_second else self.steps / self.steps_per_second


def packs_of(packing: bool | int) -> int | None:
    """Return what `packing` means as a number of packs, see `Capacity`; None to find out.

    Raises:
        ConfigError: it is below 0.
    """
    if packing is True:
        return None
    if packing < 0:
        raise ConfigError(f"packing = {packing}: expected True, False or a number of packs")
    return int(packing)


def measure(
    recipe: Recipe,
    settings: Sequence[Setting],
    run: Run,
    metrics: Sequence[str],
    places: int | None,
    most: int,
    packs: int | None = None,
) -> Capacity:
    """Train some steps of a run, and throw them away.

    Args:
        recipe: of the sweep.
        settings: the first that can be trained is.
        run: its seed and its fold.
        metrics: of the sweep.
        places: runs at once, where the user says; None to find out.
        most: runs that there will be for this rank at most.
        packs: as `Capacity`, where the user says; None to find out.

    Raises:
        ConfigError: a metric is none of the logs.
        DptrainError: no setting can be trained: why the first cannot.
    """

    def look(setting: Setting) -> Capacity:
        return _measure(recipe, setting, run, metrics, places, max(1, most), packs)

    return first_that_works(settings, look)


def first_that_works(settings: Sequence[Setting], action: Callable[[Setting], T]) -> T:
    """Return what `action` makes of the first setting that it can be done with: others fail when they are trained.

    Raises:
        ConfigError: a metric is none of the logs, whatever the setting.
        Exception: the device is unusable, or no setting works: why the first does not.
    """
    problem: Exception | None = None
    for setting in settings:
        try:
            return action(setting)
        except _UnknownMetricError:
            raise
        except Exception as error:
            if is_of_the_device(error):
                raise
            problem = problem or error
    assert problem is not None
    raise problem


class _UnknownMetricError(ConfigError):
    pass


def _measure(
    recipe: Recipe,
    setting: Setting,
    run: Run,
    metrics: Sequence[str],
    places: int | None,
    most: int,
    packs: int | None,
) -> Capacity:
    with ExitStack() as stack:
        trainings: list[Training] = []

        def add(threads: int | None = None) -> Training:
            slot = stack.enter_context(closing(Slot(len(trainings), threads, packing=packs != 0)))
            training = Training(recipe, Segment(run), setting, slot, b"", lambda run, epoch, logs: None)
            stack.callback(training.close)
            training.advance()  # allocates
            trainings.append(training)
            return training

        first = add()
        backend, by_key = first.trainer.backend, first.model._metrics_by_key
        logs = list({**by_key, **first.trainer.programs.logs("train")})
        directions = {}
        for metric in metrics:
            measured = metric in MEASURED and metric not in logs
            if not measured:
                _require_metric(metric, logs)
            directions[metric] = MEASURED[metric] if measured else direction_of(metric, by_key)
        steps, run_bytes, device = first.steps, first.trainer.nbytes, backend.description
        free, threads, at_once = backend.room_for_data(), None, 1
        if isinstance(backend, CpuBackend):
            threads = backend.threads
            if backend.compiles:  # each run at work has a core for itself; others are ready when its Python waits
                places = min(_PER_CORE * threads, most) if places is None else places
                at_once = threads_for(backend, places)
            if at_once > 1:
                trainings.clear()
                while len(trainings) < at_once:
                    add(1)
        schedule: RoundRobin[Training] = stack.enter_context(closing(RoundRobin(at_once)))
        speed = _steps_per_second(schedule, trainings)
        if places is None:
            places = 1
            while free is not None and 2 * places <= most and (2 * places - 1) * run_bytes <= _USABLE * free:
                try:
                    while len(trainings) < 2 * places:
                        add()
                    faster = _steps_per_second(schedule, trainings)
                except Exception as error:
                    if not is_out_of_memory(error):
                        raise
                    break
                if faster < _GAIN * speed:
                    break
                places, speed = 2 * places, faster
            if packs is None and places > 1:
                divided = _steps_per_second(RoundRobin(packs=2), trainings[:places])
                if divided >= _GAIN * speed:
                    packs, speed = 2, divided
        packs = 1 if packs is None else packs
        return Capacity(places, device, run_bytes, free, steps, speed, threads, at_once, packs, directions)


def _steps_per_second(schedule: RoundRobin[Training], trainings: Sequence[Training]) -> float:
    """Return how many steps of all trainings together the device makes."""
    _wait(trainings)
    begun, before = time.perf_counter(), _steps_done(trainings)
    for _ in range(_TURNS):
        found = schedule.advance(trainings)
        for outcome in found:
            if outcome.error is not None and (is_of_the_device(outcome.error) or is_out_of_memory(outcome.error)):
                raise outcome.error
        # So short a run tells what it can; so does one that diverges or fails: the run itself will be recorded.
        if any(outcome.error is not None or outcome.ended is not None for outcome in found):
            break
        if time.perf_counter() - begun > _SECONDS:
            break
    _wait(trainings)
    return (_steps_done(trainings) - before) / (time.perf_counter() - begun)


def _steps_done(trainings: Sequence[Training]) -> int:
    return sum(training.trainer.steps_done for training in trainings)


def _wait(trainings: Sequence[Training]) -> None:
    for training in trainings:
        training.trainer.wait()


def _require_metric(metric: str, keys: Sequence[str]) -> None:
    known = list(keys)
    if metric.removeprefix("val_") not in known:
        raise _UnknownMetricError(
            f"metric = {metric!r}: the logs have {', '.join(known)}, and the validation's as 'val_...'"
        )
