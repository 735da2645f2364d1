"""Writes golden_attention.json: what Keras 3 on JAX returns for attention layers in float64.

KERAS_BACKEND=jax JAX_ENABLE_X64=1 python -m tests.unit.layers.golden_attention
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.unit.layers.golden_recurrent import numbers

PAGE = Path(__file__).with_name("golden_attention.json")
QUERY, VALUE, KEY = numbers((2, 3, 4)), numbers((2, 5, 4), 3), numbers((2, 5, 4), 8)
TARGETS = np.array([[True, True, False], [True, False, True]])
SOURCES = np.array([[True, True, True, False, False], [True, False, True, True, True]])
PAIRS = (TARGETS[:, :, None] & SOURCES[:, None]) | np.eye(3, 5, dtype=bool)


def layers(module: Any) -> dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """Return layers of dptrain's or Keras' module `layers`, by name, with the arguments of a call."""
    L, exact = module, {"dtype": "float64"}
    scores = {"return_attention_scores": True}  # with these Keras on JAX computes in float64
    lists = {"mask": [TARGETS, SOURCES]} | scores
    return {
        "heads": (L.MultiHeadAttention(2, 3, **exact), (QUERY, VALUE), scores),
        "heads with a mask": (
            L.MultiHeadAttention(2, 3, 2, **exact),
            (QUERY, VALUE, KEY),
            {"attention_mask": PAIRS} | scores,
        ),
        "causal heads": (
            L.MultiHeadAttention(3, 2, output_shape=5, use_bias=False, **exact),
            (QUERY, VALUE),
            {"use_causal_mask": True} | scores,
        ),
        "groups": (L.GroupQueryAttention(3, 4, 2, **exact), (QUERY, VALUE), {"attention_mask": PAIRS} | scores),
        "dots": (L.Attention(use_scale=True, **exact), ([QUERY, VALUE, KEY],), lists),
        "sums": (L.Attention(score_mode="concat", **exact), ([QUERY, VALUE],), {"use_causal_mask": True} | lists),
        "additive": (L.AdditiveAttention(**exact), ([QUERY, VALUE],), lists),
    }


def results(layer: Any, arguments: tuple[Any, ...], keywords: dict[str, Any], to_numpy: Any) -> list[np.ndarray]:
    """Return a layer's output and scores."""
    layer(*arguments, **keywords)
    layer.set_weights([numbers(weight.shape, 5 * place) for place, weight in enumerate(layer.get_weights())])
    return [to_numpy(tensor) for tensor in layer(*arguments, **keywords)]


if __name__ == "__main__":
    import keras
    from keras.src.backend.common import dtypes

    keras.config.set_floatx("float64")
    dtypes.BIT64_TO_BIT32_DTYPE["float64"] = "float64"  # else Keras' promotion makes it float32
    golden = {
        name: [array.tolist() for array in results(layer, arguments, keywords, keras.ops.convert_to_numpy)]
        for name, (layer, arguments, keywords) in layers(keras.layers).items()
    }
    PAGE.write_text(json.dumps(golden) + "\n")
