"""`--schedule cosine:warmup=500`: Keras' learning-rate schedules as text.

NAME, or NAME:KEY=VALUE,KEY=VALUE (in a grid, where commas separate values, NAME:KEY=VALUE:KEY=VALUE). Lengths are steps
(500), epochs (2epochs) or a part of the training (5%); a decay takes all of it unless `steps` says otherwise.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dptrain.cli.options.words import suggest
from dptrain.errors import ConfigError

if TYPE_CHECKING:
    from dptrain.optimizers.schedules import LearningRateSchedule

_NUMBER = r"\d{1,12}(?:\.\d{0,20})?(?:e-?\d{1,2})?"
_LENGTH = re.compile(rf"(?P<number>{_NUMBER})(?P<unit>%|epochs?|)")


@dataclass(frozen=True)
class Length:
    """A number of steps, epochs, or percent of the training."""

    number: float
    unit: str = ""  # "" for steps, "epochs" or "%"

    def steps(self, total: int, epoch: int) -> int:
        """Convert to steps, given the training's total and an epoch's."""
        return round(self.number * {"": 1, "epochs": epoch, "%": total / 100}[self.unit])

    def __str__(self) -> str:
        return f"{_text(self.number)}{self.unit}"


# Kinds of numbers in words, with their checks.
_PART, _FACTOR, _ABOVE, _FROM_1 = "0 to 1", "above 0, at most 1", "above 0", "of at least 1"
_FITS = {
    _PART: lambda value: 0 <= value <= 1,
    _FACTOR: lambda value: 0 < value <= 1,
    _ABOVE: lambda value: value > 0,
    _FROM_1: lambda value: value >= 1,
}
# Keys of each schedule with type and default; None for the rest of the training.
_WARMUP = {"warmup": (Length, Length(0)), "start": (_PART, 0.0)}
_END = {"steps": (Length, None), "alpha": (_PART, 0.0)}
SCHEDULES: dict[str, dict[str, tuple[Any, Any]]] = {
    "constant": {**_WARMUP},
    "cosine": {**_WARMUP, **_END},
    "cosine_restarts": {
        "first": (Length, Length(1, "epochs")),
        "t_mul": (_FROM_1, 2.0),
        "m_mul": (_FACTOR, 1.0),
        "alpha": (_PART, 0.0),
    },
    "linear": {**_END},
    "polynomial": {**_END, "power": (_ABOVE, 2.0)},
    "exponential": {"steps": (Length, None), "alpha": (_FACTOR, 0.01)},
    "step": {"every": (Length, Length(30, "%")), "factor": (_FACTOR, 0.1)},
}


@dataclass(frozen=True)
class Schedule:
    """A schedule's name and the values set, by key."""

    name: str
    values: Mapping[str, Any]

    def __str__(self) -> str:
        parts = [f"{key}={value if isinstance(value, Length) else _text(value)}" for key, value in self.values.items()]
        return f"{self.name}:{','.join(parts)}" if parts else self.name

    @property
    def follows_training(self) -> bool:
        """Whether it depends on the number of epochs."""
        values = self._filled().values()
        return any(value is None or (isinstance(value, Length) and value.unit == "%") for value in values)

    def make(self, rate: float, epoch: int, epochs: int) -> "LearningRateSchedule | float":
        """Return Keras' schedule from the highest learning rate, an epoch's steps and the number of epochs."""
        from dptrain.optimizers import schedules

        total = max(epoch * epochs, 1)
        arguments = {
            key: value.steps(total, epoch) if isinstance(value, Length) else value
            for key, value in self._filled().items()
        }
        warmup, steps = arguments.get("warmup", 0), arguments.get("steps")
        if steps is None:
            steps = total - warmup
        for key, length in {**arguments, "steps": steps}.items():
            if key in ("steps", "first", "every") and length < 1:
                training = f"the training has {total} steps"
                raise ConfigError(
                    f"optimizer.schedule = {self}: {training}, no more than its warmup"
                    if warmup and key == "steps"
                    else f"optimizer.schedule = {self}: {key} is less than a step; {training}"
                )
        if self.name == "constant":
            if not warmup:
                return rate
            return schedules.CosineDecay(arguments["start"] * rate, 1, 1.0, warmup_target=rate, warmup_steps=warmup)
        if self.name == "cosine":
            if not warmup:
                return schedules.CosineDecay(rate, steps, arguments["alpha"])
            begin = arguments["start"] * rate
            return schedules.CosineDecay(begin, steps, arguments["alpha"], warmup_target=rate, warmup_steps=warmup)
        if self.name == "cosine_restarts":
            return schedules.CosineDecayRestarts(
                rate, arguments["first"], arguments["t_mul"], arguments["m_mul"], arguments["alpha"]
            )
        if self.name in ("linear", "polynomial"):
            return schedules.PolynomialDecay(rate, steps, arguments["alpha"] * rate, arguments.get("power", 1.0))
        if self.name == "exponential":
            return schedules.ExponentialDecay(rate, steps, arguments["alpha"])
        return schedules.ExponentialDecay(rate, arguments["every"], arguments["factor"], staircase=True)

    def _filled(self) -> dict[str, Any]:
        return {key: self.values.get(key, default) for key, (_, default) in SCHEDULES[self.name].items()}


