"""The command line: `python -m dptrain [train|evaluate|predict|...] [options]`, see COMMANDS."""

import argparse
import gc
import platform
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from dptrain.cli.options import scaling_options
from dptrain.cli.options.config import Config, Leaf, leaves, read_file, resolve, to_dict, to_yaml, value_at, verbosity
from dptrain.cli.options.parser import Gathered, Options, Parser
from dptrain.cli.options.sweep_options import add_options
from dptrain.cli.options.words import suggest
from dptrain.cli.serving import add_custom_objects
from dptrain.errors import AgreedError, ConfigError, ExitCode, OutputError
from dptrain.runtime import failure, signals
from dptrain.runtime.launch.launcher import detect_launch
from dptrain.runtime.output import terminal
from dptrain.runtime.output.log_stream import begin_log, end_log
from dptrain.runtime.output.streams import lost_output, outlive_readers, write_error
from dptrain.runtime.watch import records, watchdog
from dptrain.version import __version__

# Slow imports, NumPy first of all, are inside the functions that need them, so that help and the first line of a
# training come at once.
if TYPE_CHECKING:
    from dptrain.comm import Communicator

    Command = Callable[[Config, Communicator, argparse.Namespace], int]

T = TypeVar("T")

# First lines of these commands' help; the options of a run apply to them too.
_ABOUT = {
    "sweep": """\
Train every setting of a plan with every seed, and say which differences are more than chance:

  python -m dptrain sweep --seeds 0-4 --grid learning_rate=1e-3,3e-4 --grid hidden=64,128
  python -m dptrain sweep --random 20 learning_rate=log:1e-5..1e-1 --folds 5
  mpirun -n 4 python -m dptrain sweep --plan plan.yaml --out sweeps/first

All other options apply to the runs.
""",
    "explain": """\
Show what a step computes, without a device: fused ops, shapes, messages, memory:

  python -m dptrain explain --hidden 64
  python -m dptrain explain --data houses.csv --target price
  python -m dptrain explain runs/X --step predict --kernels
  python -m dptrain explain --device cuda --code > step.cu
  python -m dptrain explain --device cuda --ranks 1-1024 --node-gpus 8 --network 200Gb

The last one predicts scaling instead of showing ops.
""",
    "doctor": """\
Show what is installed, what is missing and what would be used; exit with 0 if training would work:

  python -m dptrain doctor                       this machine and its GPUs, if any
  python -m dptrain doctor --device cuda         what a GPU would need
  mpirun -n 4 python -m dptrain doctor           all ranks, and a breakdown of a step's time

All training options are accepted; these have an effect:
""",
}
# Commands whose help lists only the fields that name them.
_SHOWING_SOME = ("doctor", "explain")

# Descriptions of the groups of options.
_ABOUT_GROUPS = {
    "data": "The samples, and the meaning of their columns, files and targets.",
    "model": "The network: built-in, or from your function.",
    "optimizer": "The update rule.",
    "pruning": "Which weights become zero.",
    "train": "Duration, batches, loss and validation.",
    "checkpoint": "When to save the training, and where to resume.",
    "logging": "External loggers.",
    "run": "The job: folder, device, ranks, precision, output.",
}

# The most choices on an option's line of the help.
_MOST_CHOICES = 8
_DESCRIPTION = """\
Train a neural network in one process, or on several ranks with mpirun:

  python -m dptrain                              built-in data, one process
  mpirun -n 4 python -m dptrain                  the same on four ranks
  python -m dptrain --data mnist --data-dir DIR --hidden 512,256 --epochs 10
  python -m dptrain --config runs/X/config.yaml  repeat a run
  python -m dptrain evaluate runs/X              its metrics
  python -m dptrain predict runs/X --data new.npz --out predictions.csv
  python -m dptrain report runs/X                a page about its quality
  python -m dptrain serve runs/X                 its predictions over HTTP
  python -m dptrain --model FILE.py:build_model  your own model
  python -m dptrain sweep --seeds 0-15 --grid learning_rate=1e-3,3e-4
  python -m dptrain runs --sort val_loss         all runs, best first
  python -m dptrain doctor                       what works, what is missing
  python -m dptrain explain --hidden 64          a step's ops
  python -m dptrain launch -n 4 -- COMMAND       any command on supervised ranks
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code, the same on every rank; an error of a single rank ends all."""
    outlive_readers()
    try:
        return _exit_code(argv)
    finally:
        end_log()


