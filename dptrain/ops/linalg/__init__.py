"""Keras' `keras.ops.linalg`: functions of matrices, the last two axes, by LAPACK on the host."""

from typing import TYPE_CHECKING

from dptrain.ops.derivatives import jvp
from dptrain.ops.linalg.matrices import (
    cholesky,
    cholesky_inverse,
    det,
    eigh,
    inv,
    lstsq,
    lu_factor,
    matrix_rank,
    pinv,
    qr,
    solve,
    solve_triangular,
    svd,
)
from dptrain.ops.linalg.norms import norm
from dptrain.registry.names import not_there

__all__ = [
    "cholesky",
    "cholesky_inverse",
    "det",
    "eigh",
    "inv",
    "jvp",
    "lstsq",
    "lu_factor",
    "matrix_rank",
    "norm",
    "pinv",
    "qr",
    "solve",
    "solve_triangular",
    "svd",
]

if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__ = not_there("ops.linalg", __all__)
