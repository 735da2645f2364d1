"""Measures how many runs a rank trains at once, by speed and memory of the device."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import TypeVar

from dptrain.backend.cpu.backend import CpuBackend
from dptrain.callbacks.monitor import direction_of
from dptrain.errors import ConfigError
from dptrain.runtime.storage.cache import compilations
from dptrain.sweeps.records import Run, Segment, Setting
from dptrain.sweeps.scheduling.round_robin import RoundRobin, threads_for
from dptrain.sweeps.scheduling.training import MEASURED, Recipe, Slot, Training, is_of_the_device, is_out_of_memory

T = TypeVar("T")

# Measured seconds for each number of runs, and the most advances.
_SECONDS, _TURNS = 0.3, 200
# Measurements at most until nothing is compiled in one.
_ATTEMPTS = 6
# Runs for each core of a CPU; one of them computes.
_PER_CORE = 2
# Another doubling of the runs must make the device faster by this factor to be worth it.
_GAIN = 1.1
# The part of the free memory for runs: ops need some too.
_USABLE = 0.9


@dataclass(frozen=True)
class Capacity:
    """What a rank can train."""

    places: int  # concurrent runs
    device: str  # description
    run_bytes: int  # device memory of one run, without the samples
    free_bytes: int | None  # device memory left beside the samples and one run; None on the host
    steps: int | None  # of one run; None if unknown
    steps_per_second: float  # of all runs together, without evaluation
    threads: int | None  # of the CPU; None on a GPU
    at_once: int  # training threads, see `RoundRobin`
    packs: int  # groups of runs of one program on a GPU; 0 for none
    directions: Mapping[str, str | None]  # "up" or "down", which is better, by metric; None if unknown

    @property
    def seconds(self) -> float | None:
        """Seconds of one run on this rank, without evaluation; None if unknown."""
        return None if self.steps is None or not self.steps_per_second else self.steps / self.steps_per_second


def packs_of(packing: bool | int) -> int | None:
    """Return the number of packs that `packing` asks for; None to measure it."""
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
    """Train some steps of the first trainable setting and discard them; `most` bounds the runs of this rank."""

    def look(setting: Setting) -> Capacity:
        return _measure(recipe, setting, run, metrics, places, max(1, most), packs)

    return first_that_works(settings, look)


def first_that_works(settings: Sequence[Setting], action: Callable[[Setting], T]) -> T:
    """Return the result of `action` for the first setting it succeeds with; raise the first error if none works."""
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
            if backend.compiles:  # each computing run has a core; others are ready when its Python waits
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
    """Return the speed of some trainings together while nothing is compiled, which a sweep does once."""
    for _ in range(_ATTEMPTS):
        compiled, is_compiling = compilations()
        speed, is_over = _speed(schedule, trainings)
        if is_over or (compilations()[0] == compiled and not is_compiling):
            break
    return speed


def _speed(schedule: RoundRobin[Training], trainings: Sequence[Training]) -> tuple[float, bool]:
    """Return the speed of some steps, and whether a training has ended in them."""
    _wait(trainings)
    is_over = False
    begun, before = time.perf_counter(), _steps_done(trainings)
    for _ in range(_TURNS):
        outcomes = schedule.advance(trainings)
        for outcome in outcomes:
            if outcome.error is not None and (is_of_the_device(outcome.error) or is_out_of_memory(outcome.error)):
                raise outcome.error
        # A short run measures what it can, as one that diverges or fails does: the sweep will record the run itself.
        is_over = any(outcome.error is not None or outcome.ended is not None for outcome in outcomes)
        if is_over:
            break
        if time.perf_counter() - begun > _SECONDS:
            break
    _wait(trainings)
    return (_steps_done(trainings) - before) / (time.perf_counter() - begun), is_over


def _steps_done(trainings: Sequence[Training]) -> int:
    return sum(training.trainer.steps_done for training in trainings)


def _wait(trainings: Sequence[Training]) -> None:
    for training in trainings:
        training.trainer.wait()


def _require_metric(metric: str, keys: Sequence[str]) -> None:
    log_keys = list(keys)
    if metric.removeprefix("val_") not in log_keys:
        raise _UnknownMetricError(
            f"metric = {metric!r}: expected one of {', '.join(log_keys)}, with the prefix 'val_' for validation"
        )
