"""Recurrent layers: their options, and steps in plain NumPy."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dptrain import layers, tree
from dptrain.program.tensor import Array
from tests.options.check import Call, Options, set_weights
from tests.options.convolution import around, convolve, each

OPTIONS: dict[str, Sequence[Any]] = {
    "cells": [["SimpleRNN"], ["LSTM"], ["GRU"], ["GRU, reset before"], ["LSTM", "GRU"], ["GRU", "SimpleRNN", "LSTM"]],
    "form": ["layer", "cell", "list", "stack"],
    "units": [1, 3, 8],
    "features": [2, 9],
    "steps": [1, 2, 5],
    "steps_of_second_call": [None, 1, 3, 5],
    "direction": ["forwards", "backwards", "concat", "sum", "mul", "ave", None],
    "return_sequences": [False, True],
    "return_state": [False, True],
    "stateful": [False, True],
    "unroll": [False, True],
    "zero_output_for_mask": [False, True],
    "mask": [False, True],
    "initial_state": [False, True],
    "use_bias": [True, False],
    "activation": ["tanh", "sigmoid"],
}
GROUPS = [
    ("direction", "mask", "zero_output_for_mask", "return_sequences"),
    ("direction", "unroll", "return_sequences", "return_state"),
    ("stateful", "initial_state", "steps_of_second_call", "return_state"),
    ("form", "direction", "mask"),
]
OPTIONS_OF_CONV_LSTM: dict[str, Sequence[Any]] = {
    "dims": [1, 2],
    "kernel_size": [1, 3, (3, 2)],
    "strides": [1, 2, (2, 1)],
    "dilation_rate": [1, (1, 2)],
    "padding": ["valid", "same"],
    "data_format": ["channels_last", "channels_first"],
    **{name: OPTIONS[name] for name in ("return_sequences", "return_state", "stateful", "use_bias", "mask")},
    "direction": ["forwards", "backwards", "concat"],
    "steps_of_second_call": [None, 1, 3],
}
Step = Callable[..., tuple[Array, list[Array]]]


def draw(options: Options, rng: np.random.Generator, rows: int, dtype: str) -> Call:
    """Return calls of a recurrent layer with options drawn together."""
    kinds, units = options["cells"], [options["units"] + number for number, _ in enumerate(options["cells"])]
    own = {name: options[name] for name in ("use_bias", "activation")}
    names = ["return_sequences", "return_state", "stateful", "unroll", "zero_output_for_mask"]
    of_layer = {name: options[name] for name in names} | {"go_backwards": options["direction"] == "backwards"}
    cells = [_cell(kind, f"{kind.partition(',')[0]}Cell", count, own) for kind, count in zip(kinds, units, strict=True)]
    if options["form"] == "layer":
        layer = _cell(kinds[0], kinds[0].partition(",")[0], units[0], own | of_layer)
    else:
        cell = {"cell": cells[0], "list": cells, "stack": layers.StackedRNNCells(cells)}[options["form"]]
        layer = layers.RNN(cell, **of_layer)
    steps = [_STEPS[kind] for kind in kinds]
    sizes = [[(count,)] * (2 if kind == "LSTM" else 1) for kind, count in zip(kinds, units, strict=True)]
    nested = options["form"] in ("list", "stack")
    return _calls(options, layer, steps, sizes, (options["features"],), rows, dtype, rng, nested)


def draw_conv_lstm(options: Options, rng: np.random.Generator, rows: int, dtype: str) -> Call:
    """Return calls of a convolutional recurrent layer with options drawn together."""
    dims, first = options["dims"], options["data_format"] == "channels_first"
    names = ["kernel_size", "strides", "dilation_rate", "padding", "data_format", "use_bias"]
    names += ["return_sequences", "return_state", "stateful"]
    of_layer = {name: options[name] for name in names} | {"go_backwards": options["direction"] == "backwards"}
    layer = getattr(layers, f"ConvLSTM{dims}D")(3, **of_layer)
    space = (6, 5)[:dims]
    reach = [(k - 1) * d + 1 for k, d in zip(options["kernel_size"], options["dilation_rate"], strict=True)]
    edges = around(space, reach, options["strides"], options["padding"])
    lengths = [(n + sum(e) - r) // s + 1 for n, e, r, s in zip(space, edges, reach, options["strides"], strict=True)]

    def step(weights: list[Array], x: Array, states: list[Array], options: Options) -> tuple[Array, list[Array]]:
        x, h, c = (np.moveaxis(array, 1, -1) if first else array for array in (x, *states))
        z = convolve(x, weights[0], options["strides"], options["padding"], options["dilation_rate"])
        z = z + convolve(h, weights[1], 1, "same") + (weights[2] if options["use_bias"] else 0)
        i, f, new, o = np.split(z, 4, -1)
        c = _sigmoid(f) * c + _sigmoid(i) * np.tanh(new)
        h = _sigmoid(o) * np.tanh(c)
        h, c = (np.moveaxis(array, -1, 1) if first else array for array in (h, c))
        return h, [h, c]

    shape, size = ((2, *space), (3, *lengths)) if first else ((*space, 2), (*lengths, 3))
    full = options | {"steps": 3, "initial_state": False, "zero_output_for_mask": False}
    return _calls(full, layer, [step], [[size, size]], shape, rows, dtype, rng, False)


def allowed(options: Options) -> Options:
    """Return options that layers take together."""
    if len(options["cells"]) > 1 and options["form"] in ("layer", "cell"):
        options["form"] = "list"
    return options


def allowed_of_conv_lstm(options: Options) -> Options:
    """Return options that layers take together."""
    dims = options["dims"]
    for name in ("kernel_size", "strides", "dilation_rate"):
        options[name] = each(options[name], dims)[:dims]
    if max(options["strides"]) > 1:
        options["dilation_rate"] = (1,) * dims
    return options


def _cell(kind: str, name: str, units: int, options: Options) -> Any:
    if kind.startswith("GRU"):
        options = options | {"reset_after": kind == "GRU"}
    return getattr(layers, name)(units, **options)


def _calls(
    options: Options,
    layer: Any,
    steps: list[Step],
    sizes: Any,
    shape: Any,
    rows: int,
    dtype: str,
    rng: Any,
    nested: bool,
) -> Call:
    """Return the calls of a layer whose cells have these steps, and states of these sizes."""
    both = options["direction"] not in ("forwards", "backwards")
    wrapper = layers.Bidirectional(layer, merge_mode=options["direction"]) if both else layer
    lengths = [options["steps"], *([options["steps_of_second_call"]] if options["steps_of_second_call"] else [])]
    wrapper._set_dtype(dtype)
    wrapper.build((rows, lengths[0], *shape))
    set_weights(wrapper, rng)
    inputs = {f"x{number}": rng.normal(size=(rows, n, *shape)) for number, n in enumerate(lengths)}
    if options["initial_state"]:
        flat = [size for cell in sizes for size in cell] * (1 + both)
        inputs |= {f"state{number}": rng.normal(size=(rows, *size)) for number, size in enumerate(flat)}
    inputs = {name: value.astype(dtype) for name, value in inputs.items()}
    for number, n in enumerate(lengths if options["mask"] else ()):
        inputs[f"mask{number}"] = rng.random((rows, n)) < 0.6

    def states_in(values: Any) -> list[Any]:
        """Return each direction's initial states, by cell."""
        flat = iter([values[name] for name in values if name.startswith("state")])
        return [[[next(flat) for _ in cell] for cell in sizes] for _ in range(1 + both)]

    def call(tensors: Any) -> list[Any]:
        outputs = []
        for number, _ in enumerate(lengths):
            keywords = {"mask": tensors[f"mask{number}"]} if options["mask"] else {}
            if options["initial_state"] and number == 0:
                given = [cell for direction in states_in(tensors) for cell in direction]
                alone = [cell if len(cell) > 1 else cell[0] for cell in given]  # as a stack has single states
                keywords["initial_state"] = alone if nested else [state for cell in given for state in cell]
            outputs += tree.flatten(wrapper(tensors[f"x{number}"], **keywords))
        return outputs

    def reference(values: Any, weights: Sequence[Array]) -> list[Array]:
        count = len(weights) // (1 + both)
        zeros = [[[np.zeros((rows, *size)) for size in cell] for cell in sizes] for _ in range(1 + both)]
        states, outputs = states_in(values) if options["initial_state"] else list(zeros), []
        for number, _ in enumerate(lengths):
            parts = []
            for direction in range(1 + both):
                own = list(weights[direction * count : (direction + 1) * count])
                backwards = direction == 1 or options["direction"] == "backwards"
                mask = values.get(f"mask{number}")
                y, states[direction] = run(
                    options, steps, own, values[f"x{number}"], states[direction], mask, backwards, both
                )
                parts.append(y if options["return_sequences"] else y[:, -1])
            outputs += [*_merged(parts, options), *tree.flatten(states if options["return_state"] else [])]
            # No gradient goes through states that are kept, as in Keras.
            states = tree.map_structure(np.real, states) if options["stateful"] else list(zeros)
        return outputs

    reset = (lambda: wrapper.reset_state()) if options["stateful"] else (lambda: None)
    return Call(options, inputs, wrapper.trainable_weights, call, reference, reset)


