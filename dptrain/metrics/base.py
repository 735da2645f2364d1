"""The base of metrics: variables that accumulate batches, and a value computed from them.

Totals are float64 sums over samples (`aggregation="sum"`): each rank may keep a summand and communicate only when the
result is read, which is exact on any number of ranks.
"""

import functools
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt

from dptrain import initializers, ops
from dptrain.errors import ConfigError
from dptrain.losses.base import weights_like, wide
from dptrain.losses.functions import same_rank
from dptrain.mixed_precision import POLICIES, DTypePolicy, policy_name
from dptrain.program import tree
from dptrain.program.stateless import lending, values_of, with_values
from dptrain.program.tensor import Tensor, Variable, is_tracing, mask_of
from dptrain.program.turns import TURNS
from dptrain.registry.names import snake_case
from dptrain.registry.serialization import Configurable, function_named


def _in_turn(method: Callable[..., Any]) -> Callable[..., Any]:
    """Serialise a metric's method across threads."""

    @functools.wraps(method)
    def in_turn(self: "Metric", *args: Any, **kwargs: Any) -> Any:
        if is_tracing() or "_variables" not in vars(self):
            return method(self, *args, **kwargs)
        with TURNS.of(writes=frozenset([self, *self.variables])):
            return method(self, *args, **kwargs)

    return in_turn


# Methods that read or change a metric's state.
_IN_TURN = ("update_state", "result", "reset_state", "__call__")


class Metric(Configurable):
    """A number about samples.

    Your own metric is a subclass with variables from `add_variable`, `update_state` and `result`; or, if it is a mean
    over samples, just a function of y_true and y_pred. All metrics raise ConfigError for arguments out of range.

    Args:
        dtype: kept for Keras' configurations; totals are float64.
        name: its key in logs; by default the class's name in snake case.

    Attributes:
        _takes_labels: targets are integer labels (True) or values (False); None if unknown.
        _direction: "up" or "down" where the metric gets better; None if unknown.
    """

    _takes_labels: bool | None = None
    _direction: str | None = None

    def __init__(self, dtype: Any = None, name: str | None = None) -> None:
        self.name = snake_case(type(self).__name__) if name is None else name
        kind = policy_name(dtype)
        self._dtype = DTypePolicy(kind).compute_dtype if kind in POLICIES else kind or "float32"
        self._variables: list[Variable] = []

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name in _IN_TURN:
            if name in vars(cls):
                setattr(cls, name, _in_turn(vars(cls)[name]))

    def add_variable(
        self,
        shape: Sequence[int] = (),
        initializer: Any = "zeros",
        dtype: npt.DTypeLike | None = None,
        aggregation: Literal["none", "sum"] = "sum",
        name: str | None = None,
    ) -> Variable:
        """Return a new variable of the metric's state.

        Args:
            shape: its shape.
            initializer: its first value; `reset_state` sets zeros.
            dtype: by default float64.
            aggregation: "sum" for a sum over samples, of which each rank may keep a summand; else "none".
            name: for files and messages.
        """
        value = initializers.get("zeros" if initializer is None else initializer)(tuple(shape))
        value = np.asarray(value, dtype or np.float64)
        variable = Variable(value, name or "variable", trainable=False, aggregation=aggregation)
        variable._path = f"{self.name}/{variable.name}"
        self._variables.append(variable)
        return variable

    def add_weight(
        self,
        shape: Sequence[int] = (),
        initializer: Any = "zeros",
        dtype: npt.DTypeLike | None = None,
        name: str | None = None,
    ) -> Variable:
        """Return a new variable of the metric's state; see `add_variable`."""
        return self.add_variable(shape, initializer, dtype, name=name)

    @property
    def variables(self) -> list[Variable]:
        """Its state, and that of metrics in its attributes, also in lists, tuples and dictionaries."""
        variables = [*self._variables, *tree.attributes(self, Variable)]
        parts: list[Metric] = tree.attributes(self, Metric)  # type: ignore[type-abstract]
        return list(
            {
                id(variable): variable
                for variable in [*variables, *(variable for part in parts for variable in part.variables)]
            }.values()
        )

    @property
    def dtype(self) -> str:
        """Name of the type that it was given, by default "float32"."""
        return self._dtype

    def stateless_update_state(self, metric_variables: Sequence[Any], *args: Any, **kwargs: Any) -> list[Tensor]:
        """Return the state that `update_state` would make of another; the metric keeps its own.

        Args:
            metric_variables: a value for each of `variables`.
            args: of `update_state`.
            kwargs: of `update_state`.

        Raises:
            ConfigError: not one value for each variable.
        """
        with self._lending(metric_variables):
            self.update_state(*args, **kwargs)
            return values_of(self.variables)

    def stateless_result(self, metric_variables: Sequence[Any]) -> Any:
        """Return the result of another state, a value for each of `variables`; the metric keeps its own.

        Raises:
            ConfigError: not one value for each variable.
        """
        with self._lending(metric_variables):
            return with_values(self.result())

    def stateless_reset_state(self) -> list[Tensor]:
        """Return the state of a new beginning; the metric keeps its own."""
        variables = self.variables
        with self._lending(values_of(variables)):
            self.reset_state()
            return values_of(variables)

    def _lending(self, values: Sequence[Any]) -> AbstractContextManager[None]:
        return lending(self.variables, values, "metric_variables", f"{type(self).__name__}().variables")

    @abstractmethod
    def update_state(self, *args: Any, **kwargs: Any) -> None:
        """Add a batch: y_true, y_pred and sample_weight, which may be None."""

    @abstractmethod
    def result(self) -> Any:
        """Return the metric's value, a tensor without dimensions."""

    @_in_turn
    def reset_state(self) -> None:
        """Set all of the state to 0."""
        for variable in self.variables:
            variable.assign(ops.zeros(variable.shape, variable.dtype))

    @_in_turn
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Add a batch, and return the new value."""
        self.update_state(*args, **kwargs)
        return self.result()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} name={self.name}>"

    def _get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments as Keras' `get_config` names them."""
        return {"name": self.name, "dtype": self.dtype}


