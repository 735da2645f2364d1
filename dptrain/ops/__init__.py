"""Keras' array functions with gradients, one family a file, and ops of your own (`op`).

They take tensors, arrays and numbers. Outside a trace they run at once, with NumPy, and `backward()` of a result gives
gradients. Arguments of the wrong shape or type, missing axes and unknown words raise ConfigError.
"""

from typing import TYPE_CHECKING

from dptrain.ops import image, linalg, nn, numpy, parts  # noqa: F401  # with which tensors have []
from dptrain.ops.arrays import convert_to_numpy, convert_to_tensor, rsqrt, shape, unstack
from dptrain.ops.associative import associative_scan
from dptrain.ops.branches import cond, switch
from dptrain.ops.creation import dtype, is_tensor, saturate_cast
from dptrain.ops.custom import LETTERS, CustomOp, Launch, op
from dptrain.ops.derivatives import (
    custom_gradient,
    jvp,
)
from dptrain.ops.elementwise import cast, stop_gradient
from dptrain.ops.linalg.matrices import (
    cholesky,
    cholesky_inverse,
    det,
    eigh,
    inv,
    logdet,
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
from dptrain.ops.loops import fori_loop, map, scan, vectorized_map, while_loop
from dptrain.ops.math.special import (
    erfc,
    erfinv,
)
from dptrain.ops.nn import *  # noqa: F403  # Keras has these in `ops` too
from dptrain.ops.nn.activation import erf, mish
from dptrain.ops.nn.cross_entropy import in_top_k
from dptrain.ops.numpy import *  # noqa: F403
from dptrain.ops.reduction import logsumexp
from dptrain.ops.signal import (
    extract_sequences,
    fft,
    fft2,
    ifft2,
    irfft,
    istft,
    rfft,
    stft,
)
from dptrain.ops.sorting.counting import (
    scatter_update,
    segment_max,
    segment_min,
    segment_prod,
    slice,
    slice_update,
)
from dptrain.ops.sorting.searching import scatter, segment_sum
from dptrain.ops.sorting.sort import top_k
from dptrain.ops.statistics import (
    cdist,
    rearrange,
)
from dptrain.program import gradient  # noqa: F401  # and backward
from dptrain.registry.names import not_there

__all__ = [
    "LETTERS",
    "CustomOp",
    "Launch",
    "associative_scan",
    "cast",
    "cdist",
    "cholesky",
    "cholesky_inverse",
    "cond",
    "convert_to_numpy",
    "convert_to_tensor",
    "custom_gradient",
    "det",
    "dtype",
    "eigh",
    "erf",
    "erfc",
    "erfinv",
    "extract_sequences",
    "fft",
    "fft2",
    "fori_loop",
    "ifft2",
    "image",
    "in_top_k",
    "inv",
    "irfft",
    "is_tensor",
    "istft",
    "jvp",
    "linalg",
    "logdet",
    "logsumexp",
    "lstsq",
    "lu_factor",
    "map",
    "matrix_rank",
    "mish",
    "nn",
    "norm",
    "numpy",
    "op",
    "pinv",
    "qr",
    "rearrange",
    "rfft",
    "rsqrt",
    "saturate_cast",
    "scan",
    "scatter",
    "scatter_update",
    "segment_max",
    "segment_min",
    "segment_prod",
    "segment_sum",
    "shape",
    "slice",
    "slice_update",
    "solve",
    "solve_triangular",
    "stft",
    "stop_gradient",
    "svd",
    "switch",
    "top_k",
    "unstack",
    "vectorized_map",
    "while_loop",
]
__all__ += nn.__all__
__all__ += numpy.__all__

if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__ = not_there("ops", __all__)
