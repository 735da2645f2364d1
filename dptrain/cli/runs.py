"""`python -m dptrain runs`: a table of run folders, and two or more of them side by side."""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dptrain.cli.config import Config, leaves
from dptrain.cli.parser import Options
from dptrain.cli.words import suggest
from dptrain.errors import ConfigError, DataError, printable
from dptrain.runtime import terminal
from dptrain.runtime.failure import phase

if TYPE_CHECKING:
    from rich.table import Table

    from dptrain.cli.run_records import RunRecord
    from dptrain.comm import Communicator

# Others than runs that are named, and columns of metrics.
_NAMED, _METRICS = 10, 3
_PLAIN_KEYS = ("name", "when", "state", "epochs", "seconds")


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dir", metavar="DIR", nargs="?", default="runs", help="folder of run folders (default: runs)")
    text = "name, when, state, epochs, seconds or a metric, such as val_loss: the best first (default: when)"
    parser.add_argument("--sort", metavar="KEY", default="when", help=text)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    text = "draw the curves of these runs, and show what differs; folders, or their names in DIR"
    parser.add_argument("--compare", metavar="RUN", nargs="+", help=text)
    text = "where --compare draws (default: compare-RUN-RUN.png)"
    parser.add_argument("--picture", metavar="FILE.png", help=text)


OPTIONS = Options("Show the runs in a folder, or compare some.", _add_options, ("debug",), "[DIR] [options]")


def runs(config: Config, comm: "Communicator", parsed: argparse.Namespace) -> int:
    """Print the table on rank 0. Collective.

    Args:
        config: not used.
        comm: the ranks.
        parsed: the command line.
    """
    phase.enter("runs")
    comm.agree("runs", lambda: _show(parsed) if comm.rank == 0 else None)
    return 0


def _show(parsed: argparse.Namespace) -> None:
    from dptrain.cli.run_records import read_runs

    folder = Path(parsed.dir)
    if parsed.compare is not None:
        _compare(folder, parsed.compare, parsed.picture)
        return
    if parsed.picture is not None:
        raise ConfigError("--picture says where --compare draws; name the runs: --compare A B")
    found, others = read_runs(folder)
    found = _sorted(found, parsed.sort)
    if parsed.json:
        listed = [{"path": name, "why": why} for name, why in others]
        print(json.dumps({"runs": [_plain(one) for one in found], "others": listed}, indent=2, default=str))
        return
    if found:
        terminal.console().print(_table(found))
    else:
        terminal.say(f"no runs in {folder}")
    for name, why in others[:_NAMED]:
        terminal.say(f"{name}: {why}")
    if len(others) > _NAMED:
        print(f"and {len(others) - _NAMED} more that are no runs")


def _sorted(found: "list[RunRecord]", key: str) -> "list[RunRecord]":
    """Return runs in the order of a key; those without it come last.

    Raises:
        ConfigError: no run has such a key.
    """
    plain: dict[str, Any] = {
        "name": lambda one: one.name,
        "when": lambda one: one.started,
        "state": lambda one: one.state,
        "epochs": lambda one: one.epochs,
        "seconds": lambda one: one.seconds,
    }
    if key in plain:
        return sorted(found, key=lambda one: (plain[key](one) is None, plain[key](one)))
    known = {name for one in found for name in one.metrics}
    if key not in known:
        if not found:
            return []
        raise ConfigError(f"unknown --sort {key!r}{suggest(key, [*_PLAIN_KEYS, *sorted(known)])}")
    sign = -1 if _is_better_high(key) else 1

    def place(one: "RunRecord") -> tuple[bool, float]:
        value = one.value(key)
        return value is None, 0 if value is None else sign * value

    return sorted(found, key=place)


def _is_better_high(key: str) -> bool:
    """Whether more of a metric is better, as far as its name is one of dptrain's."""
    from dptrain import metrics

    try:
        return getattr(metrics.get(key.removeprefix("val_")), "_direction", None) == "up"
    except (ConfigError, ValueError):
        return False


def _plain(one: "RunRecord") -> dict[str, Any]:
    return {
        "name": one.name,
        "path": str(one.path),
        "state": one.state,
        "started": one.started,
        "epochs": one.epochs,
        "seconds": one.seconds,
        "metrics": dict(one.metrics),
        "best": {key: one.best[key] for key in ("epoch", "monitor", "value") if key in one.best},
        "settings": dict(one.settings),
    }


def differing(found: "Sequence[RunRecord]") -> list[str]:
    """Return the paths of settings that are not the same in all runs; of one run alone those that were set."""
    from dptrain.cli.run_records import defaults, is_about_training

    paths = dict.fromkeys(path for one in found for path in one.settings if is_about_training(path))
    settings = [one.settings for one in found] + ([defaults()] if len(found) == 1 else [])
    return [path for path in paths if len({repr(one.get(path)) for one in settings}) > 1]


