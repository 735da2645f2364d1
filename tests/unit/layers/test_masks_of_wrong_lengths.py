"""A mask without the lengths of its input is refused with its layer and both shapes."""

import re

import numpy as np
import pytest

import dptrain as dp
from dptrain import layers as L  # noqa: N812
from dptrain.errors import ConfigError

X = np.zeros((4, 6, 3), np.float32)
LAYERS = {
    "LSTM": lambda: L.LSTM(2, name="taker"),
    "sequences": lambda: L.GRU(2, return_sequences=True, unroll=True, name="taker"),
    "stacked": lambda: L.RNN([L.GRUCell(2), L.LSTMCell(3)], name="taker"),
    "pooling": lambda: L.GlobalAveragePooling1D(name="taker"),
    "normalization": lambda: L.BatchNormalization(name="taker"),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("shape", [(4, 5), (4, 7), (3, 6)], ids=str)
def test_the_layer_and_the_lengths_are_named(name, shape):
    message = re.escape(f"shape {shape}, expected (4, 6), as its input has")
    with pytest.raises(ConfigError, match=f"mask of layer 'taker' .*{message}"):
        LAYERS[name]()(X, mask=np.ones(shape, bool))
    whole = LAYERS[name]()
    assert whole(X, mask=np.ones((1, 6), bool)).shape == whole(X).shape


def attended(query, value, masks):
    return L.Attention(name="taker")([query, value], mask=[masks.get("query_mask"), masks.get("value_mask")])


ATTENTION = {
    "Attention": attended,
    "MultiHeadAttention": lambda q, v, masks: L.MultiHeadAttention(2, 3, name="taker")(q, v, **masks),
    "GroupQueryAttention": lambda q, v, masks: L.GroupQueryAttention(3, 2, 1, name="taker")(q, v, **masks),
}


@pytest.mark.parametrize(
    ("kind", "mask"),
    [(kind, mask) for kind in ATTENTION for mask in ("query", "value", "key") if (kind, mask) != ("Attention", "key")],
)
def test_masks_of_attention(kind, mask):
    wrong, length = np.ones((4, 8), bool), 6 if mask == "query" else 5
    with pytest.raises(ConfigError, match=rf"{mask}.mask of layer 'taker' .*\(4, 8\), expected \(4, {length}\)"):
        ATTENTION[kind](X, X[:, :5], {f"{mask}_mask": wrong})


def test_in_a_model():
    x, mask = dp.Input((6, 3)), dp.Input((5,), dtype="bool")
    with pytest.raises(ConfigError, match=r"layer 'taker' \(GRU\): shape \(None, 5\), expected \(None, 6\)"):
        L.GRU(2, name="taker")(x, mask=mask)
