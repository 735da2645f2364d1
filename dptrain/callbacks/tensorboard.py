"""TensorBoard: writes losses, metrics and weights as event files, with tensorboardX."""

import itertools
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from dptrain.callbacks.base import Callback, Logs
from dptrain.callbacks.models import named_weights_of, rates_of
from dptrain.callbacks.ranks import on_rank_0
from dptrain.errors import ConfigError
from dptrain.runtime.extras import pip_install
from dptrain.runtime.storage.files import output_error

_number = itertools.count()
_ADVICE = "choose another `log_dir` of TensorBoard"


class TensorBoard(Callback):
    """Writes event files for TensorBoard, on rank 0.

    Tags are Keras': log_dir/train has "epoch_loss", "epoch_learning_rate", ... by epoch and "batch_loss", ... by step;
    log_dir/validation has "epoch_loss", ... by epoch and "evaluation_loss_vs_iterations", ... by updates. Histograms
    are "<weight>/histogram". An epoch's values are on the disk when the next begins.

    Args:
        log_dir: where the files go.
        histogram_freq: epochs between histograms of the weights; 0 for none.
        write_steps_per_second: by epoch, and with `update_freq` by step.
        update_freq: "epoch", "batch", or a number of steps between values by step.
        write_graph, embeddings_metadata: not used, as in Keras without TensorFlow.
        write_images, profile_batch, embeddings_freq: not supported (ConfigError).

    Source: keras/src/callbacks/tensorboard.py, Keras 3.15.
    """

    _same_on_all_ranks = ("histogram_freq", "update_freq")

    def __init__(
        self,
        log_dir: Any = "logs",
        histogram_freq: int = 0,
        write_graph: bool = True,
        write_images: bool = False,
        write_steps_per_second: bool = False,
        update_freq: str | int = "epoch",
        profile_batch: int | tuple[int, int] = 0,
        embeddings_freq: int = 0,
        embeddings_metadata: Any = None,
    ) -> None:
        super().__init__()
        for name, value in (
            ("write_images", write_images),
            ("profile_batch", profile_batch),
            ("embeddings_freq", embeddings_freq),
        ):
            if value:
                raise ConfigError(f"not supported: {name}={value!r} of TensorBoard")
        self.log_dir = os.fspath(log_dir)
        self.histogram_freq = histogram_freq
        self.write_graph = write_graph
        self.write_steps_per_second = write_steps_per_second
        self.update_freq = 1 if update_freq == "batch" else update_freq
        if self.update_freq != "epoch" and (not isinstance(self.update_freq, int) or self.update_freq < 1):
            raise ConfigError(f"update_freq = {update_freq!r}: expected 'batch', 'epoch' or an integer >= 1")
        self._step = self._first_batch = 0
        self._in_fit = False
        self._step_began = self._epoch_began = 0.0
        self._iterations_before = 0
        self._writers: dict[str, _EventFile] = {}
        if self.update_freq != "epoch":  # batch hooks make all ranks meet after each batch
            vars(self).update(on_train_batch_begin=self._before_step, on_train_batch_end=self._after_step)

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Reset the step counter. Collective.

        Raises:
            ConfigError: tensorboardX is not installed.
            OutputError: the directory cannot be written.
        """
        self._step, self._in_fit = 0, True
        on_rank_0(self, "TensorBoard", self._begin)

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps."""
        return {"step": self._step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore it."""
        self._step = state["step"]

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Close the files. Collective."""
        self._in_fit = False
        on_rank_0(self, "TensorBoard", self._release)

    def on_test_end(self, logs: Logs | None = None) -> None:
        """Write an evaluation by updates. Collective."""
        values = {f"evaluation_{name}_vs_iterations": value for name, value in (logs or {}).items()}

        def write() -> None:
            self._write("validation", values, self._iterations())
            if not self._in_fit:
                self._release()

        on_rank_0(self, "TensorBoard", write)

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Start the clock."""
        self._iterations_before, self._epoch_began = self._iterations(), time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Write the logs, and histograms of the weights if due. Collective."""
        histograms = bool(self.histogram_freq)
        on_rank_0(self, "TensorBoard", lambda: self._write_epoch(epoch, dict(logs or {})), reads_model=histograms)

    def _before_step(self, batch: int, logs: Any = None) -> None:
        self._first_batch = batch
        self._step_began = time.perf_counter()

    def _after_step(self, batch: int, logs: Any = None) -> None:
        """Write the logs of a step if due. Collective."""
        steps, frequency = batch + 1 - self._first_batch, int(self.update_freq)  # several are executed at once
        before, self._step = self._step, self._step + steps
        if self._step // frequency == before // frequency:
            return
        values = {f"batch_{name}": value for name, value in ({} if logs is None else logs).items()}
        if self.write_steps_per_second:
            values["batch_steps_per_second"] = steps / max(time.perf_counter() - self._step_began, 1e-9)
        on_rank_0(self, "TensorBoard", lambda: self._write("train", values, self._step))

    def _write_epoch(self, epoch: int, logs: Logs) -> None:
        if logs:
            train = {name: value for name, value in logs.items() if not name.startswith("val_")}
            train |= rates_of(self.model.optimizer)
            if self.write_steps_per_second:
                seconds = max(time.perf_counter() - self._epoch_began, 1e-9)
                train["steps_per_second"] = (self._iterations() - self._iterations_before) / seconds
            self._write("train", {f"epoch_{name}": value for name, value in train.items()}, epoch)
            validated = {f"epoch_{name[4:]}": value for name, value in logs.items() if name.startswith("val_")}
            if validated:
                self._write("validation", validated, epoch)
        if self.histogram_freq and epoch % self.histogram_freq == 0:
            weights = {f"{name}/histogram": weight for name, weight in named_weights_of(self.model).items()}
            self._write("train", weights, epoch)

    def _begin(self) -> None:
        self._release()
        self._write("train", {}, 0)

    def _iterations(self) -> int:
        optimizer = self.model.optimizer
        return 0 if optimizer is None else int(optimizer.iterations)

    def _write(self, part: str, values: dict[str, Any], step: int) -> None:
        """Write numbers as scalars and arrays as histograms, and flush them to the disk."""
        place = Path(self.log_dir) / part
        try:
            if part not in self._writers:
                self._writers[part] = _EventFile(place)
            self._writers[part].add(values, step)
        except OSError as error:
            raise output_error(place, error, advice=_ADVICE) from error

    def _release(self) -> None:
        while self._writers:
            self._writers.popitem()[1].close()


class _EventFile:
    """An event file, written synchronously: tensorboardX' SummaryWriter hides errors in a thread."""

    def __init__(self, place: Path) -> None:
        summary, writer, event = tensorboardx_module()
        self._summary, self._event = summary, event
        place.mkdir(parents=True, exist_ok=True)
        # tensorboardX names files by the second, and replaces an existing file or the target of a link.
        self._file = writer(str(place / "events"), f".{os.getpid()}.{next(_number)}.{os.urandom(8).hex()}")

    def add(self, values: dict[str, Any], step: int) -> None:
        for tag, value in values.items():
            if np.ndim(value) == 0:
                summary = self._summary.scalar(tag, value)
            else:
                finite = np.asarray(value)[np.isfinite(value)]  # histograms cannot hold others
                if not finite.size:
                    continue
                summary = self._summary.histogram(tag, finite, bins=30)  # TensorFlow's number of bins
            self._file.write_event(self._event(wall_time=time.time(), step=step, summary=summary))
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def tensorboardx_module() -> tuple[Any, Any, Any]:
    """Return tensorboardX' summaries, writer and event class, or raise ConfigError."""
    try:
        from tensorboardX import summary
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event
    except ImportError as error:
        raise ConfigError(f"TensorBoard needs tensorboardX: {pip_install('tensorboard')}") from error
    return summary, EventsWriter, Event
