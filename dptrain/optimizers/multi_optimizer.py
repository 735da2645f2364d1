"""Different optimizers for different variables."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any, Self

from dptrain.errors import ArgumentTypeError, ConfigError, DataError, NoAttributeError
from dptrain.optimizers.base import CLASSES, Optimizer
from dptrain.optimizers.loss_scale_optimizer import LossScaleOptimizer
from dptrain.program.tensor import Variable
from dptrain.registry import serialization

_NO_RATE = (
    "Learning rate cannot be {} on a MultiOptimizer. {} the learning rate on the individual sub-optimizers instead."
)


class OptimizerMap(MutableMapping[str, Optimizer]):
    """Optimizers by the paths of the variables that they train.

    A path that is no key is matched against all keys as regular expressions, from its begin to its end.

    Args:
        default_optimizer: of variables whose paths no key matches.
        optimizer_map: the other ones, by path or regular expression.

    Attributes:
        default_optimizer: as above.

    Raises:
        ConfigError: something else was given; also a TypeError.
    """

    def __init__(self, default_optimizer: Optimizer, optimizer_map: dict[str, Optimizer] | None = None) -> None:
        if not isinstance(default_optimizer, Optimizer):
            raise ArgumentTypeError(
                f"default_optimizer must be a Keras Optimizer instance. Received: {default_optimizer}"
            )
        if optimizer_map is not None and not isinstance(optimizer_map, dict):
            raise ArgumentTypeError(f"optimizer_map must be a dictionary. Received: {optimizer_map}")
        self.default_optimizer = default_optimizer
        self._optimizers: dict[str, Optimizer] = {}
        for key, one in (optimizer_map or {}).items():
            self[key] = one

    def __getitem__(self, key: str) -> Optimizer:
        """Return the optimizer of a path.

        Raises:
            ConfigError: several regular expressions match it.
        """
        if key in self._optimizers:
            return self._optimizers[key]
        found = [one for pattern, one in self._optimizers.items() if re.fullmatch(pattern, key)]
        if len(found) > 1:
            raise ConfigError(f"Multiple optimizers assigned to variable {key}.")
        return found[0] if found else self.default_optimizer

    def __setitem__(self, key: str, optimizer: Optimizer) -> None:
        """Give paths an optimizer.

        Raises:
            ConfigError: the key is there already, or is no regular expression, or this is no optimizer for a part of
                the variables.
        """
        if key in self._optimizers:
            raise ConfigError(
                f"'{key}' already exists in the OptimizerMap with value {self._optimizers[key]}. Please make sure to "
                "not use duplicated keys."
            )
        if not isinstance(key, str):
            raise ConfigError(f"key must be a string. Received: {key}")
        if not isinstance(optimizer, Optimizer):
            raise ConfigError(f"optimizer must be a Keras Optimizer instance. Received: {optimizer}")
        if isinstance(optimizer, LossScaleOptimizer | MultiOptimizer):
            raise ConfigError(f"optimizer cannot be {type(optimizer).__name__}.")
        try:
            re.compile(key)
        except re.error as error:
            raise ConfigError(f"key {key!r} of the OptimizerMap is no regular expression: {error}") from None
        self._optimizers[key] = optimizer

    def __delitem__(self, key: str) -> None:
        del self._optimizers[key]

    def __len__(self) -> int:
        return len(self._optimizers)

    def __iter__(self) -> Iterator[str]:
        return iter(self._optimizers)

    def __call__(self, variable: Variable) -> Optimizer:
        """Return the optimizer of a variable; as `self[variable.path]`."""
        return self[variable.path]

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments as Keras names them."""
        return {
            "default_optimizer": _described(self.default_optimizer),
            "optimizer_map": {key: _described(one) for key, one in self._optimizers.items()},
        }

    @classmethod
    def from_config(cls, config: Mapping[str, Any], custom_objects: Mapping[str, Any] | None = None) -> Self:
        """Return a map with the arguments that `get_config` gave.

        Raises:
            ConfigError: they are none.
        """
        rest = config.get("optimizer_map")
        if not isinstance(rest, Mapping):
            raise ConfigError(f"OptimizerMap: expected a dictionary as optimizer_map, found {rest!r}")
        made = {key: _made(one, custom_objects) for key, one in rest.items()}
        return cls(_made(config.get("default_optimizer"), custom_objects), made)


