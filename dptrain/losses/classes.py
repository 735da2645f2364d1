"""Keras' losses: each is a function of `functions` with a reduction."""

from collections.abc import Callable
from typing import Any

from dptrain.errors import ConfigError
from dptrain.losses import functions
from dptrain.losses.base import Loss, LossFunctionWrapper, last_axis, smoothing


class _BuiltIn(LossFunctionWrapper):
    """A loss of Keras'; its class names the function."""

    takes_labels = False

    def config(self) -> dict[str, Any]:
        """Return the constructor's arguments as Keras' `get_config` names them."""
        return Loss.config(self) | self.arguments


class _Plain(_BuiltIn):
    """A loss without further arguments.

    Args:
        reduction: as `Loss`.
        name: as `Loss`; by default the function's.
        dtype: as `Loss`.

    Attributes:
        function: what computes it.
    """

    function: Callable[..., Any]

    def __init__(
        self, reduction: str | None = "sum_over_batch_size", name: str | None = None, dtype: str | None = None
    ) -> None:
        super().__init__(type(self).function, reduction, name, dtype)


class MeanSquaredError(_Plain):
    """Mean of (y_pred - y_true)^2."""

    function = staticmethod(functions.mean_squared_error)


class MeanAbsoluteError(_Plain):
    """Mean of |y_pred - y_true|, whose gradient is 0 where they are equal."""

    function = staticmethod(functions.mean_absolute_error)


class MeanAbsolutePercentageError(_Plain):
    """100 times the mean of |y_pred - y_true| / |y_true|."""

    function = staticmethod(functions.mean_absolute_percentage_error)


class MeanSquaredLogarithmicError(_Plain):
    """Mean of (log(1 + y_true) - log(1 + y_pred))^2."""

    function = staticmethod(functions.mean_squared_logarithmic_error)


class LogCosh(_Plain):
    """Mean of log(cosh(y_pred - y_true))."""

    function = staticmethod(functions.log_cosh)


class Hinge(_Plain):
    """Mean of max(1 - y_true y_pred, 0); targets are -1 and 1, or 0 and 1."""

    function = staticmethod(functions.hinge)


class SquaredHinge(_Plain):
    """Mean of max(1 - y_true y_pred, 0)^2; targets are -1 and 1, or 0 and 1."""

    function = staticmethod(functions.squared_hinge)


class CategoricalHinge(_Plain):
    """max(1 + the greatest output of a wrong class - that of the right class, 0); targets are one-hot."""

    function = staticmethod(functions.categorical_hinge)


class KLDivergence(_Plain):
    """Sum of y_true log(y_true / y_pred)."""

    function = staticmethod(functions.kl_divergence)


class Poisson(_Plain):
    """Mean of y_pred - y_true log(y_pred)."""

    function = staticmethod(functions.poisson)


class CosineSimilarity(_BuiltIn):
    """Minus the cosine of the angle between y_true and y_pred: -1 where they point the same way.

    Args:
        axis: of the vectors.
        reduction: as `Loss`.
        name: as `Loss`.
        dtype: as `Loss`.
    """

    def __init__(
        self,
        axis: int = -1,
        reduction: str | None = "sum_over_batch_size",
        name: str | None = "cosine_similarity",
        dtype: str | None = None,
    ) -> None:
        super().__init__(functions.cosine_similarity, reduction, name, dtype, axis=axis)


class Huber(_BuiltIn):
    """Mean of e^2 / 2 where |e| <= delta, else delta |e| - delta^2 / 2, of e = y_pred - y_true.

    Source: P. Huber, "Robust estimation of a location parameter", Annals of Mathematical Statistics 35 (1964).

    Args:
        delta: where the squared error becomes an absolute one, above 0.
        reduction: as `Loss`.
        name: as `Loss`.
        dtype: as `Loss`.

    Raises:
        ConfigError: delta is not above 0.
    """

    def __init__(
        self,
        delta: float = 1.0,
        reduction: str | None = "sum_over_batch_size",
        name: str | None = "huber_loss",
        dtype: str | None = None,
    ) -> None:
        if not delta > 0:
            raise ConfigError(f"delta = {delta}: expected a number above 0")
        super().__init__(functions.huber, reduction, name, dtype, delta=float(delta))
        self.delta = float(delta)


class BinaryCrossentropy(_BuiltIn):
    """Mean over a sample's outputs of -y_true log p - (1 - y_true) log(1 - p).

    Where the model ends in a sigmoid, that is computed together with the loss, from the logits; p of another origin is
    clipped to [1e-7, 1 - 1e-7] as by Keras. What differs from Keras on PyTorch is said in `ops/cross_entropy.py`.

    Args:
        from_logits: the model's outputs are logits, p = sigmoid(output), else p.
        label_smoothing: the part of a target that becomes 1/2, in [0, 1].
        axis: that the mean is over, -1.
        reduction: as `Loss`.
        name: as `Loss`.
        dtype: as `Loss`.

    Raises:
        ConfigError: an argument is out of range or not supported.
    """

    function = staticmethod(functions.binary_crossentropy)

    def __init__(
        self,
        from_logits: bool = False,
        label_smoothing: float = 0.0,
        axis: int = -1,
        reduction: str | None = "sum_over_batch_size",
        name: str | None = None,
        dtype: str | None = None,
    ) -> None:
        given = {"from_logits": from_logits, "label_smoothing": smoothing(label_smoothing), "axis": last_axis(axis)}
        super().__init__(type(self).function, reduction, name, dtype, **given)
        self.from_logits, self.label_smoothing = from_logits, float(label_smoothing)


class CategoricalCrossentropy(BinaryCrossentropy):
    """-sum over classes of y_true log probability; targets are one-hot or probabilities, (rows, classes).

    Where the model ends in softmax, that is computed together with the loss, from the logits and without overflow;
    probabilities of another origin are divided by their sum and clipped to [1e-7, 1 - 1e-7] as by Keras.

    Args:
        from_logits: the model's outputs are logits, else probabilities.
        label_smoothing: the part of a target that is spread over all classes, in [0, 1].
        axis: of classes, -1.
        reduction: as `Loss`.
        name: as `Loss`.
        dtype: as `Loss`.

    Raises:
        ConfigError: an argument is out of range or not supported.
    """

    function = staticmethod(functions.categorical_crossentropy)


class SparseCategoricalCrossentropy(_BuiltIn):
    """-log of the probability that the model gives to the label; labels are integers, 0 to classes - 1.

    Softmax as of `CategoricalCrossentropy`.

    Args:
        from_logits: the model's outputs are logits, else probabilities.
        ignore_class: samples of this label have no loss and do not count in the divisor; any integer.
        reduction: as `Loss`.
        axis: of classes, -1.
        name: as `Loss`.
        dtype: as `Loss`.

    Raises:
        ConfigError: an argument is not supported.
    """

    takes_labels = True

    def __init__(
        self,
        from_logits: bool = False,
        ignore_class: int | None = None,
        reduction: str | None = "sum_over_batch_size",
        axis: int = -1,
        name: str | None = "sparse_categorical_crossentropy",
        dtype: str | None = None,
    ) -> None:
        last_axis(axis)
        if ignore_class is not None and (isinstance(ignore_class, bool) or not isinstance(ignore_class, int)):
            raise ConfigError(f"ignore_class = {ignore_class!r}: expected an integer or None")
        function, given = functions.sparse_categorical_crossentropy, {"from_logits": from_logits}
        super().__init__(function, reduction, name, dtype, **given, ignore_class=ignore_class)
        self.from_logits, self.ignored = from_logits, ignore_class
