"""`python -m dptrain explain`: what a step of the configured model computes; reads no data and opens no device."""

import argparse

import numpy as np

from dptrain.cli.building import build_model
from dptrain.cli.config import Config
from dptrain.cli.user_code import custom_objects
from dptrain.comm import Communicator
from dptrain.data.loading import LoadedData, Split
from dptrain.errors import ConfigError, printable
from dptrain.models import load_model
from dptrain.models.explaining import explain as explained
from dptrain.runtime.failure import phase


def explain(config: Config, comm: Communicator, parsed: argparse.Namespace) -> int:
    """Print the program on rank 0. Collective.

    Args:
        config: as for training.
        comm: the ranks.
        parsed: the command line: which step, and a run, or the shape of the samples.
    """
    phase.enter("explain")
    asked = {"kernels": parsed.kernels, "code": parsed.code}
    if parsed.run is not None:
        own = custom_objects(parsed.custom_objects, comm)
        loaded = load_model(parsed.run, own, device=config.device, precision=config.precision)
        phase.enter("explain")

    def text() -> str:
        if parsed.run is not None:
            return explained(loaded, config.train.batch_size, parsed.step, **asked)
        shape, classes = _shape(parsed.input_shape), _whole("--classes", parsed.classes, 2)
        samples = Split(np.zeros((1, *shape), np.uint8), np.zeros(1, np.int64))
        model = build_model(config, LoadedData("explain", samples, samples, classes))
        return explained(model, config.train.batch_size, parsed.step, dtype="uint8", **asked)

    found = comm.agree("explain", text)
    if comm.rank == 0:
        print(printable(found, "\n"))
    return 0


def _shape(text: str) -> tuple[int, ...]:
    return tuple(_whole("--input-shape", part, 1) for part in text.split(","))


def _whole(option: str, text: str, least: int) -> int:
    if not text.strip().isdecimal() or int(text) < least:
        raise ConfigError(f"{option} {text}: expected an integer >= {least}")
    return int(text)
