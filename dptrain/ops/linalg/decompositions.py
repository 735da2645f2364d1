"""Matrix decompositions by LAPACK through NumPy, on the host for a GPU too.

A matrix is the last two axes. Undefined results, such as the inverse of a singular matrix, are NaN. Decompositions
with several parts are packed along their last axis, so that one call computes all; `linalg` unpacks them.

Gradients: M. Giles, "An extended collection of matrix derivative results for forward and reverse mode algorithmic
differentiation", 2008; LU, QR and the pseudo-inverse cite theirs.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dptrain.errors import ConfigError
from dptrain.ops.arrays import tril, triu
from dptrain.ops.common import elementwise, floating_dtype, unbroadcast
from dptrain.ops.elementwise import where
from dptrain.ops.manipulation import concatenate, expand_dims, reshape, transpose_to
from dptrain.ops.products import batch_matmul
from dptrain.ops.reduction import reduce_sum
from dptrain.program.lowering import HostCall
from dptrain.program.op import Op, op
from dptrain.program.shapes import Shape, broadcast
from dptrain.program.sharding.sharding_rule import names
from dptrain.program.tensor import Array, Tensor


def transposed(x: Tensor) -> Tensor:
    """Swap the last two axes."""
    return transpose_to(x, axes=(*range(x.ndim - 2), x.ndim - 1, x.ndim - 2))


def _letters(output_rank: int) -> Callable[..., str]:
    """Return the sharding rule of an op on whole matrices with `output_rank` axes beside the batch's."""

    def letters(shapes: Sequence[Shape], out: Shape, attributes: Any) -> str:
        rows = names(len(shapes[0]) - 2)
        return f"{rows}XX->{rows}{'X' * output_rank}"

    return letters


def _pair_letters(shapes: Sequence[Shape], out: Shape, attributes: Any) -> str:
    operands, _, result = elementwise([shape[:-2] for shape in shapes], out[:-2], attributes).partition("->")
    a, b = operands.split(",")
    return f"{a}XX,{b}Xz->{result}Xz"  # columns are independent


def matrix_shape(shape: Shape, square: bool, name: str) -> Shape:
    """Return the lengths of a matrix; refuse fewer axes, and with `square` other than square ones."""
    if len(shape) < 2:
        raise ConfigError(f"{name}: shape {shape}; expected at least 2 dimensions")
    m, n = int(shape[-2]), int(shape[-1])
    if square and m != n:
        raise ConfigError(f"{name}: shape {shape}; expected a square matrix")
    return m, n


def _per_matrix(function: Callable[..., Array], out: Array, *arrays: Array) -> None:
    """Apply a function to each matrix; NaN where LAPACK fails."""
    if not out.size:
        return
    try:
        out[...] = function(*(array.astype(out.dtype, copy=False) for array in arrays))
        return
    except np.linalg.LinAlgError:
        pass
    rank = out.ndim - max(array.ndim for array in arrays) + 2
    batch = out.shape[: out.ndim - rank]
    spread = [np.broadcast_to(array, (*batch, *array.shape[-2:])) for array in arrays]
    for place in np.ndindex(batch):
        try:
            out[place] = function(*(array[place].astype(out.dtype, copy=False) for array in spread))
        except np.linalg.LinAlgError:
            out[place] = np.nan


def _square_op(name: str, function: Callable[..., Array], shape: Callable[[Shape], Shape], output_rank: int) -> Op:
    def compute(x: Array, *, out: Array) -> None:
        _per_matrix(function, out, x)

    def checked(input_shape: Shape) -> Shape:
        matrix_shape(input_shape, True, name)
        return shape(input_shape)

    compute.__name__, compute.__doc__ = name, f"numpy.linalg: {name}."
    return op(shape=checked, letters=_letters(output_rank), dtype=floating_dtype, lowering=HostCall())(compute)


def _symmetric(x: Array) -> Array:
    return (x + x.swapaxes(-1, -2)) / 2


def _same_shape(shape: Shape) -> Shape:
    return shape


# Inverses and determinants

