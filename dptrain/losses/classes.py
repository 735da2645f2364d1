"""Keras' losses: functions of `functions` with a reduction. For `reduction`, `name` and `dtype` see `Loss`."""

from collections.abc import Callable, Sequence
from typing import Any

from dptrain import ops
from dptrain.errors import ConfigError
from dptrain.losses import alignments, functions, overlap, pairs
from dptrain.losses.base import Loss, LossFunctionWrapper, smoothing
from dptrain.program.tensor import Tensor


class _BuiltIn(LossFunctionWrapper):
    """A loss of Keras, with `_function` set by its class."""

    _takes_labels = False

    def __init__(
        self, fn: Callable[..., Any], reduction: str | None, name: str | None, dtype: str | None, **kwargs: Any
    ) -> None:
        super().__init__(fn, reduction, name, dtype, **kwargs)
        vars(self).update(kwargs)  # as Keras has them; what is computed does not read them

    def _get_config(self) -> dict[str, Any]:
        return Loss._get_config(self) | self._fn_kwargs


class _Plain(_BuiltIn):
    """A loss without further arguments, computed by `function`."""

    _function: Callable[..., Any]

    def __init__(
        self, reduction: str | None = "sum_over_batch_size", name: str | None = None, dtype: str | None = None
    ) -> None:
        super().__init__(type(self)._function, reduction, name, dtype)


class MeanSquaredError(_Plain):
    """Mean of (y_pred - y_true)^2."""

    _function = staticmethod(functions.mean_squared_error)


class MeanAbsoluteError(_Plain):
    """Mean of |y_pred - y_true|, whose gradient is 0 where they are equal."""

    _function = staticmethod(functions.mean_absolute_error)


class MeanAbsolutePercentageError(_Plain):
    """100 times the mean of |y_pred - y_true| / |y_true|."""

    _function = staticmethod(functions.mean_absolute_percentage_error)


class MeanSquaredLogarithmicError(_Plain):
    """Mean of (log(1 + y_true) - log(1 + y_pred))^2."""

    _function = staticmethod(functions.mean_squared_logarithmic_error)


class LogCosh(_Plain):
    """Mean of log(cosh(y_pred - y_true))."""

    _function = staticmethod(functions.log_cosh)


class Hinge(_Plain):
    """Mean of max(1 - y_true y_pred, 0); targets are -1 and 1, or 0 and 1."""

    _function = staticmethod(functions.hinge)


class SquaredHinge(_Plain):
    """Mean of max(1 - y_true y_pred, 0)^2; targets are -1 and 1, or 0 and 1."""

    _function = staticmethod(functions.squared_hinge)


class CategoricalHinge(_Plain):
    """max(1 + greatest output of a wrong class - that of the right class, 0); targets are one-hot."""

    _function = staticmethod(functions.categorical_hinge)


class KLDivergence(_Plain):
    """Sum of y_true log(y_true / y_pred)."""

    _function = staticmethod(functions.kl_divergence)


class Poisson(_Plain):
    """Mean of y_pred - y_true log(y_pred)."""

    _function = staticmethod(functions.poisson)


class CosineSimilarity(_BuiltIn):
    """Minus the cosine of the angle between y_true and y_pred along `axis`: -1 where they point the same way."""

    def __init__(
        self,
        axis: int = -1,
        reduction: str | None = "sum_over_batch_size",
        name: str | None = "cosine_similarity",
        dtype: str | None = None,
    ) -> None:
        super().__init__(functions.cosine_similarity, reduction, name, dtype, axis=axis)


