"""The CPU backend's inner loops compiled by Numba: one pass over memory each. The only module that imports numba.

Compiled at the first use of a dtype (a second or so) and cached on disk. All run without the interpreter lock. Sums
are in row order, so that the same inputs give the same bits; the only liberty taken is to contract a product and a sum
into one fused multiply-add.
"""

import math
from typing import Any

import numba
import numpy as np

from dptrain.backend.cpu.loops import Array, Loops

_compiled = numba.njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract"})


@_compiled
def _gather(x_NF: Array, rows_B: Array, scale: Any, offset: Any, out_BF: Array) -> None:
    for b in range(rows_B.size):
        row = rows_B[b]
        for f in range(x_NF.shape[1]):
            out_BF[b, f] = x_NF[row, f] * scale + offset


@_compiled
def _add_bias_relu(y_BO: Array, bias_O: Array) -> None:
    zero = y_BO.dtype.type(0)
    for b in range(y_BO.shape[0]):
        for o in range(y_BO.shape[1]):
            z = y_BO[b, o] + bias_O[o]
            # Written so that NaN stays NaN, as in NumPy's maximum.
            y_BO[b, o] = zero if z < zero else z


@_compiled
def _relu_gradient(y_BO: Array, dy_BO: Array, dbias_O: Array) -> None:
    zero = y_BO.dtype.type(0)
    for o in range(dbias_O.size):
        dbias_O[o] = zero
    for b in range(y_BO.shape[0]):
        for o in range(y_BO.shape[1]):
            d = dy_BO[b, o] if y_BO[b, o] > zero else zero
            dy_BO[b, o] = d
            dbias_O[o] += d


@_compiled
def _erf(x: Array) -> None:
    for i in range(x.size):
        x[i] = math.erf(x[i])


@_compiled
def _shift_rows(x_BC: Array, shifted_BC: Array) -> None:
    for b in range(x_BC.shape[0]):
        highest = x_BC[b, 0]
        for c in range(1, x_BC.shape[1]):
            # Written so that NaN wins, as in NumPy's maximum.
            highest = highest if highest >= x_BC[b, c] or highest != highest else x_BC[b, c]
        for c in range(x_BC.shape[1]):
            shifted_BC[b, c] = x_BC[b, c] - highest


@_compiled
def _shift_and_compare(x_BC: Array, labels_B: Array, shifted_BC: Array, correct_B: Array) -> None:
    for b in range(x_BC.shape[0]):
        highest = x_BC[b, 0]
        for c in range(1, x_BC.shape[1]):
            # Written so that NaN wins, as in NumPy's maximum and argmax.
            highest = highest if highest >= x_BC[b, c] or highest != highest else x_BC[b, c]
        # The place of the highest is asked for only where it may be the label: none before it is as high.
        correct_B[b] = 0
        if not x_BC[b, labels_B[b]] < highest:
            c = 0
            while x_BC[b, c] < highest or (x_BC[b, c] == x_BC[b, c] and highest != highest):
                c += 1
            correct_B[b] = c == labels_B[b]
        for c in range(x_BC.shape[1]):
            shifted_BC[b, c] = x_BC[b, c] - highest


@_compiled
def _cross_entropy(shifted_BC: Array, exp_BC: Array, labels_B: Array, values_B: Array) -> None:
    one = exp_BC.dtype.type(1)
    for b in range(exp_BC.shape[0]):
        total = exp_BC.dtype.type(0)
        for c in range(exp_BC.shape[1]):
            total += exp_BC[b, c]
        for c in range(exp_BC.shape[1]):
            exp_BC[b, c] /= total
        label = labels_B[b]
        exp_BC[b, label] -= one
        values_B[b] = np.log(total) - shifted_BC[b, label]


