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

from dptrain.backend import denormals
from dptrain.backend.base import Backend, HostArray
from dptrain.backend.custom import Op
from dptrain.backend.loops import CACHE_LINE, Loops, NumpyLoops, Scratch, aligned_empty
from dptrain.backend.transfers import Exchange, HostExchange, HostStaging, Staging
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
        dkernel_IO: Array,
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
        np.matmul(x_BI.T, dy_BO, out=dkernel_IO)
        if dx_BI is not None:
            np.matmul(dy_BO, kernel_IO.T, out=dx_BI)

    def activation_forward(self, x_BF: Array, activation: str, y_BF: Array) -> None:
        if activation == "relu":
            np.maximum(x_BF, 0, out=y_BF)
        elif activation == "sigmoid":
            # 1 / (1 + exp(-x)) overflows harmlessly in float32 below -88; tanh never does.
            np.multiply(x_BF, self.dtype.type(0.5), out=y_BF)
            np.tanh(y_BF, out=y_BF)
            np.multiply(y_BF, self.dtype.type(0.5), out=y_BF)
            np.add(y_BF, self.dtype.type(0.5), out=y_BF)
        elif activation == "tanh":
            np.tanh(x_BF, out=y_BF)
        elif activation == "softmax":
            classes = x_BF.shape[-1]
            self.loops.shift_rows(x_BF.reshape(-1, classes), y_BF.reshape(-1, classes))
            np.exp(y_BF, out=y_BF)
            np.divide(y_BF, np.add.reduce(y_BF, axis=-1, keepdims=True), out=y_BF)
        else:
            np.copyto(y_BF, x_BF)

    def activation_backward(self, y_BF: Array, dy_BF: Array, activation: str, dx_BF: Array) -> None:
        if activation == "relu":
            positive = self._scratch("relu", y_BF.shape, np.bool_)
            np.greater(y_BF, 0, out=positive)
            np.multiply(dy_BF, positive, out=dx_BF)
        elif activation in ("sigmoid", "tanh"):
            slope = self._scratch("slope", y_BF.shape, self.dtype)
            np.multiply(y_BF, y_BF, out=slope)  # tanh' = 1 - y^2, sigmoid' = y - y^2
            np.subtract(y_BF if activation == "sigmoid" else self.dtype.type(1), slope, out=slope)
            np.multiply(dy_BF, slope, out=dx_BF)
        elif activation == "softmax":
            weighted = self._scratch("slope", y_BF.shape, self.dtype)
            np.multiply(y_BF, dy_BF, out=weighted)
            np.subtract(dy_BF, np.add.reduce(weighted, axis=-1, keepdims=True), out=dx_BF)
            np.multiply(dx_BF, y_BF, out=dx_BF)
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

    def multiply(self, a: Array, b: Array, out: Array) -> None:
        np.multiply(a, b, out=out)

    def copy(self, source: Array, out: Array) -> None:
        np.copyto(out, source)

    # Losses and metrics

    def softmax_cross_entropy(
        self,
        logits_BC: Array,
        labels_B: Array,
        dlogits_BC: Array | None,
        loss_sum: Array,
        correct_sum: Array | None,
    ) -> None:
        # Without a gradient to return, its memory is scratch.
        exp_BC = dlogits_BC if dlogits_BC is not None else self._scratch("exp", logits_BC.shape, self.dtype)
        shifted_BC = self._scratch("shifted", logits_BC.shape, self.dtype)
        if correct_sum is None:
            self.loops.shift_rows(logits_BC, shifted_BC)
        else:
            correct_sum += self.loops.shift_and_count(logits_BC, labels_B, shifted_BC)
        np.exp(shifted_BC, out=exp_BC)
        loss_sum += self.loops.cross_entropy(shifted_BC, exp_BC, labels_B)

    def squared_error(self, y_BF: Array, target_BF: Array, dy_BF: Array | None, loss_sum: Array) -> None:
        difference = self._scratch("difference", y_BF.shape, self.dtype)
        np.subtract(y_BF, target_BF, out=difference, casting="same_kind")
        features = y_BF.shape[-1]
        if dy_BF is not None:
            np.multiply(difference, self.dtype.type(2 / features), out=dy_BF)
        np.multiply(difference, difference, out=difference)
        loss_sum += np.add.reduce(difference, axis=None) / features

    def count_correct(self, scores_BC: Array, labels_B: Array, correct_sum: Array) -> None:
        correct_sum += self.loops.count_correct(scores_BC, labels_B)

    def absolute_error(self, y_BF: Array, target_BF: Array, error_sum: Array) -> None:
        difference = self._scratch("difference", y_BF.shape, self.dtype)
        np.subtract(y_BF, target_BF, out=difference, casting="same_kind")
        np.absolute(difference, out=difference)
        error_sum += np.add.reduce(difference, axis=None) / y_BF.shape[-1]

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

    def count_nonfinite(self, x: Array, total: Array) -> None:
        for part in _parts(x):
            finite = self._scratch("finite", part.shape, np.bool_)
            np.isfinite(part, out=finite)
            total += part.size - np.count_nonzero(finite)

    def fill(self, buffer: Array, value: float) -> None:
        buffer.fill(value)

    def add(self, source: Array, out: Array) -> None:
        np.add(out, source, out=out)

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


def _parts(x: Array) -> Iterator[Array]:
    """Cut an array, taken as flat, so that intermediate results of a part stay in the cache."""
    flat = x.reshape(-1)
    return (flat[begin : begin + NumpyLoops.chunk] for begin in range(0, flat.size, NumpyLoops.chunk))


def _start_worker() -> None:
    """Give a worker thread what `step_scope` gives the calling one."""
    denormals.enable_flush_to_zero()
    np.seterr(all="ignore")
