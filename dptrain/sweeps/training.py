"""One segment of a run while it is trained, some steps at a time."""

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

# Metrics of a sweep that need be in no logs: the elements of a model's weights, the seconds that its run has taken, and
# the part of zeros in its kernels; each with its better direction.
MEASURED = {"parameters": "down", "seconds": "down", "sparsity": "up"}

# Takes a run, an epoch counted from 1, and its logs.
Report = Callable[[Run, int, Logs], None]


class Recipe(ABC):
    """What the runs of a sweep train: a model for every setting and seed, and what it is trained on.

    Attributes:
        has_test: whether there are samples that decide nothing, on which the best models are evaluated in the end.
        test_samples: how many; None where it is not known.
        validation_samples: on how many every run is judged, in cross-validation over all folds; None where it is not
            known or differs.
    """

    has_test: bool = False
    test_samples: int | None = None
    validation_samples: int | None = None

    @abstractmethod
    def build(self, setting: Setting, seed: int, run: Run | None = None) -> Model:
        """Return a new model, compiled.

        Args:
            setting: of its trial.
            seed: of the model.
            run: that it is trained in; None where it is not trained to its end.

        Raises:
            DptrainError: the setting makes no model.
        """

    @abstractmethod
    def train(self, model: Model, setting: Setting, callbacks: Sequence[Callback], run: Run) -> StepIterator[None]:
        """Return the training, as `Model.fit_steps`, silent.

        Args:
            model: as `build` has returned it.
            setting: of its trial.
            callbacks: come at the end of its own.
            run: the training's; in cross-validation it says which fold is validated on instead of trained on.
        """

    def test(self, model: Model) -> Logs:
        """Return loss and metrics on the samples that decide nothing, where there are some."""
        raise NotImplementedError

    def test_arrays(self) -> tuple[Any, Any]:
        """Return what `predict` takes of these samples, and their targets."""
        raise NotImplementedError


class Slot:
    """A place on this rank's device for one run at a time: backends, each with a stream of its own, that runs reuse.

    Args:
        place: its number among those of this rank.
        threads: of the CPU for the run; None for all of this rank's.
        packing: on a GPU, steps of the run wait for those of other slots' runs, to be executed as a pack.

    Attributes:
        place: as given.
    """

    def __init__(self, place: int = 0, threads: int | None = None, *, packing: bool = True) -> None:
        self.place, self._threads, self._packing = place, threads, packing
        self._backends: dict[tuple[tuple[str, Any], ...], Backend] = {}

    def backend(self, options: dict[str, Any]) -> Backend:
        """Return a backend that `open_backend` opens with these options; the rank's device is open already."""
        key = tuple(sorted(options.items()))
        if key not in self._backends:
            backend = open_backend(SoloCommunicator(), **options)
            backend.shares_samples = True  # the data of a sweep is the same for all runs, and stays as it is
            backend.joins_packs = self._packing
            if self._threads is not None and isinstance(backend, CpuBackend):
                backend.threads = self._threads
            self._backends[key] = backend
        return self._backends[key]

    def launch_waiting(self) -> None:
        """Let the device begin with what waits for the runs of other slots."""
        for backend in self._backends.values():
            backend.launch_waiting()

    def close(self) -> None:
        """Close the backends."""
        while self._backends:
            self._backends.popitem()[1].close()


class Training:
    """Trains a segment in a slot.

    Args:
        recipe: says what.
        segment: the epochs of which run.
        setting: of its trial.
        slot: where; nobody else uses it meanwhile.
        state: where the run stands, if the segment does not begin with the first epoch.
        report: told every epoch.
        metrics: of the sweep; those of `MEASURED` that no logs have come with the segment's ending.

    Attributes:
        segment: as given.
        slot: as given.
        place: the slot's.
        model: that is trained.
    """

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
        self._keeper = _Keeper(segment, state, report, self._seconds_now)
        self._fit = recipe.train(self.model, setting, [self._keeper], segment.run)
        # What this segment has taken of the rank's time, and when the advance at hand has begun.
        self._seconds, self._begun = 0.0, time.perf_counter()

    @property
    def trainer(self) -> Trainer:
        """What trains the model on its device."""
        return self.model._open_trainer(SoloCommunicator())

    @property
    def steps(self) -> int | None:
        """Steps of the whole run; None before the first, or where nobody knows."""
        params = getattr(self._keeper, "params", {})
        return None if params.get("steps") is None else int(params["steps"] * params["epochs"])

    @property
    def has_reported(self) -> bool:
        """Whether an epoch has been reported."""
        return self._keeper.epochs > self.segment.begin

    def advance(self) -> tuple[Ending, bytes] | None:
        """Queue the next steps; where there are none, return how the segment ended, and a waiting run's state."""
        self._begun = time.perf_counter()
        try:
            next(self._fit)
        except StopIteration:
            if self._keeper.state is not None:
                return self._ending(Status.PAUSED), self._keeper.state
            # Taken here, not with the last epoch: callbacks and the optimizer may put other weights there in the end.
            self._keeper.take_restored()
            return self._ending(Status.DONE), self._keeper.stand(ended=True) if self.segment.keep else b""
        self._seconds = self._seconds_now()
        return None

    def launch_waiting(self) -> None:
        """Let the device begin with what `advance` has queued, together with what others have."""
        self.slot.launch_waiting()

    def failed(self, error: Exception) -> Ending:
        """Return the ending that an error of `advance` makes."""
        status = Status.DIVERGED if exit_code_of(error) == ExitCode.DIVERGED else Status.FAILED
        return self._ending(status, describe(error), exit_code_of(error))

    def close(self) -> None:
        """Give back what the run holds."""
        self._fit.close()
        self.model._release_device()

    def _seconds_now(self) -> float:
        return self._seconds + time.perf_counter() - self._begun

    def _ending(self, status: Status, reason: str = "", exit_code: int = 0) -> Ending:
        keeper = self._keeper
        seconds = round(keeper.seconds_before + self._seconds_now(), 3)
        metrics = keeper.logs
        if metrics and self._measured:
            found = {"parameters": float(self.model.count_params()), "seconds": seconds}
            if "sparsity" in self._measured and status is Status.DONE:  # else weights may not be readable
                found["sparsity"] = sparsity(self.model)
            metrics = {name: found[name] for name in self._measured if name in found} | metrics
        return Ending(self.segment.run, status, keeper.epochs, seconds, metrics, reason, exit_code)