inverse = _square_op("inverse", np.linalg.inv, _same_shape, 2)
determinant = _square_op("determinant", np.linalg.det, lambda shape: shape[:-2], 0)
log_determinant = _square_op(
    "log_determinant", lambda x: np.stack(np.linalg.slogdet(x), -1), lambda shape: (*shape[:-2], 2), 1
)


def _cofactors(x: Array) -> Array:
    """Return the derivative of the determinant, |x| times the inverse's transpose where that exists.

    Of a singular u s v^T it is |u| |v| u c v^T, the n-th of c the product of all s but the n-th.
    """
    with np.errstate(all="ignore"):
        value = np.linalg.det(x)
        regular = np.isfinite(value) & (value != 0)
        square = np.where(regular[..., None, None], x, np.eye(x.shape[-1], dtype=x.dtype))
        result = value[..., None, None] * np.linalg.inv(square).swapaxes(-1, -2)
    is_finite = np.asarray(np.isfinite(x).all((-2, -1)))
    singular = is_finite & ~regular
    for place in np.argwhere(singular):
        at = tuple(place)
        u, s, vt = np.linalg.svd(x[at])
        others = np.array([np.prod(np.delete(s, n)) for n in range(len(s))])
        result[at] = np.linalg.det(u) * np.linalg.det(vt) * (u * others) @ vt
    return np.where(is_finite[..., None, None], result, np.nan)


cofactors = _square_op("cofactors", _cofactors, _same_shape, 2)


@cofactors.gradient
def _cofactors_gradient(y: Tensor, dy: Tensor, x: Tensor) -> Tensor:
    """With y = |x| b and b the inverse's transpose; NaN of a singular matrix."""
    b = transposed(inverse(x))
    traces = reduce_sum(dy * b, axes=(y.ndim - 2, y.ndim - 1), keepdims=True)
    return traces * y - batch_matmul(batch_matmul(y, transposed(dy)), b)


@inverse.gradient
def _inverse(y: Tensor, dy: Tensor, x: Tensor) -> Tensor:
    t = transposed(y)
    return -batch_matmul(batch_matmul(t, dy), t)


@determinant.gradient
def _determinant(y: Tensor, dy: Tensor, x: Tensor) -> Tensor:
    return expand_dims(dy, (-2, -1)) * cofactors(x)


@log_determinant.gradient
def _log_determinant(y: Tensor, dy: Tensor, x: Tensor) -> Tensor:
    return expand_dims(dy[..., 1], (-2, -1)) * transposed(inverse(x))


def _pair_shape(a: Shape, b: Shape, **attributes: Any) -> Shape:
    n, _ = matrix_shape(a, True, "solve")
    if len(b) < 2 or int(b[-2]) != n:
        raise ConfigError(f"solve: shapes {a} and {b} are incompatible")
    return (*broadcast(a[:-2], b[:-2]), *b[-2:])


@op(shape=_pair_shape, letters=_pair_letters, dtype=floating_dtype, linear="each", linear_in=(1,), lowering=HostCall())
def solution(a: Array, b: Array, *, out: Array) -> None:
    """The x of a x = b."""
    _per_matrix(np.linalg.solve, out, a, b)


