"""What an optimizer is: a specification of its slots and of one update, written in backend ops."""

import math
import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from dptrain.backend.base import Backend, Buffer
from dptrain.errors import ArgumentTypeError, ConfigError
from dptrain.optimizers import schedules
from dptrain.optimizers.schedules import LearningRateSchedule
from dptrain.registry.names import snake_case


@dataclass(slots=True)  # made at every step
class Update:
    """What one update works on.

    Attributes:
        ops: the backend.
        params: flat parameters, to be changed in place.
        grads: flat gradients after clipping; may be destroyed.
        divisor: one element that the gradients are still to be divided by, by a rule that says `divides`.
        slots: the flat buffers named by the optimizer's `slots`, to be changed in place.
        scratch: as many flat buffers as the optimizer's `scratch` says, of any content.
        learning_rate: of this update.
        iteration: 1 for the first update.
    """

    ops: Backend
    params: Buffer
    grads: Buffer
    divisor: Buffer
    slots: Mapping[str, Buffer]
    scratch: tuple[Buffer, ...]
    learning_rate: float
    iteration: int


class Optimizer(ABC):
    """One rule that turns gradients into new parameters; what is done with them before is in `optimizers/updater.py`.

    A subclass names its `slots` and writes `update_step` in the vector ops of `Backend`; with arguments of its own it
    also extends `get_config`. Elements between parameters have gradients of 0 and must stay finite.

    Args:
        learning_rate: 0 or above, or a schedule.
        weight_decay: before every update parameters lose this times the learning rate of themselves.
        clipnorm: highest norm of the gradient of each parameter of a layer.
        clipvalue: highest absolute value of an element of the gradients.
        global_clipnorm: highest norm of all gradients together.
        use_ema: False.
        ema_momentum: 0.99.
        ema_overwrite_frequency: None.
        loss_scale_factor: None.
        gradient_accumulation_steps: update once in so many batches, 2 or more, by the mean of their gradients.
        name: the class's in snake case by default (which Keras numbers).

    Attributes:
        slots: names of the flat buffers (like the parameters, zero at first) that the rule keeps from step to step.
        scratch: number of flat buffers that the rule needs within a step.
        divides: the rule itself divides the gradients by `Update.divisor`, as the fused ops do.
        steps: batches whose gradients were taken; what a schedule is asked with.
        name: see above.

    Raises:
        ConfigError: an argument is out of range, or not supported.
    """

    slots: tuple[str, ...] = ()
    scratch: int = 0
    divides: bool = False

    def __init__(
        self,
        learning_rate: float | LearningRateSchedule,
        weight_decay: float | None = None,
        clipnorm: float | None = None,
        clipvalue: float | None = None,
        global_clipnorm: float | None = None,
        use_ema: bool = False,
        ema_momentum: float = 0.99,
        ema_overwrite_frequency: int | None = None,
        loss_scale_factor: float | None = None,
        gradient_accumulation_steps: int | None = None,
        name: str | None = None,
        **kwargs: Any,
    ) -> None:
        if kwargs.pop("decay", None) is not None:
            warnings.warn("Argument `decay` is no longer supported and will be ignored.", stacklevel=2)
        if kwargs:
            raise ConfigError(f"Argument(s) not recognized: {kwargs}")
        for argument, value, default in (
            ("use_ema", use_ema, False),
            ("ema_momentum", ema_momentum, 0.99),
            ("ema_overwrite_frequency", ema_overwrite_frequency, None),
            ("loss_scale_factor", loss_scale_factor, None),
        ):
            if value != default:
                raise ConfigError(f"not supported: {argument}={value!r} of an optimizer")
        clips = {"clipnorm": clipnorm, "clipvalue": clipvalue, "global_clipnorm": global_clipnorm}
        if sum(limit is not None for limit in clips.values()) > 1:
            received = ", ".join(f"{clip}={limit}" for clip, limit in clips.items())
            raise ConfigError(
                f"Only one of `clipnorm`, `clipvalue` and `global_clipnorm` can be set. Received: {received}"
            )
        steps = gradient_accumulation_steps or None
        if steps is not None and not (steps >= 2 and steps == int(steps)):
            raise ConfigError(
                "`gradient_accumulation_steps` must be an integer >= 2. "
                f"Received: gradient_accumulation_steps={gradient_accumulation_steps}"
            )
        self._learning_rate = _rate(learning_rate)
        self.weight_decay = _optional("weight_decay", weight_decay)
        self.clipnorm = _optional("clipnorm", clipnorm)
        self.clipvalue = _optional("clipvalue", clipvalue)
        self.global_clipnorm = _optional("global_clipnorm", global_clipnorm)
        self.gradient_accumulation_steps = None if steps is None else int(steps)
        self.name = snake_case(type(self).__name__) if name is None else name
        self.steps = 0
        self._not_decayed: re.Pattern[str] | None = None

    @abstractmethod
    def update_step(self, update: Update) -> None:
        """Change the parameters and the slots in place."""

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next update; can be set, unless a schedule says it.

        Raises:
            ConfigError: set to a number that is out of range; also a TypeError where a schedule says it.
        """
        rate = self._learning_rate
        return float(rate(self.steps)) if isinstance(rate, LearningRateSchedule) else rate

    @learning_rate.setter
    def learning_rate(self, rate: float | LearningRateSchedule) -> None:
        if self.follows_schedule and not isinstance(rate, LearningRateSchedule):
            raise ArgumentTypeError(
                "This optimizer was created with a `LearningRateSchedule` object as its `learning_rate` constructor "
                "argument, hence its learning rate is not settable. If you need the learning rate to be settable, you "
                "should instantiate the optimizer with a float `learning_rate` argument."
            )
        self._learning_rate = _rate(rate)

    @property
    def follows_schedule(self) -> bool:
        """Whether a schedule says the learning rate, which then goes by the steps and cannot be set."""
        return isinstance(self._learning_rate, LearningRateSchedule)

    def resume_learning_rate(self, rate: float) -> None:
        """Go on with the learning rate that an interrupted training had; a schedule knows it from the steps."""
        if not self.follows_schedule:
            self.learning_rate = rate

    @property
    def iterations(self) -> int:
        """Updates made: steps, divided by those that one update accumulates."""
        return self.steps // (self.gradient_accumulation_steps or 1)

    @property
    def all_slots(self) -> tuple[str, ...]:
        """Names of all flat buffers that are kept from step to step, in Keras' order: `slots` after the accumulator."""
        return ("gradient_accumulator", *self.slots) if self.gradient_accumulation_steps else self.slots

    def exclude_from_weight_decay(self, var_list: object = None, var_names: list[str] | None = None) -> None:
        """Name parameters that do not decay. Call it before `compile`.

        Args:
            var_list: not supported.
            var_names: regular expressions; a parameter is excluded where one is found in its own name ("bias").

        Raises:
            ConfigError: var_list is given.
        """
        if var_list:
            raise ConfigError("not supported: exclude_from_weight_decay(var_list=...); name them in var_names")
        self._not_decayed = re.compile("|".join(sorted(set(var_names)))) if var_names else None

    def decays(self, parameter: str) -> bool:
        """Whether the weight decay applies to a parameter of that name in the model, such as "dense/kernel"."""
        own_name = parameter.rpartition("/")[2]
        return self.weight_decay is not None and not (self._not_decayed and self._not_decayed.search(own_name))

    def config(self) -> dict[str, Any]:
        """Return `get_config()`, under the name that it has in layers."""
        return self.get_config()

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments as Keras names them; a schedule as `schedules.serialize` gives it."""
        rate = self._learning_rate
        return {
            "name": self.name,
            "learning_rate": schedules.serialize(rate) if isinstance(rate, LearningRateSchedule) else rate,
            "weight_decay": self.weight_decay,
            "clipnorm": self.clipnorm,
            "global_clipnorm": self.global_clipnorm,
            "clipvalue": self.clipvalue,
            "use_ema": False,
            "ema_momentum": 0.99,
            "ema_overwrite_frequency": None,
            "loss_scale_factor": None,
            "gradient_accumulation_steps": self.gradient_accumulation_steps,
        }

    def describe(self) -> dict[str, Any]:
        """Return what must be the same on all ranks: `get_config()`, or less where a schedule does not tell."""
        try:
            return self.get_config()
        except NotImplementedError:
            return {"learning_rate": type(self._learning_rate).__name__}

    @classmethod
    def from_config(cls, config: Mapping[str, Any], custom_objects: Mapping[str, type[Any]] | None = None) -> Self:
        """Return an optimizer with the arguments that `get_config` gave.

        Raises:
            ConfigError: the arguments are not this optimizer's, or the schedule's class is unknown.
        """
        arguments = dict(config)
        if isinstance(arguments.get("learning_rate"), Mapping):
            arguments["learning_rate"] = schedules.deserialize(arguments["learning_rate"], custom_objects)
        return cls(**arguments)


def check_range(
    name: str, value: float, *, above: float | None = None, least: float | None = None, below: float = math.inf
) -> float:
    """Return `value` as a float.

    Raises:
        ConfigError: it is not finite or not in the range.
    """
    value = _number(name, value)
    if (
        not math.isfinite(value)
        or value >= below
        or (above is not None and value <= above)
        or (least is not None and value < least)
    ):
        low = f"> {above:g}" if above is not None else f">= {least:g}" if least is not None else ""
        high = f"< {below:g}" if math.isfinite(below) else ""
        expected = " and ".join(part for part in (low, high) if part) or "that is finite"
        raise ConfigError(f"{name} = {value:g}: expected a number {expected}")
    return value


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ConfigError(f"{name} = {value!r}: expected a number") from None


def _optional(name: str, value: float | None) -> float | None:
    return None if value is None else check_range(name, value)


def _rate(rate: float | LearningRateSchedule) -> float | LearningRateSchedule:
    if isinstance(rate, LearningRateSchedule):
        return rate
    if callable(rate):
        raise ConfigError("not supported: a function as learning_rate; subclass LearningRateSchedule")
    return check_range("learning_rate", rate, least=0.0)
