"""Keras' metrics that are means over samples of a function."""

from collections.abc import Callable, Sequence
from typing import Any

from dptrain import ops
from dptrain.losses import functions as losses
from dptrain.losses.base import smoothing, weights_like, wide
from dptrain.losses.functions import same_rank
from dptrain.metrics import functions
from dptrain.metrics.base import Mean, MeanMetricWrapper, positive
from dptrain.ops.nn.cross_entropy import as_labels
from dptrain.program.shapes import is_one
from dptrain.program.tensor import Tensor
from dptrain.registry.names import snake_case


class BuiltIn(MeanMetricWrapper):
    """A metric of Keras, computed by `function`, which its class names."""

    _function: Callable[..., Any]
    _takes_labels = False

    def __init__(self, name: str | None = None, dtype: str | None = None, **kwargs: Any) -> None:
        super().__init__(
            type(self)._function, snake_case(type(self).__name__) if name is None else name, dtype, **kwargs
        )
        vars(self).update(kwargs)  # as Keras has them; what is computed does not read them

    def _get_config(self) -> dict[str, Any]:
        return Mean._get_config(self) | self._fn_kwargs


class _Answers(BuiltIn):
    """Right answers, without further arguments."""

    _direction = "up"

    def __init__(self, name: str | None = None, dtype: str | None = None) -> None:
        super().__init__(name, dtype)


class Accuracy(_Answers):
    """Fraction of outputs that equal the target."""

    _function = staticmethod(functions.accuracy)


class SparseCategoricalAccuracy(_Answers):
    """Fraction of samples whose highest output, the first of equals, is at the label."""

    _function = staticmethod(functions.sparse_categorical_accuracy)
    _takes_labels = True


class CategoricalAccuracy(_Answers):
    """Fraction of samples whose highest output is where the highest target value is."""

    _function = staticmethod(functions.categorical_accuracy)


class BinaryAccuracy(BuiltIn):
    """Fraction of outputs that are above the threshold if, and only if, the target is 1."""

    _function = staticmethod(functions.binary_accuracy)
    _direction = "up"

    def __init__(self, name: str | None = "binary_accuracy", dtype: str | None = None, threshold: float = 0.5) -> None:
        super().__init__(name, dtype, threshold=threshold)


class TopKCategoricalAccuracy(BuiltIn):
    """Fraction of samples with fewer than k outputs above the output at the highest target value; k is at least 1."""

    _function = staticmethod(functions.top_k_categorical_accuracy)
    _direction = "up"

    def __init__(self, k: int = 5, name: str | None = "top_k_categorical_accuracy", dtype: str | None = None) -> None:
        super().__init__(name, dtype, k=positive(k))


class SparseTopKCategoricalAccuracy(BuiltIn):
    """Fraction of samples with fewer than k outputs above the output at the label.

    With `from_sorted_ids` outputs are ids of classes, the most probable first, instead of a number for each.
    """

    _function = staticmethod(functions.sparse_top_k_categorical_accuracy)
    _direction = "up"
    _takes_labels = True

    def __init__(
        self,
        k: int = 5,
        name: str | None = "sparse_top_k_categorical_accuracy",
        dtype: str | None = None,
        from_sorted_ids: bool = False,
    ) -> None:
        super().__init__(name, dtype, k=positive(k), from_sorted_ids=from_sorted_ids)


class _Distance(BuiltIn):
    """A distance of outputs from targets, without further arguments."""

    _direction = "down"

    def __init__(self, name: str | None = None, dtype: str | None = None) -> None:
        super().__init__(name, dtype)


class MeanSquaredError(_Distance):
    """Mean over a sample's outputs of (y_pred - y_true)^2."""

    _function = staticmethod(losses.mean_squared_error)


def _squares(y_true: Any, y_pred: Any) -> Tensor:
    target, output = losses.pair(y_true, y_pred)
    return ops.square(output - target)


class RootMeanSquaredError(_Distance):
    """The root of the mean over all samples' outputs of (y_pred - y_true)^2; weights may be per output."""

    _function = staticmethod(_squares)

    def result(self) -> Tensor:
        """Return the root of the mean."""
        return ops.sqrt(super().result())


class MeanAbsoluteError(_Distance):
    """Mean over a sample's outputs of |y_pred - y_true|."""

    _function = staticmethod(losses.mean_absolute_error)


class MeanAbsolutePercentageError(_Distance):
    """100 times the mean of |y_pred - y_true| / |y_true|."""

    _function = staticmethod(losses.mean_absolute_percentage_error)


class MeanSquaredLogarithmicError(_Distance):
    """Mean of (log(1 + y_true) - log(1 + y_pred))^2."""

    _function = staticmethod(losses.mean_squared_logarithmic_error)


class LogCoshError(_Distance):
    """Mean of log(cosh(y_pred - y_true))."""

    _function = staticmethod(losses.log_cosh)

    def __init__(self, name: str | None = "logcosh", dtype: str | None = None) -> None:
        super().__init__(name, dtype)


class KLDivergence(_Distance):
    """Sum of y_true log(y_true / y_pred)."""

    _function = staticmethod(losses.kl_divergence)


