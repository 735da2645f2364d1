"""The run directory: what a training leaves behind.

config.yaml        enough to repeat the run with --config
metrics.jsonl      one object an epoch
checkpoints/       where the training stood, see `dptrain.saving.checkpoints`
model.keras        the model: layers, weights, optimizer; `dptrain.models.load_model` takes it, or the directory
best.keras         the model of the epoch in which the monitored metric was best
model.safetensors  the weights, and the layers as metadata
summary.json       final metrics, versions, world size, device, time; there is one when the run has come to its end
curves.png         loss and metrics over epochs, where matplotlib is installed
report.html        a page about the model's quality, where Jinja2 is installed
training.prom      the training's state for Prometheus, with --metrics-file
trace.json         what --profile has measured, for ui.perfetto.dev
lock, holder       while the run goes on: who works there
"""

import datetime
import itertools
import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any, Self

from dptrain.cli.curves import draw_curves
from dptrain.errors import OutputError
from dptrain.runtime.storage.files import FILE, FOLDER, Directory, open_directory, output_error, writing
from dptrain.runtime.storage.locks import LOCK, locked
from dptrain.saving.run_folder import (
    BEST,
    CHECKPOINTS,
    CONFIG,
    CURVES,
    METRICS,
    MODEL,
    REPORT,
    SUMMARY,
    TENSORBOARD,
    TRACE,
    WANDB,
    WEIGHTS,
)

_ELSEWHERE = "choose another --out"
# Names that a run and its loggers write.
_FOLDERS = (CHECKPOINTS, TENSORBOARD, WANDB)
_FILES = (CONFIG, METRICS, MODEL, BEST, WEIGHTS, SUMMARY, CURVES, TRACE, REPORT)


