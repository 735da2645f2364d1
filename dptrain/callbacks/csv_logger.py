"""CSVLogger: writes the logs of every epoch as a line of a file."""

import csv
import io
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from dptrain.callbacks.base import Callback, Logs
from dptrain.callbacks.ranks import on_rank_0
from dptrain.runtime.failure import warn
from dptrain.runtime.storage.files import append, output_error, sync

_ADVICE = "choose another `filename` of CSVLogger"


class CSVLogger(Callback):
    """Writes epoch and logs to a CSV file, a line per epoch, on rank 0.

    The columns are those of the first epoch, sorted; missing values are "NA". Each line is on the disk when the next
    epoch begins.

    Args:
        filename: such as "run/log.csv"; the directory must exist.
        separator: between columns.
        append: continue an existing file instead of replacing it.

    Source: keras/src/callbacks/csv_logger.py, Keras 3.15.
    """

    _same_on_all_ranks = ()

    def __init__(self, filename: Any, separator: str = ",", append: bool = False) -> None:
        super().__init__()
        self.filename = str(filename)
        self.sep = separator
        self.append = append
        self.append_header = True
        self.keys: list[str] | None = None

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Create the file, or empty it. Collective."""
        self.keys = None
        on_rank_0(self, "CSVLogger", self._begin)

    def state_dict(self) -> dict[str, Any]:
        """Return columns and length of the file."""
        path = Path(self.filename)
        return {"keys": self.keys, "bytes": path.stat().st_size if path.exists() else 0}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the file after the finished epochs. Collective."""
        self.keys = on_rank_0(self, "CSVLogger", lambda: self._go_on(state["keys"], state["bytes"]))

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Write the line. Collective."""
        on_rank_0(self, "CSVLogger", lambda: self._write(epoch, dict(logs or {})))

    def _begin(self) -> None:
        path = Path(self.filename)
        try:
            if self.append or self.params.get("resumes"):
                if path.exists():
                    with open(path, "rb") as file:
                        self.append_header = not file.readline()
            else:
                path.write_bytes(b"")
        except OSError as error:
            raise output_error(path, error, advice=_ADVICE) from error

    def _go_on(self, keys: list[str] | None, size: int) -> list[str] | None:
        path = Path(self.filename)
        try:
            if path.exists() and path.stat().st_size >= size:
                os.truncate(path, size)  # later lines will be written again
                sync(path)
                self.append_header = not size
                return keys
            warn(f"{path} is shorter than at the checkpoint; the lines of earlier epochs are missing")
            path.write_bytes(b"")
            self.append_header = True
        except OSError as error:
            raise output_error(path, error, advice=_ADVICE) from error
        return None

    def _write(self, epoch: int, logs: Logs) -> None:
        text = io.StringIO()
        writer = csv.writer(text, delimiter=self.sep)
        if self.keys is None:
            self.keys = sorted(logs)
            if not any(key.startswith("val_") for key in self.keys):
                self.keys += [f"val_{key}" for key in self.keys]  # later epochs may be validated
            if self.append_header:
                writer.writerow(["epoch", *self.keys])
        writer.writerow([epoch, *(_cell(logs.get(key, "NA")) for key in self.keys)])
        append(Path(self.filename), text.getvalue().encode(), advice=_ADVICE)


def _cell(value: Any) -> Any:
    scalar = isinstance(value, str) or (isinstance(value, np.ndarray) and value.ndim == 0)
    if isinstance(value, Iterable) and not scalar:
        return f'"[{", ".join(map(str, value))}]"'
    return value
