"""Convolutions: their options, and windows in plain NumPy."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from dptrain import layers
from dptrain.program.tensor import Array
from tests.options.check import Call, Options, set_weights

OPTIONS: dict[str, Sequence[Any]] = {
    "layer": ["Conv", "Conv", "DepthwiseConv", "SeparableConv", "ConvTranspose"],
    "dims": [1, 2, 3],
    "padding": ["valid", "same", "causal"],
    "strides": [1, 2, (2, 1, 3)],
    "dilation_rate": [1, 2, (1, 2, 3)],
    "kernel_size": [1, 2, 3, (3, 2, 1)],
    "groups": [1, 2],
    "data_format": ["channels_last", "channels_first"],
    "use_bias": [True, False],
    "channels": [2, 4, 8, 64],
    "filters": [2, 6, 8, 40],
    "depth_multiplier": [1, 2],
    "activation": [None, "tanh"],
}
GROUPS = [("layer", "dims", "padding", "data_format"), ("padding", "strides", "dilation_rate"), ("layer", "strides")]


def draw(options: Options, rng: np.random.Generator, rows: int, dtype: str) -> Call:
    """Return a call of a convolution with options drawn together."""
    dims, channels = options["dims"], options["channels"]
    names = ["padding", "strides", "dilation_rate", "kernel_size", "data_format", "use_bias", "activation"]
    names += {"Conv": ["groups", "filters"], "DepthwiseConv": ["depth_multiplier"], "ConvTranspose": ["filters"]}.get(
        options["layer"], ["filters", "depth_multiplier"]
    )
    space = tuple(int(n) for n in rng.integers(7, 10 if dims < 3 else 8, dims))
    kind = f"Conv{dims}DTranspose" if options["layer"] == "ConvTranspose" else f"{options['layer']}{dims}D"
    layer = getattr(layers, kind)(**{name: options[name] for name in names}, dtype=dtype)
    shape = (channels, *space) if options["data_format"] == "channels_first" else (*space, channels)
    layer.build((None, *shape))
    set_weights(layer, rng)

    def reference(inputs: Any, weights: Sequence[Array]) -> list[Array]:
        return [_convolved(options, inputs["x"], list(weights))]

    x = rng.normal(size=(rows, *shape)).astype(dtype)
    return Call(options, {"x": x}, layer.trainable_weights, lambda tensors: [layer(tensors["x"])], reference)


def allowed(options: Options) -> Options:
    """Return options that layers take together."""
    kind, dims = options["layer"], options["dims"]
    if kind in ("DepthwiseConv", "SeparableConv"):
        options["dims"] = dims = min(dims, 2)
        options["groups"] = 1
        if dims == 2 and isinstance(options["strides"], tuple):
            options["strides"] = 2  # one for both axes, as in Keras
    if options["padding"] == "causal" and (dims > 1 or kind != "Conv"):
        options["padding"] = "same"
    if kind == "ConvTranspose":
        options["groups"] = 1
    for name in ("strides", "dilation_rate", "kernel_size"):
        if isinstance(options[name], tuple):
            options[name] = options[name][:dims]
    if np.max(options["strides"]) > 1 and np.max(options["dilation_rate"]) > 1:
        options["dilation_rate"] = 1
    return options


def each(value: Any, dims: int) -> tuple[int, ...]:
    """Return a number for each axis."""
    return tuple(value) if isinstance(value, tuple | list) else (value,) * dims


def around(
    lengths: Sequence[int], windows: Sequence[int], strides: Sequence[int], padding: str
) -> list[tuple[int, int]]:
    """Return the zeros before and behind each axis."""
    if padding == "causal":
        return [(window - 1, 0) for window in windows]
    totals = [
        max((-(-n // stride) - 1) * stride + window - n, 0) if padding == "same" else 0
        for n, window, stride in zip(lengths, windows, strides, strict=True)
    ]
    return [(total // 2, total - total // 2) for total in totals]


def convolve(
    x: Array, kernel: Array, strides: Any = 1, padding: str = "valid", dilation: Any = 1, groups: int = 1
) -> Array:
    """Return the convolution of (rows, *space, channels) with (*window, channels / groups, filters)."""
    dims = x.ndim - 2
    strides, dilation, window = each(strides, dims), each(dilation, dims), kernel.shape[:dims]
    reach = [(length - 1) * step + 1 for length, step in zip(window, dilation, strict=True)]
    x = np.pad(x, [(0, 0), *around(x.shape[1:-1], reach, strides, padding), (0, 0)])
    lengths = [(n - r) // s + 1 for n, r, s in zip(x.shape[1:-1], reach, strides, strict=True)]
    parts = []
    for inputs, weights in zip(np.split(x, groups, -1), np.split(kernel, groups, -1), strict=True):
        parts.append(0)
        for tap in np.ndindex(*window):
            starts = [t * d for t, d in zip(tap, dilation, strict=True)]
            key = [slice(a, a + (n - 1) * s + 1, s) for a, n, s in zip(starts, lengths, strides, strict=True)]
            parts[-1] = parts[-1] + inputs[(slice(None), *key)] @ weights[tap]
    return np.concatenate(parts, -1)


def convolve_transposed(x: Array, kernel: Array, strides: Any, padding: str, dilation: Any) -> Array:
    """Return the transposed convolution of (rows, *space, channels) with (*window, filters, channels)."""
    dims = x.ndim - 2
    strides, dilation, window = each(strides, dims), each(dilation, dims), kernel.shape[:dims]
    reach = [(length - 1) * step + 1 for length, step in zip(window, dilation, strict=True)]
    space = x.shape[1:-1]
    y = np.zeros(
        (len(x), *(n * s + max(r - s, 0) for n, s, r in zip(space, strides, reach, strict=True)), kernel.shape[-2]),
        np.result_type(x, kernel),
    )
    for tap in np.ndindex(*window):
        starts = [t * d for t, d in zip(tap, dilation, strict=True)]
        key = [slice(a, a + (n - 1) * s + 1, s) for a, n, s in zip(starts, space, strides, strict=True)]
        y[(slice(None), *key)] += x @ kernel[tap].T
    if padding == "same":
        before = [max(r - s, 0) // 2 for r, s in zip(reach, strides, strict=True)]
        y = y[(slice(None), *(slice(b, b + n * s) for b, n, s in zip(before, space, strides, strict=True)))]
    return y


def _convolved(options: Options, x: Array, weights: list[Array]) -> Array:
    dims, first = options["dims"], options["data_format"] == "channels_first"
    kind, strides, dilation = options["layer"], options["strides"], options["dilation_rate"]
    x = np.moveaxis(x, 1, -1) if first else x
    if kind == "ConvTranspose":
        y = convolve_transposed(x, weights[0], strides, options["padding"], dilation)
    elif kind == "Conv":
        y = convolve(x, weights[0], strides, options["padding"], dilation, options["groups"])
    else:
        channels = x.shape[-1]
        kernel = weights[0].reshape(*weights[0].shape[:dims], 1, -1)
        y = convolve(x, kernel, strides, options["padding"], dilation, channels)
        y = y @ weights[1].reshape(weights[1].shape[-2:]) if kind == "SeparableConv" else y
    y = y + weights[-1] if options["use_bias"] else y
    y = np.tanh(y) if options["activation"] == "tanh" else y
    return np.moveaxis(y, -1, 1) if first else y
