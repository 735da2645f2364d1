"""The command line: `python -m dptrain [train|sweep|doctor] [options]`."""

import argparse
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from dptrain.cli.config import Config, leaves, read_file, resolve, to_dict, to_yaml, verbosity
from dptrain.cli.sweep_options import add_options
from dptrain.errors import AgreedError, ConfigError
from dptrain.registry.names import lookup, suggestion
from dptrain.runtime import failure, terminal
from dptrain.runtime.failure import phase
from dptrain.runtime.launcher import detect_launch
from dptrain.runtime.streams import outlive_readers
from dptrain.version import __version__

# What takes long to import, NumPy to begin with, is imported by the functions that use it, so that help and the first
# line of a training come at once.
if TYPE_CHECKING:
    from dptrain.callbacks import Callback
    from dptrain.cli.run_directory import RunDirectory
    from dptrain.comm import Communicator
    from dptrain.data.loading import LoadedData
    from dptrain.sequential import Sequential

T = TypeVar("T")

_DESCRIPTION = """\
Train a neural network on one process, or on several ranks with mpirun:

  python -m dptrain                              built-in data, one process
  mpirun -n 4 python -m dptrain                  the same on four ranks
  python -m dptrain --data mnist --data-dir DIR --hidden 512,256 --epochs 10
  python -m dptrain --config runs/X/config.yaml  repeat a run
  python -m dptrain sweep --seeds 0-15 --grid learning_rate=1e-3,3e-4
  python -m dptrain doctor                       what works, what is missing
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code, the same on every rank.

    An error that all ranks know of is printed by rank 0; one that a single rank meets ends them all.
    """
    outlive_readers()
    try:
        return _run(sys.argv[1:] if argv is None else argv)
    except AgreedError as error:
        return failure.end_together(error)
    except BaseException as error:
        if isinstance(error, SystemExit) and not failure.exit_code_of(error):
            raise  # --help and --version, on every rank alike
        return failure.end_job(error)


def _run(argv: Sequence[str]) -> int:
    command, arguments = _split_command(argv)
    parse = _tried(lambda: _parse(command, arguments))
    configure = _tried(lambda: _configure(parse()))
    _announce(command, parse, configure)
    comm = _communicator(command)
    run = comm.agree("command line", lambda: lookup("command", command, COMMANDS))
    parsed = comm.agree("command line", parse)
    config = comm.agree("configuration", lambda: _checked(configure()))
    failure.show_traceback = config.debug
    _check_same_everywhere(comm, config)
    if parsed.print_config:
        if comm.rank == 0:
            print(to_yaml(config), end="")
        return 0
    return run(config, comm, parsed)


def _tried(action: Callable[[], T]) -> Callable[[], T]:
    """Do something at once, and return what gives its result or raises its error later, on all ranks together."""
    try:
        result = action()
    except Exception as error:
        failure = error

        def fail() -> T:
            raise failure

        return fail
    return lambda: result


def _announce(command: str, parse: Callable[[], argparse.Namespace], configure: Callable[[], Config]) -> None:
    """Say on rank 0 what begins: libraries, MPI and data take seconds."""
    launch = detect_launch()
    if command not in ("train", "sweep") or (launch is not None and launch.rank != 0):
        return
    try:
        parsed, config = parse(), configure()
    except Exception:  # told when all ranks know of it
        return
    if config.verbose != 0 and not parsed.print_config:
        ranks = f" on {launch.size} ranks" if launch is not None and launch.size > 1 else ""
        terminal.say(f"dptrain {__version__}{ranks}: loading {config.data.name}")


