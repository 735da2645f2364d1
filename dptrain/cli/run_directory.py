"""The run directory: what a training leaves behind.

config.yaml        enough to repeat the run with --config
metrics.jsonl      one object an epoch
model.safetensors  the weights, and the layers as metadata
summary.json       final metrics, versions, world size, device, time
curves.png         loss and metrics over epochs, where matplotlib is installed
"""

import datetime
import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy.typing as npt

from dptrain.cli.curves import draw_curves
from dptrain.errors import OutputError
from dptrain.runtime.files import append_line, output_error, write_atomically
from dptrain.saving import safetensors_file


class RunDirectory:
    """A directory that belongs to one run. Only rank 0 has one.

    Args:
        path: the directory, which must not hold a run yet.
        config_yaml: the configuration; its file claims the directory.

    Raises:
        OutputError: it holds a run already, or cannot be written.
    """

    def __init__(self, path: Path, config_yaml: str) -> None:
        self.path = path
        self._written = ["config.yaml"]
        claim = path / "config.yaml"
        try:
            path.mkdir(parents=True, exist_ok=True)
            # "x" is the claim: of two runs started at once into one directory, one gets it.
            with open(claim, "x", encoding="utf-8") as file:
                file.write(config_yaml)
        except FileExistsError as error:
            what = "holds a run already" if claim.exists() else "is not a directory"
            raise OutputError(f"{path} {what}; choose another --out") from error
        except OSError as error:
            raise output_error(claim, error, len(config_yaml)) from error

    @classmethod
    def in_free_place(cls, name: str, config_yaml: str) -> "RunDirectory":
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

    def add_epoch(self, epoch: Mapping[str, Any]) -> None:
        """Append an epoch's metrics to metrics.jsonl.

        Raises:
            OutputError: it cannot be written.
        """
        append_line(self.path / "metrics.jsonl", json.dumps(epoch))
        if "metrics.jsonl" not in self._written:
            self._written.append("metrics.jsonl")

    def finish(
        self, weights: Mapping[str, npt.NDArray[Any]], architecture: list[dict[str, Any]], summary: Mapping[str, Any]
    ) -> list[str]:
        """Write model, summary and curves; return the names of the files that the run wrote.

        Args:
            weights: by name.
            architecture: class name and configuration of every layer.
            summary: anything that JSON can carry.

        Raises:
            OutputError: a file cannot be written.
        """
        write_atomically(self.path / "model.safetensors", safetensors_file.encode(weights, architecture))
        write_atomically(self.path / "summary.json", (json.dumps(summary, indent=2) + "\n").encode())
        metrics = self.path / "metrics.jsonl"
        written = [*self._written, "model.safetensors", "summary.json"]
        if metrics.name in written:
            epochs = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
            picture = draw_curves(epochs, title=self.path.resolve().name)
            if picture is not None:
                write_atomically(self.path / "curves.png", picture)
                written.append("curves.png")
        return sorted(written)


def stamped_name(name: str) -> str:
    """Return "<date-time>-<name>", of letters that any file system takes."""
    plain = "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in name).strip(".") or "run"
    return f"{datetime.datetime.now().strftime('%Y%m%d-%H%M%S')}-{plain}"
