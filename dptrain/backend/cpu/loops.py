"""The memory-bound inner loops of the CPU backend, once as NumPy passes and once compiled.

NumPy makes one pass over memory for each operation: twelve for an Adam update, which on small batches is half of a
step. Numba (the extra `jit`) compiles the same loops into one pass each. Both are held to the same tests; results
differ in the last bit, so all ranks must use the same (`Backend.numerics`).
"""

import functools
import math
import sys
import threading
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

# Bytes.
CACHE_LINE = 64


class Scratch:
    """Memory for intermediate results, allocated at its first use and kept, so that a step allocates nothing.

    Each thread has its own.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, tuple[int, ...], np.dtype[Any], int], Array] = {}

    def __call__(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """Return the buffer of that name, shape and dtype; its content is what its last user left."""
        key = (name, shape, np.dtype(dtype), threading.get_ident())
        buffer = self._buffers.get(key)
        if buffer is None:
            buffer = self._buffers[key] = aligned_empty(shape, dtype)
        return buffer


def aligned_empty(shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
    """Return an uninitialised array that begins on a cache line, without which AVX-512 passes are a tenth slower."""
    kind = np.dtype(dtype)
    size = math.prod(map(int, shape)) * kind.itemsize
    if size > sys.maxsize - CACHE_LINE:  # NumPy would call it a ValueError
        raise MemoryError(f"unable to allocate {size} bytes for an array with shape {tuple(shape)}")
    memory = np.empty(size + CACHE_LINE, np.uint8)
    start = -memory.ctypes.data % CACHE_LINE
    return memory[start : start + size].view(kind).reshape(shape)


class Loops(ABC):
    """Inner loops on contiguous arrays; shapes and meaning are at the ops of `Backend` that use them.

    Attributes:
        name: "numpy" or "numba".
        chunk: elements of a flat buffer to pass to `adam` at a time, at most.
    """

    name: str
    chunk: int

    @abstractmethod
    def warm_up(self, dtype: np.dtype[Any], samples: Array) -> None:
        """Do what the first use of these types would otherwise do inside a timed step."""

    @abstractmethod
    def gather(self, x_NF: Array, rows_B: Array, scale: Any, offset: Any, out_BF: Array) -> None:
        """out[b] = x[rows[b]] * scale + offset."""

    @abstractmethod
    def add_bias_relu(self, y_BO: Array, bias_O: Array) -> None:
        """y = max(y + bias, 0)."""

    @abstractmethod
    def relu_gradient(self, y_BO: Array, dy_BO: Array, dbias_O: Array) -> None:
        """dy = dy where y > 0, else 0; dbias = sum over rows of dy."""

    @abstractmethod
    def shift_rows(self, x_BC: Array, shifted_BC: Array) -> None:
        """shifted[b] = x[b] - max(x[b]); shifted may be x."""

    @abstractmethod
    def shift_and_compare(self, x_BC: Array, labels_B: Array, shifted_BC: Array, correct_B: Array) -> None:
        """`shift_rows`, and `top1_correct` of x; shifted is not x."""

    @abstractmethod
    def cross_entropy(self, shifted_BC: Array, exp_BC: Array, labels_B: Array, values_B: Array) -> None:
        """values = log(sum(exp[b])) - shifted[b, labels[b]]; turn exp into softmax - onehot, in place."""

    @abstractmethod
    def top1_correct(self, scores_BC: Array, labels_B: Array, values_B: Array) -> None:
        """values = 1 where the highest score, the first of equals, is at the label, else 0."""

    @abstractmethod
    def erf(self, x: Array) -> None:
        """x = erf(x), the error function."""

    @abstractmethod
    def adam(
        self, p: Array, g: Array, m: Array, v: Array, divide: Any, alpha: Any, beta_1: Any, beta_2: Any, epsilon: Any
    ) -> None:
        """Adam's update with the mean gradient g * divide; g is destroyed."""