def _names(paths: Sequence[str]) -> list[str]:
    """Return how settings are typed: by their flags, else by the ends of their paths."""
    flags = {leaf.path: leaf.flag.replace("-", "_") for leaf in leaves() if leaf.flag is not None}
    return [flags.get(path, path.rpartition(".")[2]) for path in paths]


def _table(found: "Sequence[RunRecord]") -> "Table":
    from rich.table import Table

    from dptrain.cli.run_records import defaults
    from dptrain.sweeps import formatting

    paths = [path for path in differing(found) if path not in ("train.epochs", "model.digest")]
    names, usual = _names(paths), defaults()
    shown = [key for key in dict.fromkeys(key for one in found for key in one.metrics) if key.startswith("val_")]
    shown = shown[:_METRICS]
    table = Table("run", "when", "state", "epochs", "settings that differ", *map(printable, shown), "best")
    for one in found:
        # What is as it is by default goes without saying.
        values = ((name, one.settings.get(path), usual.get(path)) for name, path in zip(names, paths, strict=True))
        said = {name: value for name, value, default in values if value != default}
        total = "" if one.asked is None else f"/{one.asked}"
        _add_row(
            table,
            one.name,
            one.started[:16].replace("T", " "),
            one.state,
            f"{one.epochs}{total}",
            formatting.described(said),
            *(formatting.number(one.metrics.get(key)) for key in shown),
            _best(one.best),
        )
    return table


def _add_row(table: "Table", *cells: str) -> None:
    """Add texts as they are: a file's could hold rich's markup, or a terminal's escape codes."""
    from rich.text import Text

    table.add_row(*(Text(printable(cell), overflow="fold") for cell in cells))


def _compare(folder: Path, names: Sequence[str], picture: str | None) -> None:
    from rich.table import Table

    from dptrain.cli.curves import draw_comparison
    from dptrain.cli.run_records import read_epochs, read_run
    from dptrain.runtime.files import write_atomically
    from dptrain.sweeps import formatting

    if len(names) < 2:
        raise ConfigError("--compare: expected two runs or more")
    places = [_place(folder, name) for name in names]
    if picture is not None and not picture.endswith(".png"):
        raise ConfigError(f"--picture {picture}: expected a file that ends in .png")
    found = [read_run(place) for place in places]
    titles = [printable(title) for title in _distinct(found, names)]
    table = Table("", *titles)
    paths = differing(found)
    for name, path in zip(_names(paths), paths, strict=True):
        _add_row(table, name, *(formatting.brief(one.settings.get(path)) for one in found))
    table.add_section()
    _add_row(table, "state", *(one.state for one in found))
    _add_row(table, "epochs", *(str(one.epochs) for one in found))
    _add_row(table, "seconds", *(formatting.number(one.seconds) for one in found))
    for key in dict.fromkeys(key for one in found for key in one.metrics):
        if key not in ("epoch", "seconds", "samples_per_second"):
            _add_row(table, key, *(formatting.number(one.metrics.get(key)) for one in found))
    if any(one.best for one in found):
        _add_row(table, "best", *(_best(one.best) for one in found))
    terminal.console().print(table)
    drawn = draw_comparison({title: read_epochs(one.path) for title, one in zip(titles, found, strict=True)})
    if isinstance(drawn, str):
        terminal.say(drawn)
        return
    place = Path(picture or f"{'-'.join(['compare', *(_file_name(title) for title in titles)])[:200]}.png")
    write_atomically(place, drawn, advice="choose another --picture")
    terminal.say(f"Curves in {place}")


def _best(found: Mapping[str, Any]) -> str:
    from dptrain.sweeps import formatting

    return f"{found['monitor']} {formatting.number(found['value'])} in epoch {found['epoch']}" if found else "-"


def _place(folder: Path, name: str) -> Path:
    """Return the folder of a run that is named by its path, or by its name in a folder of runs.

    Raises:
        DataError: there is none.
    """
    for place in (Path(name), folder / name):
        if place.is_dir():
            return place
    known = sorted(one.name for one in folder.iterdir() if one.is_dir()) if folder.is_dir() else []
    raise DataError(f"--compare {name}: no such folder here or in {folder}{suggest(name, known)}")


def _distinct(found: "Sequence[RunRecord]", names: Sequence[str]) -> list[str]:
    """Return the names of folders, or where two have the same how they were given; equal ones get numbers."""
    titles = [one.name for one in found]
    if len(set(titles)) < len(titles):
        titles = [f"{number}: {name}" for number, name in enumerate(names, 1)]
    return titles


def _file_name(text: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in text)[:60]
