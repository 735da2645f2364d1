"""One segment of a run in training, advanced some steps at a time."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dptrain.backend.base import Backend
from dptrain.backend.cpu.backend import CpuBackend
from dptrain.callbacks import Callback, EarlyStopping, Logs
from dptrain.comm import SoloCommunicator
from dptrain.errors import DataError, DeviceMemoryError, ExitCode
from dptrain.models import Model
from dptrain.pruning import sparsity
from dptrain.runtime.failure import describe, exit_code_of
from dptrain.saving.state import decode, encode, restore
from dptrain.sweeps.records import Ending, Run, Segment, Setting, Status
from dptrain.train.devices import open_backend
from dptrain.train.trainer import StepIterator, Trainer

# Metrics of a sweep beyond the logs: the elements of a model's weights, the seconds of its run, and the part of zeros
# in its kernels; each with its better direction.
MEASURED = {"parameters": "down", "seconds": "down", "sparsity": "up"}

# Takes a run, an epoch counted from 1, and its logs.
Report = Callable[[Run, int, Logs], None]


class Recipe(ABC):
    """Builds and trains the models of a sweep."""

    has_test: bool = False  # whether there is a test set for the best trial's models
    test_samples: int | None = None  # None if unknown
    validation_samples: int | None = None  # of every run, over all folds; None if unknown or varying

    @abstractmethod
    def build(self, setting: Setting, seed: int, run: Run | None = None) -> Model:
        """Return a new compiled model; `run` is None where it is not trained to its end."""

    @abstractmethod
    def train(self, model: Model, setting: Setting, callbacks: Sequence[Callback], run: Run) -> StepIterator[None]:
        """Return the silent training as a step iterator; `callbacks` come after the model's own."""

    def test(self, model: Model) -> Logs:
        """Return loss and metrics on the test set."""
        raise NotImplementedError

    def test_arrays(self) -> tuple[Any, Any]:
        """Return inputs and targets of the test set."""
        raise NotImplementedError


class Slot:
    """A place on this rank's device for one run at a time; runs reuse its backends, each with its own stream."""

    def __init__(self, place: int = 0, threads: int | None = None, *, packing: bool = True) -> None:
        self.place, self._threads, self._packing = place, threads, packing
        self._backends: dict[tuple[tuple[str, Any], ...], Backend] = {}

    def backend(self, options: dict[str, Any]) -> Backend:
        """Return the backend of these options; the rank's device is open already."""
        key = tuple(sorted(options.items()))
        if key not in self._backends:
            backend = open_backend(SoloCommunicator(), **options)
            backend.shares_samples = True  # all runs of a sweep share its data, which never changes
            backend.joins_packs = self._packing
            if self._threads is not None and isinstance(backend, CpuBackend):
                backend.threads = self._threads
            self._backends[key] = backend
        return self._backends[key]

    def launch_waiting(self) -> None:
        """Launch what waits for the runs of other slots."""
        for backend in self._backends.values():
            backend.launch_waiting()

    def close(self) -> None:
        """Close the backends."""
        while self._backends:
            self._backends.popitem()[1].close()


class Training:
    """Trains a segment in a slot, from `state` if it does not begin with the first epoch."""

    def __init__(
        self,
        recipe: Recipe,
        segment: Segment,
        setting: Setting,
        slot: Slot,
        state: bytes,
        report: Report,
        metrics: Sequence[str] = (),
    ) -> None:
        self.segment, self.slot, self.place = segment, slot, slot.place
        self._measured = [name for name in MEASURED if name in metrics]
        self.model = recipe.build(setting, segment.run.seed, segment.run)
        self.model._put_on(slot.backend(self.model._device_options))
        self._callback = _SegmentCallback(segment, state, report, self._seconds_now)
        self._fit = recipe.train(self.model, setting, [self._callback], segment.run)
        # Seconds of this segment before the current advance, and when that began.
        self._seconds, self._begun = 0.0, time.perf_counter()

    @property
    def trainer(self) -> Trainer:
        """Trainer of the model."""
        return self.model._open_trainer(SoloCommunicator())

    @property
    def steps(self) -> int | None:
        """Steps of the whole run; None if unknown."""
        params = getattr(self._callback, "params", {})
        return None if params.get("steps") is None else int(params["steps"] * params["epochs"])

    @property
    def has_reported(self) -> bool:
        """Whether an epoch has been reported."""
        return self._callback.epochs > self.segment.begin

    def advance(self) -> tuple[Ending, bytes] | None:
        """Queue the next steps; after the last, return the ending and a waiting or kept run's state."""
        self._begun = time.perf_counter()
        try:
            next(self._fit)
        except StopIteration:
            if self._callback.state is not None:
                return self._ending(Status.PAUSED), self._callback.state
            # Taken here, not with the last epoch: callbacks and the optimizer may change the weights in the end.
            self._callback.take_restored()
            return self._ending(Status.DONE), self._callback.stand(ended=True) if self.segment.keep else b""
        self._seconds = self._seconds_now()
        return None

    def launch_waiting(self) -> None:
        """Launch what `advance` has queued, together with other runs' steps."""
        self.slot.launch_waiting()

    def failed(self, error: Exception) -> Ending:
        """Return the ending for an error of `advance`."""
        status = Status.DIVERGED if exit_code_of(error) == ExitCode.DIVERGED else Status.FAILED
        return self._ending(status, describe(error), exit_code_of(error))

    def close(self) -> None:
        """Release the device."""
        self._fit.close()
        self.model._release_device()

    def _seconds_now(self) -> float:
        return self._seconds + time.perf_counter() - self._begun

    def _ending(self, status: Status, reason: str = "", exit_code: int = 0) -> Ending:
        callback = self._callback
        seconds = round(callback.seconds_before + self._seconds_now(), 3)
        metrics = callback.logs
        if metrics and self._measured:
            measured = {"parameters": float(self.model.count_params()), "seconds": seconds}
            if "sparsity" in self._measured and status is Status.DONE:  # else weights may not be readable
                measured["sparsity"] = sparsity(self.model)
            metrics = {name: measured[name] for name in self._measured if name in measured} | metrics
        return Ending(self.segment.run, status, callback.epochs, seconds, metrics, reason, exit_code)