class NumpyLoops(Loops):
    """A NumPy pass for each operation."""

    name = "numpy"
    # Larger is faster until four float32 arrays leave a core's 2 MB second-level cache: each pass has a fixed cost.
    chunk = 102_400

    def __init__(self) -> None:
        self._scratch = Scratch()

    def warm_up(self, dtype: np.dtype[Any], samples: Array) -> None:
        """Nothing to compile."""

    def gather(self, x_NF: Array, rows_B: Array, scale: Any, offset: Any, out_BF: Array) -> None:
        """Two passes, three with an offset."""
        stored_BF = self._scratch("stored", out_BF.shape, x_NF.dtype)
        # mode="clip" writes straight into `out`; the default checks bounds by way of a second copy.
        np.take(x_NF, rows_B, axis=0, out=stored_BF, mode="clip")
        np.multiply(stored_BF, scale, out=out_BF, casting="same_kind")
        if offset:
            np.add(out_BF, offset, out=out_BF)

    def add_bias_relu(self, y_BO: Array, bias_O: Array) -> None:
        """Two passes."""
        np.add(y_BO, bias_O, out=y_BO)
        np.maximum(y_BO, 0, out=y_BO)

    def relu_gradient(self, y_BO: Array, dy_BO: Array, dbias_O: Array) -> None:
        """Three passes."""
        positive_BO = self._scratch("positive", y_BO.shape, np.bool_)
        np.greater(y_BO, 0, out=positive_BO)
        np.multiply(dy_BO, positive_BO, out=dy_BO)
        np.add.reduce(dy_BO, axis=0, out=dbias_O)

    def shift_rows(self, x_BC: Array, shifted_BC: Array) -> None:
        """Two passes."""
        self._shift(x_BC, shifted_BC)

    def shift_and_compare(self, x_BC: Array, labels_B: Array, shifted_BC: Array, correct_B: Array) -> None:
        """Two passes, as without the comparison."""
        np.equal(self._shift(x_BC, shifted_BC), labels_B, out=correct_B)

    def _shift(self, x_BC: Array, shifted_BC: Array) -> Array:
        """Do `shift_rows`; return the place of each row's highest, (B,)."""
        B, C = x_BC.shape
        best_B, place_B = self._scratch("best", (B,), np.intp), self._scratch("place", (B,), np.intp)
        highest_B1 = self._scratch("highest", (B, 1), x_BC.dtype)
        # Over many short rows argmax takes a quarter of the time of maximum.reduce.
        np.argmax(x_BC, axis=-1, out=best_B)
        np.add(best_B, np.arange(0, B * C, C), out=place_B)
        np.take(x_BC.reshape(-1), place_B, out=highest_B1.reshape(-1), mode="clip")
        np.subtract(x_BC, highest_B1, out=shifted_BC)
        return best_B

    def cross_entropy(self, shifted_BC: Array, exp_BC: Array, labels_B: Array, values_B: Array) -> None:
        """Three passes."""
        B, C = exp_BC.shape
        sum_B1, place_B = self._scratch("sum", (B, 1), exp_BC.dtype), self._scratch("place", (B,), np.intp)
        np.add.reduce(exp_BC, axis=-1, keepdims=True, out=sum_B1)
        np.divide(exp_BC, sum_B1, out=exp_BC)
        np.add(labels_B, np.arange(0, B * C, C), out=place_B)
        exp_BC.reshape(-1)[place_B] -= 1
        np.take(shifted_BC.reshape(-1), place_B, out=values_B, mode="clip")
        np.log(sum_B1, out=sum_B1)
        np.subtract(sum_B1.reshape(-1), values_B, out=values_B)

    def top1_correct(self, scores_BC: Array, labels_B: Array, values_B: Array) -> None:
        """One pass."""
        best_B = self._scratch("best", labels_B.shape, np.intp)
        np.argmax(scores_BC, axis=-1, out=best_B)
        np.equal(best_B, labels_B, out=values_B)

    def erf(self, x: Array) -> None:
        """Two passes for each coefficient, about fifty in float64 and thirty in float32.

        NumPy has no error function, and Python's takes 200 ns an element. With t = 1 / (1 + |x| / 2),
        erf(x) = sign(x) (1 - t exp(-x^2 + p(t))), where p is smooth.
        """
        t, power, negative = (self._scratch(f"erf {i}", x.shape, x.dtype) for i in range(3))
        number = x.dtype.type
        np.minimum(np.absolute(x, out=power), number(_ERF_IS_ONE), out=power)
        np.multiply(power, number(0.5), out=t)
        np.add(t, number(1), out=t)
        np.divide(number(1), t, out=t)
        np.multiply(power, power, out=negative)  # x^2
        np.multiply(t, number(2 * _ERF_SLOPE), out=power)
        np.subtract(power, number(_ERF_SLOPE * (1 + _ERF_LEAST)), out=power)  # t in the units of the coefficients
        np.subtract(_polynomial(power, erf_coefficients(x.dtype), self._scratch), negative, out=negative)
        np.exp(negative, out=negative)
        np.multiply(negative, t, out=negative)
        np.subtract(number(1), negative, out=negative)
        np.copysign(negative, x, out=negative)
        np.copyto(x, negative, where=~np.isnan(x))

    def adam(
        self, p: Array, g: Array, m: Array, v: Array, divide: Any, alpha: Any, beta_1: Any, beta_2: Any, epsilon: Any
    ) -> None:
        """Twelve passes, the division by the weight folded into the moments' factors, in place on the gradient."""
        number = p.dtype.type
        np.multiply(g, number(divide * (1 - beta_1)), out=g)
        np.multiply(m, number(beta_1), out=m)
        np.add(m, g, out=m)
        np.multiply(g, g, out=g)
        np.multiply(g, number((1 - beta_2) / (1 - beta_1) ** 2), out=g)
        np.multiply(v, number(beta_2), out=v)
        np.add(v, g, out=v)
        np.sqrt(v, out=g)
        np.add(g, number(epsilon), out=g)
        np.divide(m, g, out=g)
        np.multiply(g, number(-alpha), out=g)
        np.add(p, g, out=p)


