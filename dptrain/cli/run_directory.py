"""The run directory: what a training leaves behind.

config.yaml        enough to repeat the run with --config
metrics.jsonl      one object an epoch
checkpoints/       where the training stood, see `dptrain.saving.checkpoints`
model.keras        the model: layers, weights, optimizer; `dptrain.models.load_model` takes it, or the directory
best.keras         the model of the epoch in which the monitored metric was best
model.safetensors  the weights, and the layers as metadata
summary.json       final metrics, versions, world size, device, time; there is one when the run has come to its end
curves.png         loss and metrics over epochs, where matplotlib is installed
lock, holder       while the run goes on: who works there
"""

import datetime
import itertools
import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from dptrain.cli.curves import draw_curves
from dptrain.errors import OutputError
from dptrain.runtime.files import append_line, make_folder, output_error, sweep_temporaries, write_atomically
from dptrain.runtime.locks import LOCK, locked
from dptrain.saving.run_folder import BEST, CHECKPOINTS

_ELSEWHERE = "choose another --out"


class RunDirectory:
    """A directory that belongs to one run, and while it goes on to one job. Only rank 0 has one.

    Args:
        path: the directory, which must not hold a run, but one that has left nothing, or has not come to its end.
        config_yaml: the configuration.
        resumes: whether a run that has not come to its end may go on here.

    Attributes:
        path: as given.
        continues: whether there is such a run; its config.yaml stays until `finish`.

    Raises:
        OutputError: it holds a run already, or somebody works there, or it cannot be written.
    """

    def __init__(self, path: Path, config_yaml: str, *, resumes: bool = False) -> None:
        self.path, self._config = path, config_yaml
        # A configuration without a lock was put there by somebody else.
        self._was_locked = (path / LOCK).exists()
        claim = path / "config.yaml"
        try:
            if path.exists() and not path.is_dir():
                raise OutputError(f"{path} is not a directory; {_ELSEWHERE}")
            self._refuse_run(resumes)
            make_folder(path)
            with ExitStack() as stack:
                stack.enter_context(locked(path, "training", _ELSEWHERE))
                self._refuse_run(resumes)  # that has ended meanwhile
                sweep_temporaries(path)
                self.continues = self._has_begun()
                if not self.continues:
                    write_atomically(claim, config_yaml.encode())
                self._held = stack.pop_all()
        except OutputError:
            raise
        except (OSError, NotImplementedError) as error:
            failure = error if isinstance(error, OSError) else OSError(str(error))
            raise output_error(claim, failure, len(config_yaml)) from error
        self._written = ["config.yaml"]
        if self.continues and (path / "metrics.jsonl").exists():
            self._written.append("metrics.jsonl")

    @classmethod
    def in_free_place(cls, name: str, config_yaml: str) -> Self:
        """Return a new run directory runs/<date-time>-<name> in the working directory.

        Runs that start in the same second each get one: a number is put behind the name of the later.

        Raises:
            OutputError: it cannot be written.
        """
        stamped = stamped_name(name)
        for number in itertools.count(1):
            path = Path("runs") / f"{stamped}{f'-{number}' if number > 1 else ''}"
            try:
                return cls(path, config_yaml)
            except OutputError:
                if not (path / "config.yaml").exists():
                    raise
        raise AssertionError("itertools.count ends")

    @property
    def checkpoints(self) -> Path:
        """Where they are."""
        return self.path / CHECKPOINTS

    def __enter__(self) -> Self:
        """Return the directory itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Let others work there."""
        self._held.close()

    def add_epoch(self, epoch: Mapping[str, Any]) -> None:
        """Append an epoch's metrics to metrics.jsonl.

        Raises:
            OutputError: it cannot be written.
        """
        append_line(self.path / "metrics.jsonl", json.dumps(epoch))
        if "metrics.jsonl" not in self._written:
            self._written.append("metrics.jsonl")

    def keep_epochs(self, epochs: Sequence[Mapping[str, Any]]) -> None:
        """Let metrics.jsonl hold the metrics of these epochs: those that follow will be trained, maybe once more.

        Raises:
            OutputError: it cannot be written.
        """
        metrics = self.path / "metrics.jsonl"
        content = "".join(f"{json.dumps(epoch)}\n" for epoch in epochs).encode()
        if (metrics.read_bytes() if metrics.exists() else b"") != content:
            write_atomically(metrics, content)
        if content and metrics.name not in self._written:
            self._written.append(metrics.name)

    def finish(self, files: Mapping[str, bytes], summary: Mapping[str, Any]) -> list[str]:
        """Write model, summary and curves; return the names of the files that the run wrote.

        Args:
            files: of the model, by name.
            summary: anything that JSON can carry.

        Raises:
            OutputError: a file cannot be written.
        """
        if self.continues:  # with as many epochs as there are now
            write_atomically(self.path / "config.yaml", self._config.encode())
        metrics = self.path / "metrics.jsonl"
        written = [*self._written, *files, "summary.json"]
        for name, content in files.items():
            write_atomically(self.path / name, content)
        if metrics.name in written:
            epochs = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
            picture = draw_curves(epochs, title=self.path.resolve().name)
            if picture is not None:
                write_atomically(self.path / "curves.png", picture)
                written.append("curves.png")
        written += [name for name in (BEST, CHECKPOINTS) if (self.path / name).exists()]
        # The last: with it the run has come to its end.
        write_atomically(self.path / "summary.json", (json.dumps(summary, indent=2) + "\n").encode())
        (self.path / LOCK).unlink(missing_ok=True)
        return sorted(written)

    def _refuse_run(self, resumes: bool) -> None:
        finished = (self.path / "summary.json").exists()
        if self._has_begun() and (finished or not self._was_locked or not resumes):
            more = f", and add --resume {self.path} to train on from there" if finished else ""
            raise OutputError(f"{self.path} holds a run already; {_ELSEWHERE}{more}")

    def _has_begun(self) -> bool:
        """Whether a run has left anything here but its lock and its configuration."""
        if not (self.path / "config.yaml").exists():
            return False
        places = (self.path / name for name in ("metrics.jsonl", "summary.json"))
        saved = self.checkpoints.is_dir() and any(self.checkpoints.iterdir())
        return saved or not self._was_locked or any(place.exists() for place in places)


def stamped_name(name: str) -> str:
    """Return "<date-time>-<name>", of letters that any file system takes."""
    plain = "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in name).strip(".") or "run"
    return f"{datetime.datetime.now().strftime('%Y%m%d-%H%M%S')}-{plain}"
