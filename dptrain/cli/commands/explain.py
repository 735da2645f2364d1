"""`python -m dptrain explain`: what a step of the configured model computes, without a device."""

import argparse

import numpy as np

from dptrain.cli.building import build_model, load_data
from dptrain.cli.commands.scaling import hardware_of, report, with_device
from dptrain.cli.options.config import Config
from dptrain.cli.options.mesh import lengths_of, mesh_of
from dptrain.cli.options.scaling_options import read_options
from dptrain.cli.user_code import custom_objects
from dptrain.comm import Communicator
from dptrain.data.catalog import CATALOG
from dptrain.data.loading import LoadedData, Split
from dptrain.errors import ConfigError, printable
from dptrain.models import Model, load_model
from dptrain.models.explaining import explain as explained
from dptrain.runtime.failure import phase


def explain(config: Config, comm: Communicator, parsed: argparse.Namespace) -> int:
    """Print the program on rank 0. Collective."""
    phase.enter("explain")
    scaling = comm.agree("command line", lambda: read_options(parsed))
    machine = None
    if scaling is not None:
        config = comm.agree("command line", lambda: with_device(config, scaling))
        machine = hardware_of(config, scaling, comm)
    options = {"kernels": parsed.kernels, "code": parsed.code}
    data = None if parsed.run is not None else _data(config, comm, parsed)
    if parsed.run is not None:
        objects = custom_objects(parsed.custom_objects, comm)
        loaded = load_model(parsed.run, objects, device=config.device, precision=config.precision)
    phase.enter("explain")

    def text() -> str:
        if data is None:
            return shown(loaded, None)
        return shown(build_model(config, data), str(data.train.x.dtype))

    def shown(model: Model, dtype: str | None) -> str:
        if scaling is not None and machine is not None:
            return report(model, config, scaling, *machine, dtype)
        mesh = None if config.mesh is None else mesh_of(model, lengths_of(config.mesh))
        return explained(model, config.train.batch_size, parsed.step, dtype=dtype, mesh=mesh, **options)

    output = comm.agree("explain", text)
    if comm.rank == 0:
        print(printable(output, "\n"))
    return 0


def _data(config: Config, comm: Communicator, parsed: argparse.Namespace) -> LoadedData:
    """Return the file's or folder's samples, or a sample of the given or default shape. Collective."""
    if config.data.name not in CATALOG and parsed.input_shape is None and parsed.classes is None:
        phase.enter("data")
        return load_data(config, comm)
    shape = comm.agree("command line", lambda: _shape(parsed.input_shape or "28,28"))
    classes = comm.agree("command line", lambda: _whole("--classes", parsed.classes or "10", 2))
    samples = Split(np.zeros((1, *shape), np.uint8), np.zeros(1, np.int64))
    return LoadedData("explain", samples, samples, classes)


def _shape(text: str) -> tuple[int, ...]:
    return tuple(_whole("--input-shape", part, 1) for part in text.split(","))


def _whole(option: str, text: str, least: int) -> int:
    if not text.strip().isdecimal() or int(text) < least:
        raise ConfigError(f"{option} {text}: expected an integer >= {least}")
    return int(text)
