"""Pooling: its options, and windows in plain NumPy."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from dptrain import layers
from dptrain.program.tensor import Array
from tests.options.check import Call, Options
from tests.options.convolution import around, each

OPTIONS: dict[str, Sequence[Any]] = {
    "kind": ["Max", "Average"],
    "form": ["", "", "Global"],
    "dims": [1, 2, 3],
    "pool_size": [1, 2, 3, (3, 2, 1)],
    "strides": [None, 1, 2, (2, 1, 3)],
    "padding": ["valid", "same"],
    "data_format": ["channels_last", "channels_first"],
    "keepdims": [True, False],
    "channels": [1, 3, 8],
}
GROUPS = [("kind", "form", "dims", "padding", "data_format"), ("pool_size", "strides", "padding")]


def draw(options: Options, rng: np.random.Generator, rows: int, dtype: str) -> Call:
    """Return a call of a pooling layer with options drawn together."""
    dims = options["dims"]
    names = ["data_format", "keepdims"] if options["form"] else ["pool_size", "strides", "padding", "data_format"]
    kind = f"{options['form']}{options['kind']}Pooling{dims}D"
    layer = getattr(layers, kind)(**{name: options[name] for name in names}, dtype=dtype)
    space = [int(n) for n in rng.integers(3, 8, dims)]
    channels = options["channels"]
    shape = [channels, *space] if options["data_format"] == "channels_first" else [*space, channels]
    x = rng.normal(size=(rows, *shape)).astype(dtype)

    def reference(inputs: Any, weights: Sequence[Array]) -> list[Array]:
        first = options["data_format"] == "channels_first"
        y = _pooled(options, np.moveaxis(inputs["x"], 1, -1) if first else inputs["x"])
        return [np.moveaxis(y, -1, 1) if first and y.ndim > 2 else y]

    return Call(options, {"x": x}, [], lambda tensors: [layer(tensors["x"])], reference)


def allowed(options: Options) -> Options:
    """Return options that layers take together."""
    for name in ("pool_size", "strides"):
        if isinstance(options[name], tuple):
            options[name] = options[name][: options["dims"]]
    return options


def _pooled(options: Options, x: Array) -> Array:
    dims, join = options["dims"], np.max if options["kind"] == "Max" else np.mean
    if options["form"]:
        return join(x, tuple(range(1, dims + 1)), keepdims=options["keepdims"])
    window = each(options["pool_size"], dims)
    strides = window if options["strides"] is None else each(options["strides"], dims)
    edges = around(x.shape[1:-1], window, strides, options["padding"])
    lengths = [
        (n + sum(edge) - w) // s + 1 for n, edge, w, s in zip(x.shape[1:-1], edges, window, strides, strict=True)
    ]
    y = np.zeros((len(x), *lengths, x.shape[-1]), x.dtype)
    for place in np.ndindex(*lengths):  # what lies outside does not count
        starts = [p * s - before for p, s, (before, _) in zip(place, strides, edges, strict=True)]
        key = tuple(slice(max(a, 0), a + w) for a, w in zip(starts, window, strict=True))
        y[(slice(None), *place)] = join(x[(slice(None), *key)], tuple(range(1, dims + 1)))
    return y
