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

    A path that is not a key is matched in full against all keys as regular expressions.

    Args:
        default_optimizer: for paths that no key matches; also an attribute.
        optimizer_map: the others, by path or regular expression.

    Raises:
        ConfigError: an argument has another type; also a TypeError.
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
        for key, optimizer in (optimizer_map or {}).items():
            self[key] = optimizer

    def __getitem__(self, key: str) -> Optimizer:
        """Return the optimizer of a path; ConfigError if several regular expressions match it."""
        if key in self._optimizers:
            return self._optimizers[key]
        matches = [optimizer for pattern, optimizer in self._optimizers.items() if re.fullmatch(pattern, key)]
        if len(matches) > 1:
            raise ConfigError(f"Multiple optimizers assigned to variable {key}.")
        return matches[0] if matches else self.default_optimizer

    def __setitem__(self, key: str, optimizer: Optimizer) -> None:
        """Give paths an optimizer that trains a part of the variables; ConfigError for existing or invalid keys."""
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
            raise ConfigError(f"key {key!r} of the OptimizerMap is not a regular expression: {error}") from None
        self._optimizers[key] = optimizer

    def __delitem__(self, key: str) -> None:
        del self._optimizers[key]

    def __len__(self) -> int:
        return len(self._optimizers)

    def __iter__(self) -> Iterator[str]:
        return iter(self._optimizers)

    def __call__(self, variable: Variable) -> Optimizer:
        """Return the optimizer of a variable: `self[variable.path]`."""
        return self[variable.path]

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments as Keras names them."""
        return {
            "default_optimizer": _described(self.default_optimizer),
            "optimizer_map": {key: _described(optimizer) for key, optimizer in self._optimizers.items()},
        }

    @classmethod
    def from_config(cls, config: Mapping[str, Any], custom_objects: Mapping[str, Any] | None = None) -> Self:
        """Return a map from its `get_config`, else raise ConfigError."""
        rest = config.get("optimizer_map")
        if not isinstance(rest, Mapping):
            raise ConfigError(f"OptimizerMap: expected a dictionary as optimizer_map, found {rest!r}")
        optimizers = {key: _optimizer_of(description, custom_objects) for key, description in rest.items()}
        return cls(_optimizer_of(config.get("default_optimizer"), custom_objects), optimizers)


class MultiOptimizer(Optimizer):
    """Trains each variable by one of several optimizers.

        MultiOptimizer(OptimizerMap(SGD(0.1), {"encoder/.*": Adam()}))

    Each clips the gradients of its own variables, and counts its own updates. There is no common learning rate:
    callbacks set those of all `optimizers`.

    Args:
        optimizer_map: an `OptimizerMap`, or a function from a variable to its optimizer, called once for each variable,
            with the same result on all ranks.
        loss_scale_factor: see `Optimizer`; replaces those of the optimizers.
        name: by default "multi_optimizer".

    Raises:
        ConfigError: an argument has another type.
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
            for inner in (*optimizer_map.values(), optimizer_map.default_optimizer):
                self._add(inner)

    def _add(self, optimizer: Any) -> Optimizer:
        """Add an optimizer, unless it cannot train a part of the variables."""
        if not isinstance(optimizer, Optimizer):
            raise ConfigError(f"MultiOptimizer: expected an optimizer for each variable, found {optimizer!r}")
        if isinstance(optimizer, LossScaleOptimizer | MultiOptimizer):
            raise ConfigError(f"{type(optimizer).__name__} cannot be used inside an MultiOptimizer.")
        if not any(inner is optimizer for inner in self._inner):
            optimizer.loss_scale_factor = self.loss_scale_factor
            self._inner.append(optimizer)
        return optimizer

    @property
    def optimizers(self) -> list[Optimizer]:
        """All optimizers; those of a function are known once this one is built."""
        return list(self._inner)

    def build(self, variables: Iterable[Variable]) -> None:
        """Choose and build the optimizers of variables that have none."""
        listed = list(variables)
        for variable in listed:
            if variable not in self._of:
                self._of[variable] = self._add(self._map(variable))
        for optimizer, group in self._shared(listed):
            optimizer.build(group)
        for variable in listed:
            self._slots[variable] = self._of[variable]._slots[variable]
        self.built = True

    def _shared(self, variables: Iterable[Variable]) -> list[tuple[Optimizer, list[Variable]]]:
        """Return the optimizers that have some of the variables, with these."""
        listed = list(variables)
        groups = [(each, [variable for variable in listed if self._of.get(variable) is each]) for each in self._inner]
        return [(each, group) for each, group in groups if group]

    def apply(self, grads: Iterable[Any], trainable_variables: Iterable[Variable] | None = None) -> None:
        """Update variables by their gradients; see `Optimizer.apply`."""
        listed = list(grads)
        if not listed:
            return
        variables = self._checked(listed, None if trainable_variables is None else list(trainable_variables))
        by_variable = dict(zip(variables, listed, strict=True))
        for optimizer, group in self._shared(variables):
            optimizer.apply([by_variable[variable] for variable in group], group)
        self._iterations.assign_add(1)

    def update_step(self, gradient: Any, variable: Variable, learning_rate: Any) -> None:
        """Call the variable's optimizer."""
        self._of[variable].update_step(gradient, variable, learning_rate)

    # State

    @property
    def _own_variables(self) -> list[Variable]:
        """State without the optimizers': steps made, and a learning rate that stays 0, as in Keras."""
        return [self._iterations, self._rate]

    @property
    def variables(self) -> list[Variable]:
        """The state in Keras' order."""
        return [*self._own_variables, *(variable for each in self._inner for variable in each.variables)]

    def _variables_for(self, variables: Iterable[Variable]) -> list[Variable]:
        if not self.built:
            return self.variables
        listed = list(variables)
        self.build(listed)
        groups = dict(self._shared(listed))
        return [
            *self._own_variables,
            *(variable for each in self._inner for variable in each._variables_for(groups.get(each, []))),
        ]

    @property
    def iterations(self) -> Variable:
        """Batches seen; each of the optimizers counts its updates."""
        return self._iterations

    @property
    def _program_version(self) -> int:
        return sum(optimizer._program_version for optimizer in self._inner)

    # Learning rates

    @property
    def learning_rate(self) -> Any:
        """Not available: NoAttributeError."""
        raise NoAttributeError(_NO_RATE.format("accessed", "Access"))

    @learning_rate.setter
    def learning_rate(self, rate: Any) -> None:
        """Not available: NoAttributeError."""
        raise NoAttributeError(_NO_RATE.format("set", "Set"))

    @property
    def _follows_schedule(self) -> bool:
        return any(optimizer._follows_schedule for optimizer in self._inner)

    @property
    def _rates(self) -> dict[str, float]:
        """Learning rates by log name, with the optimizers' names, numbered if they repeat."""
        rates: dict[str, float] = {}
        for optimizer in self._inner:
            name, number = f"learning_rate_{optimizer.name}", 1
            while name in rates:
                name, number = f"learning_rate_{optimizer.name}_{number}", number + 1
            rates[name] = float(optimizer.learning_rate)
        return rates

    @property
    def _resumed_rate(self) -> Any:
        return [optimizer._resumed_rate for optimizer in self._inner]

    def _resume_learning_rate(self, rate: Any) -> None:
        """Restore the optimizers' rates; DataError for another number of them."""
        if not isinstance(rate, list) or len(rate) != len(self._inner):
            raise DataError(
                f"MultiOptimizer: expected the learning rates of {len(self._inner)} optimizers, found {rate!r}"
            )
        for optimizer, its in zip(self._inner, rate, strict=True):
            optimizer._resume_learning_rate(its)

    # Delegated to the optimizers

    @property
    def loss_scale_factor(self) -> float | None:
        """See `Optimizer`; shared by all of the optimizers."""
        return self._factor

    @loss_scale_factor.setter
    def loss_scale_factor(self, factor: float | None) -> None:
        """See `Optimizer`; shared by all of the optimizers."""
        self._factor = factor
        for optimizer in self._inner:
            optimizer.loss_scale_factor = factor

    @property
    def _ends_with_averages(self) -> bool:
        return any(optimizer._ends_with_averages for optimizer in self._inner)

    def finalize_variable_values(self, var_list: Iterable[Variable]) -> None:
        """See `Optimizer.finalize_variable_values`."""
        for optimizer, group in self._shared(var_list):
            optimizer.finalize_variable_values(group)

    def exclude_from_weight_decay(
        self, var_list: Iterable[Variable] | None = None, var_names: Iterable[str] | None = None
    ) -> None:
        """Raise ConfigError: call it on the optimizers within."""
        raise ConfigError("MultiOptimizer: call exclude_from_weight_decay on its optimizers")

    # Configuration

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments as Keras names them; ConfigError if the map is a lambda."""
        if isinstance(self._map, OptimizerMap):
            described = serialization.to_dict("keras.optimizers", self._map, (OptimizerMap,))
        else:
            described = serialization.function_to_dict(self._map)
        return {"optimizer_map": described, "loss_scale_factor": self.loss_scale_factor, "name": self.name}

    def _describe(self) -> dict[str, Any]:
        described: Any = getattr(self._map, "__qualname__", type(self._map).__name__)
        if isinstance(self._map, OptimizerMap):
            optimizers = {**self._map, "": self._map.default_optimizer}
            described = [
                [key, type(optimizer).__name__, optimizer._describe()] for key, optimizer in optimizers.items()
            ]
        return {"optimizer_map": described, "loss_scale_factor": self.loss_scale_factor}

    @classmethod
    def from_config(cls, config: Mapping[str, Any], custom_objects: Mapping[str, Any] | None = None) -> Self:
        """Return an optimizer from its `get_config`; ConfigError for a function that `custom_objects` does not have."""
        chosen: Any = config.get("optimizer_map")
        if isinstance(chosen, Mapping) and chosen.get("class_name") == "OptimizerMap":
            chosen = OptimizerMap.from_config(_config(chosen), custom_objects)
        elif isinstance(chosen, Mapping):
            with serialization.custom_object_scope(custom_objects):
                chosen = serialization.custom_object_or_name(chosen)
            if not callable(chosen):
                raise ConfigError(f"MultiOptimizer: unknown function {chosen!r}; pass it in custom_objects")
        return cls(chosen, **{name: value for name, value in config.items() if name != "optimizer_map"})


def _described(optimizer: Optimizer) -> dict[str, Any]:
    return serialization.to_dict("keras.optimizers", optimizer, CLASSES.values())


def _optimizer_of(description: Any, custom_objects: Mapping[str, Any] | None) -> Any:
    return serialization.from_description(
        "optimizer", description, CLASSES | dict(custom_objects or {}), custom_objects
    )


def _config(description: Mapping[str, Any]) -> Mapping[str, Any]:
    config = description.get("config")
    if not isinstance(config, Mapping):
        raise ConfigError(f"OptimizerMap: expected a dictionary as config, found {config!r}")
    return config