def _exit_code(argv: Sequence[str] | None) -> int:
    try:
        code = _run(sys.argv[1:] if argv is None else argv)
    except AgreedError as error:
        return failure.end_together(error)
    except BaseException as error:
        if isinstance(error, failure.ReportedExit):
            return failure.exit_code_of(error)
        if failure.exit_code_of(error) or not isinstance(error, SystemExit):
            return failure.end_job(error)
        if lost_output() is None:
            raise  # --help and --version, on every rank alike
        code = 0
    why = lost_output()
    if why is not None and not code:  # all else is done and saved
        failure.report(OutputError(f"standard output: {why}; the output is lost"))
        return int(ExitCode.IO)
    return code


def _run(argv: Sequence[str]) -> int:
    command, arguments = _split_command(argv)
    if command == "sweep":
        signals.interrupt_early()
    elif command not in ("train", "launch"):
        signals.release_early()
    if command == "launch":  # it starts the ranks, and is not a rank
        from dptrain.cli.commands.launch import launch

        _collect_from_here()
        return launch(arguments)
    parse = _tried(lambda: _parse(command, arguments))
    configure = _tried(lambda: _configure(parse()))
    begin = _tried(lambda: _begin_log(command, parse, configure))
    _announce(command, parse, configure)
    comm = _communicator(command)
    parsed = comm.agree("command line", parse)
    run = comm.agree("command line", lambda: _command(command))
    config = comm.agree("configuration", lambda: _checked(configure()))
    comm.agree("environment", begin)
    failure.show_traceback = config.debug
    if config.debug and comm.local_rank == 0:
        write_error("".join(f"dptrain: {line}\n" for line in records.left_alone))
    watchdog.limit(config.stall_warning, config.stall_timeout)
    _check_same_everywhere(comm, config)
    if getattr(parsed, "print_config", False):
        if comm.rank == 0:
            print(to_yaml(config), end="")
        return 0
    if config.model.function is not None:
        from dptrain.cli.options.model_function import loaded

        config = loaded(config, parsed, comm)
    if config.mesh is not None and command == "train":
        from dptrain.cli.options.mesh import arranged

        comm = arranged(config.mesh, comm, config.stages)
    if config.stages > 1 and command == "train":
        from dptrain.cli.options.mesh import in_stages

        comm = in_stages(config.stages, comm)
    _collect_from_here()
    return run(config, comm, parsed)


