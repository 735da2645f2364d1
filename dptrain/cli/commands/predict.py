"""`python -m dptrain predict RUN`: writes a model's predictions to a file or standard output."""

import argparse
import sys
from pathlib import Path
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
from dptrain.errors import ConfigError
from dptrain.runtime.failure import phase

if TYPE_CHECKING:
    from dptrain.comm import Communicator

_ENDINGS = (".csv", ".npy", ".npz")


def _add_options(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_samples(parser)
    text = ".csv with a line per sample, .npy or .npz with the outputs; replaced if it exists (default: CSV on stdout)"
    parser.add_argument("--out", dest="file", metavar="FILE", help=text)


OPTIONS = Options("Print a trained model's predictions, in the order of the rows.", _add_options, (*SAMPLES, *DEVICE))


def predict(config: Config, comm: "Communicator", parsed: argparse.Namespace) -> int:
    """Write the predictions on rank 0. Collective."""
    out = None if parsed.file is None else Path(parsed.file)

    def check() -> int | None:
        if out is not None and out.suffix not in _ENDINGS:
            raise ConfigError(f"--out {out}: expected a file that ends in {', '.join(_ENDINGS)}")
        return batch_size_of(parsed)

    batch_size = comm.agree("command line", check)
    model = load_served(config, comm, parsed)
    phase.enter("data")
    samples = load_served_samples(config, comm, parsed, model)
    outputs = model.predict(samples.x, batch_size=batch_size, verbose=0)
    show_notes(comm, samples.notes)
    phase.enter("saving")

    def write() -> None:
        from dptrain.cli import predictions
        from dptrain.runtime.storage.files import write_through_links

        if comm.rank != 0:
            return
        if out is None or out.suffix == ".csv":
            text = predictions.as_csv(outputs, predictions.meaning(model), samples.files)
            if out is None:
                sys.stdout.write(text)
            else:
                write_through_links(out, text.encode(), advice="choose another --out")
        else:
            write_through_links(out, predictions.as_arrays(outputs, out.suffix), advice="choose another --out")

    comm.agree("saving", write)
    return 0
