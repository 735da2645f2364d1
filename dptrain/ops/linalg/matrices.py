"""Decompositions, inverses and solutions of matrices, the last two axes; their ops are in `decompositions`."""

from typing import Any

import numpy as np

from dptrain.errors import ConfigError
from dptrain.ops.elementwise import cast, floating, in_float32
from dptrain.ops.indexing import gather_rows_along
from dptrain.ops.linalg.decompositions import (
    cholesky_factor,
    determinant,
    eigen_packed,
    inverse,
    log_determinant,
    lu_packed,
    matrix_shape,
    pseudo_inverse,
    qr_packed,
    qr_shapes,
    rank_of,
    singular_values,
    solution,
    svd_packed,
    svd_shapes,
    transposed,
    triangular_solution,
    unpack,
)
from dptrain.ops.manipulation import expand_dims, squeeze
from dptrain.ops.open_shapes import for_open_shapes
from dptrain.ops.operation_calls import operation
from dptrain.ops.products import batch_matmul
from dptrain.program.tensor import Tensor, as_tensors


@operation
def cholesky(x: Any, upper: bool = False) -> Tensor:
    """Return the lower triangular L with L L^T = x of positive definite x (..., n, n), or with `upper` L^T.

    Only the symmetric part of x counts. Where x is not positive definite, L is NaN in a traced step; outside of one,
    ConfigError is raised.
    """
    factor = cholesky_factor(x)
    if factor.value is not None and np.isnan(factor.value).any():
        raise ConfigError("Cholesky decomposition failed. The input might not be a valid positive definite matrix.")
    return transposed(factor) if upper else factor


@operation
def cholesky_inverse(x: Any, upper: bool = False) -> Tensor:
    """Return the inverse of the matrices with these Cholesky factors (..., n, n): L, or with `upper` L^T."""
    factor = floating(x)
    n, _ = matrix_shape(factor.shape, True, "cholesky_inverse")
    inverse = triangular_solution(factor, np.eye(n, dtype=factor.dtype), lower=not upper)
    return batch_matmul(inverse, transposed(inverse)) if upper else batch_matmul(transposed(inverse), inverse)


@operation
def det(x: Any) -> Tensor:
    """Return the determinants of (..., n, n) matrices."""
    return determinant(x)


@operation
def slogdet(x: Any) -> tuple[Tensor, Tensor]:
    """Return the signs of determinants, and the logarithms of their absolute values."""
    packed = log_determinant(x)
    return packed[..., 0], packed[..., 1]


@operation
@for_open_shapes
def logdet(x: Any) -> Tensor:
    """Return the logarithms of the absolute values of determinants."""
    return log_determinant(x)[..., 1]


@operation
def inv(x: Any) -> Tensor:
    """Return the inverses of (..., n, n) matrices; NaN of singular ones."""
    return inverse(x)


@operation
def eigh(x: Any) -> tuple[Tensor, Tensor]:
    """Return the ascending eigenvalues of the symmetric part of x (..., n, n), and the eigenvectors as columns."""
    packed = eigen_packed(x)
    return packed[..., 0], packed[..., 1:]


@operation
def qr(x: Any, mode: str = "reduced") -> tuple[Tensor, Tensor]:
    """Return q with orthonormal columns and an upper triangular r, with q r = x (..., m, n).

    q has min(m, n) columns for `mode` "reduced", m for "complete", which has no gradient where m > n.
    """
    if mode not in ("reduced", "complete"):
        raise ConfigError(
            f"`mode` argument value not supported. Expected one of {{'reduced', 'complete'}}. Received: mode={mode}"
        )
    tensor, full = _matrices(x), mode == "complete"
    q, r = unpack(qr_packed(tensor, full=full), *qr_shapes(*_lengths("qr", tensor), full))
    return q, r