def train(config: Config, comm: "Communicator", parsed: argparse.Namespace) -> int:
    """Train as configured, and leave a run directory."""
    import numpy as np

    from dptrain.callbacks import EpochRecorder, StopOnDivergence
    from dptrain.cli.building import build_model, epochs_of, load_data, make_sampler
    from dptrain.train.trainer import run_to_end

    started = time.time()
    phase.enter("data")
    data = load_data(config, comm)
    phase.enter("model")
    sampler = comm.agree("configuration", lambda: make_sampler(config, data, comm))
    model = comm.agree("model", lambda: build_model(config, data))
    device = model.describe_device(comm)
    quiet = config.verbose == 0
    devices = _show_start(config, data, model, sampler.steps, device, comm, quiet)
    with ExitStack() as stack:
        run = _open_run(config, data, comm, stack)
        callbacks: list[Callback] = [] if run is None else [EpochRecorder(run.add_epoch)]
        steps = model.fit_splits_steps(
            data.train,
            data.test,
            sampler,
            epochs=epochs_of(config),
            verbose=verbosity(config),
            callbacks=[*callbacks, StopOnDivergence()],
        )
        run_to_end(steps)
        history = model.history
        assert history is not None
        phase.enter("saving")
        final = {key: values[-1] for key, values in history.history.items()}
        seconds = round(time.time() - started, 3)

        def write_results() -> list[str]:
            if run is None:
                return []
            summary = {
                "metrics": final,
                "epochs": len(history.epoch),
                "seconds": seconds,
                "started": time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(started)),
                "world_size": comm.size,
                "devices": devices,
                "data": {"name": data.name, "train": data.train.total, "test": data.test.total},
                "parameters": model.count_params(),
                "versions": {
                    "dptrain": __version__,
                    "python": platform.python_version(),
                    "numpy": np.__version__,
                    "communicator": comm.description,
                },
            }
            architecture = [{"class": type(layer).__name__, "config": layer.config()} for layer in model.layers]
            return run.finish(model.named_weights(), architecture, summary)

        files = comm.agree("saving", write_results)
        if run is not None and not quiet:
            if config.fast_dev_run and config.out is None:
                terminal.say(f"Fast dev run: everything works ({', '.join(files)} written and removed)")
            else:
                missing = "" if "curves.png" in files else " (no curves.png: pip install 'dptrain[plots]')"
                terminal.say(f"Results in {run.path}: {', '.join(files)}{missing}")
    return 0


def sweep(config: Config, comm: "Communicator", parsed: argparse.Namespace) -> int:
    """Train every setting with every seed."""
    from dptrain.cli.sweep import sweep as run_sweep

    return run_sweep(config, comm, parsed)


def doctor(config: Config, comm: "Communicator", parsed: argparse.Namespace) -> int:
    """Say what is there, what is missing and what would be used."""
    import numpy as np

    from dptrain.cli.building import build_model
    from dptrain.cli.doctor import examine
    from dptrain.data.loading import LoadedData, Split

    def sample_model() -> "Sequential":
        images = Split.whole(np.zeros((1, 28, 28), np.uint8), np.zeros(1, np.int64), 0, 1)
        return build_model(config, LoadedData("doctor", images, images, 10))

    return examine(config, comm, sample_model)


# Subcommands by name; the first is what runs where none is given.
COMMANDS: dict[str, Callable[[Config, "Communicator", argparse.Namespace], int]] = {
    "train": train,
    "sweep": sweep,
    "doctor": doctor,
}


def _communicator(command: str) -> "Communicator":
    """Return the ranks; where MPI is broken, the doctor still looks at each process alone."""
    from dptrain import comm as comms

    try:
        return comms.current()
    except Exception:
        if command != "doctor":
            raise
        return comms.SoloCommunicator()


def _open_run(config: Config, data: "LoadedData", comm: "Communicator", stack: ExitStack) -> "RunDirectory | None":
    """Claim the run directory on rank 0, before anything is trained; a fast dev run's is removed in the end."""
    from dptrain.cli.building import run_name
    from dptrain.cli.run_directory import RunDirectory

    def claim() -> RunDirectory | None:
        if comm.rank != 0:
            return None
        if config.out is not None:
            path = Path(config.out)
        elif config.fast_dev_run:
            path = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dptrain-")))
        else:
            return RunDirectory.in_free_place(run_name(config, data), to_yaml(config))
        return RunDirectory(path, to_yaml(config))

    return comm.agree("output", claim)


def _show_start(
    config: Config, data: "LoadedData", model: "Sequential", steps: int, device: str, comm: "Communicator", quiet: bool
) -> list[list[Any]]:
    """Print who computes what, on rank 0; return the table's rows: rank, host, PID, device."""
    from dptrain.cli.ranks import show_ranks

    rows = [[rank, *found] for rank, found in enumerate(comm.allgather([comm.host, os.getpid(), device]))]
    if comm.rank == 0 and not quiet:
        show_ranks(rows)
        network = " -> ".join(
            ["x".join(map(str, model.architecture.input_shape)), *map(str, config.model.hidden), str(data.num_classes)]
        )
        terminal.say(
            f"{data.name}: {data.train.total:,} + {data.test.total:,} samples; "
            f"{network}, {model.count_params():,} parameters; {config.optimizer.name}, "
            f"global batch {config.train.batch_size}, {steps} step{'' if steps == 1 else 's'} an epoch"
        )
    return rows