def run(
    options: Options,
    steps: list[Step],
    weights: list[Array],
    x: Array,
    states: Any,
    mask: Any,
    backwards: bool,
    both: bool,
) -> tuple[Array, Any]:
    """Return the outputs of all steps in the order of their computation, and the last states of each cell."""
    outputs, count = [], len(weights) // len(steps)
    zeroed = options["return_sequences"] if both else options["zero_output_for_mask"]
    for time in reversed(range(x.shape[1])) if backwards else range(x.shape[1]):
        y, after = x[:, time], []
        for number, (step, before) in enumerate(zip(steps, states, strict=True)):
            y, new = step(weights[number * count : (number + 1) * count], y, before, options)
            after.append(new)
        if mask is not None:
            counts = mask[:, time].reshape(-1, *(1,) * (y.ndim - 1))
            y = np.where(counts, y, 0 if zeroed else states[-1][0])
            after = [
                [np.where(counts, new, old) for new, old in zip(*cell, strict=True)]
                for cell in zip(after, states, strict=True)
            ]
        states = after
        outputs.append(y)
    return np.stack(outputs, 1), states


def _merged(parts: list[Array], options: Options) -> list[Array]:
    if len(parts) == 1:
        return parts
    y, back = parts
    back = back[:, ::-1] if options["return_sequences"] else back
    if options["direction"] is None:
        return [y, back]
    return [
        {"concat": np.concatenate([y, back], -1), "sum": y + back, "mul": y * back, "ave": (y + back) / 2}[
            options["direction"]
        ]
    ]


