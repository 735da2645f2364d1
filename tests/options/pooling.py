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
    "form": ["", "", "Global", "Adaptive"],
    "dims": [1, 2, 3],
    "pool_size": [1, 2, 3, (3, 2, 1)],
    "strides": [None, 1, 2, (2, 1, 3)],
    "padding": ["valid", "same"],
    "data_format": ["channels_last", "channels_first"],
    "keepdims": [True, False],
    "output_size": [1, 2, 3, (4, 2, 3)],
    "has_mask": [True, False],
    "channels": [1, 3, 8],
}
GROUPS = [
    ("kind", "form", "dims", "padding", "data_format"),
    ("pool_size", "strides", "padding"),
    ("form", "has_mask", "data_format", "keepdims"),
]
# The arguments of each form.
NAMES = {
    "": ["pool_size", "strides", "padding", "data_format"],
    "Global": ["data_format", "keepdims"],
    "Adaptive": ["output_size", "data_format"],
}


def draw(options: Options, rng: np.random.Generator, rows: int, dtype: str) -> Call:
    """Return a call of a pooling layer with options drawn together."""
    dims = options["dims"]
    kind = f"{options['form']}{options['kind']}Pooling{dims}D"
    layer = getattr(layers, kind)(**{name: options[name] for name in NAMES[options["form"]]}, dtype=dtype)
    space = [int(n) for n in rng.integers(3, 8, dims)]
    channels = options["channels"]
    shape = [channels, *space] if options["data_format"] == "channels_first" else [*space, channels]
    inputs = {"x": rng.normal(size=(rows, *shape)).astype(dtype)}
    if options["has_mask"]:
        inputs["mask"] = rng.random((rows, *space)) < 0.5
        inputs["mask"][:, rng.integers(space[0])] = True

    def compute(tensors: Any) -> list[Any]:
        return [layer(**{"inputs" if name == "x" else name: tensor for name, tensor in tensors.items()})]

    def reference(inputs: Any, weights: Sequence[Array]) -> list[Array]:
        first = options["data_format"] == "channels_first"
        y = _pooled(options, np.moveaxis(inputs["x"], 1, -1) if first else inputs["x"], inputs.get("mask"))
        return [np.moveaxis(y, -1, 1) if first and y.ndim > 2 else y]

    return Call(options, inputs, [], compute, reference)


def allowed(options: Options) -> Options:
    """Return options that layers take together."""
    options["has_mask"] &= (options["kind"], options["form"], options["dims"]) == ("Average", "Global", 1)
    for name in ("pool_size", "strides", "output_size"):
        if isinstance(options[name], tuple):
            options[name] = options[name][: options["dims"]]
    return options


def _pooled(options: Options, x: Array, mask: Array | None) -> Array:
    dims, join = options["dims"], np.max if options["kind"] == "Max" else np.mean
    if mask is not None:
        x = np.stack([join(row[counts], 0, keepdims=True) for row, counts in zip(x, mask, strict=True)])
    if options["form"] == "Global":
        return join(x, tuple(range(1, dims + 1)), keepdims=options["keepdims"])
    if options["form"] == "Adaptive":
        for axis, size in enumerate(each(options["output_size"], dims), 1):
            n = x.shape[axis]
            ends = [(i * n // size, -(-(i + 1) * n // size)) for i in range(size)]
            x = np.stack([join(x.take(range(*end), axis), axis) for end in ends], axis)
        return x
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
