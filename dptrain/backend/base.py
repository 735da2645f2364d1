"""What executes ops on a device: the vocabulary that layers, losses, metrics and optimizers are written in.

Legend of shape suffixes, the same in every module and kernel: N rows of the data set, B rows of a batch, F features
of a sample, I inputs, O outputs of a dense layer, C classes, P elements of the flat parameter buffer.

A buffer is what `empty` returns: an array on the device that can be sliced and reshaped without copying. Ops write
into buffers that they are given; unless an op says "adds", it overwrites.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dptrain.backend.custom import Op
from dptrain.backend.transfers import Buffer as Buffer
from dptrain.backend.transfers import Exchange, Staging
from dptrain.backend.transfers import HostArray as HostArray

# Activations whose gradient is a function of their output, which is all that backward keeps.
ACTIVATIONS = (
    *("linear", "relu", "sigmoid", "tanh", "softmax"),
    *("leaky_relu", "elu", "selu", "softplus", "exponential"),
)
# Activations whose gradient needs their input.
INPUT_ACTIVATIONS = ("gelu", "silu")
# The slope of leaky_relu below 0, and the factor of elu, where none is given: Keras' defaults.
DEFAULT_ALPHA = {"leaky_relu": 0.2, "elu": 1.0}
# Source: G. Klambauer et al., "Self-normalizing neural networks", NeurIPS 2017.
SELU_SCALE, SELU_ALPHA = 1.0507009873554805, 1.6732632423543772

# Errors that `pointwise_loss` knows; kernels/pointwise.cu numbers them in this order.
POINTWISE = ("squared", "absolute", "huber", "binary", "binary_logits", "equal", "same_side")
# Probabilities of an origin that the loss does not know are kept this far from 0 and 1, as by Keras.
EPSILON = 1e-7
# The elements that begin the reduction's tail and the totals; what follows are the metrics' states.
DIVISOR, ROWS, LOSS, FIRST_STATE = 0, 1, 2, 3


class RowSum(NamedTuple):
    """What `Backend.sum_rows` is to sum.

    Attributes:
        values: (B,).
        weights: (B,), or None for 1.
        total: one element, to which the sum of weighted values is added.
        weight: one element, to which the sum of the weights is added, or None.
    """

    values: Buffer
    weights: Buffer | None
    total: Buffer
    weight: Buffer | None = None


class Backend(ABC):
    """Memory and ops on one device.

    Attributes:
        name: "numpy" or "cuda".
        dtype: floating-point type of parameters, activations and gradients.
        description: the device in words, for the start-up table.
        numerics: what the bits of results depend on; must be the same on all ranks.
        gpu: identity of the GPU in use, which no two ranks should share; None on the CPU.
        shares_samples: samples that another backend of this process holds on the same device are not copied again;
            for who trains several models on arrays that nobody changes.
    """

    name: str
    dtype: np.dtype[Any]
    description: str
    numerics: str
    gpu: str | None = None
    shares_samples: bool = False

    # Memory, whose names appear in messages where it is short

    @abstractmethod
    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike | None = None, name: str = "") -> Buffer:
        """Return an uninitialised buffer of `dtype` (default: the backend's)."""

    @abstractmethod
    def zeros(self, shape: tuple[int, ...], dtype: npt.DTypeLike | None = None, name: str = "") -> Buffer:
        """Return a buffer of zeros of `dtype` (default: the backend's)."""

    @abstractmethod
    def upload(self, array: HostArray, name: str = "") -> Buffer:
        """Return the array on the device; no copy where the device is the host."""

    @abstractmethod
    def download(self, buffer: Buffer) -> HostArray:
        """Return a host copy of a buffer, after all work queued before it."""

    @abstractmethod
    def write(self, buffer: Buffer, array: HostArray) -> None:
        """Overwrite a buffer with a host array of the same shape."""

    @abstractmethod
    def exchange(self, buffer: Buffer, *, direct: bool = False) -> Exchange:
        """Return the way of a buffer to MPI and back.

        Args:
            buffer: on the device.
            direct: MPI is given the device's memory itself instead of a copy on the host.
        """

    @abstractmethod
    def staging(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Staging:
        """Return a way for samples from the host to the device, with memory of that shape at both ends."""

    @abstractmethod
    def close(self) -> None:
        """Give back what the backend holds; it cannot be used afterwards."""

    @abstractmethod
    def upload_samples(self, array: HostArray) -> Buffer:
        """Return samples on the device, as `upload`; the buffer is only read.

        With `shares_samples` some of the last are kept, so that they are there when the next model comes.
        """

    @abstractmethod
    def missing_samples(self, array: HostArray) -> int:
        """Return how many bytes of the device's memory `upload_samples` would take."""

    @abstractmethod
    def room_for_data(self) -> int | None:
        """Return how many bytes of samples the device could hold now; None where it reads the host's own memory."""

    @abstractmethod
    def step_scope(self) -> AbstractContextManager[None]:
        """Return the context in which ops run."""

    # Batches

    @abstractmethod
    def gather(self, x_NF: Buffer, rows_B: Buffer, scale: float, offset: float, out_BF: Buffer) -> None:
        """Batch op: out[b] = x[rows[b]] * scale + offset, cast from the stored dtype to the backend's."""

    @abstractmethod
    def gather_targets(self, y_N: Buffer, rows_B: Buffer, out_B: Buffer) -> None:
        """out[b] = y[rows[b]], without a cast; y may have further dimensions."""

    # Layers

    @abstractmethod
    def dense_forward(
        self, x_BI: Buffer, kernel_IO: Buffer, bias_O: Buffer | None, activation: str, y_BO: Buffer
    ) -> None:
        """y = activation(x @ kernel + bias), with the activation's default alpha."""

    @abstractmethod
    def dense_backward(
        self,
        x_BI: Buffer,
        kernel_IO: Buffer,
        y_BO: Buffer,
        dy_BO: Buffer,
        activation: str,
        dkernel_IO: Buffer | None,
        dbias_O: Buffer | None,
        dx_BI: Buffer | None,
    ) -> None:
        """Gradients of `dense_forward`, those that are given; dy is overwritten by the gradient before the activation.

        For `INPUT_ACTIVATIONS` y is what goes into the activation.
        """

    @abstractmethod
    def activation_forward(self, x_BF: Buffer, activation: str, y_BF: Buffer, alpha: float | None = None) -> None:
        """y = activation(x), one of `ACTIVATIONS` or `INPUT_ACTIVATIONS`; softmax over the last axis.

        leaky_relu is alpha x below 0, elu alpha (exp(x) - 1); alpha None stands for Keras' default. gelu is
        x Phi(x) with the exact normal distribution function (D. Hendrycks and K. Gimpel, 2016), silu x sigmoid(x).
        """

    @abstractmethod
    def activation_backward(
        self, y_BF: Buffer, dy_BF: Buffer, activation: str, dx_BF: Buffer, alpha: float | None = None
    ) -> None:
        """dx = dy times the activation's derivative, from its output y; dx may be dy.

        For `INPUT_ACTIVATIONS` y is the activation's input. Corners have the slope from below.
        """

    @abstractmethod
    def affine(self, x_BF: Buffer, scale: float, offset: float, y_BF: Buffer) -> None:
        """y = x * scale + offset; y may be x."""

    @abstractmethod
    def dropout_mask(self, rate: float, seed: int, step: int, layer: int, first_row: int, mask_BF: Buffer) -> None:
        """mask = 1 / (1 - rate) with probability 1 - rate, else 0.

        Row b, feature f draws 32-bit number f of row `first_row + b` from Philox4x64-10 with key (seed, DROPOUT) and
        counter (block, step, layer, 0): a row begins a new block of eight 32-bit numbers, so that a sample's mask
        depends on its place in the global batch and not on the rank that computes it.
        """

    @abstractmethod
    def copy(self, source: Buffer, out: Buffer) -> None:
        """Elementwise out = source."""

    # Batch normalization: statistics of B rows (of any number of samples' inner axes as well) for each of F features

    @abstractmethod
    def batch_sums(self, x_BF: Buffer, sums_F: Buffer) -> None:
        """sums = sum_b x, float64."""

    @abstractmethod
    def batch_squares(self, x_BF: Buffer, totals_F1: Buffer, squares_F: Buffer) -> None:
        """squares = sum_b (x - mean)^2, float64, with mean = totals[:F] / totals[F]: a global sum and its rows."""

    @abstractmethod
    def batch_statistics(
        self,
        totals_F1: Buffer,
        squares_F: Buffer,
        momentum: float,
        moving_mean_F: Buffer,
        moving_variance_F: Buffer,
        mean_F: Buffer,
        variance_F: Buffer,
    ) -> None:
        """mean = totals[:F] / totals[F], variance = squares / totals[F], moving = moving momentum + it (1 - momentum).

        totals and squares are sums over all ranks; the variance is the biased one.
        """

    @abstractmethod
    def batch_normalize(
        self,
        x_BF: Buffer,
        mean_F: Buffer,
        variance_F: Buffer,
        gamma_F: Buffer | None,
        beta_F: Buffer | None,
        epsilon: float,
        y_BF: Buffer,
    ) -> None:
        """y = (x - mean) / sqrt(variance + epsilon) gamma + beta; without gamma or beta these are 1 and 0."""

    @abstractmethod
    def batch_gradient_sums(
        self,
        x_BF: Buffer,
        dy_BF: Buffer,
        mean_F: Buffer,
        variance_F: Buffer,
        epsilon: float,
        sums_2F: Buffer,
        dgamma_F: Buffer | None,
        dbeta_F: Buffer | None,
    ) -> None:
        """sums[:F] = sum_b dy, sums[F:] = sum_b dy (x - mean) / sqrt(variance + epsilon), float64.

        The first is also written to dbeta and the second to dgamma, where these are given.
        """

    @abstractmethod
    def batch_normalize_backward(
        self,
        x_BF: Buffer,
        dy_BF: Buffer,
        mean_F: Buffer,
        variance_F: Buffer,
        gamma_F: Buffer | None,
        epsilon: float,
        sums_2F: Buffer | None,
        totals_F1: Buffer | None,
        dx_BF: Buffer,
    ) -> None:
        """dx = (dy - sums[:F] / n - xhat sums[F:] / n) gamma / sqrt(variance + epsilon); dx may be dy.

        xhat is (x - mean) / sqrt(variance + epsilon), n is totals[F], and sums are those of `batch_gradient_sums`
        over all ranks; without sums and totals, where mean and variance do not depend on x, both terms are missing.
        """

    # Losses write a value for each row, and its gradient times the row's weight; `sum_rows` weighs and sums the values

    @abstractmethod
    def softmax_cross_entropy(
        self,
        logits_BC: Buffer,
        labels_B: Buffer,
        weights_B: Buffer | None,
        ignored: int | None,
        dlogits_BC: Buffer | None,
        values_B: Buffer,
        correct_B: Buffer | None,
    ) -> None:
        """values = -log softmax(logits)[b, labels[b]]; dlogits = weights (softmax(logits) - onehot(labels)).

        Rows whose label is `ignored` have value and gradient 0, whatever their logits. The highest logit of a row is
        subtracted first, so that no exponential overflows. As it is at hand, the op also writes what
        `top1_correct` of the logits would to correct, where that is given.
        """

    @abstractmethod
    def dense_cross_entropy(
        self,
        logits_BC: Buffer,
        target_BC: Buffer,
        keep: float,
        shift: float,
        weights_B: Buffer | None,
        dlogits_BC: Buffer | None,
        values_B: Buffer,
    ) -> None:
        """values = -sum_c t log softmax(logits), t = keep target + shift; dlogits = weights (softmax sum_c t - t)."""

    @abstractmethod
    def probability_cross_entropy(
        self,
        y_BC: Buffer,
        target: Buffer,
        keep: float,
        shift: float,
        ignored: int | None,
        weights_B: Buffer | None,
        dy_BC: Buffer | None,
        values_B: Buffer,
    ) -> None:
        """values = -sum_c t log p of outputs that are no logits, p = y / sum_c y clipped to [EPSILON, 1 - EPSILON].

        target: (B,) int64 labels, then t is one at the label, and a row whose label is `ignored` has value and
        gradient 0; or (B, C) values, then t = keep target + shift. dy = weights times the gradient in y, through the
        division by the sum; the clipping passes it inside its bounds alone.
        """

    @abstractmethod
    def pointwise_loss(
        self,
        kind: str,
        parameter: float,
        y_BF: Buffer,
        target_BF: Buffer,
        keep: float,
        shift: float,
        weights_B: Buffer | None,
        dy_BF: Buffer | None,
        values_B: Buffer,
    ) -> None:
        """values = mean over f of an error between y and t = keep target + shift; dy = weights times its gradient.

        kind:
            "squared": (y - t)^2.
            "absolute": |y - t|, of gradient 0 where they are equal.
            "huber": (y - t)^2 / 2 where |y - t| <= parameter, else parameter |y - t| - parameter^2 / 2.
            "binary": -t log p - (1 - t) log(1 - p), p = y clipped to [EPSILON, 1 - EPSILON].
            "binary_logits": the same of p = sigmoid(y), from y itself: max(y, 0) - y t + log(1 + exp(-|y|)).
            "equal": 1 where y = t, else 0; no gradient.
            "same_side": 1 where t = (1 if y > parameter else 0), else 0; no gradient.
        """

    # Metrics

    @abstractmethod
    def highest(self, scores_BC: Buffer, places_B: Buffer) -> None:
        """places (int64) = the place of each row's highest score, the first of equals; NaN is highest."""

    @abstractmethod
    def top1_correct(self, scores_BC: Buffer, labels_B: Buffer, values_B: Buffer) -> None:
        """values = 1 where the highest score of the row, as `highest` finds it, is at the label, else 0."""

    @abstractmethod
    def label_in_top(self, scores_BC: Buffer, labels_B: Buffer, k: int, values_B: Buffer) -> None:
        """values = 1 where fewer than k scores of the row are higher than the label's, else 0.

        Equal scores are all in the top. NaN is higher than any number and in no top; so is no label outside 0..C-1.
        """

    @abstractmethod
    def confusion(
        self, y_BF: Buffer, target_BF: Buffer, threshold: float, both_B: Buffer, predicted_B: Buffer, missed_B: Buffer
    ) -> None:
        """Count in each row where y > threshold and target is not 0, where only the first and where only the second."""

    @abstractmethod
    def labels_other_than(self, labels_B: Buffer, ignored: int, values_B: Buffer) -> None:
        """values = 1 where the label is not `ignored`, else 0."""

    @abstractmethod
    def sum_rows(self, *sums: RowSum) -> None:
        """Adds sum_b weights values to each `total` and, where asked for, sum_b weights to each `weight`."""

    @abstractmethod
    def add_totals(self, tail: Buffer, totals: Buffer) -> None:
        """Adds a global batch's tail to an epoch's totals (float64), both [divisor, rows, loss, others...].

        totals: rows += rows, loss += rows loss / divisor, others += others; its own divisor stays. A divisor of 0,
        which stands for none, is 1 here, and is set to 1 in the tail, by which the update divides.
        """

    # Ops that users bring along

    @abstractmethod
    def custom(self, op: Op, buffers: Sequence[Buffer], numbers: Mapping[str, Any]) -> None:
        """Run a user's op, see `dptrain.ops`."""

    # Flat buffers

    @abstractmethod
    def sum(self, x: Buffer, total: Buffer) -> None:
        """Adds the sum of all elements of x to total, one element of float64, in float64.

        The order of the additions depends on the size alone.
        """

    @abstractmethod
    def squared_norm(self, x: Buffer, total: Buffer) -> None:
        """Adds sum_i x[i]^2 to total, one element of float64, in float64; ordered as `sum`."""

    @abstractmethod
    def regularize(
        self, params_P: Buffer, grads_P: Buffer | None, weight: Buffer, l1: float, l2: float, total: Buffer
    ) -> None:
        """Adds weight[1] (l1 sum_i |p[i]| + l2 sum_i p[i]^2) to total, one element of float64; ordered as `sum`.

        Where grads is given, adds its gradient, weight[0] (l1 sign(p) + 2 l2 p), with sign(0) = 0, to that. So weight
        is what the gradients will be divided by, and the number of rows that the total will be divided by.
        """

    @abstractmethod
    def count_nonfinite(self, x: Buffer, total: Buffer) -> None:
        """Adds the number of elements that are NaN or infinite to total, one element of float64."""

    @abstractmethod
    def fill(self, buffer: Buffer, value: float) -> None:
        """Set every element."""

    @abstractmethod
    def add(self, source: Buffer, out: Buffer) -> None:
        """Elementwise out += source."""

    # Vector ops, of which optimizers are made that have no fused op. Buffers are of the backend's dtype and of one
    # size; `out` may be an operand. NaN stays NaN, so that divergence is seen.

    @abstractmethod
    def axpby(self, a: float, x: Buffer, b: float, y: Buffer, out: Buffer) -> None:
        """Elementwise out = a x + b y."""

    @abstractmethod
    def multiply(self, a: Buffer, b: Buffer, out: Buffer) -> None:
        """Elementwise out = a * b; b may have one element for all."""

    @abstractmethod
    def divide(self, a: Buffer, b: Buffer, out: Buffer) -> None:
        """Elementwise out = a / b; b may have one element for all."""

    @abstractmethod
    def maximum(self, a: Buffer, b: Buffer, out: Buffer) -> None:
        """Elementwise the larger of a and b; b may have one element for all."""

    @abstractmethod
    def minimum(self, a: Buffer, b: Buffer, out: Buffer) -> None:
        """Elementwise the smaller of a and b; b may have one element for all."""

    @abstractmethod
    def clip(self, x: Buffer, low: float, high: float, out: Buffer) -> None:
        """Elementwise out = x, but low where x is below and high where it is above; low <= high."""

    @abstractmethod
    def absolute(self, x: Buffer, out: Buffer) -> None:
        """Elementwise out = |x|."""

    @abstractmethod
    def sign(self, x: Buffer, out: Buffer) -> None:
        """Elementwise out = -1, 0 or 1, as x is below, at or above 0."""

    @abstractmethod
    def sqrt(self, x: Buffer, out: Buffer) -> None:
        """Elementwise out = the square root of x; NaN below 0."""

    @abstractmethod
    def clip_divisors(self, squares_E: Buffer, weight: Buffer, limit: float, divisors_E: Buffer) -> None:
        """What sums of gradients are divided by so that the norms of the gradients are `limit` at most.

        divisors[e] = weight[0] max(norm, limit) / limit, where norm = sqrt(squares[e]) / weight[0]; NaN where the norm
        is not finite. Squares are float64, as `squared_norm` leaves them; weight is one element, limit is above 0.
        """

    # Fused updates

    @abstractmethod
    def adam(
        self,
        params_P: Buffer,
        grads_P: Buffer,
        momentum_P: Buffer,
        velocity_P: Buffer,
        weight: Buffer,
        alpha: float,
        beta_1: float,
        beta_2: float,
        epsilon: float,
    ) -> None:
        """Adam's update with g = grads / weight[0]; grads is destroyed.

        m += (g - m)(1 - beta_1), v += (g^2 - v)(1 - beta_2), p -= alpha m / (sqrt(v) + epsilon).

        Source: D. Kingma and J. Ba, "Adam: a method for stochastic optimization", ICLR 2015, in the order of the
        paragraph before section 2.1 (epsilon-hat), as Keras. `alpha` holds the bias corrections.
        """

    @abstractmethod
    def rmsprop(
        self,
        params_P: Buffer,
        grads_P: Buffer,
        velocity_P: Buffer,
        weight: Buffer,
        learning_rate: float,
        rho: float,
        epsilon: float,
    ) -> None:
        """RMSprop's update with g = grads / weight[0], as Keras; grads is destroyed.

        v = rho v + (1 - rho) g^2, p -= learning_rate g / sqrt(v + epsilon).
        """

    @abstractmethod
    def sgd(
        self,
        params_P: Buffer,
        grads_P: Buffer,
        momentum_P: Buffer | None,
        weight: Buffer,
        learning_rate: float,
        momentum: float,
    ) -> None:
        """Gradient descent with g = grads / weight[0]; grads is destroyed.

        m = momentum m - learning_rate g, p += m; without m, p -= learning_rate g.
        """


def flat_features(shape: Sequence[int]) -> int:
    """Return the number of features of one sample of that shape."""
    return int(np.prod(shape, dtype=np.int64))


def amount(nbytes: float) -> str:
    """Return a number of bytes as people read it."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes / 2**10:.1f} KiB" if nbytes >= 2**10 else f"{nbytes:.0f} bytes"
