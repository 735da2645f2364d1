"""`python -m dptrain export RUN`: writes a model in another format."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from dptrain.cli.options.config import Config
from dptrain.cli.options.parser import Options
from dptrain.cli.serving import DEVICE, add_model, load_served
from dptrain.errors import ConfigError, OutputError

if TYPE_CHECKING:
    from dptrain.comm import Communicator

# File endings of each format, the usual one first.
_ENDINGS = {
    "keras": (".keras",),
    "onnx": (".onnx",),
    "safetensors": (".safetensors",),
    "program": (".program", ".dptrain", ".bin"),
    "generation": (),
    "npz": (".npz",),
}


def _add_options(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument(
        "--format",
        metavar="|".join(_ENDINGS),
        help="keras: the whole model; onnx: `predict` for ONNX Runtime; program: `predict` for "
        "`dptrain.saving.load_program`; generation: `generate`, likewise; "
        "safetensors, npz: the weights by name (default: by the file's suffix)",
    )
    parser.add_argument("--out", dest="file", metavar="FILE", required=True, help="where to")
    parser.add_argument(
        "--length", type=int, metavar="N", help="of sequences of a generation, for models of any length"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the file if it exists")


OPTIONS = Options("Write a trained model in another format.", _add_options, DEVICE)


def export(config: Config, comm: "Communicator", parsed: argparse.Namespace) -> int:
    """Write the model on rank 0. Collective."""
    path = Path(parsed.file)

    def check() -> str:
        if comm.rank == 0 and path.exists() and not parsed.overwrite:
            raise OutputError(f"{path} exists; --overwrite replaces it")
        kind = _format(parsed.format, path)
        if parsed.length is not None and kind != "generation":
            raise ConfigError(f"--length is for --format generation; found {kind}")
        return kind

    kind = comm.agree("command line", check)
    model = load_served(config, comm, parsed)
    if kind == "npz":

        def write() -> None:
            from dptrain.cli.predictions import as_arrays
            from dptrain.runtime.storage.files import write_through_links

            if comm.rank == 0:
                write_through_links(path, as_arrays(model._named_weights(), ".npz"), advice="choose another --out")

        comm.agree("saving", write)
    elif kind in ("keras", "safetensors"):
        (model.save if kind == "keras" else model.save_weights)(path)
    else:
        model.export(path, kind, length=parsed.length)
    if comm.rank == 0:
        print(f"{path}: {kind}, {path.stat().st_size:,} bytes")
    return 0


def _format(name: str | None, path: Path) -> str:
    by_ending = next((name for name, endings in _ENDINGS.items() if path.suffix in endings), None)
    if name is None:
        if by_ending is None:
            raise ConfigError(f"--out {path}: its suffix is not that of a format; use --format {'|'.join(_ENDINGS)}")
        return by_ending
    if name not in _ENDINGS:
        raise ConfigError(f"--format {name}: expected one of {', '.join(_ENDINGS)}")
    if name not in ("program", "generation") and name != by_ending:
        raise ConfigError(f"--format {name} --out {path}: expected a file that ends in {_ENDINGS[name][0]}")
    return name
