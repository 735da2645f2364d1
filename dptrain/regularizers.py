"""Regularizers: penalties on parameters that are added to the loss, as in Keras."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dptrain import ops
from dptrain.errors import ConfigError
from dptrain.registry.names import not_there
from dptrain.registry.serialization import Configurable, Registry

__all__ = [
    "L1",
    "L1L2",
    "L2",
    "REGULARIZERS",
    "OrthogonalRegularizer",
    "Regularizer",
    "deserialize",
    "get",
    "serialize",
]

if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__ = not_there("regularizers", __all__)


class Regularizer(Configurable):
    """A penalty on a weight. A subclass has `__call__` and, for files, `get_config`."""

    def __call__(self, x: Any) -> Any:
        """Return the penalty, a number in `dptrain.ops`, of a weight or a layer's output."""
        raise NotImplementedError(f"{type(self).__name__} has no `__call__`")

    def _get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments; none for a subclass without its own `get_config`."""
        return {}


class L1L2(Regularizer):
    """l1 * sum |x| + l2 * sum x^2, with finite factors of 0 or above (else ConfigError); None is 0."""

    def __init__(self, l1: float | None = 0.0, l2: float | None = 0.0) -> None:
        self.l1 = _factor(0.0 if l1 is None else l1, "l1")
        self.l2 = _factor(0.0 if l2 is None else l2, "l2")

    def __call__(self, x: Any) -> Any:
        """Return the penalty."""
        first = self.l1 * ops.sum(ops.absolute(x)) if self.l1 else None
        second = self.l2 * ops.sum(ops.square(x)) if self.l2 or first is None else None
        return second if first is None else first if second is None else first + second

    def _get_config(self) -> dict[str, Any]:
        return {"l1": self.l1, "l2": self.l2}


class L1(L1L2):
    """l1 * sum |x|; see `L1L2`, but None is 0.01."""

    def __init__(self, l1: float | None = 0.01) -> None:
        super().__init__(0.01 if l1 is None else l1, 0.0)

    def _get_config(self) -> dict[str, Any]:
        return {"l1": self.l1}


class L2(L1L2):
    """l2 * sum x^2; see `L1L2`, but None is 0.01."""

    def __init__(self, l2: float | None = 0.01) -> None:
        super().__init__(0.0, 0.01 if l2 is None else l2)

    def _get_config(self) -> dict[str, Any]:
        return {"l2": self.l2}


class OrthogonalRegularizer(Regularizer):
    """factor times the mean magnitude of the cosines between the rows of a matrix, or between its columns.

    `factor` is finite, 0 or above, `mode` "rows" or "columns" (else ConfigError).
    """

    def __init__(self, factor: float = 0.01, mode: str = "rows") -> None:
        self.factor = _factor(factor, "factor")
        if mode not in ("rows", "columns"):
            raise ConfigError(
                f'Invalid value for argument `mode`. Expected one of {{"rows", "columns"}}. Received: mode={mode}'
            )
        self.mode = mode

    def __call__(self, x: Any) -> Any:
        """Return the penalty, 0 for a single row or column; ConfigError if x is not a matrix."""
        if len(x.shape) != 2:
            raise ConfigError(f"Inputs to OrthogonalRegularizer must have rank 2. Received: inputs.shape={x.shape}")
        vectors = ops.normalize(x if self.mode == "rows" else ops.transpose(x), axis=1)
        number = vectors.shape[0]
        cosines = ops.matmul(vectors, ops.transpose(vectors))
        pairs = max(number * (number - 1), 1)  # each counted twice
        others = ops.where(ops.eye(number, dtype="bool"), 0, ops.absolute(cosines))
        return ops.sum(others) * (self.factor / pairs)

    def _get_config(self) -> dict[str, Any]:
        return {"factor": self.factor, "mode": self.mode}


# Keras' other names of the classes.
l1, l2, l1_l2, orthogonal_regularizer = L1, L2, L1L2, OrthogonalRegularizer

# Names as Keras accepts them.
_CLASSES: dict[str, type[Regularizer]] = {"L1": L1, "L2": L2, "L1L2": L1L2}
REGULARIZERS = _CLASSES | {name.lower(): cls for name, cls in _CLASSES.items()}
REGULARIZERS |= dict.fromkeys(("OrthogonalRegularizer", "orthogonal_regularizer"), OrthogonalRegularizer)

# A function of the weight serves as well, as in Keras.
RegularizerLike = Regularizer | Callable[[Any], Any]

_registry: Registry[RegularizerLike] = Registry(
    "regularizer", "keras.regularizers", Regularizer, REGULARIZERS, functions={}
)
deserialize = _registry.deserialize


def get(identifier: Any) -> RegularizerLike | None:
    """Return the regularizer for a name or class (with Keras' defaults) or a configuration.

    Regularizers, functions of the weight and None are returned unchanged; ConfigError for an unknown name, or an
    argument out of range.
    """
    return None if identifier is None else _registry.get(identifier)


def serialize(regularizer: RegularizerLike | None) -> dict[str, Any] | None:
    """Return the regularizer as Keras writes it to JSON; ConfigError for a lambda."""
    return None if regularizer is None else _registry.serialize(regularizer)


def _factor(value: float, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, float | int) or not math.isfinite(value) or value < 0:
        raise ConfigError(f"Invalid value for argument {name}: expected a non-negative float. Received: {name}={value}")
    return float(value)
