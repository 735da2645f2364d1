"""`python -m dptrain report RUN`: writes the page about a finished run's model, as the run itself does at its end."""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from dptrain.cli.options.config import Config
from dptrain.cli.options.parser import Options
from dptrain.cli.serving import DEVICE, add_custom_objects, add_data, data_of_run, load_served, show_notes
from dptrain.errors import ConfigError, DataError
from dptrain.runtime.failure import phase

if TYPE_CHECKING:
    from dptrain.cli.reporting.report import Run
    from dptrain.comm import Communicator


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="the folder of a finished run, such as runs/X")
    parser.set_defaults(best=False)
    add_custom_objects(parser)
    add_data(parser, "the data that the run was trained on, if they lie elsewhere now")
    parser.add_argument("--out", dest="file", metavar="FILE", help="where to (default: RUN/report.html)")


OPTIONS = Options("Write a page about the quality of a run's model.", _add_options, ("data.max_bytes", *DEVICE))


def report(config: Config, comm: "Communicator", parsed: argparse.Namespace) -> int:
    """Write the page on rank 0. Collective."""
    from dptrain.cli.building import splits_of
    from dptrain.cli.loading import load_configured
    from dptrain.cli.reporting.report import Run, report_of
    from dptrain.cli.run_records import read_config
    from dptrain.runtime.output import terminal
    from dptrain.runtime.storage.files import write_atomically, write_through_links
    from dptrain.saving.run_folder import REPORT

    path = Path(parsed.run)
    record = comm.agree("command line", lambda: _record(path) if comm.rank == 0 else Run("", {}, []))
    trained = comm.agree("data", lambda: read_config(path))
    model = load_served(config, comm, parsed)
    phase.enter("data")
    source = trained.data if "data.name" in vars(parsed) else comm.agree("data", lambda: data_of_run(path))
    given = {name: getattr(config.data, name) for name in ("name", "dir") if f"data.{name}" in vars(parsed)}
    source = replace(source, max_bytes=config.data.max_bytes, **given)  # the limit is the reader's, not the folder's
    preprocessing = model._preprocessing
    data = load_configured(source, comm, source.task if preprocessing is None else preprocessing.task, preprocessing)
    splits = comm.agree("configuration", lambda: splits_of(trained, data))
    content = report_of(model, trained, data, splits, comm, record)
    show_notes(comm, data.notes)
    phase.enter("saving")
    out = path / REPORT if parsed.file is None else Path(parsed.file)

    def write() -> None:
        if comm.rank == 0:  # a link in a run's folder may be another user's; that of --out is this user's
            replace_file = write_atomically if parsed.file is None else write_through_links
            replace_file(out, content, advice="choose another --out")

    comm.agree("saving", write)
    if comm.rank == 0:
        terminal.say(f"{out}: open it in a browser")
    return 0


def _record(path: Path) -> "Run":
    """Return the run's records on rank 0, or why there can be no page of it."""
    from dptrain.cli.reporting.page import installed
    from dptrain.cli.reporting.report import Run
    from dptrain.cli.run_records import read_epochs, read_run, read_summary
    from dptrain.runtime.extras import pip_install
    from dptrain.saving.run_folder import METRICS, REPORT

    if not installed():
        raise ConfigError(f"{REPORT} needs Jinja2: {pip_install('report')}")
    if not path.is_dir():
        raise DataError(f"{path}: not found; expected the folder of a run, such as runs/X")
    if read_run(path).state != "finished":
        raise DataError(f"{path}: the run has not finished; its page shows the finished model")
    epochs = read_epochs(path) if (path / METRICS).exists() else []  # a run of no epoch has no metrics
    return Run.of(path, read_summary(path), epochs)
