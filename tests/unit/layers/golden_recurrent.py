"""Writes golden_recurrent.json: what Keras 3 on JAX returns for recurrent layers in float64.

KERAS_BACKEND=jax JAX_ENABLE_X64=1 python -m tests.unit.layers.golden_recurrent
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

PAGE = Path(__file__).with_name("golden_recurrent.json")


def layers(module: Any) -> dict[str, tuple[Any, Any]]:
    """Return layers of dptrain's or Keras' module `layers`, by name, with the shapes of their first states."""
    L = module
    outputs = {"return_sequences": True, "return_state": True}
    return {
        "simple": (L.SimpleRNN(2, **outputs), ((2, 2),)),
        "lstm": (L.LSTM(2, **outputs), ((2, 2), (2, 2))),
        "lstm backwards": (L.LSTM(2, go_backwards=True, return_state=True), ((2, 2), (2, 2))),
        "lstm zeros": (L.LSTM(2, zero_output_for_mask=True, use_bias=False, **outputs), ((2, 2), (2, 2))),
        "gru": (L.GRU(2, go_backwards=True, **outputs), ((2, 2),)),
        "gru before": (L.GRU(2, reset_after=False, recurrent_activation="tanh", **outputs), ((2, 2),)),
        "stack": (L.RNN([L.GRUCell(2), L.LSTMCell(3)], return_sequences=True), None),
        "bidirectional": (L.Bidirectional(L.LSTM(2, **outputs)), ((2, 2),) * 4),
        "bidirectional mean": (L.Bidirectional(L.GRU(2), "ave"), None),
    }


def numbers(shape: tuple[int, ...], start: int = 0) -> np.ndarray:
    """Return numbers of -1 to 1 that look random."""
    return np.sin(np.arange(start, start + np.prod(shape), dtype=np.float64) * 1.7 + 0.3).reshape(shape)


X = numbers((2, 4, 3))
MASK = np.array([[False, True, True, False], [True, False, True, True]])


def results(layer: Any, states: Any, to_numpy: Any, flatten: Any) -> list[list[np.ndarray]]:
    """Return what a layer returns without and with a mask, and then from given states."""
    layer(X)
    layer.set_weights([numbers(weight.shape, 5 * place) for place, weight in enumerate(layer.get_weights())])
    outputs = [layer(X), layer(X, mask=MASK)]
    if states:
        outputs.append(layer(X, initial_state=[numbers(shape, 7) for shape in states], mask=MASK))
    return [[to_numpy(tensor) for tensor in flatten(output)] for output in outputs]


if __name__ == "__main__":
    import keras
    from keras.src.backend.common import dtypes

    keras.config.set_floatx("float64")
    dtypes.BIT64_TO_BIT32_DTYPE["float64"] = "float64"  # else Keras' promotion makes it float32
    golden = {
        name: [
            [values.tolist() for values in output]
            for output in results(layer, states, keras.ops.convert_to_numpy, keras.tree.flatten)
        ]
        for name, (layer, states) in layers(keras.layers).items()
    }
    PAGE.write_text(json.dumps(golden) + "\n")