class Huber(_BuiltIn):
    """Mean of e^2 / 2 where |e| <= delta, else delta |e| - delta^2 / 2, with e = y_pred - y_true and delta above 0.

    Source: P. Huber, "Robust estimation of a location parameter", Annals of Mathematical Statistics 35 (1964).
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

    If the model ends in a sigmoid, it is computed together with the loss, from the logits; other p are clipped to
    [1e-7, 1 - 1e-7] as in Keras. `ops/nn/cross_entropy.py` says how Keras on PyTorch differs.

    Args:
        from_logits: the model's outputs are logits, p = sigmoid(output), else p.
        label_smoothing: the part of a target that becomes 1/2, in [0, 1].
        axis: that the mean is over.
    """

    _function = staticmethod(functions.binary_crossentropy)

    def __init__(
        self,
        from_logits: bool = False,
        label_smoothing: float = 0.0,
        axis: int = -1,
        reduction: str | None = "sum_over_batch_size",
        name: str | None = None,
        dtype: str | None = None,
    ) -> None:
        arguments = {"from_logits": from_logits, "label_smoothing": smoothing(label_smoothing), "axis": axis}
        super().__init__(type(self)._function, reduction, name, dtype, **arguments)


class CategoricalCrossentropy(BinaryCrossentropy):
    """-sum over classes of y_true log probability; targets are one-hot or probabilities, (rows, classes).

    If the model ends in softmax, it is computed together with the loss, from the logits and without overflow; other
    probabilities are divided by their sum and clipped to [1e-7, 1 - 1e-7] as in Keras.

    Args:
        from_logits: the model's outputs are logits, else probabilities.
        label_smoothing: the part of a target that is spread over all classes, in [0, 1].
        axis: of classes.
    """

    _function = staticmethod(functions.categorical_crossentropy)


class SparseCategoricalCrossentropy(_BuiltIn):
    """-log of the label's probability, labels from 0 to classes - 1; for softmax see `CategoricalCrossentropy`.

    Args:
        from_logits: the model's outputs are logits, else probabilities.
        ignore_class: samples of this label (any integer) have no loss and do not count in the divisor.
        axis: of classes.
    """

    _takes_labels = True

    def __init__(
        self,
        from_logits: bool = False,
        ignore_class: int | None = None,
        reduction: str | None = "sum_over_batch_size",
        axis: int = -1,
        name: str | None = "sparse_categorical_crossentropy",
        dtype: str | None = None,
    ) -> None:
        if ignore_class is not None and (isinstance(ignore_class, bool) or not isinstance(ignore_class, int)):
            raise ConfigError(f"ignore_class = {ignore_class!r}: expected an integer or None")
        function = functions.sparse_categorical_crossentropy
        arguments = {"from_logits": from_logits} | ({} if axis == -1 else {"axis": axis})
        super().__init__(function, reduction, name, dtype, **arguments, ignore_class=ignore_class)
        self.axis, self._ignored = axis, ignore_class


class BinaryFocalCrossentropy(_BuiltIn):
    """Mean of (1 - p_t)^gamma times the binary cross-entropy, p_t the probability of the right answer.

    Source: T. Lin et al., "Focal loss for dense object detection", ICCV 2017.

    Args:
        apply_class_balancing: weigh targets of 1 by alpha and those of 0 by 1 - alpha.
        alpha: see there.
        gamma: focusing exponent, 0 or above.
        from_logits, label_smoothing, axis: see `BinaryCrossentropy`.
    """

    def __init__(
        self,
        apply_class_balancing: bool = False,
        alpha: float = 0.25,
        gamma: float = 2.0,
        from_logits: bool = False,
        label_smoothing: float = 0.0,
        axis: int = -1,
        reduction: str | None = "sum_over_batch_size",
        name: str | None = "binary_focal_crossentropy",
        dtype: str | None = None,
    ) -> None:
        arguments = {"apply_class_balancing": apply_class_balancing, "alpha": alpha, "gamma": gamma, "axis": axis}
        arguments |= {"from_logits": from_logits, "label_smoothing": label_smoothing}
        super().__init__(overlap.binary_focal_crossentropy, reduction, name, dtype, **arguments)