def numbers_of(logs: Logs | None) -> Logs:
    """Return what of the logs is a number; callbacks put there what they like."""
    return {
        key: float(value)
        for key, value in (logs or {}).items()
        if np.ndim(value) == 0 and isinstance(np.asarray(value).item(), int | float)
    }


class _Keeper(Callback):
    """Begins a run where it was, reports its epochs, and ends it at the end of the segment.

    Attributes:
        epochs: done in all.
        logs: the last value of every key: with `validation_freq` not all come after every epoch.
        seconds_before: that the run had taken before this segment.
        state: at the end of the segment, where the run is to go on from there.
    """

    def __init__(self, segment: Segment, state: bytes, report: Report, seconds: Callable[[], float]) -> None:
        super().__init__()
        self._segment, self._begin_with, self._report, self._seconds = segment, state, report, seconds
        self.epochs = segment.begin
        self.logs: Logs = {}
        self.seconds_before = 0.0
        self.state: bytes | None = None
        self._stopping: list[EarlyStopping] = []
        self._best_logs: Logs | None = None

    def _set_callbacks(self, callbacks: Sequence[Callback]) -> None:
        """Find those that may give the model other weights in the end."""
        self._stopping = [one for one in callbacks if isinstance(one, EarlyStopping) and one.restore_best_weights]

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Restore the run's state.

        Raises:
            DataError: it is damaged, or of a training that cannot go on.
        """
        if not self._segment.begin:
            return
        about, arrays = decode(self._begin_with, f"the state of run {self._segment.run.number}")
        if about["ended"] and self.model._compiled_optimizer._ends_with_averages:
            raise DataError("its moving averages have taken the place of its weights: it cannot train on")
        restore(self.model, arrays)
        self.seconds_before, self.logs = about["seconds"], about["logs"]
        self.model._compiled_optimizer._resume_learning_rate(about["rate"])
        self._trainer.go_to(self._segment.begin)

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Report; at the end of the segment take the state, and stop."""
        logs = numbers_of(logs)
        self._report(self._segment.run, epoch + 1, logs)
        # An ending must not claim more epochs than were reported.
        self.epochs, self.logs = epoch + 1, self.logs | logs
        if any(one.best_weights is not None and one.best_epoch == epoch for one in self._stopping):
            self._best_logs = self.logs
        if self.epochs == self._segment.end and self.epochs < self.params["epochs"]:
            self.state = self.stand()
            self.model.stop_training = True

    def take_restored(self) -> None:
        """Let the logs be those of the epoch whose weights the training has ended with."""
        self.logs = self.logs if self._best_logs is None else self._best_logs

    def stand(self, ended: bool = False) -> bytes:
        """Return where the run stands.

        Args:
            ended: whether its training has come to its end.
        """
        about = {
            "seconds": self.seconds_before + self._seconds(),
            "logs": self.logs,
            "rate": self.model._compiled_optimizer._resumed_rate,
            "ended": ended,
        }
        return encode(self.model, about)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether an error says that the device's memory is short."""
    while error is not None:
        if isinstance(error, DeviceMemoryError | MemoryError):
            return True
        error = error.__cause__
    return False


def is_of_the_device(error: BaseException) -> bool:
    """Return whether an error leaves the device unusable, such as a failed launch: no run can go on after it."""
    return type(error).__module__.partition(".")[0] == "pycuda"