@solution.gradient
def _solution(y: Tensor, dy: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    db = solution(transposed(a), dy)
    return unbroadcast(-batch_matmul(db, transposed(y)), a), unbroadcast(db, b)


def _triangle(x: Array, lower: bool) -> Array:
    return np.tril(x) if lower else np.triu(x)


@op(shape=_pair_shape, letters=_pair_letters, dtype=floating_dtype, linear="each", linear_in=(1,), lowering=HostCall())
def triangular_solution(a: Array, b: Array, *, lower: bool, out: Array) -> None:
    """The x of a x = b, where only one triangle of a counts."""
    _per_matrix(lambda matrix, right_side: np.linalg.solve(_triangle(matrix, lower), right_side), out, a, b)


@triangular_solution.gradient
def _triangular_solution(y: Tensor, dy: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    lower = y.attributes["lower"]
    db = triangular_solution(transposed(a), dy, lower=not lower)
    da = -batch_matmul(db, transposed(y))
    return unbroadcast(tril(da) if lower else triu(da), a), unbroadcast(db, b)


# Cholesky's factor, and eigenvectors

cholesky_factor = _square_op("cholesky_factor", lambda x: np.linalg.cholesky(_symmetric(x)), _same_shape, 2)


@cholesky_factor.gradient
def _cholesky_factor(y: Tensor, dy: Tensor, x: Tensor) -> Tensor:
    """I. Murray, "Differentiation of the Cholesky decomposition", 2016."""
    n = int(x.shape[-1])
    halved = tril(batch_matmul(transposed(y), dy)) * (1 - np.eye(n, dtype=y.dtype) / 2)
    left_solution = solution(transposed(y), halved)
    gradient = transposed(solution(transposed(y), transposed(left_solution)))
    return (gradient + transposed(gradient)) / 2


def _eigen(x: Array) -> Array:
    values, vectors = np.linalg.eigh(_symmetric(x))
    return np.concatenate([values[..., None], vectors], -1)


eigen_packed = _square_op("eigen_packed", _eigen, lambda shape: (*shape[:-1], int(shape[-1]) + 1), 2)


def _reciprocal_differences(x: Tensor) -> Tensor:
    """Return 1 / (x_j - x_i), 0 where they are equal."""
    differences = expand_dims(x, -2) - expand_dims(x, -1)
    equal = differences == 0
    return where(equal, 0.0, 1.0 / where(equal, 1.0, differences))


def _diagonal(x: Tensor) -> Tensor:
    return expand_dims(x, -1) * np.eye(int(x.shape[-1]), dtype=x.dtype)


@eigen_packed.gradient
def _eigen_packed(y: Tensor, dy: Tensor, x: Tensor) -> Tensor:
    values, vectors, dvalues, dvectors = y[..., 0], y[..., 1:], dy[..., 0], dy[..., 1:]
    inner = _reciprocal_differences(values) * batch_matmul(transposed(vectors), dvectors)
    gradient = batch_matmul(batch_matmul(vectors, _diagonal(dvalues) + inner), transposed(vectors))
    return (gradient + transposed(gradient)) / 2


# Decompositions of any matrices, packed into vectors


def _pack(*parts: Array) -> Array:
    """Flatten and concatenate matrices and vectors after the batch's axes."""
    rank = parts[0].ndim - 2
    return np.concatenate([part.reshape(*part.shape[:rank], -1) for part in parts], -1)


def unpack(packed: Tensor, *shapes: Shape) -> list[Tensor]:
    """Split what `_pack` joined into parts of these shapes."""
    parts, start = [], 0
    for shape in shapes:
        length = int(np.prod(shape, dtype=np.int64))
        part = packed[..., start : start + length]
        parts.append(part if len(shape) == 1 else reshape(part, (*packed.shape[:-1], *shape)))
        start += length
    return parts


def _packed_op(name: str, function: Callable[..., Array], length: Callable[..., int], has_full: bool = False) -> Op:
    """Return an op of matrices whose parts are packed."""

    def shape(input_shape: Shape, **attributes: bool) -> Shape:
        return *input_shape[:-2], length(*matrix_shape(input_shape, False, name), *attributes.values())

    def plain(x: Array, *, out: Array) -> None:
        _per_matrix(function, out, x)

    def chosen(x: Array, *, full: bool, out: Array) -> None:
        _per_matrix(lambda matrix: function(matrix, full), out, x)

    compute: Callable[..., None] = chosen if has_full else plain
    compute.__name__, compute.__doc__ = name, f"numpy.linalg: {name}."
    return op(shape=shape, letters=_letters(1), dtype=floating_dtype, lowering=HostCall())(compute)


def qr_shapes(m: int, n: int, full: bool) -> tuple[Shape, Shape]:
    """Return the shapes of q and r."""
    k = m if full else min(m, n)
    return (m, k), (k, n)


qr_packed = _packed_op(
    "qr_packed",
    lambda x, full: _pack(*np.linalg.qr(x, "complete" if full else "reduced")),
    lambda m, n, full: sum(a * b for a, b in qr_shapes(m, n, full)),
    has_full=True,
)


@qr_packed.gradient
def _qr_packed(y: Tensor, dy: Tensor, x: Tensor) -> Tensor:
    """D. Roberts and L. Roberts, "QR and LQ decomposition matrix backpropagation algorithms", 2020."""
    (m, n), full = map(int, x.shape[-2:]), y.attributes["full"]
    if full and m > n:
        raise ConfigError(f"qr: no gradient with mode='complete' of {m} x {n} matrices; use mode='reduced'")
    shapes = qr_shapes(m, n, full)
    (q, r), (dq, dr) = unpack(y, *shapes), unpack(dy, *shapes)
    if m < n:  # r = [u v], x = [q u, q v]
        dv = dr[..., m:]
        dq = dq + batch_matmul(x[..., m:], transposed(dv))
        r, dr = r[..., :m], dr[..., :m]
    mixed = batch_matmul(r, transposed(dr)) - batch_matmul(transposed(dq), q)
    lower = tril(mixed) + transposed(tril(mixed, -1))
    dx = transposed(solution(r, transposed(dq + batch_matmul(q, lower))))
    return dx if m >= n else concatenate([dx, batch_matmul(q, dv)], -1)


def svd_shapes(m: int, n: int, full: bool) -> tuple[Shape, Shape, Shape]:
    """Return the shapes of u, s and the transposed v."""
    k = min(m, n)
    return (m, m if full else k), (k,), (n if full else k, n)


svd_packed = _packed_op(
    "svd_packed",
    lambda x, full: _pack(*np.linalg.svd(x, full)),
    lambda m, n, full: sum(int(np.prod(shape)) for shape in svd_shapes(m, n, full)),
    has_full=True,
)
singular_values = _packed_op("singular_values", lambda x: np.linalg.svd(x, compute_uv=False), lambda m, n: min(m, n))


@svd_packed.gradient
def _svd_packed(y: Tensor, dy: Tensor, x: Tensor) -> Tensor:
    m, n = map(int, x.shape[-2:])
    if y.attributes["full"] and m != n:
        raise ConfigError(f"svd: no gradient with full_matrices of {m} x {n} matrices; use full_matrices=False")
    shapes = svd_shapes(m, n, False)
    (u, s, vt), (du, ds, dvt) = unpack(y, *shapes), unpack(dy, *shapes)
    gaps = _reciprocal_differences(s * s)
    j, k = gaps * batch_matmul(transposed(u), du), gaps * batch_matmul(vt, transposed(dvt))
    row, column = expand_dims(s, -2), expand_dims(s, -1)
    inner = _diagonal(ds) + (j + transposed(j)) * row + column * (k + transposed(k))
    dx = batch_matmul(batch_matmul(u, inner), vt)
    if m > n:
        outside = du - batch_matmul(u, batch_matmul(transposed(u), du))
        dx = dx + batch_matmul(outside / row, vt)
    if m < n:
        outside = dvt - batch_matmul(batch_matmul(dvt, transposed(vt)), vt)
        dx = dx + batch_matmul(u, outside / column)
    return dx


@singular_values.gradient
def _singular_values(y: Tensor, dy: Tensor, x: Tensor) -> Tensor:
    m, n = map(int, x.shape[-2:])
    u, _, vt = unpack(svd_packed(x, full=False), *svd_shapes(m, n, False))
    return batch_matmul(u * expand_dims(dy, -2), vt)


# LU, by Gauss with the greatest pivot of each column


def _lu(x: Array) -> Array:
    m, n = x.shape[-2:]
    lu = x.reshape(-1, m, n).copy()
    k, batch = min(m, n), np.arange(len(lu))
    pivots = np.zeros((len(lu), k), x.dtype)
    for column in range(k):
        place = column + np.argmax(np.abs(lu[:, column:, column]), axis=1)
        pivots[:, column] = place
        rows = lu[batch, place].copy()
        lu[batch, place] = lu[:, column]
        lu[:, column] = rows
        pivot = lu[:, column, column][:, None]
        below = np.where(pivot == 0, lu[:, column + 1 :, column], lu[:, column + 1 :, column] / pivot)
        lu[:, column + 1 :, column] = below
        lu[:, column + 1 :, column + 1 :] -= below[:, :, None] * lu[:, None, column, column + 1 :]
    return _pack(lu.reshape(x.shape), pivots.reshape(*x.shape[:-2], k))


lu_packed = _packed_op("lu_packed", _lu, lambda m, n: m * n + min(m, n))


@op(
    shape=lambda shape: (*shape, shape[-1]),
    letters=lambda shapes, out, attributes: f"{names(len(out) - 2)}X->{names(len(out) - 2)}XX",
    dtype=floating_dtype,
    lowering=HostCall(),
    ends_gradients=True,
)
def pivot_matrix(pivots: Array, *, out: Array) -> None:
    """The P of P L U: the matrix that undoes successive exchanges of rows."""
    n = pivots.shape[-1]
    for place in np.ndindex(pivots.shape[:-1]):
        order = np.arange(n)
        for row, pivot in enumerate(pivots[place].astype(np.int64)):
            order[[row, pivot]] = order[[pivot, row]]
        out[place] = np.eye(n, dtype=out.dtype)[:, order]


@pivot_matrix.gradient
def _pivot_matrix(y: Tensor, dy: Tensor, pivots: Tensor) -> None:
    return None


@lu_packed.gradient
def _lu_packed(y: Tensor, dy: Tensor, x: Tensor) -> Tensor:
    """S. Axen, "Differentiating the LU decomposition", 2021."""
    m, n = map(int, x.shape[-2:])
    if m != n:
        raise ConfigError(f"lu_factor: no gradient of {m} x {n} matrices; expected square ones")
    (lu, pivots), (dlu, _) = unpack(y, (n, n), (n,)), unpack(dy, (n, n), (n,))
    lower, upper = tril(lu, -1) + np.eye(n, dtype=lu.dtype), triu(lu)
    inner = tril(batch_matmul(transposed(lower), tril(dlu, -1)), -1) + triu(batch_matmul(triu(dlu), transposed(upper)))
    left_solution = triangular_solution(transposed(lower), inner, lower=False)
    solved = transposed(triangular_solution(upper, transposed(left_solution), lower=False))
    return batch_matmul(pivot_matrix(pivots), solved)


# Least squares


@op(
    shape=lambda shape, *, rcond: (*shape[:-2], shape[-1], shape[-2]),
    letters=_letters(2),
    dtype=floating_dtype,
    lowering=HostCall(),
)
def pseudo_inverse(x: Array, *, rcond: float, out: Array) -> None:
    """numpy.linalg.pinv; a negative rcond stands for 10 eps times the greater length."""
    least = 10 * max(x.shape[-2:]) * np.finfo(out.dtype).eps if rcond < 0 else rcond
    _per_matrix(lambda matrix: np.linalg.pinv(matrix, least), out, x)


@pseudo_inverse.gradient
def _pseudo_inverse(y: Tensor, dy: Tensor, x: Tensor) -> Tensor:
    """G. Golub and V. Pereyra, "The differentiation of pseudo-inverses", 1973."""
    p, t, dt = y, transposed(y), transposed(dy)
    n, m = map(int, y.shape[-2:])
    rows = np.eye(m, dtype=y.dtype) - batch_matmul(x, p)
    columns = np.eye(n, dtype=y.dtype) - batch_matmul(p, x)
    first = batch_matmul(batch_matmul(t, dy), t)
    second = batch_matmul(batch_matmul(rows, dt), batch_matmul(p, t))
    third = batch_matmul(batch_matmul(t, p), batch_matmul(dt, columns))
    return second + third - first


@op(
    shape=lambda shape, *, tol: shape[:-2],
    letters=_letters(0),
    dtype=lambda x, *, tol: np.int32,
    lowering=HostCall(),
)
def rank_of(x: Array, *, tol: float, out: Array) -> None:
    """numpy.linalg.matrix_rank; a negative tol stands for NumPy's default."""
    number = x if x.dtype.kind == "f" else x.astype(np.float64)
    out[...] = np.linalg.matrix_rank(number, None if tol < 0 else tol)
