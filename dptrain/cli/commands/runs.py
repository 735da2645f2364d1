"""`python -m dptrain runs`: a table of runs, or two and more side by side."""

import argparse
import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dptrain.cli.options.config import Config, leaves
from dptrain.cli.options.parser import Options
from dptrain.cli.options.words import suggest
from dptrain.errors import ConfigError, DataError, printable
from dptrain.runtime.failure import phase
from dptrain.runtime.output import terminal

if TYPE_CHECKING:
    from rich.table import Table

    from dptrain.cli.run_records import RunRecord
    from dptrain.comm import Communicator

# The most named entries that are not runs, columns of metrics, and columns before these.
_NAMED, _METRICS, _FIXED = 10, 3, 5
# Characters at most of a cell of the table.
_CELL = 500
_PLAIN_KEYS = ("name", "when", "state", "epochs", "seconds")


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dir", metavar="DIR", nargs="?", default="runs", help="folder of run folders (default: runs)")
    text = "name, when, state, epochs, seconds or a metric, such as val_loss or NAME:max: best first (default: when)"
    parser.add_argument("--sort", metavar="KEY", default="when", help=text)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    text = "draw the curves of these runs, and show what differs; folders, or their names in DIR"
    parser.add_argument("--compare", metavar="RUN", nargs="+", help=text)
    text = "file of --compare's picture (default: compare-RUN-RUN.png)"
    parser.add_argument("--picture", metavar="FILE.png", help=text)


OPTIONS = Options("Show the runs in a folder, or compare some.", _add_options, ("debug",), "[DIR] [options]")


def runs(config: Config, comm: "Communicator", parsed: argparse.Namespace) -> int:
    """Print the table on rank 0. Collective."""
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
        raise ConfigError("--picture is the file that --compare draws; add the runs: --compare A B")
    records, others = read_runs(folder)
    metric, mode = _metric(records, parsed.sort)
    records = _sorted(records, metric, mode)
    if parsed.json:
        listed = [{"path": name, "why": why} for name, why in others]
        print(json.dumps({"runs": [_plain(record) for record in records], "others": listed}, indent=2, default=str))
        return
    if records:
        _print_table(records, metric)
    else:
        terminal.say(f"no runs in {folder}")
    for name, why in others[:_NAMED]:
        terminal.say(f"{name}: {why}")
    if len(others) > _NAMED:
        print(f"and {len(others) - _NAMED} more that are not runs")


def _metric(records: "Sequence[RunRecord]", key: str) -> tuple[str, str]:
    """Return what --sort names and, of a metric, whether better values are "up" or "down"."""
    metrics = {name for record in records for name in record.metrics}
    name, colon, mode = (key, "", "") if key in metrics else key.partition(":")
    if (name in _PLAIN_KEYS and not colon) or not records:
        return name, ""
    if name not in metrics:
        raise ConfigError(f"unknown --sort {key!r}{suggest(name, [*_PLAIN_KEYS, *sorted(metrics)])}")
    if colon and mode not in ("min", "max"):
        raise ConfigError(f"--sort {key!r}: expected {name}:max or {name}:min")
    direction = {"min": "down", "max": "up"}.get(mode) or _direction(records, name)
    if direction is None:
        raise ConfigError(f"--sort {key!r}: its direction is unknown: --sort {name}:max or {name}:min")
    return name, direction


def _direction(records: "Sequence[RunRecord]", name: str) -> str | None:
    """Return the direction that a run has recorded for a metric, else that of dptrain's metric of this name."""
    from dptrain import metrics
    from dptrain.callbacks.monitor import direction_of

    for record in records:
        if name in record.directions:
            return record.directions[name]
    try:
        known = metrics.get(name.removeprefix("val_"))
    except (ConfigError, ValueError):
        known = None
    return direction_of(name, {name.removeprefix("val_"): known} if isinstance(known, metrics.Metric) else {})


def _sorted(records: "list[RunRecord]", key: str, direction: str) -> "list[RunRecord]":
    sign = -1 if direction == "up" else 1

    def position(record: "RunRecord") -> tuple[bool, Any]:
        plain: dict[str, Any] = {
            "name": record.name,
            "when": record.started,
            "state": record.state,
            "epochs": record.epochs,
            "seconds": record.seconds,
        }
        if not direction:
            return plain[key] is None, plain[key]
        value = record.value(key)
        return value is None, value and sign * value

    return sorted(records, key=position)


def _plain(record: "RunRecord") -> dict[str, Any]:
    return {
        "name": record.name,
        "path": str(record.path),
        "state": record.state,
        "started": record.started,
        "epochs": record.epochs,
        "seconds": record.seconds,
        "metrics": dict(record.metrics),
        "best": {key: record.best[key] for key in ("epoch", "monitor", "value") if key in record.best},
        "settings": dict(record.settings),
    }


def differing(records: "Sequence[RunRecord]") -> list[str]:
    """Return the paths of settings that differ between runs, or of a single run from the defaults."""
    from dptrain.cli.run_records import defaults, is_about_training

    paths = dict.fromkeys(path for record in records for path in record.settings if is_about_training(path))
    settings = [record.settings for record in records] + ([defaults()] if len(records) == 1 else [])
    return [path for path in paths if len({repr(values.get(path)) for values in settings}) > 1]


def _names(paths: Sequence[str]) -> list[str]:
    """Return how settings are typed: by flag, or the last part of the path."""
    flags = {leaf.path: leaf.flag.replace("-", "_") for leaf in leaves() if leaf.flag is not None}
    return [flags.get(path, path.rpartition(".")[2]) for path in paths]


