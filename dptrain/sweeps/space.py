"""The search space of a sweep: seeds, grids and distributions as people write them.

A grid is `learning_rate=1e-3,3e-4`. A distribution is `0.1..0.5` (uniform), `log:1e-5..1e-1` (uniform in the
logarithm), the same with two integers (integers, both ends included), or `relu,tanh` (one of these).
"""

import hashlib
import itertools
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import yaml

from dptrain.errors import ConfigError
from dptrain.random import Purpose, stream
from dptrain.registry.names import suggestion
from dptrain.sweeps.records import Setting

MAX_SEEDS = 10_000
MAX_SETTINGS = 100_000
_SEED_END = 2**63

_NAME = re.compile(r"[A-Za-z_][\w.-]*", re.ASCII)
_PREFIX = re.compile(r"\s*([A-Za-z_]\w*)\s*:(.*)", re.DOTALL)
_SEEDS = re.compile(r"(\d{1,40})(?:\s*-\s*(\d{1,40}))?", re.ASCII)
_INTEGER = re.compile(r"[-+]?\d{1,40}", re.ASCII)
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?", re.ASCII)
# Numbers that YAML 1.1 reads as words: it requires a point and a sign, as in 1.0e+3.
_WITH_EXPONENT = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)[eE][-+]?\d+", re.ASCII)
# Words that need no quotation marks; neither a prefix nor a range.
_BARE = re.compile(r"[A-Za-z_](?:[-./+]?\w)*", re.ASCII)


def parse_seeds(words: str | int | Iterable[str | int]) -> tuple[int, ...]:
    """Return distinct seeds in written order, of texts such as "0-3,8,10-12", numbers, or several of these."""
    seeds: dict[int, None] = {}
    for word in _seed_words(words):
        low, high = _seed_range(word)
        if high >= _SEED_END:
            raise ConfigError(f"seeds: {_quoted(word)} is above 2**63 - 1")
        if low > high:
            raise ConfigError(f"seeds: the range {_quoted(word)} is descending; write the lower end first")
        for seed in range(low, high + 1):
            if seed in seeds:
                raise ConfigError(f"seeds: {seed} of {_quoted(word)} appears twice")
            if len(seeds) == MAX_SEEDS:
                raise ConfigError(f"seeds: with {_quoted(word)} there are more than {MAX_SEEDS}")
            seeds[seed] = None
    if not seeds:
        raise ConfigError(f"seeds: {_quoted(words)} contains no seed; expected a list such as 0-15 or 0,2,5")
    return tuple(seeds)


def _seed_words(words: Any) -> Iterable[Any]:
    if isinstance(words, str):
        return words.split(",") if words.strip() else []
    if isinstance(words, Iterable) and not isinstance(words, Mapping | bytes):
        return itertools.chain.from_iterable(word.split(",") if isinstance(word, str) else [word] for word in words)
    return [words]


def _seed_range(word: Any) -> tuple[int, int]:
    if isinstance(word, int | np.integer) and not isinstance(word, bool) and word >= 0:
        return int(word), int(word)
    match = _SEEDS.fullmatch(word.strip()) if isinstance(word, str) else None
    if match is None:
        raise ConfigError(f"seeds: {_quoted(word)} is neither an integer >= 0 nor a range such as 0-15")
    return int(match[1]), int(match[2] or match[1])


def parse_grid(text: str) -> tuple[str, list[Any]]:
    """Return name and values of "learning_rate=1e-3,3e-4"; values as in a YAML list, exponents need no point."""
    name, values = _assignment("grid", text)
    return name, list(_values(f"grid: {name}", _read(f"grid: {name}", values)))


def parse_random(text: str) -> tuple[str, "FieldDistribution"]:
    """Return name and distribution of "learning_rate=log:1e-5..1e-1"."""
    name, distribution = _assignment("random", text)
    return name, _distribution(name, distribution)


class FieldDistribution(ABC):
    """Distribution of one field's random values."""

    @abstractmethod
    def sample(self, rng: np.random.Generator) -> Any:
        """Return a JSON value."""

    @abstractmethod
    def describe(self) -> str:
        """Return the text that `parse_distribution` reads."""


