"""`python -m dptrain evaluate RUN`: loss and metrics of a trained model on any samples."""

import argparse
import json
from typing import TYPE_CHECKING

from dptrain.cli.options.config import Config
from dptrain.cli.options.parser import Options
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
from dptrain.runtime.failure import phase
from dptrain.runtime.output import terminal

if TYPE_CHECKING:
    from dptrain.comm import Communicator


def _add_options(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_samples(parser)
    text = "targets of --data FILE.npy"
    parser.add_argument("--target", "--data.target", metavar="FILE.npy", help=text)
    parser.add_argument("--json", action="store_true", help="print a JSON object instead of a readable line")


OPTIONS = Options("Print the loss and the metrics of a trained model.", _add_options, (*SAMPLES, *DEVICE))


def evaluate(config: Config, comm: "Communicator", parsed: argparse.Namespace) -> int:
    """Print the loss and the metrics on rank 0. Collective."""
    from dptrain.cli import classes, predictions

    batch_size = comm.agree("command line", lambda: batch_size_of(parsed))
    model = load_served(config, comm, parsed)
    phase.enter("data")
    samples = load_served_samples(config, comm, parsed, model)

    def check() -> None:
        if not model.compiled:
            raise ConfigError(f"{parsed.run}: the model was saved without loss and metrics (it was not compiled)")
        if samples.y is None:
            hint = "; --target FILE.npy names them" if samples.name.endswith(".npy") else ""
            raise DataError(f"{samples.name}: no targets to compare with{hint}; `python -m dptrain predict` needs none")

    comm.agree("data", check)
    values = model.evaluate(samples.x, samples.y, batch_size=batch_size, verbose=0, return_dict=True)
    assert isinstance(values, dict)
    show_notes(comm, samples.notes)
    means = predictions.meaning(model)
    outputs = None
    if means.task in ("binary", "multiclass"):
        outputs = model.predict(samples.x, batch_size=batch_size, verbose=0)
    by_class = classes.of_classes(means, samples.y, outputs)
    if comm.rank == 0:
        if parsed.json:
            result = {"model": parsed.run, "data": samples.name, "samples": len(samples), "metrics": values}
            print(json.dumps(result if by_class is None else {**result, "classes": by_class}))
        else:
            metrics = ", ".join(f"{name} {value:.4g}" for name, value in values.items())
            terminal.say(f"{samples.name}: {len(samples):,} samples: {metrics}")
            if by_class is not None:
                classes.show(by_class)
    return 0