def _check_same_everywhere(comm: "Communicator", config: Config) -> None:
    """Refuse ranks with different configurations or versions."""
    import numpy as np

    versions = {"dptrain": __version__, "numpy": np.__version__, "python": platform.python_version()}
    flat = {leaf.path: _at(to_dict(config), leaf.path) for leaf in leaves()}
    flat |= {f"version of {name}": version for name, version in versions.items()}
    comm.require_same("the ranks are set up differently", flat)


def _at(tree: dict[str, Any], path: str) -> Any:
    value: Any = tree
    for key in path.split("."):
        value = value[key]
    return value


# Parsing


def _split_command(argv: Sequence[str]) -> tuple[str, list[str]]:
    if argv and not argv[0].startswith("-"):
        return argv[0], list(argv[1:])
    return next(iter(COMMANDS)), list(argv)


class _Help(argparse.RawDescriptionHelpFormatter):
    """Help that names each option once: by its short flag, where it has one."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        names = action.option_strings
        dotted = [name for name in names[1:] if "." in name or "_" in name]
        action.option_strings = [name for name in names if name not in dotted]
        try:
            return super()._format_action_invocation(action)
        finally:
            action.option_strings = names


class _Parser(argparse.ArgumentParser):
    """An argument parser whose errors are ours, and whose help is printed by rank 0 alone."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)

    def _print_message(self, message: str, file: Any = None) -> None:
        launch = detect_launch()
        if launch is None or launch.rank == 0:
            super()._print_message(message, file)


def _build_parser(command: str) -> _Parser:
    parser = _Parser(
        prog="dptrain",
        usage=f"python -m dptrain [{'|'.join(COMMANDS)}] [options]",
        description=_DESCRIPTION,
        epilog="Every option can also be written with its group, as in a file:\n"
        "--optimizer.learning_rate. The command line overrides the file.",
        formatter_class=_Help,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"dptrain {__version__}")
    parser.add_argument("--config", metavar="FILE", help="read options from a YAML file, such as a run's config.yaml")
    parser.add_argument("--print-config", action="store_true", help="print the configuration as YAML and exit")
    if command == "sweep":
        add_options(parser)
    groups: dict[str, Any] = {}
    for leaf in leaves():
        section = leaf.path.rpartition(".")[0] or "run"
        if section not in groups:
            groups[section] = parser.add_argument_group(section)
        names = [f"--{leaf.flag}"] if leaf.flag else []
        if f"--{leaf.path}" not in names:
            names.append(f"--{leaf.path}")
        default = "" if leaf.default is None or leaf.is_flag else f" (default: {_shown(leaf.default)})"
        groups[section].add_argument(
            *names,
            dest=leaf.path,
            default=argparse.SUPPRESS,
            metavar="on|off" if leaf.is_flag else "|".join(leaf.choices) or leaf.path.rpartition(".")[2].upper(),
            help=(leaf.help + default).replace("%", "%%"),
            **({"nargs": "?", "const": "true"} if leaf.is_flag else {}),
        )
    return parser


def _shown(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _parse(command: str, arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the options of a command.

    Raises:
        ConfigError: an unknown option, or one without its value.
    """
    parser = _build_parser(command)
    parsed, unknown = parser.parse_known_args(arguments)
    if unknown:
        name = unknown[0].partition("=")[0]
        known = [option for action in parser._actions for option in action.option_strings]
        # An option has two names, of which the one with its group is meant by whoever writes a group.
        alike = [option for option in known if ("." in option) == ("." in name)]
        raise ConfigError(f"unknown {unknown[0]!r}{suggestion(name, alike)}")
    return parsed


def _configure(parsed: argparse.Namespace) -> Config:
    file = {} if parsed.config is None else read_file(Path(parsed.config))
    paths = {leaf.path for leaf in leaves()}
    overrides = {path: value for path, value in vars(parsed).items() if path in paths}
    return resolve(file, str(parsed.config), overrides)


def _checked(config: Config) -> Config:
    """Return a configuration whose fields fit together; what does not is refused before any data is read.

    Raises:
        ConfigError: they do not.
    """
    from dptrain.cli.building import make_optimizer

    make_optimizer(config)
    if verbosity(config) == "auto":
        terminal.progress_mode()
    return config