class MultiOptimizer(Optimizer):
    """Lets each variable be trained by one of several optimizers.

        MultiOptimizer(OptimizerMap(SGD(0.1), {"encoder/.*": Adam()}))

    Each one clips the gradients of its own variables, and counts its own updates. There is no learning rate that
    callbacks could set: set those of the `optimizers`.

    Args:
        optimizer_map: an `OptimizerMap`, or a function that takes a variable and returns its optimizer. It is called
            once for each variable, and must return the like on all ranks.
        loss_scale_factor: as of `Optimizer`, in the place of those that the optimizers have.
        name: by default "multi_optimizer".

    Raises:
        ConfigError: something else was given.
    """

    def __init__(
        self,
        optimizer_map: OptimizerMap | Callable[[Variable], Optimizer],
        loss_scale_factor: float | None = None,
        name: str | None = None,
    ) -> None:
        if not callable(optimizer_map) or isinstance(optimizer_map, Optimizer | type):
            raise ConfigError(
                "optimizer_map must be an OptimizerMap, or a function of a variable that returns an optimizer. "
                f"Received: {optimizer_map}"
            )
        self._inner: list[Optimizer] = []
        self._map, self._of = optimizer_map, dict[Variable, Optimizer]()
        super().__init__(0.0, loss_scale_factor=loss_scale_factor, name=name)
        if isinstance(optimizer_map, OptimizerMap):
            for one in (*optimizer_map.values(), optimizer_map.default_optimizer):
                self._add(one)

    def _add(self, optimizer: Any) -> Optimizer:
        """Let an optimizer be one of these.

        Raises:
            ConfigError: it is none, or one that is not for a part of the variables.
        """
        if not isinstance(optimizer, Optimizer):
            raise ConfigError(f"MultiOptimizer: expected an optimizer for each variable, found {optimizer!r}")
        if isinstance(optimizer, LossScaleOptimizer | MultiOptimizer):
            raise ConfigError(f"{type(optimizer).__name__} cannot be used inside an MultiOptimizer.")
        if not any(one is optimizer for one in self._inner):
            optimizer.loss_scale_factor = self.loss_scale_factor
            self._inner.append(optimizer)
        return optimizer

    @property
    def optimizers(self) -> list[Optimizer]:
        """All of them; those that a function returns are known when this one is built."""
        return list(self._inner)

    def build(self, variables: Iterable[Variable]) -> None:
        """Choose the optimizers of variables that have none yet, and build these."""
        known = list(variables)
        for one in known:
            if one not in self._of:
                self._of[one] = self._add(self._map(one))
        for optimizer, own in self._shared(known):
            optimizer.build(own)
        for one in known:
            self._slots[one] = self._of[one]._slots[one]
        self.built = True

    def _shared(self, variables: Iterable[Variable]) -> list[tuple[Optimizer, list[Variable]]]:
        """Return each optimizer with those of the variables that it trains, those that have some."""
        known = list(variables)
        found = [(each, [one for one in known if self._of.get(one) is each]) for each in self._inner]
        return [(each, own) for each, own in found if own]

    def apply(self, grads: Iterable[Any], trainable_variables: Iterable[Variable] | None = None) -> None:
        """Update variables by their gradients; as `Optimizer.apply`."""
        found = list(grads)
        if not found:
            return
        variables = self._checked(found, None if trainable_variables is None else list(trainable_variables))
        known = dict(zip(variables, found, strict=True))
        for optimizer, own in self._shared(variables):
            optimizer.apply([known[one] for one in own], own)
        self._iterations.assign_add(1)

    def update_step(self, gradient: Any, variable: Variable, learning_rate: Any) -> None:
        """As the variable's optimizer."""
        self._of[variable].update_step(gradient, variable, learning_rate)

    # State

    @property
    def _own_variables(self) -> list[Variable]:
        """The state without that of the optimizers: steps made, and a learning rate that stays 0, as in Keras."""
        return [self._iterations, self._rate]

    @property
    def variables(self) -> list[Variable]:
        """The state in Keras' order."""
        return [*self._own_variables, *(one for each in self._inner for one in each.variables)]

    def _variables_for(self, variables: Iterable[Variable]) -> list[Variable]:
        """As `Optimizer.variables_for`."""
        if not self.built:
            return self.variables
        known = list(variables)
        self.build(known)
        own = dict(self._shared(known))
        return [*self._own_variables, *(one for each in self._inner for one in each._variables_for(own.get(each, [])))]

    @property
    def iterations(self) -> Variable:
        """Batches seen; each of the optimizers counts its updates."""
        return self._iterations

    @property
    def _program_version(self) -> int:
        """As `Optimizer.version`."""
        return sum(one._program_version for one in self._inner)

    # Learning rates

    @property
    def learning_rate(self) -> Any:
        """There is none, and none can be set.

        Raises:
            NoAttributeError: always.
        """
        raise NoAttributeError(_NO_RATE.format("accessed", "Access"))

    @learning_rate.setter
    def learning_rate(self, rate: Any) -> None:
        raise NoAttributeError(_NO_RATE.format("set", "Set"))

    @property
    def _follows_schedule(self) -> bool:
        """Whether one of them does."""
        return any(one._follows_schedule for one in self._inner)

    @property
    def _rates(self) -> dict[str, float]:
        """As `Optimizer.rates`, with the names of the optimizers, numbered where several have one."""
        found: dict[str, float] = {}
        for one in self._inner:
            name, number = f"learning_rate_{one.name}", 1
            while name in found:
                name, number = f"learning_rate_{one.name}_{number}", number + 1
            found[name] = float(one.learning_rate)
        return found

    @property
    def _resumed_rate(self) -> Any:
        """As `Optimizer.resumed_rate`: a list."""
        return [one._resumed_rate for one in self._inner]

    def _resume_learning_rate(self, rate: Any) -> None:
        """As `Optimizer.resume_learning_rate`.

        Raises:
            DataError: these are not the rates of so many optimizers.
        """
        if not isinstance(rate, list) or len(rate) != len(self._inner):
            raise DataError(f"the learning rates of {len(self._inner)} optimizers; found {rate!r}")
        for one, its in zip(self._inner, rate, strict=True):
            one._resume_learning_rate(its)

    # What is the optimizers'

    @property
    def loss_scale_factor(self) -> float | None:
        """As of `Optimizer`; each of the optimizers has it."""
        return self._factor

    @loss_scale_factor.setter
    def loss_scale_factor(self, factor: float | None) -> None:
        self._factor = factor
        for one in self._inner:
            one.loss_scale_factor = factor

    @property
    def _ends_with_averages(self) -> bool:
        """As `Optimizer.ends_with_averages`."""
        return any(one._ends_with_averages for one in self._inner)

    def finalize_variable_values(self, var_list: Iterable[Variable]) -> None:
        """As `Optimizer.finalize_variable_values`."""
        for optimizer, own in self._shared(var_list):
            optimizer.finalize_variable_values(own)

    def exclude_from_weight_decay(
        self, var_list: Iterable[Variable] | None = None, var_names: Iterable[str] | None = None
    ) -> None:
        """Raise a ConfigError: it is said to those of the optimizers whose weights decay."""
        raise ConfigError("MultiOptimizer: call exclude_from_weight_decay of the optimizers within")

    # Configuration

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments as Keras names them.

        Raises:
            ConfigError: the map is a lambda, which has no name.
        """
        if isinstance(self._map, OptimizerMap):
            described = serialization.to_dict("keras.optimizers", self._map, (OptimizerMap,))
        else:
            described = serialization.function_to_dict(self._map)
        return {"optimizer_map": described, "loss_scale_factor": self.loss_scale_factor, "name": self.name}

    def _describe(self) -> dict[str, Any]:
        """As `Optimizer.describe`; of a function its name."""
        described: Any = getattr(self._map, "__qualname__", type(self._map).__name__)
        if isinstance(self._map, OptimizerMap):
            found = {**self._map, "": self._map.default_optimizer}
            described = [[key, type(one).__name__, one._describe()] for key, one in found.items()]
        return {"optimizer_map": described, "loss_scale_factor": self.loss_scale_factor}

    @classmethod
    def from_config(cls, config: Mapping[str, Any], custom_objects: Mapping[str, Any] | None = None) -> Self:
        """Return an optimizer with the arguments that `get_config` gave; as `Optimizer.from_config`.

        Raises:
            ConfigError: they are none, or the map is a function that `custom_objects` does not have.
        """
        given: Any = config.get("optimizer_map")
        if isinstance(given, Mapping) and given.get("class_name") == "OptimizerMap":
            given = OptimizerMap.from_config(_config(given), custom_objects)
        elif isinstance(given, Mapping):
            with serialization.custom_object_scope(custom_objects):
                given = serialization.own_or_name(given)
            if not callable(given):
                raise ConfigError(f"MultiOptimizer: unknown function {given!r}; pass it in custom_objects")
        return cls(given, **{name: one for name, one in config.items() if name != "optimizer_map"})


def _described(optimizer: Optimizer) -> dict[str, Any]:
    return serialization.to_dict("keras.optimizers", optimizer, CLASSES.values())


def _made(description: Any, custom_objects: Mapping[str, Any] | None) -> Any:
    return serialization.made("optimizer", description, CLASSES | dict(custom_objects or {}), custom_objects)


def _config(description: Mapping[str, Any]) -> Mapping[str, Any]:
    config = description.get("config")
    if not isinstance(config, Mapping):
        raise ConfigError(f"OptimizerMap: expected a dictionary as config, found {config!r}")
    return config