@operation
def svd(x: Any, full_matrices: bool = True, compute_uv: bool = True) -> Any:
    """Return u, the descending singular values s, and v^T, with u diag(s) v^T = x (..., m, n).

    With `full_matrices`, u is m x m and v n x n, without gradients unless m = n. Without `compute_uv`, return s alone.
    """
    tensor = _matrices(x)
    m, n = _lengths("svd", tensor)
    if not compute_uv:
        return singular_values(tensor)
    full = full_matrices and m != n
    u, s, v = unpack(svd_packed(tensor, full=full), *svd_shapes(m, n, full))
    return u, singular_values(tensor) if full else s, v


@operation
def solve(a: Any, b: Any) -> Tensor:
    """Return the x of a x = b, a (..., n, n), b (..., n) or (..., n, k)."""
    return _solve(solution, a, b)


@operation
def solve_triangular(a: Any, b: Any, lower: bool = False) -> Tensor:
    """Return the x of a x = b, like `solve`; only the upper, or with `lower` the lower, triangle of a counts."""
    return _solve(lambda left_side, right_side: triangular_solution(left_side, right_side, lower=lower), a, b)


def _solve(solve: Any, a: Any, b: Any) -> Tensor:
    matrix, right = as_tensors([a, b])
    if right.ndim == matrix.ndim - 1:
        return squeeze(solve(matrix, expand_dims(right, -1)), -1)
    return solve(matrix, right)  # type: ignore[no-any-return]


@operation
def lstsq(a: Any, b: Any, rcond: float | None = None) -> Tensor:
    """Return the least x with the least |a x - b|, a (m, n), b (m,) or (m, k).

    Singular values below `rcond` times the greatest count as 0; by default eps times the greater length.
    """
    matrix, right = (gather_rows_along(floating(tensor), range(tensor.ndim)) for tensor in as_tensors([a, b]))
    if matrix.ndim != 2 or right.ndim not in (1, 2) or int(matrix.shape[0]) != int(right.shape[0]):
        raise ConfigError(f"lstsq: shapes {matrix.shape} and {right.shape}; expected (m, n) and (m,) or (m, k)")
    least = np.finfo(matrix.dtype).eps * max(map(int, matrix.shape)) if rcond is None else rcond
    return _solve(lambda left_side, right_side: batch_matmul(pinv(left_side, least), right_side), matrix, right)


@operation
@in_float32
def pinv(x: Any, rcond: float | None = None) -> Tensor:
    """Return the pseudo-inverses of (..., m, n) matrices.

    Singular values below `rcond` times the greatest count as 0; by default 10 eps times the greater length.
    """
    tensor = _matrices(x)
    _lengths("pinv", tensor)
    return pseudo_inverse(tensor, rcond=-1.0 if rcond is None else float(rcond))


@operation
def matrix_rank(x: Any, tol: float | None = None) -> Tensor:
    """Return how many singular values of (..., m, n) matrices exceed `tol` (int32).

    By default that is eps times the greater length times the greatest of them.
    """
    (tensor,) = as_tensors([x])
    _lengths("matrix_rank", tensor)
    return rank_of(tensor, tol=-1.0 if tol is None else float(tol))


@operation
def lu_factor(x: Any) -> tuple[Tensor, Tensor]:
    """Return L and U of (..., m, n) in one matrix, without L's unit diagonal, and the row swaps (int32)."""
    tensor = _matrices(x)
    m, n = _lengths("lu_factor", tensor)
    lu, pivots = unpack(lu_packed(tensor), (m, n), (min(m, n),))
    return lu, cast(pivots, "int32")


def _lengths(name: str, x: Tensor) -> tuple[int, int]:
    m, n = matrix_shape(x.shape, False, name)
    return m, n


def _matrices(x: Any) -> Tensor:
    """Return floating-point matrices; gather all ranks' rows where these are rows or columns of one matrix."""
    tensor = floating(x)
    return gather_rows_along(tensor, range(tensor.ndim)[-2:])