@_compiled
def _highest_at_label(scores_BC: Array, labels_B: Array, values_B: Array) -> None:
    for b in range(scores_BC.shape[0]):
        best = 0
        for c in range(1, scores_BC.shape[1]):
            # NaN counts as the highest, as in NumPy's argmax.
            if not scores_BC[b, c] <= scores_BC[b, best] and scores_BC[b, best] == scores_BC[b, best]:
                best = c
        values_B[b] = best == labels_B[b]


@_compiled
def _adam(p: Array, g: Array, m: Array, v: Array, divide: Any, alpha: Any, to_m: Any, to_v: Any, epsilon: Any) -> None:
    for i in range(p.size):
        mean = g[i] * divide
        first = m[i] + (mean - m[i]) * to_m
        second = v[i] + (mean * mean - v[i]) * to_v
        m[i] = first
        v[i] = second
        p[i] -= alpha * first / (np.sqrt(second) + epsilon)


class NumbaLoops(Loops):
    """One compiled pass for each loop."""

    name = "numba"
    # Nothing is read twice, so there is no cache to stay in.
    chunk = 1 << 40

    def __init__(self) -> None:
        self._warm: set[tuple[Any, ...]] = set()

    def warm_up(self, dtype: np.dtype[Any], samples: Array) -> None:
        """Compile every loop for these types, or load it from the disk."""
        key = (dtype, samples.dtype, samples.flags.writeable, samples.flags.aligned)
        if key in self._warm or samples.ndim != 2:
            return
        self._warm.add(key)
        number = dtype.type
        row, one = np.zeros((1, samples.shape[1]), dtype), np.ones(1, dtype)
        self.gather(samples, np.zeros(min(1, len(samples)), np.int64), number(1), number(0), row)
        self.add_bias_relu(row, row[0])
        self.relu_gradient(row, row.copy(), row[0])
        label = np.zeros(1, np.int64)
        self.shift_rows(row, row)
        self.shift_and_compare(row, label, row, one.copy())
        self.cross_entropy(row, row.copy() + 1, label, one.copy())
        self.top1_correct(row, label, one.copy())
        self.erf(one.copy())
        self.adam(one, one.copy(), one.copy(), one.copy(), 1, 0, 0, 0, 1)

    def gather(self, x_NF: Array, rows_B: Array, scale: Any, offset: Any, out_BF: Array) -> None:
        """Read x once, write out once."""
        _gather(x_NF, rows_B, scale, offset, out_BF)

    def add_bias_relu(self, y_BO: Array, bias_O: Array) -> None:
        """Read and write y once."""
        _add_bias_relu(y_BO, bias_O)

    def relu_gradient(self, y_BO: Array, dy_BO: Array, dbias_O: Array) -> None:
        """Read y once, read and write dy once."""
        _relu_gradient(y_BO, dy_BO, dbias_O)

    def shift_rows(self, x_BC: Array, shifted_BC: Array) -> None:
        """A row at a time."""
        _shift_rows(x_BC, shifted_BC)

    def shift_and_compare(self, x_BC: Array, labels_B: Array, shifted_BC: Array, correct_B: Array) -> None:
        """A row at a time."""
        _shift_and_compare(x_BC, labels_B, shifted_BC, correct_B)

    def cross_entropy(self, shifted_BC: Array, exp_BC: Array, labels_B: Array, values_B: Array) -> None:
        """A row at a time."""
        _cross_entropy(shifted_BC, exp_BC, labels_B, values_B)

    def top1_correct(self, scores_BC: Array, labels_B: Array, values_B: Array) -> None:
        """A row at a time."""
        _highest_at_label(scores_BC, labels_B, values_B)

    def erf(self, x: Array) -> None:
        """Read and write x once."""
        _erf(x.reshape(-1))

    def adam(
        self, p: Array, g: Array, m: Array, v: Array, divide: Any, alpha: Any, beta_1: Any, beta_2: Any, epsilon: Any
    ) -> None:
        """Read four arrays once, write three once."""
        number = p.dtype.type
        factors = (divide, alpha, 1 - beta_1, 1 - beta_2, epsilon)
        _adam(p, g, m, v, *(number(factor) for factor in factors))
