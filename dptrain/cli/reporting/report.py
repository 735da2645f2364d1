"""Writes report.html at the end of a run, which is saved before: no fault of the page's fails the run."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from dptrain.cli.building import Splits
from dptrain.cli.options.config import Config
from dptrain.cli.reporting import page, quality
from dptrain.comm import Communicator
from dptrain.data.loading import LoadedData
from dptrain.errors import AgreedError
from dptrain.runtime import signals
from dptrain.runtime.failure import describe
from dptrain.runtime.output.streams import write_error
from dptrain.saving.run_folder import CONFIG, REPORT

if TYPE_CHECKING:
    from dptrain.models import Model


@dataclass(frozen=True)
class Run:
    """A finished run's records, on rank 0: its folder's name, summary.json, metrics.jsonl, the command to repeat it."""

    name: str
    summary: Mapping[str, Any]
    epochs: Sequence[Mapping[str, float]]
    command: str = ""

    @classmethod
    def of(cls, path: Path, summary: Mapping[str, Any], epochs: Sequence[Mapping[str, float]]) -> Self:
        """Return the run in a folder."""
        command = shlex.join(["python", "-m", "dptrain", "--config", str(path / CONFIG)])
        return cls(path.resolve().name, summary, epochs, command)


def is_signalled() -> bool:
    """Whether a signal has come, which leaves little time."""
    return signals.caught() is not None


def is_wanted(config: Config, comm: Communicator) -> bool:
    """Whether a run's end writes a page: not where a signal has come. Collective."""
    wants = config.report and not config.fast_dev_run and page.installed() and not is_signalled()
    return bool(comm.broadcast_fact(wants))


def report_of(
    model: "Model", config: Config, data: LoadedData, splits: Splits, comm: Communicator, run: Run, outputs: Any = None
) -> bytes:
    """Return the page of a finished run on rank 0, nothing on others; `outputs` as `quality.measure`. Collective."""
    measured = quality.measure(model, data, splits, comm, config.train.batch_size, outputs)

    def render() -> bytes:
        if comm.rank != 0:
            return b""
        compared = quality.beside_baselines(measured, data, splits)
        return page.run_page(run.name, config, data, splits, run.summary, run.epochs, compared, run.command)

    return comm.agree("report", render)


def try_report_of(
    model: "Model", config: Config, data: LoadedData, splits: Splits, comm: Communicator, run: Run, outputs: Any = None
) -> bytes:
    """Return `report_of`, or nothing with a warning where it fails on any rank. Collective."""
    try:
        return report_of(model, config, data, splits, comm, run, outputs)
    except Exception as error:
        if comm.size > 1 and not isinstance(error, AgreedError):  # the other ranks do not know
            raise
        if comm.rank == 0:
            write_error(f"dptrain: warning: no {REPORT}: {describe(error)}\n")
        return b""