@dataclass(frozen=True)
class Floats(FieldDistribution):
    """A float from `low` to `high`; `log`: uniform in the logarithm, with `low` above 0; ConfigError for bad bounds."""

    low: float
    high: float
    log: bool = False

    def __post_init__(self) -> None:
        _set(self, low=_float_end(self.low), high=_float_end(self.high))
        _check_ends(self.low, self.high, self.log)

    def sample(self, rng: np.random.Generator) -> float:
        """Return a float."""
        u = rng.random()
        if self.log:
            value = math.exp(math.log(self.low) * (1 - u) + math.log(self.high) * u)
        else:
            value = self.low * (1 - u) + self.high * u  # high - low may overflow
        return min(max(value, self.low), self.high)

    def describe(self) -> str:
        """Return "0.1..0.5" or "log:1e-05..0.1"."""
        return _described_range(self.low, self.high, self.log)


@dataclass(frozen=True)
class Integers(FieldDistribution):
    """An integer from `low` to `high`, both included.

    `log`: each as likely as the logarithm grows from half below to half above it; `low` is then above 0.

    Raises:
        ConfigError: the bounds are no integers of 64 bits, not in order, or have no logarithm.
    """

    low: int
    high: int
    log: bool = False

    def __post_init__(self) -> None:
        _set(self, low=_integer_end(self.low), high=_integer_end(self.high))
        _check_ends(self.low, self.high, self.log)

    def sample(self, rng: np.random.Generator) -> int:
        """Return an integer."""
        if not self.log:
            return int(rng.integers(self.low, self.high, endpoint=True))
        u = rng.random()
        value = round(math.exp(math.log(self.low - 0.5) * (1 - u) + math.log(self.high + 0.5) * u))
        return min(max(value, self.low), self.high)

    def describe(self) -> str:
        """Return "16..512" or "log:16..1024"."""
        return _described_range(self.low, self.high, self.log)


@dataclass(frozen=True)
class Choice(FieldDistribution):
    """One of several values (numbers, words, or lists of these), equally likely; ConfigError if empty or repeated."""

    choices: Sequence[Any]

    def __post_init__(self) -> None:
        _set(self, choices=_values("choice", self.choices))

    def sample(self, rng: np.random.Generator) -> Any:
        """Return one of the values."""
        return self.choices[int(rng.integers(len(self.choices)))]

    def describe(self) -> str:
        """Return "relu,tanh"."""
        return ",".join(map(_text, self.choices))


def parse_distribution(text: str) -> FieldDistribution:
    """Return the distribution of "0.1..0.5", "16..512", "log:1e-5..1e-1", "log:16..1024" or "relu,tanh"."""
    match = _PREFIX.match(text)
    if match is not None and match[1] != "log":
        raise ConfigError(f"{_quoted(text)}: unknown prefix {_quoted(match[1])}{suggestion(match[1], ['log'])}")
    body = text if match is None else match[2]
    if ".." in body and not any(mark in body for mark in ",[]{}'\""):
        low, high = (_end(text, word.strip()) for word in body.split("..", 1))
        try:
            if isinstance(low, int) and isinstance(high, int):
                return Integers(low, high, log=match is not None)
            return Floats(low, high, log=match is not None)
        except ConfigError as error:
            raise ConfigError(f"{_quoted(text)}: {error}") from error
    if match is not None:
        raise ConfigError(f"{_quoted(text)}: expected a range such as log:1e-5..1e-1")
    return Choice(_read("choice", text))