def _print_table(records: "Sequence[RunRecord]", metric: str) -> None:
    """Print the table, without the columns for which the window is too narrow."""
    table, titles = _table(records, metric, ()), _titles(records, metric)
    hidden: list[str] = []
    columns = terminal.window()
    droppable = ["best", "when", *reversed([title for title in titles[_FIXED:-1] if title != metric]), "epochs"]
    while columns is not None and droppable and terminal.natural_width(table) > columns:
        hidden.append(droppable.pop(0))
        table = _table(records, metric, hidden)
    terminal.show_table(table)
    if hidden:
        terminal.say(f"not shown, for {columns} columns: {', '.join(map(_cut, hidden))}; --json has all")


def _titles(records: "Sequence[RunRecord]", metric: str) -> list[str]:
    keys = dict.fromkeys(key for record in records for key in record.metrics)
    shown = [key for key in keys if key.startswith("val_") and key != metric][:_METRICS]
    if metric in keys:  # what the table is sorted by
        shown = [metric, *shown[: _METRICS - 1]]
    return ["run", "when", "state", "epochs", "settings that differ", *shown, "best"]


def _table(records: "Sequence[RunRecord]", metric: str, hidden: Collection[str]) -> "Table":
    """Return the table of runs without hidden columns."""
    from dptrain.cli.run_records import defaults
    from dptrain.sweeps.reporting import formatting

    paths = [path for path in differing(records) if path not in ("train.epochs", "model.digest")]
    names, usual = _names(paths), defaults()
    titles = _titles(records, metric)
    table = terminal.table(*(_cut(title) for title in titles if title not in hidden))
    for record in records:
        # Defaults are not shown.
        values = ((name, record.settings.get(path), usual.get(path)) for name, path in zip(names, paths, strict=True))
        changed = {name: value for name, value, default in values if value != default}
        total = "" if record.planned is None else f"/{record.planned}"
        cells = [
            record.name,
            record.started[:16].replace("T", " "),
            record.state,
            f"{record.epochs}{total}",
            formatting.described(changed),
            *(formatting.number(record.metrics.get(key)) for key in titles[_FIXED:-1]),
            _best(record.best),
        ]
        _add_row(table, *(cell for title, cell in zip(titles, cells, strict=True) if title not in hidden))
    return table


def _add_row(table: "Table", *cells: str) -> None:
    """Add plain texts to the table: a file's could hold Rich markup or escape codes."""
    from rich.text import Text

    table.add_row(*(Text(_cut(cell), overflow="fold") for cell in cells))


def _cut(text: str) -> str:
    """Return the beginning of a text, printable: a foreign folder's file may hold a megabyte in place of a word."""
    return printable(text if len(text) <= _CELL else f"{text[:_CELL]}...")


def _compare(folder: Path, names: Sequence[str], picture: str | None) -> None:
    from dptrain.cli.curves import draw_comparison
    from dptrain.cli.run_records import read_epochs, read_run
    from dptrain.runtime.storage.files import write_atomically
    from dptrain.sweeps.reporting import formatting

    if len(names) < 2:
        raise ConfigError("--compare: expected two runs or more")
    places = [_place(folder, name) for name in names]
    if picture is not None and not picture.endswith(".png"):
        raise ConfigError(f"--picture {picture}: expected a file that ends in .png")
    records = [read_run(place) for place in places]
    titles = [printable(title) for title in _distinct(records, names)]
    table = terminal.table("", *titles)
    paths = differing(records)
    for name, path in zip(_names(paths), paths, strict=True):
        _add_row(table, name, *(formatting.brief(record.settings.get(path)) for record in records))
    table.add_section()
    _add_row(table, "state", *(record.state for record in records))
    _add_row(table, "epochs", *(str(record.epochs) for record in records))
    _add_row(table, "seconds", *(formatting.number(record.seconds) for record in records))
    for key in dict.fromkeys(key for record in records for key in record.metrics):
        if key not in ("epoch", "seconds", "samples_per_second"):
            _add_row(table, key, *(formatting.number(record.metrics.get(key)) for record in records))
    if any(record.best for record in records):
        _add_row(table, "best", *(_best(record.best) for record in records))
    terminal.show_table(table)
    drawn = draw_comparison({title: read_epochs(record.path) for title, record in zip(titles, records, strict=True)})
    if isinstance(drawn, str):
        terminal.say(drawn)
        return
    place = Path(picture or f"{'-'.join(['compare', *(_file_name(title) for title in titles)])[:200]}.png")
    write_atomically(place, drawn, advice="choose another --picture")
    terminal.say(f"Curves in {place}")


def _best(best: Mapping[str, Any]) -> str:
    from dptrain.sweeps.reporting import formatting

    return f"{best['monitor']} {formatting.number(best['value'])} in epoch {best['epoch']}" if best else "-"


def _place(folder: Path, name: str) -> Path:
    """Return a run's folder, given its path or its name in `folder`."""
    for place in (Path(name), folder / name):
        if place.is_dir():
            return place
    names = sorted(entry.name for entry in folder.iterdir() if entry.is_dir()) if folder.is_dir() else []
    raise DataError(f"--compare {name}: no such folder here or in {folder}{suggest(name, names)}")


def _distinct(records: "Sequence[RunRecord]", names: Sequence[str]) -> list[str]:
    """Return folder names, or numbered names as typed where they repeat."""
    titles = [record.name for record in records]
    if len(set(titles)) < len(titles):
        titles = [f"{number}: {name}" for number, name in enumerate(names, 1)]
    return titles


def _file_name(text: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in text)[:60]
