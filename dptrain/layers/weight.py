"""A weight: a variable that remembers how its initial value was drawn."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from dptrain import initializers
from dptrain.errors import ConfigError
from dptrain.initializers import Initializer, InitializerLike, Ones, Orthogonal, Zeros
from dptrain.initializers.base import RandomInitializer
from dptrain.program.tensor import Drawn, Storage, Variable, is_tracing
from dptrain.program.tree import leaves
from dptrain.random import default_seed, next_position
from dptrain.runtime.floatx import floatx

# Elements left for weights made now, and the limit; None if weights are drawn as usual.
_element_budget: ContextVar[list[int] | None] = ContextVar("room", default=None)


@contextmanager
def without_values(most: int) -> Iterator[None]:
    """Make weights in this context without drawing values, which a file has; refuse more than `most` elements."""
    token = _element_budget.set([most, most])
    try:
        yield
    finally:
        _element_budget.reset(token)


def is_reading() -> bool:
    """Whether a file has the values of weights made now."""
    return _element_budget.get() is not None


def allow_without_file(elements: int) -> None:
    """Let a model that is being read make as many elements more, which its file does not have."""
    room = _element_budget.get()
    if room is not None:
        room[0] += elements


def _take_budget(shape: Sequence[int]) -> None:
    room = _element_budget.get()
    if room is not None:
        room[0] -= math.prod(shape)  # Python integers do not overflow
        if room[0] < 0:
            raise ConfigError(f"the model has {room[1] - room[0]} weights or more, which the file cannot hold")


class Weight(Variable):
    """A variable of a layer.

    Its initial value is a function of (shape, seed, position). Weights of a layer in a model get theirs when the model
    adopts the layer (`Parts.adopt`), from the model's seed and their position among the model's weights; others from
    the default seed, at once.

    Args:
        shape: of the value.
        initializer: draws it.
        seed, position: of the initial value.
        provisional: whether a model that adopts the layer draws it anew.
        dtype: of the value.
        name, trainable, regularizer, constraint, aggregation: see `Variable`.

    Attributes:
        initializer, provisional: see above.
        drawn_with: seed and position of the initial value.
        is_wide: whether it is float32 where its layer's weights are halves.
    """

    def __init__(
        self,
        shape: Sequence[int],
        initializer: InitializerLike,
        seed: int,
        position: int,
        provisional: bool,
        dtype: npt.DTypeLike,
        name: str,
        trainable: bool = True,
        regularizer: Callable[[Any], Any] | None = None,
        constraint: Callable[[Any], Any] | None = None,
        aggregation: Any = "none",
    ) -> None:
        self.initializer, self.provisional = initializer, provisional
        self.is_wide = False
        self.drawn_with = seed, position
        without_values = _element_budget.get() is not None
        if without_values:
            _take_budget(shape)
            self.provisional = False
        value: Any = np.zeros(shape, dtype)
        if not without_values:
            value = _first_value(initializer, tuple(shape), seed, position, dtype)
        options = {"regularizer": regularizer, "constraint": constraint, "aggregation": aggregation}
        super().__init__(value, name, trainable, dtype=dtype, **options)
        self._is_initial = not without_values

    @property
    def is_initial(self) -> bool:
        """Whether it still has its initial value."""
        return self._is_initial

    def _store(self, value: Any) -> None:
        """See `Variable`."""
        super()._store(value)
        self._is_initial = False

    def _move(self, storage: Storage | None) -> None:
        """See `Variable`."""
        super()._move(storage)
        self._is_initial = False

    def initialize(self, seed: int, position: int) -> None:
        """Draw the value anew, with the model's seed and the position among its weights."""
        self.drawn_with = seed, position
        value = _first_value(self.initializer, self.shape, seed, position, self.dtype)
        if isinstance(value, Drawn) and self.storage is None and not is_tracing():
            self._hold_later(value.draw, self.shape, self.dtype)
        else:
            self.assign(value.draw() if isinstance(value, Drawn) else value)
        self._is_initial = True

    def set_dtype(self, dtype: npt.DTypeLike) -> None:
        """Convert it to its layer's type; an initial value is drawn again in that type."""
        dtype = wide(dtype) if self.is_wide else dtype
        if self.dtype == np.dtype(dtype):
            return
        if self.is_initial:
            value = _first_value(self.initializer, self.shape, *self.drawn_with, dtype)
            draw = value.draw if isinstance(value, Drawn) else partial(np.asarray, value)
            self._hold_later(draw, self.shape, np.dtype(dtype))
        else:
            self._move(None)
            self._draw, self._held = None, self._own(self._at_hand().numpy().astype(dtype))


def wide(dtype: npt.DTypeLike) -> np.dtype[Any]:
    """Return a floating-point type, or float32 if that is wider."""
    return np.dtype(np.float64 if np.dtype(dtype) == np.float64 else np.float32)


def _first_value(
    initializer: InitializerLike, shape: tuple[int, ...], seed: int, position: int, dtype: npt.DTypeLike
) -> Any:
    """Return a weight's initial value, or a deferred draw if the initializer allows it."""
    draw = partial(_drawn, initializer, shape, seed, position, dtype)
    is_ours = type(initializer).__module__.startswith("dptrain.")
    if (
        is_ours
        and isinstance(initializer, Zeros | Ones | RandomInitializer)
        and not isinstance(initializer, Orthogonal)
    ):
        return Drawn(shape, dtype, draw)
    return draw()


def _drawn(
    initializer: InitializerLike, shape: tuple[int, ...], seed: int, position: int, dtype: npt.DTypeLike
) -> npt.NDArray[Any]:
    if isinstance(initializer, Initializer):
        return initializer._draw(shape, seed, position).astype(dtype)
    return np.asarray(initializer(shape, dtype=np.dtype(dtype).name), dtype)


class BatchState:
    """Variables that a batch leaves to the next: in checkpoints, not in weight files.

    Attributes:
        nested: the variables, in lists.
        variables: all of them.
    """

    def __init__(self, nested: Any) -> None:
        self.nested = nested
        self.variables: list[Weight] = leaves(nested)


class _Variables(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, Variable)


class KerasVariable(Variable, metaclass=_Variables):
    """A user's variable, made as in Keras; all variables are its instances.

    Args:
        initializer: the initial value; or with `shape` the name of an initializer, or a function `f(shape,
            dtype=None)`.
        shape: of the value, for an initializer.
        dtype: of the value; by default that of an array, else "float32".
        trainable: whether it has a gradient.
        aggregation: "sum" if ranks may each keep a summand of it.
        autocast, synchronization: not used.
        name: for messages and files.

    Raises:
        ConfigError: an unknown initializer, or an initializer without a shape.
    """

    def __init__(
        self,
        initializer: Any,
        shape: Sequence[int] | None = None,
        dtype: npt.DTypeLike | None = None,
        trainable: bool = True,
        autocast: bool = True,
        aggregation: str | None = "none",
        synchronization: str = "auto",
        name: str | None = None,
    ) -> None:
        value = initializer
        if isinstance(initializer, str | Initializer) or (
            callable(initializer) and not hasattr(initializer, "__array__")
        ):
            if shape is None:
                raise ConfigError(
                    "When creating a Variable from an initializer, the `shape` argument should be specified. Received: "
                    f"initializer={initializer} and shape={shape}"
                )
            value = _drawn(
                initializers.get(initializer), tuple(shape), default_seed(), next_position(), dtype or floatx()
            )
        kind: Any = "sum" if aggregation == "sum" else "none"
        super().__init__(value, name or "variable", trainable, dtype=dtype, aggregation=kind)