@dataclass(frozen=True)
class Space:
    """All settings of a sweep that are known beforehand.

    Args:
        grid: name -> values; all combinations are tried.
        random: name -> distribution, or the text or list of choices that `from_dict` reads. A draw takes a value from
            each.
        samples: number of random draws; 0 if nothing is random.
        seed: of the draws, 0 to 2**63 - 1.

    Raises:
        ConfigError: an invalid or repeated name, a field without values, a number out of range, more than 100_000
            settings.
    """

    grid: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    random: Mapping[str, FieldDistribution] = field(default_factory=dict)
    samples: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        grid = {
            _checked_name("grid", name): _values(f"grid: {name}", values)
            for name, values in _mapping("grid", self.grid).items()
        }
        random = {
            _checked_name("random", name): _distribution(name, value)
            for name, value in _mapping("random", self.random).items()
        }
        _set(self, grid=grid, random=random)
        for name in grid.keys() & random.keys():
            raise ConfigError(f"{name!r} is both in grid and in random; keep one")
        _check_integer("samples", self.samples, MAX_SETTINGS + 1)
        _check_integer("seed", self.seed, _SEED_END)
        if random and not self.samples:
            raise ConfigError(f"samples is 0: expected the number of random draws of {', '.join(random)}")
        if self.samples and not random:
            raise ConfigError(f"samples is {self.samples}, but no field is random")
        if self.size > MAX_SETTINGS:
            raise ConfigError(f"{self.size} settings, expected {MAX_SETTINGS} at most; use fewer values or samples")

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the swept fields: the grid's, then the random ones."""
        return (*self.grid, *self.random)

    @property
    def size(self) -> int:
        """Number of settings."""
        return math.prod(len(values) for values in self.grid.values()) * (self.samples if self.random else 1)

    def settings(self) -> list[Setting]:
        """Return every draw with every combination of the grid, draw by draw; one empty setting for an empty space.

        A drawn value is a function of (seed, draw, name): more samples keep the first ones, another field keeps the
        others' values. Draws from few values may repeat; such settings are kept.
        """
        draws = [self._draw(index) for index in range(self.samples)] if self.random else [{}]
        points = [dict(zip(self.grid, values, strict=True)) for values in itertools.product(*self.grid.values())]
        return [{**point, **draw} for draw in draws for point in points]

    def _draw(self, index: int) -> dict[str, Any]:
        return {
            name: distribution.sample(stream(self.seed, Purpose.SWEEP, index, _key(name)))
            for name, distribution in self.random.items()
        }

    def to_dict(self) -> dict[str, Any]:
        """Return the dictionary that `from_dict` reads, as JSON and YAML have it."""
        return {
            "grid": {name: list(values) for name, values in self.grid.items()},
            "random": {name: distribution.describe() for name, distribution in self.random.items()},
            "samples": self.samples,
            "seed": self.seed,
        }

    @classmethod
    def from_dict(cls, tree: Mapping[str, Any]) -> "Space":
        """Return the space of {"grid": {name: [...]}, "random": {name: "log:1e-5..1e-1"}, "samples": 20, "seed": 0}.

        Every key is optional. A random field may also be a list of choices, or a distribution. Raises as `Space`.
        """
        tree = _mapping("space", tree)
        keys = [each.name for each in fields(cls)]
        for key in tree:
            if key not in keys:
                raise ConfigError(f"space: unknown key {_quoted(key)}{suggestion(str(key), keys)}")
        return cls(**tree)


def label(setting: Setting, *, exact: bool = False) -> str:
    """Return "learning_rate=0.001, hidden=128": one line, values as in a grid, floats to six digits unless exact."""
    return ", ".join(f"{name}={_text(value if exact else _rounded(value))}" for name, value in setting.items())


def _assignment(what: str, text: str) -> tuple[str, str]:
    name, equals, values = text.partition("=")
    if not equals:
        raise ConfigError(f"{what}: {_quoted(text)} has no '='; expected name=values")
    return _checked_name(what, name.strip()), values


def _checked_name(what: str, name: Any) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(f"{what}: {_quoted(name)} is not a field's name")
    return name


def _distribution(name: str, value: Any) -> FieldDistribution:
    if isinstance(value, FieldDistribution):
        return value
    try:
        return parse_distribution(value) if isinstance(value, str) else Choice(value)
    except ConfigError as error:
        raise ConfigError(f"random: {name}: {error}") from error


def _mapping(what: str, tree: Any) -> Mapping[Any, Any]:
    if tree is None:
        return {}
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{what}: expected names with values, found {_quoted(tree)}")
    return tree