class CategoricalFocalCrossentropy(_BuiltIn):
    """-sum over classes of alpha (1 - p)^gamma target log p; see `BinaryFocalCrossentropy` for the source.

    Args:
        alpha: factor of all classes, or a list with each class's.
        gamma: 0 or above.
        from_logits, label_smoothing, axis: see `CategoricalCrossentropy`.
    """

    def __init__(
        self,
        alpha: float = 0.25,
        gamma: float = 2.0,
        from_logits: bool = False,
        label_smoothing: float = 0.0,
        axis: int = -1,
        reduction: str | None = "sum_over_batch_size",
        name: str | None = "categorical_focal_crossentropy",
        dtype: str | None = None,
    ) -> None:
        arguments = {"alpha": alpha, "gamma": gamma, "from_logits": from_logits, "label_smoothing": label_smoothing}
        super().__init__(overlap.categorical_focal_crossentropy, reduction, name, dtype, **arguments, axis=axis)


class Dice(_BuiltIn):
    """1 - 2 |both| / (|y_true| + |y_pred|), the sizes of regions.

    They are sums over `axis`, by default all axes, which gives the batch a single number.

    Source: F. Milletari et al., "V-Net", 3DV 2016.
    """

    def __init__(
        self,
        reduction: str | None = "sum_over_batch_size",
        name: str | None = "dice",
        axis: int | Sequence[int] | None = None,
        dtype: str | None = None,
    ) -> None:
        super().__init__(overlap.dice, reduction, name, dtype, axis=axis)


class Tversky(_BuiltIn):
    """1 - |both| / (|both| + alpha |y_true alone| + beta |y_pred alone|), the sizes of regions; `axis` as in `Dice`.

    Source: S. Salehi et al., "Tversky loss function for image segmentation", MLMI 2017.
    """

    def __init__(
        self,
        alpha: float = 0.5,
        beta: float = 0.5,
        reduction: str | None = "sum_over_batch_size",
        name: str | None = "tversky",
        axis: int | Sequence[int] | None = None,
        dtype: str | None = None,
    ) -> None:
        super().__init__(overlap.tversky, reduction, name, dtype, alpha=alpha, beta=beta, axis=axis)


class CategoricalGeneralizedCrossEntropy(_BuiltIn):
    """(1 - p^q) / q, p the label's probability, q between 0 and 1; labels are integers.

    Source: Z. Zhang and M. Sabuncu, "Generalized cross entropy loss for training with noisy labels", NeurIPS 2018.
    """

    _takes_labels = True

    def __init__(
        self,
        q: float = 0.5,
        reduction: str | None = "sum_over_batch_size",
        name: str | None = "categorical_generalized_cross_entropy",
        dtype: str | None = None,
    ) -> None:
        if not 0 < q < 1:
            raise ConfigError("q must be in the interval (0, 1)")
        super().__init__(overlap.categorical_generalized_cross_entropy, reduction, name, dtype, q=q)


class Circle(_BuiltIn):
    """Draws embeddings of one label together and those of different ones apart, over all pairs of the global batch.

    See `pairs.circle`. A sample that lacks another of its label, or one of another label, has the loss 0; as in Keras,
    losses of 0 are left out of a mean.

    Source: Y. Sun et al., "Circle loss: a unified perspective of pair similarity optimization", CVPR 2020.

    Args:
        gamma: factor of similarities.
        margin: within which pairs need no correction.
        remove_diagonal: do not pair a sample with itself.
    """

    _takes_labels = True
    _labels_number_outputs = False

    def __init__(
        self,
        gamma: float = 80.0,
        margin: float = 0.4,
        remove_diagonal: bool = True,
        reduction: str | None = "sum_over_batch_size",
        name: str | None = "circle",
        dtype: str | None = None,
    ) -> None:
        arguments = {"gamma": gamma, "margin": margin, "remove_diagonal": remove_diagonal}
        super().__init__(pairs.circle, reduction, name, dtype, **arguments)

    def _counted(self, target: Tensor, output: Tensor, losses: Tensor) -> Tensor:
        return ops.greater(losses, 0)

    @property
    def _depends_on_batches(self) -> bool:
        """Whether an epoch's loss depends on how its samples are batched: pairs are those of a batch."""
        return True


class CTC(_Plain):
    """Negative log-probability of label sequences, over alignments with longer logits; see `alignments.ctc`."""

    _takes_labels = True
    _labels_number_outputs = False
    _function = staticmethod(alignments.ctc)
