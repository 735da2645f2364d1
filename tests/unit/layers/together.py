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
    made, values = {}, {}
    for name, number in ALL_CASES[part::parts]:
        if name in COMPOSED:
            continue
        case, key = CASES[name][number], f"{name}_{number}"
        layer = case.make()
        case.call(layer, [Input(one.shape[1:], dtype=one.dtype.name) for one in case.inputs()])
        layer._adopt(seed=3)
        layer._set_dtype(dtype)
        inputs = [one if case.integers else one.astype(dtype) for one in case.inputs()]
        made[key] = case, layer, [f"{key}_x{n}" for n in range(len(inputs))]
        values |= dict(zip(made[key][2], inputs, strict=True))

    def step(*given: Any) -> dict[str, Any]:
        tensors, found, loss = dict(zip(values, given, strict=True)), {}, 0.0
        for key, (case, layer, names) in made.items():
            y = case.call(layer, [tensors[one] for one in names], training=True)
            found[key] = y
            loss = sum(layer.losses, loss + ops.sum(ops.square(y)))
        loss.backward()
        for key, (_, layer, _) in made.items():
            found |= {f"{key}_d{n}": one.value.grad for n, one in enumerate(layer.trainable_weights)}
        return found

    specs = {name: ((Dim.rows(ROWS), *one.shape[1:]), one.dtype) for name, one in values.items()}
    return trace(step, specs), values
