"""Every layer's outputs, gradients and updates as one program, for the backends."""

from typing import Any

import numpy as np

from dptrain import ops
from dptrain.layers import Input
from dptrain.program.dims import Dim
from dptrain.program.program import trace
from tests.unit.layers.cases import ALL_CASES, CASES, ROWS

# Which are made of other layers' changes alone, and of a quarter of all ops.
COMPOSED = ("AugMix", "RandAugment")


def program_of_all(dtype: str = "float64", part: int = 0, parts: int = 1) -> tuple[Any, dict[str, np.ndarray]]:
    """Return a training step of every layer, or of a part of them, beside each other, and the values of its inputs."""
    all_layers, values = {}, {}
    for name, number in ALL_CASES[part::parts]:
        if name in COMPOSED:
            continue
        case, key = CASES[name][number], f"{name}_{number}"
        layer = case.make()
        case.call(layer, [Input(tensor.shape[1:], dtype=tensor.dtype.name) for tensor in case.inputs()])
        layer._adopt(seed=3)
        layer._set_dtype(dtype)
        inputs = [tensor if case.integers else tensor.astype(dtype) for tensor in case.inputs()]
        all_layers[key] = case, layer, [f"{key}_x{n}" for n in range(len(inputs))]
        values |= dict(zip(all_layers[key][2], inputs, strict=True))

    def step(*arrays: Any) -> dict[str, Any]:
        tensors, results, loss = dict(zip(values, arrays, strict=True)), {}, 0.0
        for key, (case, layer, names) in all_layers.items():
            y = case.call(layer, [tensors[name] for name in names], training=True)
            results[key] = y
            loss = sum(layer.losses, loss + ops.sum(ops.square(y)))
        loss.backward()
        for key, (_, layer, _) in all_layers.items():
            results |= {f"{key}_d{n}": weight.value.grad for n, weight in enumerate(layer.trainable_weights)}
        return results

    specs = {name: ((Dim.rows(ROWS), *value.shape[1:]), value.dtype) for name, value in values.items()}
    return trace(step, specs), values