def samplewise(values: Any, sample_weight: Any = None) -> tuple[Tensor, Tensor | None]:
    """Return a number for each sample, weighted if there are weights, and these.

    `values` are (rows, ...), averaged for each sample, or a scalar; `sample_weight` has the first axes of that shape.
    """
    numbers = wide(values)
    if numbers.dtype.kind != "f":
        numbers = ops.cast(numbers, "float32")
    if sample_weight is None:
        return _mean_of_rows(numbers), None
    weights = ops.broadcast_to(weights_like(numbers, sample_weight), numbers.shape)
    return _mean_of_rows(numbers * weights), _mean_of_rows(weights)


def _mean_of_rows(values: Tensor) -> Tensor:
    return ops.mean(values, tuple(range(1, values.ndim))) if values.ndim > 1 else values


class Sum(Metric):
    """The sum of values, weighted if there are weights."""

    def __init__(self, name: str | None = "sum", dtype: str | None = None) -> None:
        super().__init__(dtype, name)
        self.total = self.add_variable(name="total")

    def update_state(self, values: Any, sample_weight: Any = None) -> None:
        """Add values, (rows, ...) or a number."""
        numbers = wide(values)
        if sample_weight is not None:
            numbers = numbers * weights_like(numbers, sample_weight)
        self.total.assign_add(ops.sum(numbers))

    def result(self) -> Tensor:
        """Return the sum."""
        return self.total.value * 1.0


class Mean(Metric):
    """The mean of values, weighted if there are weights; 0 of nothing.

    Feed it by hand in a `train_step`: `self.penalty.update_state(values)` counts a number for each sample, and a
    batch's loss, a single number, with `sample_weight=rows` for that many samples.
    """

    def __init__(self, name: str | None = "mean", dtype: str | None = None) -> None:
        super().__init__(dtype, name)
        self.total = self.add_variable(name="total")
        self.count = self.add_variable(name="count")

    def update_state(self, values: Any, sample_weight: Any = None) -> None:
        """Add samples, (rows, ...), averaged for each, or a single number; `sample_weight` likewise, None for ones."""
        numbers, weights = samplewise(values, sample_weight)
        self.total.assign_add(ops.sum(numbers))
        self.count.assign_add((numbers.shape[0] if numbers.ndim else 1) if weights is None else ops.sum(weights))

    def result(self) -> Tensor:
        """Return the mean."""
        return ops.divide_no_nan(self.total, self.count)


class MeanMetricWrapper(Mean):
    """The mean over samples of a function.

    Args:
        fn: of y_true and y_pred, returns numbers (rows, ...).
        name: its key in logs; by default the function's name.
        dtype: see `Metric`.
        kwargs: further arguments of the function.
    """

    def __init__(
        self, fn: Callable[..., Any], name: str | None = None, dtype: str | None = None, **kwargs: Any
    ) -> None:
        super().__init__(getattr(fn, "__name__", None) if name is None else name, dtype)
        self._fn, self._fn_kwargs = fn, kwargs

    def update_state(  # type: ignore[override]  # as Keras has it: what it adds is made of two
        self, y_true: Any, y_pred: Any, sample_weight: Any = None
    ) -> None:
        """Add a batch; parts masked in the outputs do not count, `sample_weight` is (rows, ...) or None."""
        target, output = wide(y_true), wide(y_pred)
        if not self._takes_labels:
            target, output = same_rank(target, output)
        values, mask = self._fn(target, output, **self._fn_kwargs), mask_of(y_pred)
        if mask is not None:
            valid = weights_like(values, mask)
            sample_weight = valid if sample_weight is None else valid * weights_like(values, sample_weight)
        super().update_state(values, sample_weight)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Return the metric that `get_config` described; ConfigError for an unknown function."""
        return cls(**{name: function_named(value) if name == "fn" else value for name, value in config.items()})

    def _get_config(self) -> dict[str, Any]:
        return super()._get_config() | {"fn": getattr(self._fn, "__name__", repr(self._fn))} | self._fn_kwargs


def positive(k: int, name: str = "k") -> int:
    """Check and return k, an integer from 1; `name` begins the error."""
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        raise ConfigError(f"{name} = {k!r}: expected an integer >= 1")
    return k