def _collect_from_here() -> None:
    """Re-enable garbage collection, except of imported objects, where `dptrain.__main__` stopped it."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()


def _tried(action: Callable[[], T]) -> Callable[[], T]:
    """Run an action now; return a function that later, on all ranks together, gives its result or raises its error."""
    try:
        result = action()
    except Exception as error:
        failure = error

        def fail() -> T:
            raise failure

        return fail
    return lambda: result


def _begin_log(command: str, parse: Callable[[], argparse.Namespace], configure: Callable[[], Config]) -> None:
    """Begin the log of a training or a sweep; ConfigError for a wrong format in the environment."""
    launch = detect_launch()
    try:
        parsed, config = parse(), configure()
    except Exception:  # reported when all ranks know of it
        return
    if command in ("train", "sweep") and not parsed.print_config:
        begin_log(config.log_format, 0 if launch is None else launch.rank)


def _announce(command: str, parse: Callable[[], argparse.Namespace], configure: Callable[[], Config]) -> None:
    """Print on rank 0 what begins: libraries, MPI and data take seconds."""
    launch = detect_launch()
    if command not in ("train", "sweep") or (launch is not None and launch.rank != 0):
        return
    try:
        parsed, config = parse(), configure()
    except Exception:  # reported when all ranks know of it
        return
    if config.verbose != 0 and not parsed.print_config:
        ranks = f" on {launch.size} ranks" if launch is not None and launch.size > 1 else ""
        terminal.say(f"dptrain {__version__}{ranks}: loading {config.data.name}")


# Subcommands, each a function of that name in a module of that name here; the first is what runs where none is given.
COMMANDS = (
    *("train", "evaluate", "predict", "export", "index", "report", "runs", "sweep", "doctor", "explain", "launch"),
    "serve",
)
# Subcommands whose modules define their options (OPTIONS), with slow imports inside functions.
_OWN_OPTIONS = ("evaluate", "predict", "export", "index", "report", "runs", "serve")


def _command(name: str) -> "Command":
    function: Command = getattr(import_module(f"dptrain.cli.commands.{name}"), name)
    return function


def _communicator(command: str) -> "Communicator":
    """Return the ranks; where MPI is broken, the doctor still checks each process alone."""
    from dptrain import comm as comms

    try:
        return comms.current()
    except Exception:
        if command != "doctor":
            raise
        return comms.SoloCommunicator()


def _check_same_everywhere(comm: "Communicator", config: Config) -> None:
    import numpy as np

    versions = {"dptrain": __version__, "numpy": np.__version__, "python": platform.python_version()}
    tree = to_dict(config)
    flat = {leaf.path: value_at(tree, leaf.path) for leaf in leaves()}
    flat |= {f"version of {name}": version for name, version in versions.items()}
    comm.require_same("the ranks are set up differently", flat)


# Parsing


def _split_command(argv: Sequence[str]) -> tuple[str, list[str]]:
    if argv and argv[0] == "help":
        return (argv[1] if len(argv) > 1 else COMMANDS[0]), ["--help"]
    if argv and not argv[0].startswith("-"):
        return argv[0], list(argv[1:])
    return COMMANDS[0], list(argv)


class _Help(argparse.RawDescriptionHelpFormatter):
    """Help that lists each option once, by its short flag where it has one."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        names = action.option_strings
        dotted = [name for name in names[1:] if "." in name or "_" in name]
        action.option_strings = [name for name in names if name not in dotted]
        try:
            return super()._format_action_invocation(action)
        finally:
            action.option_strings = names


def _build_parser(command: str) -> Parser:
    """Return a subcommand's parser: its own options, and the run configuration's that it takes."""
    if command in _OWN_OPTIONS:
        options: Options = import_module(f"dptrain.cli.commands.{command}").OPTIONS
        parser = Parser(
            prog=f"dptrain {command}",
            usage=f"python -m dptrain {command} {options.usage}",
            description=options.description,
            formatter_class=_Help,
            allow_abbrev=False,
        )
        options.add(parser)
        _add_fields(parser, [leaf for leaf in leaves() if leaf.path in options.fields])
        return parser
    parser = Parser(
        prog="dptrain",
        usage=f"python -m dptrain {command if command in _ABOUT else '[COMMAND]'} [options]",
        description=_ABOUT.get(command, _DESCRIPTION),
        epilog="Every option can also be written with its group, as in a file:\n"
        "--optimizer.learning_rate. The command line overrides the file.\n"
        "--help data shows one group alone, and so on.",
        formatter_class=_Help,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"dptrain {__version__}")
    parser.add_argument("--config", metavar="FILE", help="read options from a YAML file, such as a run's config.yaml")
    parser.add_argument("--print-config", action="store_true", help="print the configuration as YAML and exit")
    if command == "sweep":
        add_options(parser)
    if command == "explain":
        group = parser.add_argument_group("explain")
        group.add_argument("run", metavar="RUN", nargs="?", help="a run's folder or a .keras file, instead of options")
        add_custom_objects(group)
        group.add_argument(
            "--step", metavar="train|test|predict", default="train", help="the step to show (default: train)"
        )
        shape = "shape of a sample of uint8 pixels, such as 3,32; default: that of --data FILE, or 28,28"
        group.add_argument("--input-shape", metavar="SHAPE", help=shape)
        classes = "number of classes; default: that of --data FILE, or 10"
        group.add_argument("--classes", metavar="CLASSES", help=classes)
        kernels = "show which ops each kernel of the device computes; of a GPU also its predicted time"
        group.add_argument("--kernels", action="store_true", help=kernels)
        text = "show the C++ file generated for them; with --device cuda the CUDA C++ file, which needs no GPU"
        group.add_argument("--code", action="store_true", help=text)
        scaling_options.add_options(parser)
    _add_fields(parser, leaves(), command if command in _SHOWING_SOME else None)
    return parser


