"""Constraints of weights, applied after every update, as in Keras: bounds of norms, no negative values."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from dptrain import ops
from dptrain.registry.names import by_name, not_there
from dptrain.registry.serialization import Configurable, Registry

__all__ = [
    "CONSTRAINTS",
    "Constraint",
    "MaxNorm",
    "MinMaxNorm",
    "NonNeg",
    "UnitNorm",
    "deserialize",
    "get",
    "max_norm",
    "min_max_norm",
    "non_neg",
    "serialize",
    "unit_norm",
]

if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__ = not_there("constraints", __all__)

# Added to norms, which may be 0.
_EPSILON = 1e-7


class Constraint(Configurable):
    """A function of a weight, applied after every update. A subclass has `__call__` and, for files, `get_config`."""

    def __call__(self, w: Any) -> Any:
        """Return the constrained weight, in `dptrain.ops`."""
        return w

    def _get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments; none for a subclass without its own `get_config`."""
        return {}


class NonNeg(Constraint):
    """Sets negative weights to 0."""

    def __call__(self, w: Any) -> Any:
        """Return max(w, 0)."""
        return ops.maximum(w, 0.0)


class _Norm(Constraint):
    """Scales a weight to another norm along `axis`."""

    def __init__(self, axis: int | Sequence[int] = 0) -> None:
        self.axis = axis if isinstance(axis, int) else list(axis)

    def __call__(self, w: Any) -> Any:
        """Return w with another norm."""
        norm = ops.sqrt(ops.sum(ops.square(w), self.axis, keepdims=True))
        return w * (self._desired(norm) / (norm + _EPSILON))

    def _desired(self, norm: Any) -> Any:
        raise NotImplementedError

    def _get_config(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key != "axis"} | {"axis": self.axis}


class UnitNorm(_Norm):
    """Scales weights to norm 1 along `axis`, see `MaxNorm`."""

    def _desired(self, norm: Any) -> Any:
        return 1.0


class MaxNorm(_Norm):
    """Limits the norm to `max_value`.

    `axis`, one or several, is 0 for the kernel of a Dense, where each output has its own norm, [0, 1, 2] for a
    Conv2D's.

    Source: N. Srivastava et al., "Dropout: a simple way to prevent neural networks from overfitting", JMLR 2014.
    """

    def __init__(self, max_value: float = 2, axis: int | Sequence[int] = 0) -> None:
        super().__init__(axis)
        self.max_value = max_value

    def _desired(self, norm: Any) -> Any:
        return ops.clip(norm, 0.0, float(self.max_value))


class MinMaxNorm(_Norm):
    """Moves the norm the fraction `rate` of the way to the range from `min_value` to `max_value`.

    For `axis` see `MaxNorm`.
    """

    def __init__(
        self, min_value: float = 0.0, max_value: float = 1.0, rate: float = 1.0, axis: int | Sequence[int] = 0
    ) -> None:
        super().__init__(axis)
        self.min_value, self.max_value, self.rate = min_value, max_value, rate

    def _desired(self, norm: Any) -> Any:
        return self.rate * ops.clip(norm, float(self.min_value), float(self.max_value)) + (1 - self.rate) * norm


# Keras' other names of the classes.
max_norm, min_max_norm, non_neg, unit_norm = MaxNorm, MinMaxNorm, NonNeg, UnitNorm

# Names as Keras accepts them.
CONSTRAINTS: dict[str, type[Constraint]] = by_name((MaxNorm, MinMaxNorm, NonNeg, UnitNorm))

# A function of the weight serves as well, as in Keras.
ConstraintLike = Constraint | Callable[[Any], Any]

_registry: Registry[ConstraintLike] = Registry("constraint", "keras.constraints", Constraint, CONSTRAINTS, functions={})
deserialize = _registry.deserialize


def get(identifier: Any) -> ConstraintLike | None:
    """Return the constraint for a name or class (with Keras' defaults) or a configuration.

    Constraints, functions of the weight and None are returned unchanged; ConfigError for an unknown name.
    """
    return None if identifier is None else _registry.get(identifier)


def serialize(constraint: ConstraintLike | None) -> dict[str, Any] | None:
    """Return the constraint as Keras writes it to JSON; ConfigError for a lambda."""
    return None if constraint is None else _registry.serialize(constraint)
