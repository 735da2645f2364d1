"""Writes golden_masks.json: functional models with masks, as Keras 3 on JAX describes them, and what they compute.

KERAS_BACKEND=jax JAX_ENABLE_X64=1 python -m tests.unit.models.golden_masks
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.unit.layers.golden_recurrent import numbers

PAGE = Path(__file__).with_name("golden_masks.json")
IDS = np.array([[3, 1, 4, 1, 5], [2, 6, 5, 0, 0], [8, 0, 3, 7, 0]])
X = numbers((3, 5, 2)) * (IDS != 0)[:, :, None]


def merged(k: Any) -> Any:
    """Return a model of module k (dptrain or Keras) whose layers join masks."""
    L = k.layers
    inputs = k.Input((5,), dtype="int32")
    x = L.Embedding(9, 3, mask_zero=True)(inputs)
    y = L.LSTM(3, return_sequences=True)(x)
    z = L.Concatenate()([L.Add()([x, y]), y])
    return k.Model(inputs, L.Bidirectional(L.GRU(2))(z))


def attending(k: Any) -> Any:
    """Return a model of which attention and a mean get a mask; with dropout Keras on JAX attends in float64."""
    L = k.layers
    inputs = k.Input((None, 2))
    x = L.MultiHeadAttention(2, 3, dropout=0.1)(L.Masking()(inputs), L.Masking()(inputs))
    return k.Model(inputs, L.GlobalAveragePooling1D()(L.TimeDistributed(L.Dense(3))(x)))


def operating(k: Any) -> Any:
    """Return a model that computes a mask by operations, and takes it as an argument."""
    L, ops = k.layers, k.ops
    inputs = k.Input((5,), dtype="int32")
    mask = ops.logical_and(ops.not_equal(inputs, 0), inputs < 7)
    x = L.SimpleRNN(3, return_sequences=True)(L.Embedding(9, 3)(inputs), mask=mask)
    x = ops.where(ops.expand_dims(mask, -1), x, ops.zeros_like(x))
    return k.Model(inputs, ops.concatenate([ops.max(x, axis=1), x[:, 0, :2]], axis=-1))


MODELS: dict[str, tuple[Callable[[Any], Any], np.ndarray]] = {
    "merged": (merged, IDS),
    "attending": (attending, X),
    "operating": (operating, IDS),
}


def weights(model: Any) -> list[np.ndarray]:
    """Return weights for a model."""
    return [numbers(weight.shape, 3 * place) for place, weight in enumerate(model.get_weights())]


if __name__ == "__main__":
    import keras
    from keras.src.backend.common import dtypes

    keras.config.set_floatx("float64")
    dtypes.BIT64_TO_BIT32_DTYPE["float64"] = "float64"  # else Keras' promotion makes it float32
    golden = {}
    for name, (make, x) in MODELS.items():
        model = make(keras)
        model.set_weights(weights(model))
        golden[name] = {"config": json.loads(model.to_json()), "output": np.asarray(model(x)).tolist()}
    PAGE.write_text(json.dumps(golden) + "\n")
