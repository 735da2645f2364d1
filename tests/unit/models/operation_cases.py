"""A call of each of Keras' operations on symbolic tensors, for tests of files with and without Keras."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

_RNG = np.random.default_rng(7)
_SQUARE = _RNG.normal(size=(5, 3, 3))
_IDENTITY = np.eye(3, dtype=np.float32)
# Inputs of models, by name: 5 samples of each.
SAMPLES = {
    "x": _RNG.normal(size=(5, 4, 6)),
    "y": _RNG.normal(size=(5, 4, 6)),
    "unit": _RNG.uniform(-0.9, 0.9, size=(5, 4, 6)),
    "positive": _RNG.uniform(0.5, 2, size=(5, 4, 6)),
    "above": _RNG.uniform(1.5, 3, size=(5, 4, 6)),
    "steps": _RNG.normal(size=(5, 16)),
    "vector": _RNG.normal(size=(5, 3)),
    "square": _SQUARE + 3 * np.eye(3),
    "symmetric": _SQUARE @ _SQUARE.transpose(0, 2, 1) + np.eye(3),
    "lower": np.tril(_SQUARE) + 3 * np.eye(3),
    "image": _RNG.uniform(size=(5, 8, 8, 3)),
    "image_2": _RNG.uniform(size=(5, 8, 8, 3)),
    "volume": _RNG.uniform(size=(5, 4, 4, 4, 2)),
    "wide": _RNG.normal(size=(5, 4, 4, 4)),
    "heads": _RNG.normal(size=(5, 4, 2, 3)),
    "probabilities": _RNG.dirichlet(np.ones(4), size=5),
    "targets": np.eye(4)[_RNG.integers(4, size=5)],
    "whole": _RNG.integers(0, 5, size=(5, 4, 6)).astype(np.int32),
    "counts": _RNG.integers(1, 9, size=(5, 4, 6)).astype(np.int32),
    "labels": _RNG.integers(0, 4, size=(5,)).astype(np.int32)[:, None],
    "holes": np.where(_RNG.uniform(size=(5, 4, 6)) < 0.2, np.nan, _RNG.normal(size=(5, 4, 6))),
}
SAMPLES = {name: a if a.dtype == np.int32 else a.astype(np.float32) for name, a in SAMPLES.items()}

_WEIGHTS = np.linspace(0.5, 2, 6, dtype=np.float32)
_MATRIX = _RNG.normal(size=(6, 2)).astype(np.float32)
_KERNEL = _RNG.normal(size=(3, 3, 3, 2)).astype(np.float32)
_CORNERS = np.array([[[0, 0], [7, 0], [0, 7], [7, 7]]] * 5, np.float32)
_GRID = np.stack([*np.meshgrid(np.arange(5), np.linspace(0.5, 3, 4), indexing="ij")]).astype(np.float32)

_OF_NUMBERS = """
    absolute arcsinh arctan cbrt ceil conjugate cos cosh deg2rad erf erfc exp exp2 expm1 fabs floor hard_sigmoid
    hard_silu hard_tanh isfinite isinf isnan isneginf isposinf isreal log_sigmoid logical_not negative rad2deg
    real imag angle i0 relu relu6 round selu sigmoid sign signbit silu sin sinc sinh softplus softsign sparse_plus
    sparse_sigmoid sparsemax square squareplus tan tanh tanh_shrink trunc ravel ones_like zeros_like elu celu gelu
    glu leaky_relu hard_shrink soft_shrink softmax log_softmax logsumexp nan_to_num stop_gradient transpose
"""
_OF_UNITS = """
    arccos arcsin arctanh erfinv
"""
_OF_NUMBERS_ABOVE = """
    arccosh log log10 log1p log2 reciprocal rsqrt sqrt
"""
_OF_TWO = """
    add arctan2 divide equal fmax fmin fmod greater greater_equal heaviside hypot less less_equal logaddexp
    logaddexp2 logical_and logical_or logical_xor maximum minimum mod multiply nextafter not_equal subtract
    true_divide divide_no_nan isclose floor_divide
