"""Reads other jobs' run folders, without trusting, changing or executing anything there."""

import json
import os
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from dptrain.cli.options.config import Config, check_keys, leaves, resolve, to_dict
from dptrain.errors import ConfigError, DataError
from dptrain.runtime.storage.files import open_directory
from dptrain.runtime.storage.locks import LOCK
from dptrain.runtime.storage.yaml_files import MAX_BYTES, parse_mapping
from dptrain.runtime.text import one_line
from dptrain.saving.run_folder import CONFIG, METRICS, PLAN, SUMMARY

# Most bytes read of a file: of metrics the end, or all to draw them.
_MAX_TEXT, _TAIL, _MAX_METRICS = 1 << 20, 1 << 16, 1 << 26
_MAX_EPOCHS = 100_000
# Most settings of a configuration, and characters of a setting that is parsed as YAML.
_MOST_ENTRIES, _LONG = 2000, 1 << 13
# Most bytes of a configuration's file.
_SECTION = re.compile(r"(\w+):\n((?:  .*\n)+)")


@dataclass(frozen=True)
class RunRecord:
    """A run as its folder describes it."""

    name: str  # of the folder
    path: Path
    state: str  # "finished", "running" or "interrupted"
    started: str  # ISO time; of an unfinished run its folder's creation
    settings: Mapping[str, Any]  # by dotted path, with defaults
    epochs: int  # trained
    planned: int | None
    seconds: float | None  # None before its end
    metrics: Mapping[str, float]  # final, or so far
    best: Mapping[str, Any] = field(default_factory=dict)  # "epoch", "monitor" and "value"; empty if unknown
    directions: Mapping[str, str] = field(default_factory=dict)  # "up" or "down" of metrics, where known

    def value(self, key: str) -> float | None:
        """Return a metric, that of the best epoch if it is the monitored one."""
        is_best = self.best.get("monitor") == key
        return float(self.best["value"]) if is_best else self.metrics.get(key)


def read_runs(folder: Path) -> tuple[list[RunRecord], list[tuple[str, str]]]:
    """Return the runs in a folder (or the run that it is), sorted by name; and other entries with a reason."""
    try:
        if (folder / CONFIG).exists():
            return [read_run(folder)], []
        with os.scandir(folder) as entries:
            names = sorted(entry.name for entry in entries if _is_folder(entry))
    except OSError as error:
        raise DataError(f"{folder}: {error.strerror or error}; expected a folder of runs, such as runs") from error
    runs, others = [], []
    for name in names:
        try:
            runs.append(read_run(folder / name))
        except DataError as error:
            others.append((name, str(error).removeprefix(f"{folder / name}: ")))
        except (OSError, ValueError, ArithmeticError, RuntimeError) as error:  # one bad folder must not hide the others
            others.append((name, f"damaged ({one_line(error)[:200]})"))
    return runs, others


def _is_folder(entry: "os.DirEntry[str]") -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def read_run(path: Path) -> RunRecord:
    """Return the record of a run folder; DataError if it is no run's, or damaged."""
    if (path / PLAN).exists():
        raise DataError(f"{path}: a sweep, not a run; see its report.html")
    text = _text(path / CONFIG)
    if text is None:
        raise DataError(f"{path}: no run: it has no {CONFIG}")
    settings = _settings(path, text)
    summary_text = _text(path / SUMMARY)
    summary = {} if summary_text is None else _object(path / SUMMARY, summary_text)
    if summary_text is None and not (path / LOCK).exists():
        raise DataError(f"{path}: not a run: it has neither {SUMMARY} nor {LOCK}")
    last = {} if summary_text is not None else _last_epoch(path)
    planned, epochs = settings.get("train.epochs"), summary.get("epochs", last.get("epoch", 0))
    started = summary.get("started")
    best = summary.get("best")
    return RunRecord(
        Path(os.path.realpath(path)).name,
        path,
        "finished" if summary_text is not None else "running" if _is_locked(path / LOCK) else "interrupted",
        started if isinstance(started, str) else _time_of(path / CONFIG),
        settings,
        epochs if is_whole(epochs) else 0,
        planned if is_whole(planned) else None,
        summary["seconds"] if is_number(summary.get("seconds")) else None,
        numbers_of(summary.get("metrics", last)),
        best if isinstance(best, dict) and _is_best(best) else {},
        _directions(summary.get("directions")),
    )


def read_epochs(path: Path) -> list[dict[str, float]]:
    """Return the metrics of every epoch, without a torn last line."""
    content = _read(path / METRICS, _MAX_METRICS)
    if not content:
        raise DataError(f"{path}: no epoch has ended ({METRICS})")
    lines = content.decode(errors="replace").split("\n")[:-1]
    epochs = [numbers_of(_object(path / METRICS, line)) for line in lines[:_MAX_EPOCHS]]
    return [epoch for epoch in epochs if "epoch" in epoch]


def read_summary(path: Path) -> dict[str, Any]:
    """Return what summary.json holds, unchecked; DataError if the run has none, as it has not finished."""
    text = _text(path / SUMMARY)
    if text is None:
        raise DataError(f"{path}: the run has not finished: it has no {SUMMARY}")
    return _object(path / SUMMARY, text)