def parse_schedule(text: str) -> Schedule:
    """Parse a schedule."""
    word, *settings = re.split("[:,]", text.strip())
    name = word.strip().replace("-", "_")
    if name not in SCHEDULES:
        raise ConfigError(f"unknown schedule {word!r}{suggest(name, SCHEDULES) or _choices(SCHEDULES)}")
    keys, values = SCHEDULES[name], {}
    for setting in settings:
        key, equals, value = (part.strip() for part in setting.partition("="))
        if not equals:
            raise ConfigError(f"schedule {text!r}: {setting!r} has no '='; expected such as {_example(name)}")
        if key not in keys:
            having = [other for other, its in SCHEDULES.items() if key in its]
            whose = f"; only {' and '.join(having)} have it" if having else suggest(key, keys) or _choices(keys)
            raise ConfigError(f"schedule {text!r}: {name} has no {key!r}{whose}")
        if key in values:
            raise ConfigError(f"schedule {text!r}: {key} appears twice")
        values[key] = _value(text, key, value, keys[key][0])
    return Schedule(name, values)


def parse_length(word: str) -> Length:
    """Parse a length: 500, 2epochs or 5%."""
    match = _LENGTH.fullmatch(word.strip())
    if match is None:
        raise ConfigError(f"{word}: expected steps (500), 2epochs or 5%")
    unit = match["unit"].rstrip("s")
    length = Length(float(match["number"]), {"epoch": "epochs"}.get(unit, unit))
    if (not unit and length.number != int(length.number)) or (unit == "%" and length.number > 100):
        raise ConfigError(f"{word}: expected whole steps (500), 2epochs or up to 100%")
    return length


def _value(text: str, key: str, word: str, kind: Any) -> Any:
    if kind is Length:
        try:
            return parse_length(word)
        except ConfigError as error:
            raise ConfigError(f"schedule {text!r}: {key} = {error}") from None
    match = _LENGTH.fullmatch(word)
    if match is None or match["unit"] or not _FITS[kind](float(word)):
        raise ConfigError(f"schedule {text!r}: {key} = {word}: expected a number {kind}")
    return float(word)


def _text(number: float) -> str:
    return repr(float(number)).removesuffix(".0")


def _choices(names: Any) -> str:
    return f"; known: {', '.join(names)}"


def _example(name: str) -> str:
    key, (kind, default) = next(iter(SCHEDULES[name].items()))
    return f"{name}:{key}={'500' if kind is Length else default}"
