"""`python -m dptrain evaluate RUN`: the loss and the metrics of a model that was trained, on any samples."""

import argparse
import json
from typing import TYPE_CHECKING

from dptrain.cli.config import Config
from dptrain.cli.parser import Options
from dptrain.cli.serving import (
    DEVICE,
    SAMPLES,
    add_model,
    add_samples,
    batch_size_of,
    load_served,
    load_served_samples,
    show_notes,
)
from dptrain.errors import ConfigError, DataError
from dptrain.runtime import terminal
from dptrain.runtime.failure import phase

if TYPE_CHECKING:
    from dptrain.comm import Communicator


def _add_options(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_samples(parser)
    text = "targets of --data FILE.npy"
    parser.add_argument("--target", "--data.target", metavar="FILE.npy", help=text)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a line for people")


OPTIONS = Options("Print the loss and the metrics of a trained model.", _add_options, (*SAMPLES, *DEVICE))


def evaluate(config: Config, comm: "Communicator", parsed: argparse.Namespace) -> int:
    """Print the loss and the metrics on rank 0. Collective.

    Args:
        config: what names the samples and the device.
        comm: the ranks, each of which evaluates its part.
        parsed: the command line.
    """
    from dptrain.cli import classes, predictions

    batch_size = comm.agree("command line", lambda: batch_size_of(parsed))
    model = load_served(config, comm, parsed)
    phase.enter("data")
    given = load_served_samples(config, comm, parsed, model)

    def check() -> None:
        if not model.compiled:
            raise ConfigError(f"{parsed.run}: the model was saved without loss and metrics (it was not compiled)")
        if given.y is None:
            hint = "; --target FILE.npy names them" if given.name.endswith(".npy") else ""
            raise DataError(f"{given.name}: no targets to compare with{hint}; `python -m dptrain predict` needs none")

    comm.agree("data", check)
    found = model.evaluate(given.x, given.y, batch_size=batch_size, verbose=0, return_dict=True)
    assert isinstance(found, dict)
    show_notes(comm, given.notes)
    means = predictions.meaning(model)
    outputs = None
    if means.task in ("binary", "multiclass"):
        outputs = model.predict(given.x, batch_size=batch_size, verbose=0)
    by_class = classes.of_classes(means, given.y, outputs)
    if comm.rank == 0:
        if parsed.json:
            about = {"model": parsed.run, "data": given.name, "samples": len(given), "metrics": found}
            print(json.dumps(about if by_class is None else {**about, "classes": by_class}))
        else:
            metrics = ", ".join(f"{name} {value:.4g}" for name, value in found.items())
            terminal.say(f"{given.name}: {len(given):,} samples: {metrics}")
            if by_class is not None:
                classes.show(by_class)
    return 0
