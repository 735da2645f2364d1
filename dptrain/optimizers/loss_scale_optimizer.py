"""LossScaleOptimizer: scales the loss, so that float16 gradients neither underflow nor overflow."""

import functools
from collections.abc import Iterable, Mapping
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from dptrain.errors import ConfigError
from dptrain.ops import all as all_of
from dptrain.ops import equal, isfinite, logical_and, where
from dptrain.optimizers.base import CLASSES, Optimizer
from dptrain.optimizers.schedules import LearningRateSchedule
from dptrain.program.tensor import FLOATX, Tensor, Variable, constant
from dptrain.registry import serialization

# What Keras' older files have of an optimizer's arguments; only the inner one's count.
_DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(("weight_decay", "clipnorm", "global_clipnorm", "clipvalue", "ema_overwrite_frequency")),
    **dict.fromkeys(("loss_scale_factor", "gradient_accumulation_steps")),
    "use_ema": False,
    "ema_momentum": 0.99,
}


def _refuse_arguments_of_inner(arguments: Mapping[str, Any]) -> None:
    for name, value in arguments.items():
        if name in _DEFAULTS and value != _DEFAULTS[name]:
            raise ConfigError(
                f"LossScaleOptimizer does not support `{name}`. Instead, set `{name}` on the `inner_optimizer`."
            )
    unknown = [f"`{name}`" for name in arguments if name not in _DEFAULTS]
    if unknown:
        raise ConfigError(f"LossScaleOptimizer does not support arguments: {', '.join(unknown)}")


