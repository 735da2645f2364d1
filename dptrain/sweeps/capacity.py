"""How many runs a rank trains at once: as many as make its device faster and fit into its memory, both measured."""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import TypeVar

from dptrain.backend.cpu.backend import CpuBackend
from dptrain.callbacks.monitor import direction_of
from dptrain.errors import ConfigError
from dptrain.sweeps.records import Run, Segment, Setting
from dptrain.sweeps.training import Recipe, Slot, Training, is_of_the_device, is_out_of_memory

T = TypeVar("T")

# Seconds that are measured for a number of runs, and steps at most.
_SECONDS, _STEPS = 0.3, 200
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
        direction: "up" or "down" for what is better of the metric; None where nobody knows.
    """

    places: int
    device: str
    run_bytes: int
    free_bytes: int | None
    steps: int | None
    steps_per_second: float
    threads: int | None
    direction: str | None

    @property
    def seconds(self) -> float | None:
        """What a run takes of this rank's time, the evaluation aside; None where nobody knows."""
        return None if self.steps is None or not self.steps_per_second else self.steps / self.steps_per_second


def measure(
    recipe: Recipe, settings: Sequence[Setting], seed: int, metric: str, places: int | None, most: int
) -> Capacity:
    """Train some steps of a run, and throw them away.

    Args:
        recipe: of the sweep.
        settings: the first that can be trained is.
        seed: of the run.
        metric: of the sweep.
        places: runs at once, where the user says; None to find out.
        most: runs that there will be for this rank at most.

    Raises:
        ConfigError: the metric is none of the logs.
        DptrainError: no setting can be trained: why the first cannot.
    """
    return first_that_works(settings, lambda setting: _measure(recipe, setting, seed, metric, places, max(1, most)))


def first_that_works(settings: Sequence[Setting], action: Callable[[Setting], T]) -> T:
    """Return what `action` makes of the first setting that it can be done with: others fail when they are trained.

    Raises:
        ConfigError: the metric is none of the logs, whatever the setting.
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


def _measure(recipe: Recipe, setting: Setting, seed: int, metric: str, places: int | None, most: int) -> Capacity:
    with ExitStack() as stack:
        trainings: list[Training] = []

        def add() -> Training:
            slot = stack.enter_context(closing(Slot()))
            training = Training(recipe, Segment(Run(0, 0, seed)), setting, slot, b"", lambda run, epoch, logs: None)
            stack.callback(training.close)
            training.turn()  # allocates
            trainings.append(training)
            return training

        first = add()
        backend, metrics = first.trainer.backend, first.model.metrics_by_key
        _require_metric(metric, list({**metrics, **first.trainer.programs.logs("train")}))
        direction = direction_of(metric, metrics)
        steps, run_bytes, device = first.steps, first.trainer.nbytes, backend.description
        free = backend.room_for_data()
        speed = _steps_per_second(trainings)
        if places is None:
            places = 1
            while free is not None and 2 * places <= most and (2 * places - 1) * run_bytes <= _USABLE * free:
                try:
                    while len(trainings) < 2 * places:
                        add()
                    faster = _steps_per_second(trainings)
                except Exception as error:
                    if not is_out_of_memory(error):
                        raise
                    break
                if faster < _GAIN * speed:
                    break
                places, speed = 2 * places, faster
        threads = backend.threads if isinstance(backend, CpuBackend) else None
        return Capacity(places, device, run_bytes, free, steps, speed, threads, direction)


def _steps_per_second(trainings: Sequence[Training]) -> float:
    """Return how many steps of all trainings together the device makes."""
    _wait(trainings)
    begun = time.perf_counter()
    done = 0
    while done < _STEPS * len(trainings) and time.perf_counter() - begun < _SECONDS:
        try:
            if any([training.turn() is not None for training in trainings]):
                break  # so short a run tells what it can
        except Exception as error:
            if is_of_the_device(error) or is_out_of_memory(error):
                raise
            break  # so does one that diverges or fails; the run itself will be recorded
        done += len(trainings)
    _wait(trainings)
    return done / (time.perf_counter() - begun)


def _wait(trainings: Sequence[Training]) -> None:
    for training in trainings:
        training.trainer.wait()


def _require_metric(metric: str, keys: Sequence[str]) -> None:
    known = list(keys)
    if metric.removeprefix("val_") not in known:
        raise _UnknownMetricError(
            f"metric = {metric!r}: the logs have {', '.join(known)}, and the validation's as 'val_...'"
        )