def _check_integer(name: str, value: Any, end: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < end:
        raise ConfigError(f"{name}: expected an integer of 0 to {end - 1}, found {_quoted(value)}")


def _set(record: Any, **values: Any) -> None:
    for name, value in values.items():
        object.__setattr__(record, name, value)


def _key(name: str) -> int:
    key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    # The first versions passed a list, which NumPy turns into floating-point numbers here; their draws stay.
    return key if key < 2**63 else min(int(float(key)), 2**64 - 2**11)


def _end(text: str, word: str) -> int | float:
    if _INTEGER.fullmatch(word):
        return int(word)
    if _NUMBER.fullmatch(word) and math.isfinite(float(word)):
        return float(word)
    raise ConfigError(f"{_quoted(text)}: {_quoted(word)} is not a finite number")


def _float_end(value: Any) -> float:
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{_quoted(value)} is not a finite number")
    try:
        end = float(value)
    except OverflowError:
        end = math.inf
    if not math.isfinite(end):
        raise ConfigError(f"{_quoted(value)} is not a finite number")
    return end


def _integer_end(value: Any) -> int:
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, bool) or not isinstance(value, int) or not -(2**63) <= value < 2**63:
        raise ConfigError(f"{_quoted(value)} is not a 64-bit integer")
    return value


def _check_ends(low: float, high: float, log: bool) -> None:
    if low >= high:
        raise ConfigError(f"the lower end {low!r} is not below the upper end {high!r}")
    if log and low <= 0:
        raise ConfigError(f"the lower end {low!r} is not above 0 and has no logarithm")


def _described_range(low: float, high: float, log: bool) -> str:
    return f"{'log:' if log else ''}{low!r}..{high!r}"


class _Loader(yaml.SafeLoader):
    """YAML for one line: no tags, no references, and dates are words."""

    yaml_implicit_resolvers = {  # noqa: RUF012  as in PyYAML
        first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if getattr(event, "anchor", None) is not None or getattr(event, "tag", None) is not None:
            raise yaml.composer.ComposerError(problem="tags and references are not read")
        return super().compose_node(parent, index)


def _read(where: str, text: str) -> list[Any]:
    """Parse a list without its brackets."""
    problem = "not a list of values"
    try:
        values = yaml.load(f"[{text}]", _Loader)  # a safe loader
        if isinstance(values, list):
            return values
    except yaml.YAMLError as error:
        problem = " ".join(str(getattr(error, "problem", None) or problem).split())
    except (ValueError, RecursionError):  # integers of thousands of digits; brackets in brackets
        pass
    raise ConfigError(f"{where}: cannot read {_quoted(text)}: {problem}")


def _values(where: str, values: Any) -> tuple[Any, ...]:
    values = values.tolist() if isinstance(values, np.ndarray) else values
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise ConfigError(f"{where}: expected a list of values, found {_quoted(values)}")
    if not values:
        raise ConfigError(f"{where}: no values")
    identities: set[Any] = set()
    plain = tuple(_plain(where, value) for value in values)
    for value in plain:
        identity = _identity(value)
        if identity in identities:
            raise ConfigError(f"{where}: {_shortened(_text(value))} appears twice")
        identities.add(identity)
    return plain


def _plain(where: str, value: Any, depth: int = 0) -> Any:
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    if isinstance(value, list | tuple) and depth < 8:
        return [_plain(where, item, depth + 1) for item in value]
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int) and -(2**63) <= value < 2**64:
        return value
    if isinstance(value, str):
        if _WITH_EXPONENT.fullmatch(value):
            value = float(value)
        elif not any("\ud800" <= letter <= "\udfff" for letter in value):  # lone surrogates, which no encoding has
            return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    raise ConfigError(f"{where}: {_quoted(value)} is not a finite number, a word or a list of these")


def _identity(value: Any) -> Any:
    """Return a key that is equal for equal values: 1 is 1.0, but not true."""
    if isinstance(value, list):
        return tuple(map(_identity, value))
    return isinstance(value, bool), value


def _rounded(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_text, value)) + "]"
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if not isinstance(value, str):
        return repr(value)
    resolvers = _Loader.yaml_implicit_resolvers.get(value[:1], [])
    if _BARE.fullmatch(value) and not any(pattern.match(value) for _, pattern in resolvers):
        return value
    quoted: str = yaml.safe_dump(value, default_style='"', allow_unicode=True, width=math.inf)
    return quoted.rstrip("\n")


def _quoted(value: Any) -> str:
    try:
        return _shortened(repr(value))
    except (ValueError, RecursionError):  # an integer of thousands of digits; a list that holds itself
        return f"this {type(value).__name__}"


def _shortened(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."
