"""The NumPy backend: the CPU's, and the reference that CUDA kernels are compared with.

What costs on a CPU is memory passes and Python calls, not the matrix products of small networks. So every op writes
into buffers that exist, scratch is allocated once per shape, and the update works through the flat buffers in chunks
that stay in the cache, on as many threads as the rank may use.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from dptrain.backend.base import (
    DEFAULT_ALPHA,
    DIVISOR,
    EPSILON,
    FIRST_STATE,
    LOSS,
    ROWS,
    SELU_ALPHA,
    SELU_SCALE,
    Backend,
    HostArray,
    RowSum,
)
from dptrain.backend.cpu import denormals
from dptrain.backend.cpu.loops import CACHE_LINE, Loops, NumpyLoops, Scratch, aligned_empty
from dptrain.backend.custom import Op
from dptrain.backend.transfers import SAMPLES, Exchange, HostExchange, HostStaging, Staging
from dptrain.random import Purpose, stream

Array = npt.NDArray[Any]

# Below this many elements waking a second thread costs more than it saves (tens of microseconds).
_PARALLEL_FROM = 200_000


class NumpyBackend(Backend):
    """Ops on NumPy arrays.

    Args:
        dtype: float32, or float64 for a reference.
        threads: threads of elementwise work on large buffers; matrix products use the BLAS library's own.
        loops: the memory-bound inner loops; NumPy's own by default.
    """

    def __init__(self, dtype: npt.DTypeLike = np.float32, threads: int = 1, loops: Loops | None = None) -> None:
        self.name = "numpy"
        self.dtype = np.dtype(dtype)
        self.threads = threads
        self.loops = loops or NumpyLoops()
        self.numerics = f"numpy, {self.dtype}, loops {self.loops.name}"
        compiled = "" if self.loops.name == "numpy" else f", {self.loops.name}"
        self.description = f"CPU, {threads} thread{'s' if threads > 1 else ''}, {self.dtype}{compiled}"
        self._scratch = Scratch()
        self._pool: ThreadPoolExecutor | None = None

    # Memory

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike | None = None, name: str = "") -> Array:
        return aligned_empty(shape, self.dtype if dtype is None else dtype)

    def zeros(self, shape: tuple[int, ...], dtype: npt.DTypeLike | None = None, name: str = "") -> Array:
        buffer = self.empty(shape, dtype, name)
        buffer.fill(0)
        return buffer

    def upload(self, array: HostArray, name: str = "") -> Array:
        self.loops.warm_up(self.dtype, array)
        return array

    def download(self, buffer: Array) -> HostArray:
        return buffer.copy()

    def write(self, buffer: Array, array: HostArray) -> None:
        buffer[...] = array

    def exchange(self, buffer: Array, *, direct: bool = False) -> Exchange:
        return HostExchange(buffer)

    def staging(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Staging:
        return HostStaging(self.upload(aligned_empty(shape, dtype)))

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def upload_samples(self, array: HostArray) -> Array:
        return self.upload(array, SAMPLES)

    def missing_samples(self, array: HostArray) -> int:
        return array.nbytes

    def room_for_data(self) -> int | None:
        return None

    @contextmanager
    def step_scope(self) -> Iterator[None]:
        # Overflow is no event here but a number, as on a GPU: whether a loss is finite is asked where it is read.
        with denormals.flush_to_zero(), np.errstate(all="ignore"):
            yield

    # Batches

    def gather(self, x_NF: Array, rows_B: Array, scale: float, offset: float, out_BF: Array) -> None:
        factor, shift = self.dtype.type(scale), self.dtype.type(offset)

        def part(begin: int, end: int, thread: int) -> None:
            self.loops.gather(x_NF, rows_B[begin:end], factor, shift, out_BF[begin:end])

        self._in_parallel(len(rows_B), out_BF.shape[1], part)

    def gather_targets(self, y_N: Array, rows_B: Array, out_B: Array) -> None:
        np.take(y_N, rows_B, axis=0, out=out_B, mode="clip")

    # Layers

    def dense_forward(self, x_BI: Array, kernel_IO: Array, bias_O: Array | None, activation: str, y_BO: Array) -> None:
        np.matmul(x_BI, kernel_IO, out=y_BO)
        if bias_O is not None and activation == "relu":
            bias = bias_O

            def part(begin: int, end: int, thread: int) -> None:
                self.loops.add_bias_relu(y_BO[begin:end], bias)

            self._in_parallel(len(y_BO), y_BO.shape[1], part)
            return
        if bias_O is not None:
            np.add(y_BO, bias_O, out=y_BO)
        if activation != "linear":
            self.activation_forward(y_BO, activation, y_BO)

    def dense_backward(
        self,
        x_BI: Array,
        kernel_IO: Array,
        y_BO: Array,
        dy_BO: Array,
        activation: str,
        dkernel_IO: Array | None,
        dbias_O: Array | None,
        dx_BI: Array | None,
    ) -> None:
        if dbias_O is not None and activation == "relu":
            self.loops.relu_gradient(y_BO, dy_BO, dbias_O)
        else:
            if activation != "linear":
                self.activation_backward(y_BO, dy_BO, activation, dy_BO)
            if dbias_O is not None:
                np.add.reduce(dy_BO, axis=0, out=dbias_O)
        if dkernel_IO is not None:
            np.matmul(x_BI.T, dy_BO, out=dkernel_IO)
        if dx_BI is not None:
            np.matmul(dy_BO, kernel_IO.T, out=dx_BI)

    def activation_forward(self, x_BF: Array, activation: str, y_BF: Array, alpha: float | None = None) -> None:
        number = self.dtype.type
        if activation == "relu":
            np.maximum(x_BF, 0, out=y_BF)
        elif activation == "sigmoid":
            self._sigmoid(x_BF, y_BF)
        elif activation == "tanh":
            np.tanh(x_BF, out=y_BF)
        elif activation == "softmax":
            classes = x_BF.shape[-1]
            self.loops.shift_rows(x_BF.reshape(-1, classes), y_BF.reshape(-1, classes))
            np.exp(y_BF, out=y_BF)
            np.divide(y_BF, np.add.reduce(y_BF, axis=-1, keepdims=True), out=y_BF)
        elif activation in ("leaky_relu", "elu", "selu"):
            below = self._scratch("below", x_BF.shape, self.dtype)
            positive = self._scratch("positive", x_BF.shape, np.bool_)
            scale, factor = _selu_like(activation, alpha)
            np.minimum(x_BF, 0, out=below)
            if activation != "leaky_relu":
                np.expm1(below, out=below)
            np.multiply(below, number(factor), out=below)
            np.greater(x_BF, 0, out=positive)
            np.multiply(x_BF, number(scale), out=y_BF)
            np.copyto(y_BF, below, where=~positive)
        elif activation == "softplus":
            np.logaddexp(x_BF, number(0), out=y_BF)
        elif activation == "exponential":
            np.exp(x_BF, out=y_BF)
        elif activation == "gelu":
            share = self._scratch("share", x_BF.shape, self.dtype)
            self._normal_distribution(x_BF, share)
            np.multiply(x_BF, share, out=y_BF)
        elif activation == "silu":
            share = self._scratch("share", x_BF.shape, self.dtype)
            self._sigmoid(x_BF, share)
            np.multiply(x_BF, share, out=y_BF)
        else:
            np.copyto(y_BF, x_BF)

    def _sigmoid(self, x: Array, out: Array) -> None:
        # 1 / (1 + exp(-x)) overflows harmlessly in float32 below -88; tanh never does.
        np.multiply(x, self.dtype.type(0.5), out=out)
        np.tanh(out, out=out)
        np.multiply(out, self.dtype.type(0.5), out=out)
        np.add(out, self.dtype.type(0.5), out=out)

    def _normal_distribution(self, x: Array, out: Array) -> None:
        """out = Phi(x) = (1 + erf(x / sqrt(2))) / 2; out is not x."""
        np.multiply(x, self.dtype.type(np.sqrt(0.5)), out=out)
        self.loops.erf(out)
        np.multiply(out, self.dtype.type(0.5), out=out)
        np.add(out, self.dtype.type(0.5), out=out)

    def activation_backward(
        self, y_BF: Array, dy_BF: Array, activation: str, dx_BF: Array, alpha: float | None = None
    ) -> None:
        number = self.dtype.type
        slope = self._scratch("slope", y_BF.shape, self.dtype)
        if activation == "relu":
            positive = self._scratch("relu", y_BF.shape, np.bool_)
            np.greater(y_BF, 0, out=positive)
            np.multiply(dy_BF, positive, out=dx_BF)
        elif activation in ("sigmoid", "tanh"):
            np.multiply(y_BF, y_BF, out=slope)  # tanh' = 1 - y^2, sigmoid' = y - y^2
            np.subtract(y_BF if activation == "sigmoid" else number(1), slope, out=slope)
            np.multiply(dy_BF, slope, out=dx_BF)
        elif activation == "softmax":
            np.multiply(y_BF, dy_BF, out=slope)
            np.subtract(dy_BF, np.add.reduce(slope, axis=-1, keepdims=True), out=dx_BF)
            np.multiply(dx_BF, y_BF, out=dx_BF)
        elif activation in ("leaky_relu", "elu", "selu"):
            positive = self._scratch("positive", y_BF.shape, np.bool_)
            scale, factor = _selu_like(activation, alpha)
            if activation == "leaky_relu":
                slope.fill(factor)
            else:
                np.add(y_BF, number(factor), out=slope)  # (factor (exp(x) - 1))' = factor exp(x)
            np.greater(y_BF, 0, out=positive)
            np.copyto(slope, number(scale), where=positive)
            np.multiply(dy_BF, slope, out=dx_BF)
        elif activation == "softplus":
            np.negative(y_BF, out=slope)
            np.expm1(slope, out=slope)  # softplus' = sigmoid = 1 - exp(-y)
            np.negative(slope, out=slope)
            np.multiply(dy_BF, slope, out=dx_BF)
        elif activation == "exponential":
            np.multiply(dy_BF, y_BF, out=dx_BF)
        elif activation == "gelu":
            share = self._scratch("share", y_BF.shape, self.dtype)
            x = y_BF  # gelu' = Phi(x) + x phi(x)
            np.multiply(x, x, out=slope)
            np.multiply(slope, number(-0.5), out=slope)
            np.exp(slope, out=slope)
            np.multiply(slope, number(1 / np.sqrt(2 * np.pi)), out=slope)
            np.multiply(slope, x, out=slope)
            self._normal_distribution(x, share)
            np.add(slope, share, out=slope)
            np.multiply(dy_BF, slope, out=dx_BF)
        elif activation == "silu":
            share = self._scratch("share", y_BF.shape, self.dtype)
            x = y_BF  # silu' = s + x s (1 - s) with s = sigmoid(x)
            self._sigmoid(x, share)
            np.subtract(number(1), share, out=slope)
            np.multiply(slope, x, out=slope)
            np.add(slope, number(1), out=slope)
            np.multiply(slope, share, out=slope)
            np.multiply(dy_BF, slope, out=dx_BF)
        elif dx_BF is not dy_BF:
            np.copyto(dx_BF, dy_BF)

    def affine(self, x_BF: Array, scale: float, offset: float, y_BF: Array) -> None:
        np.multiply(x_BF, self.dtype.type(scale), out=y_BF)
        if offset:
            np.add(y_BF, self.dtype.type(offset), out=y_BF)

    def dropout_mask(self, rate: float, seed: int, step: int, layer: int, first_row: int, mask_BF: Array) -> None:
        rows, features = mask_BF.shape
        blocks = -(-features // 8)
        bits = stream(seed, Purpose.DROPOUT, step, layer, offset=first_row * blocks).bit_generator.random_raw(
            rows * blocks * 4
        )
        draws = bits.astype("<u8", copy=False).view("<u4").reshape(rows, blocks * 8)[:, :features]
        np.multiply(draws >= np.uint32(rate * 2**32), self.dtype.type(1 / (1 - rate)), out=mask_BF)

    def copy(self, source: Array, out: Array) -> None:
        np.copyto(out, source)

    # Batch normalization

    def batch_sums(self, x_BF: Array, sums_F: Array) -> None:
        np.add.reduce(x_BF, axis=0, dtype=np.float64, out=sums_F)

    def batch_squares(self, x_BF: Array, totals_F1: Array, squares_F: Array) -> None:
        difference = self._scratch("squares", x_BF.shape, np.float64)
        np.subtract(x_BF, totals_F1[:-1] / totals_F1[-1], out=difference)
        np.multiply(difference, difference, out=difference)
        np.add.reduce(difference, axis=0, out=squares_F)

    def batch_statistics(
        self,
        totals_F1: Array,
        squares_F: Array,
        momentum: float,
        moving_mean_F: Array,
        moving_variance_F: Array,
        mean_F: Array,
        variance_F: Array,
    ) -> None:
        np.divide(totals_F1[:-1], totals_F1[-1], out=mean_F, casting="same_kind")
        np.divide(squares_F, totals_F1[-1], out=variance_F, casting="same_kind")
        keep, take = self.dtype.type(momentum), self.dtype.type(1 - momentum)
        for moving, of_batch in ((moving_mean_F, mean_F), (moving_variance_F, variance_F)):
            np.multiply(moving, keep, out=moving)
            np.add(moving, of_batch * take, out=moving)

    def batch_normalize(
        self,
        x_BF: Array,
        mean_F: Array,
        variance_F: Array,
        gamma_F: Array | None,
        beta_F: Array | None,
        epsilon: float,
        y_BF: Array,
    ) -> None:
        np.subtract(x_BF, mean_F, out=y_BF)
        np.multiply(y_BF, self._inverse_deviation(variance_F, epsilon, gamma_F), out=y_BF)
        if beta_F is not None:
            np.add(y_BF, beta_F, out=y_BF)

    def batch_gradient_sums(
        self,
        x_BF: Array,
        dy_BF: Array,
        mean_F: Array,
        variance_F: Array,
        epsilon: float,
        sums_2F: Array,
        dgamma_F: Array | None,
        dbeta_F: Array | None,
    ) -> None:
        F = len(mean_F)
        xhat = self._xhat(x_BF, mean_F, variance_F, epsilon)
        np.multiply(xhat, dy_BF, out=xhat)
        np.add.reduce(dy_BF, axis=0, dtype=np.float64, out=sums_2F[:F])
        np.add.reduce(xhat, axis=0, dtype=np.float64, out=sums_2F[F:])
        for gradient, of_batch in ((dbeta_F, sums_2F[:F]), (dgamma_F, sums_2F[F:])):
            if gradient is not None:
                gradient[...] = of_batch

    def batch_normalize_backward(
        self,
        x_BF: Array,
        dy_BF: Array,
        mean_F: Array,
        variance_F: Array,
        gamma_F: Array | None,
        epsilon: float,
        sums_2F: Array | None,
        totals_F1: Array | None,
        dx_BF: Array,
    ) -> None:
        if sums_2F is None or totals_F1 is None:
            np.multiply(dy_BF, self._inverse_deviation(variance_F, epsilon, gamma_F), out=dx_BF)
            return
        F = len(mean_F)
        means_2F = (sums_2F / totals_F1[-1]).astype(self.dtype)
        xhat = self._xhat(x_BF, mean_F, variance_F, epsilon)
        np.multiply(xhat, means_2F[F:], out=xhat)
        np.subtract(dy_BF, means_2F[:F], out=dx_BF)
        np.subtract(dx_BF, xhat, out=dx_BF)
        np.multiply(dx_BF, self._inverse_deviation(variance_F, epsilon, gamma_F), out=dx_BF)

    def _inverse_deviation(self, variance_F: Array, epsilon: float, gamma_F: Array | None) -> Array:
        """Return gamma / sqrt(variance + epsilon)."""
        deviation = np.sqrt(variance_F + self.dtype.type(epsilon))
        inverse: Array = (self.dtype.type(1) if gamma_F is None else gamma_F) / deviation
        return inverse

    def _xhat(self, x_BF: Array, mean_F: Array, variance_F: Array, epsilon: float) -> Array:
        """Return x brought to mean 0 and variance 1, in scratch."""
        xhat = self._scratch("xhat", x_BF.shape, self.dtype)
        np.subtract(x_BF, mean_F, out=xhat)
        return np.multiply(xhat, self._inverse_deviation(variance_F, epsilon, None), out=xhat)

    # Losses

    def softmax_cross_entropy(
        self,
        logits_BC: Array,
        labels_B: Array,
        weights_B: Array | None,
        ignored: int | None,
        dlogits_BC: Array | None,
        values_B: Array,
        correct_B: Array | None,
    ) -> None:
        # Without a gradient to return, its memory is scratch.
        exp_BC = dlogits_BC if dlogits_BC is not None else self._scratch("exp", logits_BC.shape, self.dtype)
        shifted_BC = self._scratch("shifted", logits_BC.shape, self.dtype)
        if correct_B is not None and ignored is None:
            self.loops.shift_and_compare(logits_BC, labels_B, shifted_BC, correct_B)
        else:
            self.loops.shift_rows(logits_BC, shifted_BC)
            if correct_B is not None:
                self.top1_correct(logits_BC, labels_B, correct_B)
        np.exp(shifted_BC, out=exp_BC)
        # What is ignored need not be a class.
        classes_B = labels_B if ignored is None else np.where(labels_B == ignored, 0, labels_B)
        self.loops.cross_entropy(shifted_BC, exp_BC, classes_B, values_B)
        self._weigh_gradient(labels_B, weights_B, ignored, dlogits_BC, values_B)

    def dense_cross_entropy(
        self,
        logits_BC: Array,
        target_BC: Array,
        keep: float,
        shift: float,
        weights_B: Array | None,
        dlogits_BC: Array | None,
        values_B: Array,
    ) -> None:
        exp_BC = dlogits_BC if dlogits_BC is not None else self._scratch("exp", logits_BC.shape, self.dtype)
        shifted_BC = self._scratch("shifted", logits_BC.shape, self.dtype)
        t_BC = self._scratch("target", logits_BC.shape, self.dtype)
        self.affine(target_BC, keep, shift, t_BC)
        self.loops.shift_rows(logits_BC, shifted_BC)
        np.exp(shifted_BC, out=exp_BC)
        sum_B1 = np.add.reduce(exp_BC, axis=-1, keepdims=True)
        np.divide(exp_BC, sum_B1, out=exp_BC)
        t_sum_B1 = np.add.reduce(t_BC, axis=-1, keepdims=True)
        np.multiply(exp_BC, t_sum_B1, out=exp_BC)
        np.subtract(exp_BC, t_BC, out=exp_BC)
        np.subtract(np.log(sum_B1), shifted_BC, out=shifted_BC)
        np.multiply(shifted_BC, t_BC, out=shifted_BC)
        np.add.reduce(shifted_BC, axis=-1, out=values_B)
        self._weigh_gradient(None, weights_B, None, dlogits_BC, values_B)

    def probability_cross_entropy(
        self,
        y_BC: Array,
        target: Array,
        keep: float,
        shift: float,
        ignored: int | None,
        weights_B: Array | None,
        dy_BC: Array | None,
        values_B: Array,
    ) -> None:
        sum_B1 = np.add.reduce(y_BC, axis=-1, keepdims=True)
        p_BC = y_BC / sum_B1
        t_BC = target * self.dtype.type(keep) + self.dtype.type(shift) if target.ndim == 2 else None
        if t_BC is None:
            t_BC = (target[:, None] == np.arange(y_BC.shape[-1])).astype(self.dtype)
        clipped_BC, passed_BC = self._clipped(p_BC)
        np.negative(np.add.reduce(t_BC * np.log(clipped_BC), axis=-1), out=values_B)
        if dy_BC is not None:
            # With g the gradient in p: dy = (g - sum_c g p) / sum_c y.
            slope_BC = np.where(passed_BC, -t_BC / clipped_BC, 0)
            np.subtract(slope_BC, np.add.reduce(slope_BC * p_BC, axis=-1, keepdims=True), out=slope_BC)
            np.divide(slope_BC, sum_B1, out=dy_BC)
        self._weigh_gradient(target, weights_B, ignored, dy_BC, values_B)

    def pointwise_loss(
        self,
        kind: str,
        parameter: float,
        y_BF: Array,
        target_BF: Array,
        keep: float,
        shift: float,
        weights_B: Array | None,
        dy_BF: Array | None,
        values_B: Array,
    ) -> None:
        t_BF = target_BF
        if (keep, shift) != (1, 0):
            t_BF = self._scratch("target", y_BF.shape, self.dtype)
            self.affine(target_BF, keep, shift, t_BF)
        error_BF = self._scratch("difference", y_BF.shape, self.dtype)
        np.subtract(y_BF, t_BF, out=error_BF, casting="same_kind")
        # A gradient lies between the errors and the loss of each element, which takes the errors' place.
        if kind == "squared":
            if dy_BF is not None:
                np.multiply(error_BF, self.dtype.type(2), out=dy_BF)
            np.multiply(error_BF, error_BF, out=error_BF)
        elif kind == "absolute":
            if dy_BF is not None:
                np.sign(error_BF, out=dy_BF)
            np.absolute(error_BF, out=error_BF)
        elif kind == "huber":
            near_BF = self._scratch("near", y_BF.shape, self.dtype)
            np.clip(error_BF, self.dtype.type(-parameter), self.dtype.type(parameter), out=near_BF)
            if dy_BF is not None:
                np.copyto(dy_BF, near_BF)
            # e^2 / 2 near, delta |e| - delta^2 / 2 far: both are n e - n^2 / 2 of the clipped error n.
            half_BF = self._scratch("half", y_BF.shape, self.dtype)
            np.multiply(near_BF, self.dtype.type(0.5), out=half_BF)
            np.subtract(error_BF, half_BF, out=error_BF)
            np.multiply(error_BF, near_BF, out=error_BF)
        elif kind == "binary":
            p_BF, passed_BF = self._clipped(y_BF)
            if dy_BF is not None:
                np.copyto(dy_BF, np.where(passed_BF, (p_BF - t_BF) / (p_BF * (1 - p_BF)), 0))
            np.copyto(error_BF, -(t_BF * np.log(p_BF) + (1 - t_BF) * np.log(1 - p_BF)))
        elif kind == "binary_logits":
            np.copyto(error_BF, np.maximum(y_BF, 0) - y_BF * t_BF + np.log1p(np.exp(-np.absolute(y_BF))))
            if dy_BF is not None:
                sigmoid_BF = self._scratch("near", y_BF.shape, self.dtype)
                self.activation_forward(y_BF, "sigmoid", sigmoid_BF)
                np.subtract(sigmoid_BF, t_BF, out=dy_BF)
        elif kind == "equal":
            np.equal(y_BF, t_BF, out=error_BF)
        else:
            np.equal(y_BF > self.dtype.type(parameter), t_BF, out=error_BF)
        features = y_BF.shape[-1]
        np.add.reduce(error_BF, axis=-1, out=values_B)
        np.divide(values_B, self.dtype.type(features), out=values_B)
        if dy_BF is not None:
            np.divide(dy_BF, self.dtype.type(features), out=dy_BF)
        self._weigh_gradient(None, weights_B, None, dy_BF, values_B)

    def _clipped(self, p: Array) -> tuple[Array, Array]:
        """Return probabilities kept from 0 and 1, and where they were inside already."""
        low, high = self.dtype.type(EPSILON), self.dtype.type(1 - EPSILON)
        return np.clip(p, low, high), (p >= low) & (p <= high)

    def _weigh_gradient(
        self, labels_B: Array | None, weights_B: Array | None, ignored: int | None, dy: Array | None, values_B: Array
    ) -> None:
        if weights_B is not None and dy is not None:
            np.multiply(dy, weights_B[:, None], out=dy)
        if ignored is not None:
            where_B = labels_B == ignored
            values_B[where_B] = 0
            if dy is not None:
                dy[where_B] = 0

    # Metrics

    def highest(self, scores_BC: Array, places_B: Array) -> None:
        np.argmax(scores_BC, axis=-1, out=places_B)

    def top1_correct(self, scores_BC: Array, labels_B: Array, values_B: Array) -> None:
        self.loops.top1_correct(scores_BC, labels_B, values_B)

    def label_in_top(self, scores_BC: Array, labels_B: Array, k: int, values_B: Array) -> None:
        classes = scores_BC.shape[-1]
        known_B = (labels_B >= 0) & (labels_B < classes)
        own_B1 = np.take_along_axis(scores_BC, np.where(known_B, labels_B, 0)[:, None], axis=-1)
        higher_B = np.count_nonzero((scores_BC > own_B1) | np.isnan(scores_BC), axis=-1)
        np.copyto(values_B, known_B & (higher_B < k) & ~np.isnan(own_B1[:, 0]))

    def confusion(
        self, y_BF: Array, target_BF: Array, threshold: float, both_B: Array, predicted_B: Array, missed_B: Array
    ) -> None:
        predicted_BF, true_BF = y_BF > self.dtype.type(threshold), target_BF != 0
        np.copyto(both_B, np.count_nonzero(predicted_BF & true_BF, axis=-1))
        np.copyto(predicted_B, np.count_nonzero(predicted_BF & ~true_BF, axis=-1))
        np.copyto(missed_B, np.count_nonzero(~predicted_BF & true_BF, axis=-1))

    def labels_other_than(self, labels_B: Array, ignored: int, values_B: Array) -> None:
        np.not_equal(labels_B, ignored, out=values_B)

    def sum_rows(self, *sums: RowSum) -> None:
        for values_B, weights_B, total, weight in sums:
            if weights_B is None:
                total += np.add.reduce(values_B, dtype=np.float64)
            else:
                weighed_B = self._scratch("weighed", values_B.shape, np.float64)
                np.multiply(values_B, weights_B, out=weighed_B, dtype=np.float64)
                total += np.add.reduce(weighed_B)
            if weight is not None:
                weight += len(values_B) if weights_B is None else np.add.reduce(weights_B, dtype=np.float64)

    def add_totals(self, tail: Array, totals: Array) -> None:
        divisor, rows, loss = tail[: LOSS + 1].tolist()
        if divisor == 0:
            tail[DIVISOR] = divisor = 1
        totals[ROWS] += rows
        # So that no rounding comes between where the loss is a mean over all rows.
        totals[LOSS] += loss if divisor == rows else np.float64(loss) * rows / divisor
        totals[FIRST_STATE:] += tail[FIRST_STATE:]

    def custom(self, op: Op, buffers: Sequence[Array], numbers: Mapping[str, Any]) -> None:
        op.reference(*buffers, **numbers)

    # Flat buffers

    def sum(self, x: Array, total: Array) -> None:
        for part in _parts(x):
            total += np.add.reduce(part, dtype=np.float64)

    def squared_norm(self, x: Array, total: Array) -> None:
        for part in _parts(x):
            squares = self._scratch("squares", part.shape, np.float64)
            np.multiply(part, part, out=squares, dtype=np.float64)
            total += np.add.reduce(squares)

    def regularize(
        self, params_P: Array, grads_P: Array | None, weight: Array, l1: float, l2: float, total: Array
    ) -> None:
        divisor, rows, number = float(weight[0]), float(weight[1]), self.dtype.type
        flat_P = params_P.reshape(-1)
        for part in _parts(flat_P):
            terms = self._scratch("terms", part.shape, np.float64)
            np.absolute(part, out=terms)
            if l1:
                total += rows * l1 * np.add.reduce(terms)
            if l2:
                np.multiply(terms, terms, out=terms)
                total += rows * l2 * np.add.reduce(terms)
        if grads_P is None:
            return
        for part, gradient in zip(_parts(flat_P), _parts(grads_P), strict=True):
            slopes = self._scratch("slopes", part.shape, self.dtype)
            if l1:
                np.sign(part, out=slopes)
                np.multiply(slopes, number(divisor * l1), out=slopes)
                np.add(gradient, slopes, out=gradient)
            if l2:
                np.multiply(part, number(divisor * 2 * l2), out=slopes)
                np.add(gradient, slopes, out=gradient)

    def count_nonfinite(self, x: Array, total: Array) -> None:
        for part in _parts(x):
            finite = self._scratch("finite", part.shape, np.bool_)
            np.isfinite(part, out=finite)
            total += part.size - np.count_nonzero(finite)

    def fill(self, buffer: Array, value: float) -> None:
        buffer.fill(value)

    def add(self, source: Array, out: Array) -> None:
        np.add(out, source, out=out)

    def axpby(self, a: float, x: Array, b: float, y: Array, out: Array) -> None:
        number = self.dtype.type
        x_P, y_P, out_P = x.reshape(-1), y.reshape(-1), out.reshape(-1)

        def update(begin: int, end: int, scratch: Array) -> None:
            np.multiply(x_P[begin:end], number(a), out=scratch)
            np.multiply(y_P[begin:end], number(b), out=out_P[begin:end])
            np.add(out_P[begin:end], scratch, out=out_P[begin:end])

        self._in_chunks(out_P.size, update)

    def multiply(self, a: Array, b: Array, out: Array) -> None:
        np.multiply(a, b, out=out)

    def divide(self, a: Array, b: Array, out: Array) -> None:
        np.divide(a, b, out=out)

    def maximum(self, a: Array, b: Array, out: Array) -> None:
        np.maximum(a, b, out=out)

    def minimum(self, a: Array, b: Array, out: Array) -> None:
        np.minimum(a, b, out=out)

    def clip(self, x: Array, low: float, high: float, out: Array) -> None:
        np.clip(x, self.dtype.type(low), self.dtype.type(high), out=out)

    def absolute(self, x: Array, out: Array) -> None:
        np.absolute(x, out=out)

    def sign(self, x: Array, out: Array) -> None:
        np.sign(x, out=out)

    def sqrt(self, x: Array, out: Array) -> None:
        np.sqrt(x, out=out)

    def clip_divisors(self, squares_E: Array, weight: Array, limit: float, divisors_E: Array) -> None:
        norms_E = np.sqrt(squares_E)
        norms_E[~np.isfinite(norms_E)] = np.nan
        divisors_E[...] = np.maximum(norms_E, float(weight[0]) * limit) / limit

    def adam(
        self,
        params_P: Array,
        grads_P: Array,
        momentum_P: Array,
        velocity_P: Array,
        weight: Array,
        alpha: float,
        beta_1: float,
        beta_2: float,
        epsilon: float,
    ) -> None:
        divide = 1 / float(weight[0])

        def update(begin: int, end: int, scratch: Array) -> None:
            p, g, m, v = params_P[begin:end], grads_P[begin:end], momentum_P[begin:end], velocity_P[begin:end]
            self.loops.adam(p, g, m, v, divide, alpha, beta_1, beta_2, epsilon)

        self._in_chunks(params_P.size, update, self.loops.chunk)

    def rmsprop(
        self,
        params_P: Array,
        grads_P: Array,
        velocity_P: Array,
        weight: Array,
        learning_rate: float,
        rho: float,
        epsilon: float,
    ) -> None:
        number = self.dtype.type
        divide, rate, eps = number(1 / float(weight[0])), number(learning_rate), number(epsilon)
        keep, take = number(rho), number(1 - rho)

        def update(begin: int, end: int, scratch: Array) -> None:
            p, g, v = params_P[begin:end], grads_P[begin:end], velocity_P[begin:end]
            np.multiply(g, divide, out=g)
            np.multiply(g, g, out=scratch)
            np.multiply(scratch, take, out=scratch)
            np.multiply(v, keep, out=v)
            np.add(v, scratch, out=v)
            np.add(v, eps, out=scratch)
            np.sqrt(scratch, out=scratch)
            np.divide(g, scratch, out=g)
            np.multiply(g, rate, out=g)
            np.subtract(p, g, out=p)

        self._in_chunks(params_P.size, update)

    def sgd(
        self,
        params_P: Array,
        grads_P: Array,
        momentum_P: Array | None,
        weight: Array,
        learning_rate: float,
        momentum: float,
    ) -> None:
        number = self.dtype.type
        minus_rate, keep = number(-learning_rate / float(weight[0])), number(momentum)

        def update(begin: int, end: int, scratch: Array) -> None:
            p, g = params_P[begin:end], grads_P[begin:end]
            np.multiply(g, minus_rate, out=g)
            if momentum_P is not None:
                m = momentum_P[begin:end]
                np.multiply(m, keep, out=m)
                np.add(m, g, out=m)
                np.add(p, m, out=p)
            else:
                np.add(p, g, out=p)

        self._in_chunks(params_P.size, update)

    # Helpers

    def _in_chunks(self, size: int, update: Callable[[int, int, Array], None], chunk: int = NumpyLoops.chunk) -> None:
        """Call `update(begin, end, scratch)` for chunks that cover `size` elements, on threads if that pays.

        `scratch` has the chunk's length and belongs to the calling thread.
        """
        scratch_TC = self._scratch("chunk", (self.threads, min(chunk, NumpyLoops.chunk)), self.dtype)

        def part(first: int, last: int, thread: int) -> None:
            for begin in range(first, last, chunk):
                end = min(begin + chunk, last)
                update(begin, end, scratch_TC[thread, : end - begin])

        self._in_parallel(size, 1, part)

    def _in_parallel(self, rows: int, width: int, part: Callable[[int, int, int], None]) -> None:
        """Call `part(begin, end, thread)` for parts that cover `rows` of `width` elements, on threads if that pays."""
        if self.threads == 1 or rows * width < _PARALLEL_FROM:
            part(0, rows, 0)
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.threads - 1, initializer=_start_worker)
        line = CACHE_LINE // self.dtype.itemsize  # no two threads write to one cache line
        share = -(-rows // (self.threads * line)) * line
        bounds = [(begin, min(begin + share, rows)) for begin in range(0, rows, share)]
        others = [self._pool.submit(part, begin, end, 1 + i) for i, (begin, end) in enumerate(bounds[1:])]
        part(*bounds[0], 0)
        for other in others:
            other.result()


def _selu_like(activation: str, alpha: float | None) -> tuple[float, float]:
    """Return the factors above and below 0 of leaky_relu, elu and selu."""
    if activation == "selu":
        return SELU_SCALE, SELU_SCALE * SELU_ALPHA
    return 1.0, DEFAULT_ALPHA[activation] if alpha is None else alpha


def _parts(x: Array) -> Iterator[Array]:
    """Cut an array, taken as flat, so that intermediate results of a part stay in the cache."""
    flat = x.reshape(-1)
    return (flat[begin : begin + NumpyLoops.chunk] for begin in range(0, flat.size, NumpyLoops.chunk))


def _start_worker() -> None:
    """Give a worker thread what `step_scope` gives the calling one."""
    denormals.enable_flush_to_zero()
    np.seterr(all="ignore")