class RunDirectory:
    """A run's directory on rank 0, locked for one job while the run goes on.

    `path` must not hold a run, unless that has left nothing, or is incomplete and `resumes`; `continues` says that it
    does.
    """

    def __init__(self, path: Path, config_yaml: str, *, resumes: bool = False) -> None:
        self.path, self._config = path, config_yaml
        self._epochs: list[Mapping[str, Any]] = []
        claim = path / CONFIG
        try:
            if path.exists() and not path.is_dir():
                raise OutputError(f"{path} is not a directory; {_ELSEWHERE}")
            # A configuration without a lock is not from a run.
            self._was_locked = False
            if path.exists():  # before writing: no traces in a directory that is not ours
                with open_directory(path) as folder:
                    self._was_locked = folder.kind(LOCK) is not None
                    self._refuse_run(folder, resumes)
            with ExitStack() as stack:
                self._folder = stack.enter_context(open_directory(path, make=True))
                stack.enter_context(locked(path, "training", _ELSEWHERE))
                self._refuse_run(self._folder, resumes)  # that has ended meanwhile
                self._folder.remove_temporaries()
                self.continues = self._has_begun(self._folder)
                if not self.continues:
                    self._folder.replace(CONFIG, [config_yaml.encode()])
                self._held = stack.pop_all()
        except OutputError:
            raise
        except (OSError, NotImplementedError) as error:
            failure = error if isinstance(error, OSError) else OSError(str(error))
            raise output_error(claim, failure, len(config_yaml), advice=_ELSEWHERE) from error
        self._written = [CONFIG]
        if self.continues and self._folder.kind(METRICS) is not None:
            self._written.append(METRICS)

    @classmethod
    def in_free_place(cls, name: str, config_yaml: str) -> Self:
        """Create runs/<date-time>-<name> in the working directory, numbered if that exists."""
        stamped = stamped_name(name)
        for number in itertools.count(1):
            path = Path("runs") / f"{stamped}{f'-{number}' if number > 1 else ''}"
            try:
                return cls(path, config_yaml)
            except OutputError:
                if not (path / CONFIG).exists():
                    raise
        raise AssertionError("itertools.count ends")

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.path / CHECKPOINTS

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    def add_epoch(self, epoch: Mapping[str, Any]) -> None:
        """Append an epoch's metrics to metrics.jsonl."""
        line = f"{json.dumps(epoch)}\n".encode()
        with self._writing(METRICS, len(line)):
            self._folder.append(METRICS, line)
        self._epochs.append(epoch)
        if METRICS not in self._written:
            self._written.append(METRICS)

    def keep_epochs(self, epochs: Sequence[Mapping[str, Any]]) -> None:
        """Rewrite metrics.jsonl with these epochs; later ones will be trained, maybe again."""
        self._epochs = list(epochs)
        content = "".join(f"{json.dumps(epoch)}\n" for epoch in epochs).encode()
        with self._writing(METRICS, len(content)):
            there = self._folder.kind(METRICS) is not None
            if (content or there) and not (there and self._folder.holds(METRICS, [content])):
                self._folder.replace(METRICS, [content])
        if content and METRICS not in self._written:
            self._written.append(METRICS)

    def finish(self, files: Mapping[str, bytes], summary: Mapping[str, Any]) -> list[str]:
        """Write model files, summary and curves; return the names of all files that the run wrote."""
        if self.continues:  # with as many epochs as there are now
            self._replace(CONFIG, self._config.encode())
        written = [*self._written, *files, SUMMARY]
        for name, content in files.items():
            self._replace(name, content)
        picture = draw_curves(self._epochs, title=self.path.resolve().name, restored=summary.get("restored"))
        if picture is not None:
            self._replace(CURVES, picture)
            written.append(CURVES)
        written += [name for name in (BEST, CHECKPOINTS, TRACE) if self._folder.kind(name) is not None]
        # Written last: it marks the run as finished.
        self._replace(SUMMARY, (json.dumps(summary, indent=2) + "\n").encode())
        with self._writing(LOCK):
            self._folder.remove(LOCK)
        return sorted(written)

    def add_report(self, content: bytes) -> str:
        """Write the page about the finished run; return its name."""
        self._replace(REPORT, content)
        return REPORT

    @property
    def epochs(self) -> Sequence[Mapping[str, Any]]:
        """Metrics of every epoch."""
        return self._epochs

    def _replace(self, name: str, content: bytes) -> None:
        with self._writing(name, len(content)):
            self._folder.replace(name, [content])

    def _writing(self, name: str, needed: int = 0) -> AbstractContextManager[None]:
        return writing(self.path / name, needed, advice=_ELSEWHERE)

    def _refuse_run(self, folder: Directory, resumes: bool) -> None:
        """Refuse a folder in which this run may not work, before it has trained for hours."""
        there = [name for name in _FILES if folder.expect(name, FILE) is not None]
        for name in _FOLDERS:
            folder.expect(name, FOLDER)
        if _has_checkpoints(folder):
            there.append(CHECKPOINTS)
        finished = SUMMARY in there
        if there and CONFIG not in there:
            raise OutputError(f"{self.path} holds {there[0]}, but not the {CONFIG} of a run; {_ELSEWHERE}")
        if self._has_begun(folder) and (finished or not self._was_locked or not resumes):
            more = f", and add --resume {self.path} to train on from there" if finished else ""
            raise OutputError(f"{self.path} holds a run already; {_ELSEWHERE}{more}")

    def _has_begun(self, folder: Directory) -> bool:
        """Whether a run has left anything here besides its lock and configuration."""
        if folder.kind(CONFIG) is None:
            return False
        left = any(folder.kind(name) is not None for name in (METRICS, SUMMARY))
        return left or not self._was_locked or _has_checkpoints(folder)


def _has_checkpoints(folder: Directory) -> bool:
    if folder.kind(CHECKPOINTS) is None:
        return False
    with folder.folder(CHECKPOINTS) as checkpoints:
        return bool(checkpoints.names())


def stamped_name(name: str) -> str:
    """Return "<date-time>-<name>" in characters that any file system allows."""
    plain = "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in name).strip(".") or "run"
    return f"{datetime.datetime.now().strftime('%Y%m%d-%H%M%S')}-{plain}"