"""
_OF_TWO_INTEGERS = """
    bitwise_and bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift left_shift right_shift gcd lcm
"""
_ALONG_AN_AXIS = """
    all any amax amin argmax argmin average count_nonzero max mean median min prod ptp std sum var cumsum cumprod
    argsort sort nanargmax nanargmin nancumprod nancumsum nanmax nanmean nanmedian nanmin nanprod nanstd nansum
    nanvar
"""
_AROUND_HOLES = """
    nanmax nanmean nanmedian nanmin nanprod nanstd nansum nanvar
"""
_OF_MATRICES = """
    det inv logdet slogdet
"""

Case = Callable[[Any, Any], Any]
# Takes `ops` and the inputs as attributes, by the name of the operation and a digit.
CASES: dict[str, Case] = {
    # elements
    **{name: (lambda o, t, name=name: getattr(o, name)(t.x)) for name in _OF_NUMBERS.split()},
    **{name: (lambda o, t, name=name: getattr(o, name)(t.unit)) for name in _OF_UNITS.split()},
    **{name: (lambda o, t, name=name: getattr(o, name)(t.above)) for name in _OF_NUMBERS_ABOVE.split()},
    **{name: (lambda o, t, name=name: getattr(o, name)(t.x, t.y)) for name in _OF_TWO.split()},
    **{name: (lambda o, t, name=name: getattr(o, name)(t.whole, t.counts)) for name in _OF_TWO_INTEGERS.split()},
    "bitwise_invert": lambda o, t: o.bitwise_invert(t.whole),
    "bitwise_not": lambda o, t: o.bitwise_not(t.whole),
    "power": lambda o, t: o.power(t.positive, t.x),
    "ldexp": lambda o, t: o.ldexp(t.x, t.counts),
    "add2": lambda o, t: o.add(t.x, 0.1),
    "subtract2": lambda o, t: o.subtract(2, t.x),
    "power2": lambda o, t: o.power(t.x, 2),
    "maximum2": lambda o, t: o.maximum(t.x, _WEIGHTS),
    "celu2": lambda o, t: o.celu(t.x, 0.5),
    "elu2": lambda o, t: o.elu(t.x, alpha=0.5),
    "gelu2": lambda o, t: o.gelu(t.x, approximate=False),
    "glu2": lambda o, t: o.glu(t.x, axis=1),
    "hard_shrink2": lambda o, t: o.hard_shrink(t.x, 0.3),
    "soft_shrink2": lambda o, t: o.soft_shrink(t.x, threshold=0.3),
    "squareplus2": lambda o, t: o.squareplus(t.x, b=2.0),
    "threshold": lambda o, t: o.threshold(t.x, 0.2, -1.0),
    "leaky_relu2": lambda o, t: o.leaky_relu(t.x, negative_slope=0.3),
    "sparsemax2": lambda o, t: o.sparsemax(t.x, axis=1),
    "softmax2": lambda o, t: o.softmax(t.x, axis=(1, 2)),
    "log_softmax2": lambda o, t: o.log_softmax(t.x, axis=1),
    "clip": lambda o, t: o.clip(t.x, -0.5, 0.5),
    "cast": lambda o, t: o.cast(t.x, "int32"),
    "cast2": lambda o, t: o.cast(t.whole, "float32"),
    "saturate_cast": lambda o, t: o.saturate_cast(t.x, "uint8"),
    "view": lambda o, t: o.view(t.x, "int32"),
    "round2": lambda o, t: o.round(t.x, decimals=1),
    "nan_to_num2": lambda o, t: o.nan_to_num(t.holes, nan=0.5),
    "isclose2": lambda o, t: o.isclose(t.x, 0.0, rtol=1e-3, atol=0.5),
    "where": lambda o, t: o.where(t.whole > 2, t.x, 0.0),
    "where2": lambda o, t: o.where(t.whole > 2, -1.0, t.x),
    "where3": lambda o, t: o.where(t.whole > 2, t.x, -1e30),
    "select": lambda o, t: o.select([t.x > 0, t.y > 0], [t.x, t.y], 0.5),
    "full_like": lambda o, t: o.full_like(t.x, 3),
    "ones_like2": lambda o, t: o.ones_like(t.x, dtype="int32"),
    "zeros_like2": lambda o, t: o.zeros_like(t.x, "bool"),
    # reductions
    **{name: (lambda o, t, name=name: getattr(o, name)(t.x, axis=1)) for name in _ALONG_AN_AXIS.split()},
    **{
        f"{name}2": (lambda o, t, name=name: getattr(o, name)(t.holes, axis=-1, keepdims=True))
        for name in _AROUND_HOLES.split()
    },
    "mean2": lambda o, t: o.mean(t.x, axis=(1, 2), keepdims=True),
    "sum2": lambda o, t: o.sum(t.x, (-2, -1)),
    "max2": lambda o, t: o.max(t.x, axis=-1, keepdims=True, initial=0.5),
    "std2": lambda o, t: o.std(t.x, [1, 2]),
    "argmax2": lambda o, t: o.argmax(t.x, axis=-1, keepdims=True),
    "average2": lambda o, t: o.average(t.x, axis=2, weights=_WEIGHTS),
    "logsumexp2": lambda o, t: o.logsumexp(t.x, axis=(1, 2), keepdims=True),
    "moments": lambda o, t: o.moments(t.x, axes=[1]),
    "quantile": lambda o, t: o.quantile(t.x, 0.3, axis=1),
    "quantile2": lambda o, t: o.quantile(t.x, [0.1, 0.5], axis=1, method="nearest", keepdims=True),
    "percentile": lambda o, t: o.percentile(t.x, 30, axis=2),
    "nanquantile": lambda o, t: o.nanquantile(t.holes, 0.3, axis=2),
    "nanpercentile": lambda o, t: o.nanpercentile(t.holes, 30, axis=2),
    "norm": lambda o, t: o.norm(t.x, axis=1),
    "norm2": lambda o, t: o.norm(t.x, ord="fro", axis=(1, 2), keepdims=True),
    "normalize": lambda o, t: o.normalize(t.x, axis=1, order=1),
    "trapezoid": lambda o, t: o.trapezoid(t.x, dx=0.5, axis=1),
    "allclose": lambda o, t: o.expand_dims(o.allclose(t.x, t.x, rtol=1e-3), 0),
    "argpartition": lambda o, t: o.sort(o.argpartition(t.x, 3)[..., :3]),
    "top_k": lambda o, t: o.top_k(t.x, 2),
    "in_top_k": lambda o, t: o.in_top_k(o.squeeze(t.labels, 1), t.probabilities, k=2),
    "unique": lambda o, t: o.unique(t.whole[0, 0], size=6, fill_value=-1),
    "bincount": lambda o, t: o.bincount(o.reshape(t.whole, (-1, 24)), minlength=5),
    "histogram": lambda o, t: o.histogram(t.steps[0], bins=4, range=(-2.0, 2.0))[0],
    "searchsorted": lambda o, t: o.searchsorted(np.array([-1.0, 0.0, 1.0], np.float32), t.vector[0], side="right"),
    "digitize": lambda o, t: o.digitize(t.x, np.array([-1.0, 0.0, 1.0], np.float32)),
    "isin": lambda o, t: o.isin(t.whole, np.array([1, 3], np.int32), invert=True),
    "diff": lambda o, t: o.diff(t.x, n=2, axis=1),
    # shapes
    "append": lambda o, t: o.append(t.x, t.y, axis=1),
    "array_split": lambda o, t: o.array_split(t.x, 4, axis=2),
    "broadcast_to": lambda o, t: o.broadcast_to(t.vector[0], (2, 3)),
    "concatenate": lambda o, t: o.concatenate([t.x, t.y], axis=1),
    "concatenate2": lambda o, t: o.concatenate([t.x, np.zeros((5, 1, 6), np.float32), t.x], -2),
    "diag": lambda o, t: o.diag(t.vector[0], k=1),
    "diagflat": lambda o, t: o.diagflat(t.vector[0]),
    "diagonal": lambda o, t: o.diagonal(t.x, offset=1, axis1=1, axis2=2),
    "dsplit": lambda o, t: o.dsplit(t.x, 3),
    "dstack": lambda o, t: o.dstack([t.x, t.y]),
    "expand_dims": lambda o, t: o.expand_dims(t.x, 1),
    "expand_dims2": lambda o, t: o.expand_dims(t.x, (1, -1)),
    "flip": lambda o, t: o.flip(t.x, axis=(1, 2)),
    "fliplr": lambda o, t: o.fliplr(t.x),
    "flipud": lambda o, t: o.flipud(t.x[0]),
    "get_item": lambda o, t: t.x[:, 1:],
    "get_item2": lambda o, t: t.x[..., ::2],
    "get_item3": lambda o, t: t.x[:, None, 0],
    "get_item4": lambda o, t: o.get_item(t.x, (slice(None), -1)),
    "hsplit": lambda o, t: o.hsplit(t.x, 2),
    "hstack": lambda o, t: o.hstack([t.x, t.y]),
    "meshgrid": lambda o, t: o.meshgrid(t.vector[0], t.vector[1], indexing="ij"),
    "moveaxis": lambda o, t: o.moveaxis(t.x, 1, 2),
    "moveaxis2": lambda o, t: o.moveaxis(t.image, (1, 2), (2, 3)),
    "pad": lambda o, t: o.pad(t.x, ((0, 0), (1, 2), (0, 1))),
    "pad2": lambda o, t: o.pad(t.x, [[0, 0], [1, 2], [0, 1]], constant_values=2.0),
    "pad3": lambda o, t: o.pad(t.x, ((0, 0), (1, 1), (1, 1)), mode="reflect"),
    "repeat": lambda o, t: o.repeat(t.x, 2, axis=1),
    "reshape": lambda o, t: o.reshape(t.x, (-1, 24)),
    "reshape2": lambda o, t: o.reshape(t.x, (-1, 3, 8)),
    "roll": lambda o, t: o.roll(t.x, 1, axis=1),
    "roll2": lambda o, t: o.roll(t.x, (1, 2), axis=(1, 2)),
    "rot90": lambda o, t: o.rot90(t.x, k=1, axes=(1, 2)),
    "split": lambda o, t: o.split(t.x, 2, axis=1),
    "split2": lambda o, t: o.split(t.x, [1, 3], -1)[1],
    "squeeze": lambda o, t: o.squeeze(t.labels, axis=1),
    "stack": lambda o, t: o.stack([t.x, t.y], axis=1),
    "swapaxes": lambda o, t: o.swapaxes(t.x, 1, 2),
    "take": lambda o, t: o.take(t.x, np.array([0, 2], np.int32), axis=1),
    "take2": lambda o, t: o.take(_MATRIX, t.whole, axis=0),
    "take3": lambda o, t: o.take(t.x, 2, axis=-1),
    "take_along_axis": lambda o, t: o.take_along_axis(t.x, t.whole, axis=-1),
    "tile": lambda o, t: o.tile(t.x, (1, 2, 1)),
    "transpose2": lambda o, t: o.transpose(t.x, (0, 2, 1)),
    "tril": lambda o, t: o.tril(t.x, k=1),
    "triu": lambda o, t: o.triu(t.x, -1),
    "trace": lambda o, t: o.trace(t.x, offset=1, axis1=1, axis2=2),
    "unravel_index": lambda o, t: o.unravel_index(t.whole, (2, 3)),
    "unstack": lambda o, t: o.unstack(t.x, axis=1),
    "vander": lambda o, t: o.vander(t.vector[0], N=4, increasing=True),
    "vsplit": lambda o, t: o.vsplit(t.x[0], 2),
    "vstack": lambda o, t: o.vstack([t.x, t.y]),
    "rearrange": lambda o, t: o.rearrange(t.x, "b h (w c) -> b w h c", c=2),
    "slice": lambda o, t: o.slice(t.x[0], (1, 2), (2, 3)),
    "slice_update": lambda o, t: o.slice_update(t.x[0], (1, 2), np.ones((2, 2), np.float32)),
    "scatter": lambda o, t: o.scatter(np.array([[0], [2], [3]], np.int32), t.vector[0], (4,)),
    "scatter_update": lambda o, t: o.scatter_update(t.vector[0], np.array([[0], [2]], np.int32), [1.0, 2.0]),
    "segment_max": lambda o, t: o.segment_max(t.vector[0], np.array([0, 1, 1], np.int32), 2),
    "segment_min": lambda o, t: o.segment_min(t.vector[0], np.array([0, 1, 1], np.int32), 2),
    "segment_prod": lambda o, t: o.segment_prod(t.vector[0], np.array([0, 1, 1], np.int32), num_segments=2),
    "segment_sum": lambda o, t: o.segment_sum(t.vector[0], np.array([0, 1, 1], np.int32), num_segments=2),
    "one_hot": lambda o, t: o.one_hot(t.whole, 5),
    "one_hot2": lambda o, t: o.one_hot(t.whole, 5, axis=1, dtype="int32"),
    "multi_hot": lambda o, t: o.multi_hot(t.whole, 5),
    "full": lambda o, t: o.full((2, 3), t.vector[0]),
    # products
    "matmul": lambda o, t: o.matmul(t.x, _MATRIX),
    "matmul2": lambda o, t: t.x @ o.transpose(t.y, (0, 2, 1)),
    "matmul4": lambda o, t: t.x @ _WEIGHTS,
    "matmul3": lambda o, t: o.matmul(t.x, _WEIGHTS),
    "dot": lambda o, t: o.dot(t.x, _MATRIX),
    "einsum": lambda o, t: o.einsum("bij,bkj->bik", t.x, t.y),
    "einsum2": lambda o, t: o.einsum("bij,jk->bik", t.x, _MATRIX),
    "inner": lambda o, t: o.inner(t.x, _WEIGHTS),
    "outer": lambda o, t: o.outer(t.vector[0], t.vector[1]),
    "kron": lambda o, t: o.kron(t.x[0], _IDENTITY),
    "vdot": lambda o, t: o.expand_dims(o.vdot(t.vector[0], t.vector[1]), 0),
    "tensordot": lambda o, t: o.tensordot(t.x, _MATRIX, axes=1),
    "tensordot2": lambda o, t: o.tensordot(t.x, _MATRIX, axes=[[2], [0]]),
    "cross": lambda o, t: o.cross(t.vector, t.vector[:, ::-1]),
    "correlate": lambda o, t: o.correlate(t.steps[0], t.vector[0], mode="same"),
    "corrcoef": lambda o, t: o.corrcoef(t.vector),
    "cdist": lambda o, t: o.cdist(t.x, t.y),
    # linear algebra
    **{name: (lambda o, t, name=name: getattr(o, name)(t.square)) for name in _OF_MATRICES.split()},
    "cholesky": lambda o, t: o.cholesky(t.symmetric),
    "cholesky2": lambda o, t: o.cholesky(t.symmetric, upper=True),
    "cholesky_inverse": lambda o, t: o.cholesky_inverse(t.lower[0]),
    "eigh": lambda o, t: o.eigh(t.symmetric)[0],
    "lstsq": lambda o, t: o.lstsq(t.square[0], t.vector[0]),
    "lu_factor": lambda o, t: o.lu_factor(t.square),
    "matrix_rank": lambda o, t: o.linalg.matrix_rank(t.square),
    "pinv": lambda o, t: o.linalg.pinv(t.square),
    "qr": lambda o, t: o.abs(o.qr(t.square)[1]),
    "solve": lambda o, t: o.solve(t.square, t.symmetric),
    "solve_triangular": lambda o, t: o.solve_triangular(t.lower, t.symmetric, lower=True),
    "svd": lambda o, t: o.svd(t.square, compute_uv=False),
    # signals
    "fft": lambda o, t: o.fft((t.x, t.y)),
    "fft2": lambda o, t: o.fft2((t.x, t.y)),
    "ifft2": lambda o, t: o.ifft2((t.x, t.y)),
    "rfft": lambda o, t: o.rfft(t.steps, fft_length=8),
    "irfft": lambda o, t: o.irfft((t.x, t.y)),
    "stft": lambda o, t: o.stft(t.steps, 8, 4, 8),
    "istft": lambda o, t: o.istft(o.stft(t.steps, 8, 4, 8), 8, 4, 8, length=16),
    "extract_sequences": lambda o, t: o.extract_sequences(t.steps, 4, 2),
    # networks
    "average_pool": lambda o, t: o.average_pool(t.image, 2),
    "average_pool2": lambda o, t: o.average_pool(t.x, (2,), strides=1, padding="same"),
    "max_pool": lambda o, t: o.max_pool(t.image, (2, 2), strides=(1, 2), padding="same"),
    "adaptive_average_pool": lambda o, t: o.adaptive_average_pool(t.image, (4, 2)),
    "adaptive_max_pool": lambda o, t: o.adaptive_max_pool(t.image, (4, 2)),
    "conv": lambda o, t: o.conv(t.image, _KERNEL, strides=2, padding="same"),
    "conv_transpose": lambda o, t: o.conv_transpose(t.image, _KERNEL.swapaxes(2, 3), strides=2, padding="same"),
    "depthwise_conv": lambda o, t: o.depthwise_conv(t.image, _KERNEL),
    "separable_conv": lambda o, t: o.separable_conv(t.image, _KERNEL, np.ones((1, 1, 6, 4), np.float32)),
    "depth_to_space": lambda o, t: o.depth_to_space(t.wide, 2),
    "space_to_depth": lambda o, t: o.space_to_depth(t.image, 2),
    "fold": lambda o, t: o.fold(t.wide[:, :, :, 0], output_size=(4, 4), kernel_size=2, stride=2),
    "unfold": lambda o, t: o.unfold(t.wide, kernel_size=2, stride=2),
    "psnr": lambda o, t: o.expand_dims(o.psnr(t.image, t.image_2, 1.0), 0),
    "batch_normalization": lambda o, t: o.batch_normalization(t.x, _WEIGHTS, _WEIGHTS, -1),
    "batch_normalization2": lambda o, t: o.batch_normalization(
        t.x, _WEIGHTS, _WEIGHTS, axis=-1, offset=_WEIGHTS, scale=_WEIGHTS, epsilon=0.1
    ),
    "layer_normalization": lambda o, t: o.layer_normalization(t.x, _WEIGHTS, beta=_WEIGHTS, axis=-1),
    "layer_normalization2": lambda o, t: o.layer_normalization(t.x, _WEIGHTS, axis=-1, rms_scaling=True),
    "rms_normalization": lambda o, t: o.rms_normalization(t.x, _WEIGHTS, axis=-1),
    "dot_product_attention": lambda o, t: o.dot_product_attention(t.heads, t.heads, t.heads),
    "dot_product_attention2": lambda o, t: o.dot_product_attention(
        t.heads, t.heads, t.heads, mask=np.tril(np.ones((1, 1, 4, 4), bool)), scale=0.5
    ),
    "binary_crossentropy": lambda o, t: o.binary_crossentropy(t.targets, t.probabilities),
    "categorical_crossentropy": lambda o, t: o.categorical_crossentropy(t.targets, t.probabilities, from_logits=True),
    "sparse_categorical_crossentropy": lambda o, t: o.sparse_categorical_crossentropy(t.labels, t.probabilities),
    "ctc_loss": lambda o, t: o.ctc_loss(
        t.whole[:, 0, :2] + 1, t.x[:, :, :], o.full_like(t.whole[:, 0, 0], 2), o.full_like(t.whole[:, 0, 0], 4)
    ),
    "ctc_decode": lambda o, t: o.ctc_decode(t.x, o.full_like(t.whole[:, 0, 0], 4))[1],
    # pictures
    "affine_transform": lambda o, t: o.image.affine_transform(
        t.image, np.array([[1, 0.1, 0, 0, 1, 0.2, 0, 0]] * 5, np.float32)
    ),
    "crop_images": lambda o, t: o.image.crop_images(t.image, 1, 2, target_height=4, target_width=3),
    "elastic_transform": None,
    "extract_patches": lambda o, t: o.image.extract_patches(t.image, 4, strides=2),
    "extract_patches_3d": lambda o, t: o.image.extract_patches_3d(t.volume, (2, 2, 2)),
    "gaussian_blur": lambda o, t: o.image.gaussian_blur(t.image, (3, 3), (1.0, 1.0)),
    "hsv_to_rgb": lambda o, t: o.image.hsv_to_rgb(t.image),
    "map_coordinates": lambda o, t: o.image.map_coordinates(t.x[0], _GRID[:, :4], order=1),
    "pad_images": lambda o, t: o.image.pad_images(t.image, 1, 2, target_height=12, target_width=12),
    "perspective_transform": lambda o, t: o.image.perspective_transform(t.image, _CORNERS, _CORNERS * 0.9),
    "resize": lambda o, t: o.image.resize(t.image, (4, 5), interpolation="bilinear"),
    "resize2": lambda o, t: o.image.resize(t.image, [12, 10], "nearest", antialias=True),
    "rgb_to_grayscale": lambda o, t: o.image.rgb_to_grayscale(t.image),
    "rgb_to_hsv": lambda o, t: o.image.rgb_to_hsv(t.image),
    "scale_and_translate": lambda o, t: o.image.scale_and_translate(
        t.image[0], (4, 4, 3), np.array([0.5, 0.5], np.float32), np.zeros(2, np.float32), (0, 1), "linear"
    ),
    "sobel_edges": lambda o, t: o.image.sobel_edges(t.image),
    "ssim": lambda o, t: o.image.ssim(t.image, t.image_2, 1.0, filter_size=3),
    # operators
    "remainder of x % y": lambda o, t: t.x % 2,
    "power of x**y": lambda o, t: t.x**2,
    "quotient": lambda o, t: 1.0 / t.positive,
    "negative of -x": lambda o, t: -abs(t.x),
    "comparison": lambda o, t: t.x >= 0.5,
    "several": lambda o, t: o.softmax(o.mean(t.x * 0.5 + 1, axis=1) @ _MATRIX),
}
# Numbers that it draws differ.
del CASES["elastic_transform"]


def built(keras: Any, case: Case) -> tuple[Any, dict[str, Any]]:
    """Return a functional model of a case, in dptrain or Keras, and its inputs."""
    inputs: dict[str, Any] = {}

    class Inputs(SimpleNamespace):
        def __getattr__(self, name: str) -> Any:
            if name not in inputs:
                sample = SAMPLES[name]
                inputs[name] = keras.Input(sample.shape[1:], dtype=sample.dtype.name, name=name)
            return inputs[name]

    outputs = case(keras.ops, Inputs())
    model = keras.Model(dict(inputs), outputs)
    return model, {name: SAMPLES[name] for name in inputs}
