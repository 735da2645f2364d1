"""The base of losses: a number for each sample, weighted and reduced to a single one."""

import math
from collections.abc import Callable, Mapping
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from dptrain import ops
from dptrain.errors import ConfigError
from dptrain.losses.functions import same_rank
from dptrain.mixed_precision import policy_of
from dptrain.ops.nn.cross_entropy import as_labels
from dptrain.program.dims import read
from dptrain.program.shapes import differ, is_one
from dptrain.program.tensor import FLOATX, Tensor, as_tensors, in_double, mask_of
from dptrain.registry.names import snake_case
from dptrain.registry.serialization import Configurable, function_named
from dptrain.runtime.types import TYPES, is_floating, is_narrow

REDUCTIONS = ("sum_over_batch_size", "mean", "sum", "mean_with_sample_weight", "none")


class Loss(Configurable):
    """A loss: a number for each sample; training minimises their weighted sum over a divisor.

    Your own loss is a subclass with `call(y_true, y_pred)`, or just such a function.

    With l the samples' losses and w their weights, a global batch has the loss sum_i w_i l_i / divisor. As in Keras,
    the divisor is the number of samples (not the sum of weights) for reduction "sum_over_batch_size" and "mean", the
    sum of weights for "mean_with_sample_weight", and 1 for "sum"; "none" and None return w_i l_i. Ignored samples do
    not count.

    Args:
        name: by default the class's in snake case, as Keras names it.
        reduction: see above.
        dtype: of the computation; by default the outputs', at least float32.

    Attributes:
        _takes_labels: targets are integer labels, one per sample (True), or values (False); None if unknown.
        _labels_number_outputs: a label is the index of an output, so that there are no others.
        _ignored: label whose samples are left out, or None.

    Raises:
        ConfigError: an argument is out of range or not supported. The same holds for all losses.
    """

    _takes_labels: bool | None = None
    _labels_number_outputs: bool = True
    _ignored: int | None = None

    def __init__(
        self,
        name: str | None = None,
        reduction: str | None = "sum_over_batch_size",
        dtype: Any = None,
    ) -> None:
        if reduction is not None and reduction not in REDUCTIONS:
            raise ConfigError(
                f"Invalid value for argument `reduction`. Expected one of {set(REDUCTIONS) | {None}}. Received: "
                f"reduction={reduction}"
            )
        try:
            policy = policy_of(dtype)
        except ConfigError:
            by_size = sorted(TYPES.values(), key=lambda known: known.storage.itemsize)
            names = ", ".join(known.name for known in by_size if known.is_policy)
            raise ConfigError(f"dtype = {dtype!r} of a loss: expected {names} or a policy") from None
        self.reduction, self.dtype = reduction, None if policy is None else policy.compute_dtype
        self.name = snake_case(type(self).__name__) if name is None else name

    def call(self, y_true: Any, y_pred: Any) -> Any:
        """Return the loss of each sample, (rows, ...), computed with ops.

        `y_true` has y_pred's dtype unless it is labels. A subclass that overrides `__call__` instead, with a
        `sample_weight` that may be None, returns a single number.
        """
        raise NotImplementedError(f"Loss {type(self).__name__} must implement `call(y_true, y_pred)`.")

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Tensor:
        """Return the loss of a batch.

        Args:
            y_true: targets.
            y_pred: the model's outputs; if these have a mask, the rest does not count.
            sample_weight: (rows,) or of the shape of the samples' losses; None for ones.
        """
        target, output = as_tensors([y_true if self._takes_labels else in_double(y_true), y_pred])
        output = _as(output, self.dtype or np.promote_types(output.dtype if is_floating(output.dtype) else "f4", "f4"))
        if not self._takes_labels:
            target = _as(target, output.dtype)
        (losses,) = as_tensors([self.call(target, output)])
        counted, mask = self._counted(target, output, losses), mask_of(y_pred)
        if counted is not None and mask is not None:
            counted = ops.logical_and(counted, weights_like(counted, mask))
        return reduce_weighted_values(losses, sample_weight, mask if counted is None else counted, self.reduction)

    def _counted(self, target: Tensor, output: Tensor, losses: Tensor) -> Tensor | None:
        """Return which samples count; None for all."""
        return None if self._ignored is None else ops.not_equal(as_labels(target, output), self._ignored)

    @property
    def _depends_on_batches(self) -> bool:
        """Whether an epoch's loss, Keras' mean over batches, depends on how samples are batched."""
        return self.reduction in ("sum", "mean_with_sample_weight") or self._ignored is not None

    def _get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments as Keras' `get_config` names them."""
        return {"name": self.name, "reduction": self.reduction}