# From here on erf is 1 in float64; t is then `_ERF_LEAST`.
_ERF_IS_ONE = 6.0
_ERF_LEAST = 1 / (1 + _ERF_IS_ONE / 2)
# t in [_ERF_LEAST, 1] times 2 * this, minus this * (1 + _ERF_LEAST), lies in [-1, 1].
_ERF_SLOPE = 1 / (1 - _ERF_LEAST)


@functools.cache
def erf_coefficients(dtype: np.dtype[Any]) -> tuple[float, ...]:
    """Return p of `NumpyLoops.erf` as a polynomial in t brought to [-1, 1], the highest power first."""

    degree = 24 if dtype == np.float64 else 12
    u = np.polynomial.chebyshev.chebpts1(degree + 1)
    t = (u / _ERF_SLOPE + 1 + _ERF_LEAST) / 2
    z = 2 / t - 2
    p = np.array([math.log(math.erfc(one)) + one * one for one in z]) - np.log(t)
    chebyshev = np.polynomial.chebyshev.chebfit(u, p, degree)
    return tuple(float(c) for c in np.polynomial.chebyshev.cheb2poly(chebyshev)[::-1])


def _polynomial(u: Array, coefficients: tuple[float, ...], scratch: Scratch) -> Array:
    """Return a polynomial's values by Horner's rule, in scratch."""
    values = scratch("polynomial", u.shape, u.dtype)
    values.fill(coefficients[0])
    for coefficient in coefficients[1:]:
        np.multiply(values, u, out=values)
        np.add(values, u.dtype.type(coefficient), out=values)
    return values