def numbers_of(logs: Logs | None) -> Logs:
    """Return the scalar numbers of the logs; callbacks may put anything there."""
    return {
        key: float(value)
        for key, value in (logs or {}).items()
        if np.ndim(value) == 0 and isinstance(np.asarray(value).item(), int | float)
    }


class _SegmentCallback(Callback):
    """Restores a run, reports its epochs, and stops it at the end of the segment."""

    def __init__(self, segment: Segment, state: bytes, report: Report, seconds: Callable[[], float]) -> None:
        super().__init__()
        self._segment, self._begin_with, self._report, self._seconds = segment, state, report, seconds
        self.epochs = segment.begin  # done in all
        # Last value of every key: with `validation_freq` not all come after every epoch.
        self.logs: Logs = {}
        self.seconds_before = 0.0
        self.state: bytes | None = None  # of a paused run
        self._stopping: list[EarlyStopping] = []
        self._best_logs: Logs | None = None

    def _set_callbacks(self, callbacks: Sequence[Callback]) -> None:
        self._stopping = [
            callback for callback in callbacks if isinstance(callback, EarlyStopping) and callback.restore_best_weights
        ]

    def on_train_begin(self, logs: Logs | None = None) -> None:
        if not self._segment.begin:
            return
        metadata, arrays = decode(self._begin_with, f"the state of run {self._segment.run.number}")
        if metadata["ended"] and self.model._compiled_optimizer._ends_with_averages:
            raise DataError("its weights have been replaced by their moving averages: it cannot resume training")
        restore(self.model, arrays)
        self.seconds_before, self.logs = metadata["seconds"], metadata["logs"]
        self.model._compiled_optimizer._resume_learning_rate(metadata["rate"])
        self._trainer.go_to(self._segment.begin)

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Report the epoch; at the end of the segment take the state and stop."""
        logs = numbers_of(logs)
        self._report(self._segment.run, epoch + 1, logs)
        # An ending must not claim more epochs than were reported.
        self.epochs, self.logs = epoch + 1, self.logs | logs
        if any(callback.best_weights is not None and callback.best_epoch == epoch for callback in self._stopping):
            self._best_logs = self.logs
        if self.epochs == self._segment.end and self.epochs < self.params["epochs"]:
            self.state = self.stand()
            self.model.stop_training = True

    def take_restored(self) -> None:
        self.logs = self.logs if self._best_logs is None else self._best_logs

    def stand(self, ended: bool = False) -> bytes:
        """Return the state of the run; `ended` if its training is complete."""
        metadata = {
            "seconds": self.seconds_before + self._seconds(),
            "logs": self.logs,
            "rate": self.model._compiled_optimizer._resumed_rate,
            "ended": ended,
        }
        return encode(self.model, metadata)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether an error or its cause is a lack of memory."""
    while error is not None:
        if isinstance(error, DeviceMemoryError | MemoryError):
            return True
        error = error.__cause__
    return False


def is_of_the_device(error: BaseException) -> bool:
    """Return whether an error leaves the device unusable, such as a failed launch."""
    return type(error).__module__.partition(".")[0] == "pycuda"