class LossScaleOptimizer(Optimizer):
    """Scales the loss for another optimizer and divides the gradients by the scale.

    If a gradient is not finite, nothing is updated and the scale is halved; after enough updates without that it is
    doubled. All ranks decide alike, since they have the same gradients.

    Source: P. Micikevicius et al., "Mixed precision training", ICLR 2018; Keras' optimizer of the same name.

    Args:
        inner_optimizer: makes the updates.
        initial_scale: the first scale.
        dynamic_growth_steps: updates after which the scale is doubled.
        name: by default "loss_scale_optimizer".
        kwargs: `dynamic`, True.

    Attributes:
        inner_optimizer, initial_scale, dynamic_growth_steps: see there.
        dynamic_scale: the scale, a variable.
        step_counter: updates since the last change, a variable.
    """

    def __init__(
        self,
        inner_optimizer: Optimizer,
        initial_scale: float = 2.0**15,
        dynamic_growth_steps: int = 2000,
        name: str | None = None,
        **kwargs: Any,
    ) -> None:
        if not kwargs.pop("dynamic", True):
            raise ConfigError(
                "LossScaleOptimizer no longer supports `dynamic=False`. Instead, simply set `loss_scale_factor` "
                "directly on the `inner_optimizer`."
            )
        _refuse_arguments_of_inner(kwargs)
        if not isinstance(inner_optimizer, Optimizer) or isinstance(inner_optimizer, LossScaleOptimizer):
            raise ConfigError(f"LossScaleOptimizer: expected an optimizer, found {type(inner_optimizer).__name__}")
        if not 0 < initial_scale < float("inf") or dynamic_growth_steps < 1:
            raise ConfigError(
                "LossScaleOptimizer: expected initial_scale above 0 and dynamic_growth_steps of at least 1. Received: "
                f"initial_scale={initial_scale}, dynamic_growth_steps={dynamic_growth_steps}"
            )
        super().__init__(0.0, name=name)
        self.inner_optimizer, self.initial_scale = inner_optimizer, float(initial_scale)
        self.dynamic_growth_steps = int(dynamic_growth_steps)
        self.step_counter = self._variable(np.array(0, np.int32), "step_counter")
        self.dynamic_scale = self._variable(np.array(initial_scale, FLOATX), "dynamic_scale")
        inner_optimizer.loss_scale_factor = None  # else gradients would be scaled twice
        self.gradient_accumulation_steps = inner_optimizer.gradient_accumulation_steps

    def build(self, variables: Iterable[Variable]) -> None:
        """Build the inner optimizer."""
        self.inner_optimizer.build(variables)
        self.built = True

    def scale_loss(self, loss: Any) -> Any:
        """Return the loss times the scale."""
        return loss * self.dynamic_scale

    def apply(self, grads: Iterable[Any], trainable_variables: Iterable[Variable] | None = None) -> None:
        """Update variables by the gradients of the scaled loss, if all are finite; see `Optimizer.apply`."""
        listed = list(grads)
        variables = None if trainable_variables is None else list(trainable_variables)
        if variables is not None and not self.built:
            self.build(variables)
        present = [grad for grad in listed if grad is not None]
        if not present:
            self.inner_optimizer.apply(listed, variables)
            return
        finite = functools.reduce(logical_and, (all_of(isfinite(grad)) for grad in present))
        trained = [*(variables or self.inner_optimizer._slots)]
        # Variables overwritten with their "gradient" are not scaled with the loss.
        scales = [1 if variable.overwrite_with_gradient else self.dynamic_scale for variable in trained]
        unscaled = [
            None if grad is None else where(finite, grad / scale, 0.0)
            for grad, scale in zip(listed, scales, strict=True)
        ]
        changed = [*trained, *self.inner_optimizer.variables]
        old = [(variable, variable.value) for variable in changed]
        self.inner_optimizer.apply(unscaled, variables)
        for variable, value in old:
            if variable.value is not value:
                variable.assign(where(finite, variable, value))
        due = equal(self.step_counter, self.dynamic_growth_steps - 1)
        factor = where(finite, where(due, constant(2.0), 1.0), 0.5)
        self.dynamic_scale.assign(self.dynamic_scale * factor)
        self.step_counter.assign(where(logical_and(finite, equal(factor, 1.0)), self.step_counter + 1, 0))

    def update_step(self, gradient: Tensor, variable: Variable, learning_rate: Tensor) -> None:
        """Call the inner optimizer's."""
        self.inner_optimizer.update_step(gradient, variable, learning_rate)

    # Delegated to the inner optimizer

    @property
    def _own_variables(self) -> list[Variable]:
        """State without the inner optimizer's, in Keras' order; the first two never change."""
        return [self._iterations, self._rate, self.step_counter, self.dynamic_scale]

    @property
    def variables(self) -> list[Variable]:
        """The state in Keras' order."""
        return [*self._own_variables, *self.inner_optimizer.variables]

    def _variables_for(self, variables: Iterable[Variable]) -> list[Variable]:
        return [*self._own_variables, *self.inner_optimizer._variables_for(variables)]

    @property
    def _built_with(self) -> list[Variable]:
        return self.inner_optimizer._built_with

    @property
    def _all_slots(self) -> list[tuple[Variable, Variable]]:
        return self.inner_optimizer._all_slots

    def _slots_of(self, variable: Variable) -> Mapping[str, Variable]:
        return self.inner_optimizer._slots_of(variable)

    @property
    def _masks(self) -> dict[Variable, Variable]:
        return self.inner_optimizer._masks

    @property
    def _pruning_variables(self) -> list[Variable]:
        return self.inner_optimizer._pruning_variables

    def _prune(self, variable: Variable, mask: npt.NDArray[np.bool_]) -> None:
        self.inner_optimizer._prune(variable, mask)

    def _dense_gradient(self, variable: Variable) -> npt.NDArray[Any]:
        return self.inner_optimizer._dense_gradient(variable)

    @property
    def iterations(self) -> Variable | Tensor:
        """Updates made or skipped."""
        return self.inner_optimizer.iterations

    @property
    def learning_rate(self) -> Any:
        """The inner optimizer's learning rate."""
        return self.inner_optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, rate: float | LearningRateSchedule) -> None:
        """The inner optimizer's learning rate."""
        self.inner_optimizer.learning_rate = rate

    @property
    def _program_version(self) -> int:
        return self.inner_optimizer._program_version

    @property
    def _follows_schedule(self) -> bool:
        return self.inner_optimizer._follows_schedule

    @property
    def _rates(self) -> dict[str, float]:
        return self.inner_optimizer._rates

    @property
    def _resumed_rate(self) -> Any:
        return self.inner_optimizer._resumed_rate

    def _resume_learning_rate(self, rate: Any) -> None:
        self.inner_optimizer._resume_learning_rate(rate)

    @property
    def _ends_with_averages(self) -> bool:
        return self.inner_optimizer._ends_with_averages

    def exclude_from_weight_decay(
        self, var_list: Iterable[Variable] | None = None, var_names: Iterable[str] | None = None
    ) -> None:
        """Call the inner optimizer's."""
        self.inner_optimizer.exclude_from_weight_decay(var_list, var_names)

    def finalize_variable_values(self, var_list: Iterable[Variable]) -> None:
        """Call the inner optimizer's."""
        self.inner_optimizer.finalize_variable_values(var_list)

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments as Keras names them."""
        return {
            "name": self.name,
            "inner_optimizer": serialization.to_dict("keras.optimizers", self.inner_optimizer, CLASSES.values()),
            "initial_scale": self.initial_scale,
            "dynamic_growth_steps": self.dynamic_growth_steps,
        }

    @classmethod
    def from_config(cls, config: Mapping[str, Any], custom_objects: Mapping[str, type[Any]] | None = None) -> Self:
        """Return an optimizer from its `get_config`; see `Optimizer.from_config`."""
        classes = CLASSES | dict(custom_objects or {})
        inner = serialization.from_description("optimizer", config.get("inner_optimizer"), classes, custom_objects)
        return cls(inner, **{name: value for name, value in config.items() if name != "inner_optimizer"})