class Poisson(_Distance):
    """Mean of y_pred - y_true log(y_pred)."""

    _function = staticmethod(losses.poisson)


class Hinge(_Distance):
    """Mean of max(1 - y_true y_pred, 0); targets are -1 and 1, or 0 and 1."""

    _function = staticmethod(losses.hinge)


class SquaredHinge(_Distance):
    """Mean of max(1 - y_true y_pred, 0)^2; targets are -1 and 1, or 0 and 1."""

    _function = staticmethod(losses.squared_hinge)


class CategoricalHinge(_Distance):
    """max(1 + greatest output of a wrong class - that of the right class, 0); targets are one-hot."""

    _function = staticmethod(losses.categorical_hinge)


def _cosine(y_true: Any, y_pred: Any, axis: int) -> Tensor:
    return -losses.cosine_similarity(y_true, y_pred, axis)


class CosineSimilarity(BuiltIn):
    """The cosine of the angle between y_true and y_pred."""

    _function = staticmethod(_cosine)
    _direction = "up"

    def __init__(self, name: str | None = "cosine_similarity", dtype: str | None = None, axis: int = -1) -> None:
        super().__init__(name, dtype, axis=axis)


class PearsonCorrelation(BuiltIn):
    """The correlation of y_true and y_pred within each sample."""

    _function = staticmethod(functions.pearson_correlation)
    _direction = "up"

    def __init__(self, name: str | None = "pearson_correlation", dtype: str | None = None, axis: int = -1) -> None:
        super().__init__(name, dtype, axis=axis)


class ConcordanceCorrelation(BuiltIn):
    """The concordance of y_true and y_pred within each sample."""

    _function = staticmethod(functions.concordance_correlation)
    _direction = "up"

    def __init__(self, name: str | None = "concordance_correlation", dtype: str | None = None, axis: int = -1) -> None:
        super().__init__(name, dtype, axis=axis)


class SparseCategoricalCrossentropy(BuiltIn):
    """-log of the label's probability; see the loss of that name.

    The label `ignore_class` has the loss 0; as in Keras, it counts as a sample where there is no sample_weight.
    """

    _function = staticmethod(losses.sparse_categorical_crossentropy)
    _direction = "down"
    _takes_labels = True

    def __init__(
        self,
        name: str | None = "sparse_categorical_crossentropy",
        dtype: str | None = None,
        from_logits: bool = False,
        ignore_class: int | None = None,
        axis: int = -1,
    ) -> None:
        super().__init__(name, dtype, from_logits=from_logits, ignore_class=ignore_class, axis=axis)
        self._ignored = ignore_class

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:  # type: ignore[override]
        """Add a batch; see `MeanMetricWrapper`."""
        if sample_weight is not None and self._ignored is not None:
            weights = wide(sample_weight)
            counted = ops.cast(ops.not_equal(as_labels(wide(y_true), wide(y_pred)), self._ignored), weights.dtype)
            sample_weight = counted * weights_like(counted, weights)
        super().update_state(y_true, y_pred, sample_weight)


class CategoricalCrossentropy(BuiltIn):
    """-sum over classes of y_true log probability; see the loss of that name."""

    _function = staticmethod(losses.categorical_crossentropy)
    _direction = "down"

    def __init__(
        self,
        name: str | None = "categorical_crossentropy",
        dtype: str | None = None,
        from_logits: bool = False,
        label_smoothing: float = 0,
        axis: int = -1,
    ) -> None:
        arguments = {"from_logits": from_logits, "label_smoothing": smoothing(label_smoothing), "axis": axis}
        super().__init__(name, dtype, **arguments)


class BinaryCrossentropy(BuiltIn):
    """Mean over a sample's outputs of -y_true log p - (1 - y_true) log(1 - p); see the loss of that name."""

    _function = staticmethod(losses.binary_crossentropy)
    _direction = "down"

    def __init__(
        self,
        name: str | None = "binary_crossentropy",
        dtype: str | None = None,
        from_logits: bool = False,
        label_smoothing: float = 0,
    ) -> None:
        super().__init__(name, dtype, from_logits=from_logits, label_smoothing=smoothing(label_smoothing))


class ByTargets(Mean):
    """A metric that chooses its kind from the shapes of each batch, like Keras for "accuracy".

    `kinds`: for a single output, for labels, for values such as one-hot vectors.
    """

    def __init__(self, kinds: Sequence[type[BuiltIn]], name: str) -> None:
        super().__init__(name)
        self.kinds = tuple(kinds)
        self._direction = self.kinds[0]._direction

    def update_state(  # type: ignore[override]  # as Keras has it: what it adds is made of two
        self, y_true: Any, y_pred: Any, sample_weight: Any = None
    ) -> None:
        """Add a batch; see `MeanMetricWrapper`."""
        target, output = wide(y_true), wide(y_pred)
        of_one = output.ndim < 2 or is_one(output.shape[-1])
        of_labels = target.ndim < output.ndim or is_one(target.shape[-1])
        kind = self.kinds[0 if of_one else 1 if of_labels else 2]
        if not kind._takes_labels:
            target, output = same_rank(target, output)
        super().update_state(kind._function(target, output), sample_weight)
