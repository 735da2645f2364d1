"""ProgbarLogger: shows a training, an evaluation or a prediction on the terminal."""

import sys
import threading
import time
from typing import TYPE_CHECKING, Any, TextIO

from dptrain.callbacks.base import Callback, Logs
from dptrain.callbacks.ranks import ranks_of
from dptrain.errors import printable
from dptrain.registry.serialization import plain
from dptrain.runtime.failure import phase
from dptrain.runtime.output import terminal
from dptrain.runtime.text import counted

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

# Seconds between updates of the live line; reading the metrics at every step would cost more than small steps do.
_REFRESH = 0.1
# Seconds before a line says what the first step waits for.
_SILENCE = 3.0


def format_logs(logs: Logs) -> str:
    """Return "loss: 0.3505 - learning_rate: 2.0000e-05", like Keras' progress bar."""
    return " - ".join(f"{key}: {value:{'.4f' if abs(value) > 1e-3 else '.4e'}}" for key, value in logs.items())


def _fitting(parts: list[str], columns: int) -> list[str]:
    """Return the leading parts that fit into this number of columns, at least one."""
    while len(parts) > 1 and len(" - ".join(parts)) > columns:
        parts = parts[:-1]
    return parts


class ProgbarLogger(Callback):
    """Shows progress on rank 0, as params["verbose"] says; `fit`, `evaluate` and `predict` add one.

    It prints a line per epoch, with samples/s, loss and metrics; before it, with verbose 1, a live line with step and
    time remaining; and a line per evaluation or prediction, except a training's. On a terminal lines are wrapped
    between words, elsewhere never. `runtime.output.terminal` decides what "auto" is.

    Args:
        file: where lines go; standard output by default (not in Keras).
        console: of the live line; standard output by default, taken for a terminal unless it is a file (not in Keras).
    """

    _shows_only = True

    def __init__(self, file: TextIO | None = None, console: "Console | None" = None) -> None:
        super().__init__()
        self._file, self._console = file, console
        self._verbose = 1
        self._in_fit = False
        self._began = 0.0
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._shown = 0.0
        self._has_begun = False
        self._watch: threading.Timer | None = None

    def set_params(self, params: dict[str, Any]) -> None:
        """Determine what to show."""
        super().set_params(params)
        self._verbose = terminal.verbosity(params.get("verbose", 1))
        vars(self).pop("on_train_batch_end", None)
        if self._verbose == 1:
            vars(self)["on_train_batch_end"] = self._update

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Treat evaluations as validations."""
        self._in_fit, self._has_begun = True, False

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Treat evaluations as the user's."""
        self._in_fit = False

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Start the live line."""
        if self._verbose and not self._has_begun and ranks_of(self).rank == 0:
            self._has_begun = True
            self._watch = threading.Timer(_SILENCE, self._say_that_it_compiles)
            self._watch.daemon = True
            self._watch.start()
        in_file = self._console is None and terminal.ends_in_file()
        if self._verbose == 1 and not in_file and ranks_of(self).rank == 0:
            self._start(epoch)

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Replace the live line by the epoch's."""
        self._release()
        timing = self._trainer.timing
        numbers = {"seconds": round(timing.seconds, 3), "samples_per_second": round(timing.samples_per_second, 1)}
        self._print(
            f"Epoch {epoch + 1}/{self.params['epochs']} - {counted(timing.steps, 'step')} - {timing.seconds:.1f} s - "
            f"{timing.samples_per_second:,.0f} samples/s - {format_logs(logs or {})}",
            {
                "epoch": epoch + 1,
                "epochs": self.params["epochs"],
                "steps": timing.steps,
                **numbers,
                **plain(logs or {}),
            },
        )

    def on_test_begin(self, logs: Logs | None = None) -> None:
        """Start the clock."""
        if not self._in_fit:
            self._began = time.perf_counter()

    def on_test_end(self, logs: Logs | None = None) -> None:
        """Print the line of an evaluation."""
        if not self._in_fit:
            timing = self._trainer.timing
            line = f"{self._steps()}{timing.seconds:.1f} s - {timing.samples_per_second:,.0f} samples/s"
            self._print(f"{line} - {format_logs(logs)}" if logs else line)

    def on_predict_begin(self, logs: Logs | None = None) -> None:
        """Start the clock."""
        self._began = time.perf_counter()

    def on_predict_end(self, logs: Logs | None = None) -> None:
        """Print the line of a prediction."""
        self._print(f"{self._steps()}{time.perf_counter() - self._began:.1f} s")

    def _release(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _say_that_it_compiles(self) -> None:
        """Print a line if a slow first step is compiling."""
        if phase.name != "compilation" or self._watch is None:
            return
        text = "compiling the step, once for this model and machine"
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, state=text, refresh=True)
        elif (self._file or sys.stdout).isatty():  # somebody watches; a log file gets only a line per epoch
            self._print(text)

    def _steps(self) -> str:
        steps = self.params.get("steps")
        return "" if steps is None else f"{counted(steps, 'step')} - "

    def _print(self, line: str, fields: dict[str, Any] | None = None) -> None:
        if self._verbose and ranks_of(self).rank == 0:
            terminal.say(line, file=self._file, fields=fields)

    def _start(self, epoch: int) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
        from rich.table import Column

        console = self._console or terminal.console(live=True)
        room = console.width - 82  # the text fills 80 columns; a bar needs more
        self._progress = Progress(
            TextColumn("Epoch {task.fields[epoch]}/{task.fields[epochs]} {task.completed}/{task.total}"),
            *([BarColumn(bar_width=min(room, 24))] if room >= 8 else []),
            TextColumn("ETA"),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[state]}", table_column=Column(no_wrap=True), markup=False),
            console=console,
            transient=True,
            auto_refresh=False,  # the loop refreshes: a thread would compete for the interpreter
        )
        self._task = self._progress.add_task(
            "", total=self.params["steps"], epoch=epoch + 1, epochs=self.params["epochs"], state=""
        )
        self._progress.start()
        self._shown = time.monotonic()

    def _update(self, batch: int, logs: Any = None) -> None:
        """Update the live line, unless it was done just now."""
        now = time.monotonic()
        if self._progress is None or self._task is None or now - self._shown < _REFRESH:
            return
        self._shown = now
        columns = terminal.terminal_columns() if self._console is None else None
        if columns is not None and columns != self._progress.console.width:  # the window has another now
            epoch = self._progress.tasks[self._task].fields["epoch"] - 1
            self._progress.console.width = columns  # of the last line, too, that is drawn to be erased
            self._progress.stop()
            self._start(epoch)
        total, epochs = self.params["steps"], self.params["epochs"]
        before = len(f"Epoch {epochs}/{epochs} {batch + 1}/{total} ETA 00:00 ")
        parts = [f"{self._trainer.timing.samples_per_second:,.0f} samples/s", *format_logs(dict(logs)).split(" - ")]
        state = printable(" - ".join(_fitting(parts, self._progress.console.width - before)))
        self._progress.update(self._task, completed=batch + 1, state=state, refresh=True)