def read_config(path: Path) -> Config:
    """Return the configuration in a run folder."""
    where, text = str(path / CONFIG), _text(path / CONFIG)
    if text is None:
        raise DataError(f"{path}: no run: it has no {CONFIG}")
    try:
        tree = parse_mapping(text, where)
        if "data" not in tree:  # its default would be wrong
            raise ConfigError(f"{where}: the data set is not recorded")
        check_keys(tree, where)
        return resolve(tree, where, {})
    except ConfigError as error:
        raise DataError(f"{where}: damaged, or written by another version{str(error).removeprefix(where)}") from error


def _settings(path: Path, text: str) -> dict[str, Any]:
    """Return a configuration by dotted path, over the defaults, as earlier versions had fewer fields."""
    tree: dict[str, Any] = {}
    entries = 0
    try:
        # One line after the other: most of them are those of other runs, and YAML is slow to read.
        for entry in _split(text):
            section = _SECTION.fullmatch(entry)
            lines = [entry] if section is None else _split(textwrap.dedent(section[2]))
            entries += len(lines)
            if entries > _MOST_ENTRIES:
                raise DataError(f"{path}: damaged: {CONFIG} has more settings than any run")
            settings: dict[str, Any] = {}
            for line in lines:
                settings |= _entry(line)
            tree |= settings if section is None else {section[1]: settings}
    except ConfigError:
        if len(text) > MAX_BYTES // 4:
            raise DataError(f"{path}: damaged: {CONFIG} is not what a run writes") from None
        try:
            tree = parse_mapping(text, str(path / CONFIG))
        except ConfigError as error:
            raise DataError(f"{path}: damaged: {str(error).removeprefix(str(path) + '/')}") from error
    return dict(defaults() | dict(_flat(tree)))


def _split(text: str) -> list[str]:
    """Return a YAML mapping's entries as texts, with their indented lines."""
    return re.split(r"(?m)^(?=[^\s#-])", text)


def _entry(text: str) -> dict[str, Any]:
    """Parse an entry; a very long one stays text, as YAML takes seconds."""
    if len(text) <= _LONG:
        return _parsed(text)
    name, _, value = text.partition(":")
    return {name: " ".join(value.split())}


@lru_cache(1 << 14)
def _parsed(text: str) -> dict[str, Any]:
    return parse_mapping(text, CONFIG)


@lru_cache(1)
def defaults() -> dict[str, Any]:
    """Return the default settings by dotted path."""
    return dict(_flat(to_dict(Config())))


def _flat(tree: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def is_about_training(path: str) -> bool:
    """Whether a setting affects training, not only the job."""
    return path not in _about_job()


@cache
def _about_job() -> frozenset[str]:
    return frozenset(leaf.path for leaf in leaves() if leaf.about_job)


def _last_epoch(path: Path) -> dict[str, Any]:
    """Return the last complete line of the metrics, if any."""
    content = _read(path / METRICS, _TAIL, end=True)
    for line in reversed((content or b"").split(b"\n")[:-1]):
        try:
            return _object(path / METRICS, line.decode(errors="replace"))
        except DataError:
            continue
    return {}


def _object(path: Path, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise DataError(f"{path.parent}: damaged: {path.name} is not JSON of names and values")
    return value


def _text(path: Path) -> str | None:
    content = _read(path, _MAX_TEXT)
    try:
        return None if content is None else content.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{path.parent}: damaged: {path.name} is not UTF-8 text") from error


def _read(path: Path, most: int, *, end: bool = False) -> bytes | None:
    """Return a regular file's content or end, None if it does not exist; follows no links."""
    try:
        with open_directory(path.parent) as folder:
            if not end:
                return folder.read(path.name, most)
            with folder.open(path.name) as file:
                file.seek(max(os.fstat(file.fileno()).st_size - most, 0))
                return file.read(most)
    except FileNotFoundError:
        return None
    except DataError as error:
        raise DataError(f"{path.parent}: {path.name}: {str(error).removeprefix(f'{path}: ')}") from error
    except OSError as error:
        raise DataError(f"{path.parent}: {path.name}: {error.strerror or error}") from error


def _is_locked(lock: Path) -> bool:
    try:
        import fcntl

        handle = os.open(lock, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (ImportError, OSError):
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(handle)
    return False


def _time_of(path: Path) -> str:
    import datetime

    try:
        moment = datetime.datetime.fromtimestamp(path.stat().st_mtime)
        return moment.astimezone().strftime("%Y-%m-%dT%H:%M:%S%z")
    except (ValueError, OverflowError):  # a year that no calendar of Python's has
        return "unknown"


def numbers_of(value: Any) -> dict[str, float]:
    """Return the entries of a JSON value that are finite numbers."""
    return {str(key): value for key, value in value.items() if is_number(value)} if isinstance(value, dict) else {}


def _directions(value: Any) -> dict[str, str]:
    entries = value.items() if isinstance(value, dict) else ()
    return {str(key): direction for key, direction in entries if direction in ("up", "down")}


def _is_best(best: Mapping[str, Any]) -> bool:
    return isinstance(best.get("monitor"), str) and is_number(best.get("value")) and is_whole(best.get("epoch"))


def is_number(value: Any) -> bool:
    """Whether a JSON value is a finite number."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and abs(value) <= sys.float_info.max  # an integer of JSON may be larger than any float


def is_whole(value: Any) -> bool:
    """Whether a JSON value is a count."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53