def _add_fields(parser: Parser, fields: Iterable[Leaf], command: str | None = None) -> None:
    """Add options; `command`: the help lists only the fields that it shows."""
    existing = {option for action in parser._actions for option in action.option_strings}
    groups: dict[str, Any] = {}
    for leaf in fields:
        section = leaf.path.rpartition(".")[0] or "run"
        if section not in groups:
            groups[section] = parser.add_argument_group(section, _ABOUT_GROUPS.get(section))
        # A sweep's --keep is about models: a run's is --checkpoint.keep there, which a sweep has no use for.
        names = [f"--{leaf.flag}"] if leaf.flag and f"--{leaf.flag}" not in existing else []
        if f"--{leaf.path}" not in names:
            names.append(f"--{leaf.path}")
        default = "" if leaf.default in (None, {}, ()) or leaf.is_flag else f" (default: {_shown(leaf.default)})"
        groups[section].add_argument(
            *names,
            dest=leaf.path,
            default=argparse.SUPPRESS,
            metavar=_metavar(leaf),
            help=(leaf.help + _listed(leaf) + default).replace("%", "%%")
            if command is None or command in leaf.shown_in
            else argparse.SUPPRESS,
            **({"action": "append"} if leaf.is_mapping else {"action": Gathered} if leaf.is_gathered else {}),
            **({} if leaf.alone is None else {"nargs": "?", "const": leaf.alone}),
        )


def _metavar(leaf: Leaf) -> str:
    if leaf.is_mapping:
        return "NAME=VALUE"
    choices = "" if _listed(leaf) else "|".join(leaf.choices)
    return "on|off" if leaf.is_flag else choices or leaf.path.rpartition(".")[2].upper()


def _listed(leaf: Leaf) -> str:
    """Return an option's choices for its text if they are too many for its line."""
    return f": {', '.join(leaf.choices)}" if len(leaf.choices) > _MOST_CHOICES else ""


def _shown(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _parse(command: str, arguments: Sequence[str]) -> argparse.Namespace:
    if command not in COMMANDS:
        script = "; python -m dptrain launch -n 4 -- python script.py runs a script" if command.endswith(".py") else ""
        raise ConfigError(f"unknown command {command!r}{script or suggest(command, COMMANDS)}")
    parser = _build_parser(command)
    if len(arguments) > 1 and arguments[-2] in ("-h", "--help"):
        _show_group(parser, arguments[-1])
    return parser.parse_args(arguments)


def _show_group(parser: Parser, name: str) -> NoReturn:
    """Print the help of one group of options, and exit."""
    groups = {str(group.title): group for group in parser._action_groups if group._group_actions}
    if name not in groups:
        raise ConfigError(f"--help {name}: no such group{suggest(name, [*groups])}; the groups are {', '.join(groups)}")
    parser._action_groups, parser.description, parser.epilog = [groups[name]], None, None
    parser.print_help()
    parser.exit()


def _configure(parsed: argparse.Namespace) -> Config:
    source = getattr(parsed, "config", None)
    file = {} if source is None else read_file(Path(source))
    paths = {leaf.path for leaf in leaves()}
    overrides = {path: value for path, value in vars(parsed).items() if path in paths}
    if "model.arguments" in overrides:
        from dptrain.cli.options.model_function import parse_argument

        arguments = [parse_argument(text) for text in overrides.pop("model.arguments")]
        overrides |= {f"model.arguments.{name}": value for name, value in arguments}
    return resolve(file, str(source), overrides)


def _checked(config: Config) -> Config:
    """Return the configuration; refuse contradicting fields before any data is read."""
    from dptrain.cli.building import make_optimizer

    make_optimizer(config)
    if verbosity(config) == "auto":
        terminal.progress_mode()
    return config
