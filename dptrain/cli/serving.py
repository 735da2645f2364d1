"""Shared by `evaluate`, `predict`, `report`, `export` and `serve`: options, model, samples."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dptrain.cli.options.config import Config, device_options, leaves
from dptrain.runtime.text import short

# NumPy and all that needs it are imported by the functions that use them: help comes at once.
if TYPE_CHECKING:
    from dptrain.cli.samples import GivenSamples
    from dptrain.comm import Communicator
    from dptrain.data.preprocessing import Preprocessing
    from dptrain.models import Model

# Fields of a run's configuration that say what computes, and how it is watched; and the limit of files.
DEVICE = tuple(leaf.path for leaf in leaves() if "predict" in leaf.shown_in)
SAMPLES = ("data.max_bytes", "data.bad_pictures", "data.unseen")


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add options that name the model."""
    parser.add_argument("run", metavar="RUN", help="the folder of a run, such as runs/X, or a .keras file")
    parser.add_argument("--best", action="store_true", help="the run's best model (best.keras) instead of its last")
    add_custom_objects(parser)


def add_custom_objects(parser: "argparse._ActionsContainer") -> None:
    """Add the option that names code with custom classes."""
    text = "run your Python file (or module) that defines the model's own classes and functions; can be repeated"
    parser.add_argument("--custom-objects", action="append", default=[], metavar="FILE.py", help=text)


def add_data(parser: argparse.ArgumentParser, text: str) -> None:
    """Add the options that name data, with the help of the first."""
    field: dict[str, Any] = {"default": argparse.SUPPRESS}
    parser.add_argument("--data", "--data.name", dest="data.name", metavar="NAME", help=text, **field)
    text = "folder with the files of a named data set"
    parser.add_argument("--data-dir", "--data.dir", dest="data.dir", metavar="DIR", help=text, **field)


def add_samples(parser: argparse.ArgumentParser) -> None:
    """Add options that name the samples."""
    text = (
        "an .npz or .npy file, or whatever training accepts; - is standard input (default: the data that the run was "
        "trained on)"
    )
    add_data(parser, text)
    parser.add_argument(
        "--part", choices=("test", "train"), default="test", help="the part to use, of data with both (default: test)"
    )
    text = "samples at once, over all ranks (default: whatever is fastest)"
    parser.add_argument("--batch-size", metavar="ROWS", help=text)


def load_served(config: Config, comm: "Communicator", parsed: argparse.Namespace) -> "Model":
    """Return the model on the command line, on the configured device. Collective."""
    return loader(config, comm, parsed)()


def loader(config: Config, comm: "Communicator", parsed: argparse.Namespace) -> Callable[[], "Model"]:
    """Return what loads the model on the command line, each time anew, on the configured device. Collective."""
    from dptrain.cli.user_code import custom_objects
    from dptrain.models import load_model
    from dptrain.train.devices import open_backend

    options = {name: value for name, value in device_options(config).items() if name != "dtype"}
    objects = custom_objects(parsed.custom_objects, comm)

    def load() -> "Model":
        model = load_model(parsed.run, objects, best=parsed.best, **options)
        if not model.compiled:  # `compile` would have set the device
            model._put_on(open_backend(comm, dtype=model.dtype_policy.name, **options))
        return model

    return load


def load_served_samples(
    config: Config, comm: "Communicator", parsed: argparse.Namespace, model: "Model"
) -> "GivenSamples":
    """Return the samples on the command line, by default the run's. Collective."""
    from dptrain.cli.loading import load_configured
    from dptrain.cli.samples import GivenSamples, load_samples
    from dptrain.cli.standard_input import standard_input

    data, preprocessing = config.data, model._preprocessing
    target: str | None = getattr(parsed, "target", None)
    comm.agree("command line", lambda: refuse_options(config, preprocessing))
    if "data.name" not in vars(parsed):
        if target is not None:
            comm.agree("command line", lambda: _refuse_target(target))
        data = comm.agree("data", lambda: data_of_run(Path(parsed.run)))
        data = replace(data, max_bytes=config.data.max_bytes)  # the limit is the reader's, not the folder's
        if preprocessing is not None or data.name.endswith(".npy"):  # only the run's settings define the test part
            data = replace(data, unseen=config.data.unseen or data.unseen)
            loaded = load_configured(
                data, comm, data.task if preprocessing is None else preprocessing.task, preprocessing
            )
            split = loaded.test if parsed.part == "test" else loaded.train
            return GivenSamples(f"{data.name} ({parsed.part} part)", split.x, split.y)
    with standard_input(data.name, comm, data.max_bytes) as name:
        return load_samples(
            name,
            comm,
            target=target,
            part=parsed.part,
            inputs=model._expected_data.input_names,
            data_dir=None if data.dir is None else Path(data.dir),
            max_bytes=data.max_bytes,
            preprocessing=preprocessing,
            bad=data.bad_pictures,
            unseen=data.unseen,
        )


def show_notes(comm: "Communicator", notes: "Sequence[str]") -> None:
    """Print on rank 0 what was skipped, to standard error: the output is a table's, or JSON."""
    from dptrain.runtime.output.terminal import say

    for note in notes if comm.rank == 0 else ():
        say(f"dptrain: {note}", file=sys.stderr)


def refuse_options(config: Config, preprocessing: "Preprocessing | None") -> None:
    """Refuse options for raw data of another kind than the model's."""
    from dptrain.errors import ConfigError

    kind = "arrays" if preprocessing is None else preprocessing.kind
    for flag, of, is_set in (
        ("--unseen", "table", config.data.unseen is not None),
        ("--bad-pictures skip", "pictures", config.data.bad_pictures != "stop"),
    ):
        if is_set and kind != of:
            raise ConfigError(
                f"{flag}: the model was trained on {'a table' if kind == 'table' else kind}; leave it out"
            )


def _refuse_target(target: str) -> None:
    from dptrain.errors import ConfigError

    raise ConfigError(f"--target {target}: add --data FILE.npy, the samples of these targets")


def data_of_run(run: Path) -> Any:
    """Return the data in a run's configuration, if this user wrote it: another's could name any file."""
    from dptrain.cli.run_records import read_config
    from dptrain.errors import ConfigError
    from dptrain.saving.run_folder import CONFIG

    if not os.path.lexists(run / CONFIG):
        raise ConfigError(f"--data is missing, and {run} has no {CONFIG} that names the model's data")
    data = read_config(run).data
    if os.stat(run / CONFIG).st_uid not in (os.geteuid(), 0):
        raise ConfigError(
            f"{run / CONFIG} belongs to another user and names the data {short(data.name)}: pass --data NAME"
        )
    return data


def batch_size_of(parsed: argparse.Namespace) -> int | None:
    """Return the batch size; refuse one that is no positive integer."""
    from dptrain.errors import ConfigError

    text = parsed.batch_size
    if text is None:
        return None
    if not text.isdecimal() or not int(text):
        raise ConfigError(f"--batch-size {text}: expected an integer >= 1")
    return int(text)
