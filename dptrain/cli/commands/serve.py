"""`python -m dptrain serve RUN`: a trained model over HTTP."""

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING

from dptrain.cli.options.config import Config
from dptrain.cli.options.parser import Options
from dptrain.cli.serving import DEVICE, add_model, loader, refuse_options
from dptrain.errors import ConfigError
from dptrain.runtime.extras import pip_install
from dptrain.runtime.failure import phase

if TYPE_CHECKING:
    from dptrain.cli.server.http_server import Settings
    from dptrain.cli.server.served_model import ServedModel
    from dptrain.comm import Communicator
    from dptrain.models import Model

_DESCRIPTION = """\
Serve a trained model over HTTP: the Open Inference Protocol (v2), and POST /predict for people:

  python -m dptrain serve runs/X
  curl -d '[{"rooms": 4, "town": "Bergen"}]' http://127.0.0.1:8000/predict
"""
_SHORTEST_TOKEN = 16
_EXTRA = ("starlette", "uvicorn", "h11", "prometheus_client")
# Options with a number: metavar, default, least, most, help.
_NUMBERS = {
    "--port": ("PORT", 8000, 0, 65535, "port to listen on; 0 takes one that is free"),
    "--max-batch": ("ROWS", 256, 1, 1 << 20, "most rows of a prediction that joins requests"),
    "--max-rows": ("ROWS", 1024, 1, 1 << 30, "most rows of a request"),
    "--max-body-mb": ("MB", 16, 1, 1 << 20, "most megabytes of a request's body"),
    "--queue": ("REQUESTS", 256, 1, 1 << 20, "most requests that wait; others are answered with 503"),
    "--timeout": ("SECONDS", 30, 1, 3600, "longest time from a request's headers to its answer"),
    "--batch-wait": ("MS", 0, 0, 10_000, "milliseconds that a request waits for others to join it; while a prediction "
                     "runs they wait and join in any case"),
}  # fmt: skip


def _add_options(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument(
        "--host", default="127.0.0.1", metavar="ADDRESS", help="address to listen on (default: 127.0.0.1)"
    )
    for name, (metavar, default, _, _, text) in _NUMBERS.items():
        parser.add_argument(name, metavar=metavar, default=str(default), help=f"{text} (default: {default})")
    text = "file with the token that requests must bring as Authorization: Bearer TOKEN; needed with another --host"
    parser.add_argument("--token-file", metavar="FILE", help=text)
    text = "write a line for each request to standard error (default: on)"
    parser.add_argument("--access-log", choices=("on", "off"), default="on", help=text)


OPTIONS = Options(_DESCRIPTION, _add_options, ("data.unseen", *DEVICE))


def serve(config: Config, comm: "Communicator", parsed: argparse.Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C."""
    if comm.size > 1:
        raise ConfigError(f"serve runs in one process, not on {comm.size} ranks; leave mpirun out")
    try:
        from dptrain.cli.server.http_server import ModelServer
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        if package not in _EXTRA:
            raise
        raise ConfigError(f"serve needs {package}: {pip_install('serve')}") from None
    from dptrain.saving.run_folder import model_file

    settings = _settings(config, parsed)
    path = model_file(Path(parsed.run), best=parsed.best)
    load = loader(config, comm, parsed)

    def load_checked() -> "Model":
        model = load()
        refuse_options(config, model._preprocessing)
        return model

    phase.enter("serving")
    ModelServer(path, _name(path), load_checked, settings).run(_announce)
    return 0


def _announce(address: str, served: "ServedModel") -> None:
    """Print where a model is served."""
    print(f"{address} serves {served.name!r}, version {served.version}", flush=True)


def _name(path: Path) -> str:
    """Return a model's name: that of its run's folder, or of its file."""
    from dptrain.saving.run_folder import BEST, MODEL

    return path.resolve().parent.name if path.name in (MODEL, BEST) else path.stem


def _settings(config: Config, parsed: argparse.Namespace) -> "Settings":
    from dptrain.cli.server.app import Limits
    from dptrain.cli.server.guard import is_loopback
    from dptrain.cli.server.http_server import Settings

    numbers = {name: _number(name, getattr(parsed, name[2:].replace("-", "_"))) for name in _NUMBERS}
    token = None if parsed.token_file is None else _token(Path(parsed.token_file))
    if token is None and not is_loopback(parsed.host):
        raise ConfigError(
            f"--host {parsed.host}: other machines may reach it; add --token-file FILE with a token that requests must "
            "bring, or listen on 127.0.0.1"
        )
    return Settings(
        host=parsed.host,
        port=numbers["--port"],
        token=token,
        max_batch=numbers["--max-batch"],
        wait=numbers["--batch-wait"] / 1000,
        queue=numbers["--queue"],
        limits=Limits(numbers["--max-body-mb"] * 1_000_000, numbers["--max-rows"], numbers["--timeout"]),
        access_log=parsed.access_log == "on",
        unseen=config.data.unseen,
    )


def _number(name: str, text: str) -> int:
    _, _, least, most, _ = _NUMBERS[name]
    if not re.fullmatch("[0-9]{1,10}", text) or not least <= int(text) <= most:
        raise ConfigError(f"{name} {text}: expected an integer from {least} to {most}")
    return int(text)


def _token(path: Path) -> str:
    from dptrain.runtime.storage.files import open_regular, read_at_most

    try:
        with open_regular(path) as file:
            token = read_at_most(file, 4096).decode("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--token-file {path}: {getattr(error, 'strerror', None) or 'not ASCII'}") from None
    if not re.fullmatch(rf"[!-~]{{{_SHORTEST_TOKEN},}}", token):
        raise ConfigError(
            f"--token-file {path}: expected one line of {_SHORTEST_TOKEN} or more letters and digits, such as of "
            "`openssl rand -hex 32`"
        )
    return token