class LossFunctionWrapper(Loss):
    """A loss computed by a function.

    Args:
        fn: of y_true and y_pred, returns the samples' losses.
        reduction, name, dtype: see `Loss`; the default name is the function's.
        kwargs: further arguments of the function.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        reduction: str | None = "sum_over_batch_size",
        name: str | None = None,
        dtype: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(getattr(fn, "__name__", None) if name is None else name, reduction, dtype)
        self.fn, self._fn_kwargs = fn, kwargs

    def call(self, y_true: Any, y_pred: Any) -> Any:
        """Call the function."""
        return self.fn(*(y_true, y_pred) if self._takes_labels else same_rank(y_true, y_pred), **self._fn_kwargs)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Return the loss that `get_config` described; ConfigError for an unknown function."""
        return cls(**{name: function_named(value) if name == "fn" else value for name, value in config.items()})

    def _get_config(self) -> dict[str, Any]:
        return super()._get_config() | {"fn": getattr(self.fn, "__name__", repr(self.fn))} | self._fn_kwargs


def _as(x: Tensor, dtype: npt.DTypeLike) -> Tensor:
    """Cast x; a softmax or sigmoid is recomputed, so that it still knows its logits."""
    if x.dtype == dtype:
        return x
    if x.logits is None:
        return ops.cast(x, dtype)
    again = ops.sigmoid if x.squashed_by == "sigmoid" else ops.softmax
    return again(ops.cast(x.logits, dtype))


def wide(x: Any) -> Tensor:
    """Return a tensor for losses and metrics: half precision becomes float32, in which counts are exact."""
    (tensor,) = as_tensors([x])
    return _as(tensor, FLOATX) if is_narrow(tensor.dtype) else tensor


def weights_like(values: Tensor, sample_weight: Any) -> Tensor:
    """Return weights in the type of `values`, (rows, ...), with trailing axes of length 1 to match its rank."""
    weights = ops.cast(sample_weight, values.dtype)
    if values.ndim and weights.ndim == values.ndim + 1 and is_one(weights.shape[-1]):
        weights = ops.squeeze(weights, -1)
    pairs = zip(weights.shape, values.shape, strict=False)
    if values.ndim and (weights.ndim > values.ndim or any(differ(n, length) and not is_one(n) for n, length in pairs)):
        raise ConfigError(
            f"sample_weight of shape {read(weights.shape)}: expected the shape of the values that it weights, "
            f"{read(values.shape)}, or its leading axes"
        )
    fewer = values.ndim - weights.ndim
    return ops.reshape(weights, (*weights.shape, *(1,) * fewer)) if weights.ndim and fewer else weights


def reduce_weighted_values(
    values: Tensor, sample_weight: Any = None, mask: Tensor | None = None, reduction: str | None = "sum_over_batch_size"
) -> Tensor:
    """Reduce the samples' losses to a single number, see `Loss`; values outside the `mask` do not count."""
    weights = None if sample_weight is None else weights_like(values, sample_weight)
    if mask is not None:
        valid = ops.broadcast_to(weights_like(values, mask), values.shape)
        weights = valid if weights is None else weights * valid
    if weights is not None:
        values = values * weights
    whole = values.shape
    if reduction in (None, "none") or not whole:
        return values
    total = ops.sum(values)
    if reduction == "sum":
        return total
    if reduction == "mean_with_sample_weight" and weights is not None:
        return ops.divide_no_nan(total, ops.sum(ops.broadcast_to(weights, whole)))
    return total / math.prod(whole) if mask is None else ops.divide_no_nan(total, ops.sum(valid))


def smoothing(label_smoothing: float) -> float:
    """Return a label smoothing; refuse it outside [0, 1]."""
    if not 0 <= label_smoothing <= 1:
        raise ConfigError(f"label_smoothing = {label_smoothing}: expected a number in [0, 1]")
    return float(label_smoothing)