def _sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def _activation(options: Options) -> Callable[[Array], Array]:
    return np.tanh if options["activation"] == "tanh" else _sigmoid


def _bias(weights: list[Array], options: Options) -> Any:
    return weights[2] if options["use_bias"] else 0


def _simple(weights: list[Array], x: Array, states: list[Array], options: Options) -> tuple[Array, list[Array]]:
    h = _activation(options)(x @ weights[0] + states[0] @ weights[1] + _bias(weights, options))
    return h, [h]


def _lstm(weights: list[Array], x: Array, states: list[Array], options: Options) -> tuple[Array, list[Array]]:
    i, f, new, o = np.split(x @ weights[0] + states[0] @ weights[1] + _bias(weights, options), 4, -1)
    c = _sigmoid(f) * states[1] + _sigmoid(i) * _activation(options)(new)
    h = _sigmoid(o) * _activation(options)(c)
    return h, [h, c]


def _gru(weights: list[Array], x: Array, states: list[Array], options: Options) -> tuple[Array, list[Array]]:
    biases = weights[2] if options["use_bias"] else (0, 0)
    of_x = np.split(x @ weights[0] + biases[0], 3, -1)
    of_h = np.split(states[0] @ weights[1] + biases[1], 3, -1)
    z, r = _sigmoid(of_x[0] + of_h[0]), _sigmoid(of_x[1] + of_h[1])
    h = z * states[0] + (1 - z) * _activation(options)(of_x[2] + r * of_h[2])
    return h, [h]


def _gru_reset_before(
    weights: list[Array], x: Array, states: list[Array], options: Options
) -> tuple[Array, list[Array]]:
    kernels = np.split(weights[1], 3, -1)
    x_z, x_r, x_h = np.split(x @ weights[0] + _bias(weights, options), 3, -1)
    z, r = _sigmoid(x_z + states[0] @ kernels[0]), _sigmoid(x_r + states[0] @ kernels[1])
    h = z * states[0] + (1 - z) * _activation(options)(x_h + (r * states[0]) @ kernels[2])
    return h, [h]


_STEPS: dict[str, Step] = {"SimpleRNN": _simple, "LSTM": _lstm, "GRU": _gru, "GRU, reset before": _gru_reset_before}
