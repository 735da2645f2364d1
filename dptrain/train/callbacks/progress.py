"""What the terminal shows of a training: a live line, or one line an epoch."""

import time
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column

from dptrain.train.callbacks.base import Callback, Logs

# Seconds between updates of the live line; reading the metrics at every step would cost more than small steps do.
_REFRESH = 0.1


def format_logs(logs: Logs) -> str:
    """Return "loss: 0.3505 - accuracy: 0.9015"."""
    return " - ".join(f"{key}: {value:.4f}" for key, value in logs.items())


class EpochPrinter(Callback):
    """One line an epoch, for logs and pipes.

    Args:
        file: where to; standard output by default.
    """

    def __init__(self, file: TextIO | None = None) -> None:
        super().__init__()
        self._file = file

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Print the line."""
        timing = self.trainer.timing
        print(
            f"Epoch {epoch + 1}/{self.params['epochs']} - {timing.steps} steps - {timing.seconds:.1f} s - "
            f"{timing.samples_per_second:,.0f} samples/s - {format_logs(logs or {})}",
            file=self._file,
            flush=True,
        )


class ProgressLine(Callback):
    """A live line with step, time remaining, samples/s, loss and metrics; when an epoch ends, its summary stays.

    Args:
        console: the terminal; standard output by default, taken for a terminal even where it is a pipe, as it is
            under mpirun.
    """

    def __init__(self, console: Console | None = None) -> None:
        super().__init__()
        self._console = console or Console(force_terminal=True)
        self._progress: Progress | None = None
        self._task = TaskID(0)
        self._printer = EpochPrinter()
        self._shown = 0.0

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Start the line."""
        room = self._console.width - 82  # what the text needs at 80 columns; a bar only where there is more
        self._progress = Progress(
            TextColumn("Epoch {task.fields[epoch]}/{task.fields[epochs]} {task.completed}/{task.fields[steps]}"),
            *([BarColumn(bar_width=min(room, 24))] if room >= 8 else []),
            TextColumn("ETA"),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[state]}", table_column=Column(no_wrap=True)),
            console=self._console,
            transient=True,
            auto_refresh=False,  # the loop refreshes; a thread of its own would take turns with it for the interpreter
        )
        self._task = self._progress.add_task(
            "",
            total=self.params["steps"],
            epoch=epoch + 1,
            epochs=self.params["epochs"],
            state="",
            steps=self.params["steps"] or "Unknown",
        )
        self._progress.start()
        self._shown = time.monotonic()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Update the line if it has not been for a while."""
        now = time.monotonic()
        if self._progress is None or now - self._shown < _REFRESH:
            return
        self._shown = now
        state = f"{self.trainer.timing.samples_per_second:,.0f} samples/s - {format_logs(dict(logs))}"
        self._progress.update(self._task, completed=batch + 1, state=state, refresh=True)

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Replace the line by the epoch's summary."""
        self.stop()
        self._printer.params = self.params
        self._printer.trainer = self.trainer
        self._printer.on_epoch_end(epoch, logs)

    def stop(self) -> None:
        """Give the terminal back."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def for_verbosity(verbose: str | int, rank: int, is_terminal: bool) -> list[Callback]:
    """Return what shows progress.

    Args:
        verbose: 0 for nothing, 1 for a live line, 2 for one line an epoch, "auto" for 1 on a terminal and else 2.
        rank: only rank 0 shows anything.
        is_terminal: whether standard output is one.
    """
    if verbose == "auto":
        verbose = 1 if is_terminal else 2
    if rank != 0 or verbose == 0:
        return []
    return [ProgressLine() if verbose == 1 else EpochPrinter()]
