"""Architectures: shapes, names, layouts, and what is refused."""

import pytest

from dptrain.errors import ConfigError
from dptrain.layers import Activation, Dense, Dropout, Flatten
from dptrain.losses import BinaryCrossentropy, MeanSquaredError, SparseCategoricalCrossentropy
from dptrain.model import Architecture


def test_shapes_names_and_order_of_parameters():
    model = Architecture([Flatten(input_shape=(4, 5)), Dense(3), Dense(2, use_bias=False), Dense(1, name="last")])
    assert model.input_shapes == [(4, 5), (20,), (3,), (2,)]
    assert model.output_shapes == [(20,), (3,), (2,), (1,)]
    assert [(e.name, e.shape) for e in model.layout.entries] == [
        ("dense/kernel", (20, 3)),
        ("dense/bias", (3,)),
        ("dense_1/kernel", (3, 2)),
        ("last/kernel", (2, 1)),
        ("last/bias", (1,)),
    ]
    assert model.layout.count == 60 + 3 + 6 + 2 + 1
    assert "Total params: 72" in model.summary()
    assert "(None, 20)" in model.summary()


def test_names_given_by_the_user_are_kept_clear_of():
    model = Architecture([Dense(3, name="dense"), Dense(3), Dense(3)], (2,))
    assert [layer.name for layer in model.layers] == ["dense", "dense_1", "dense_2"]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Architecture([]), "at least one layer"),
        (lambda: Architecture([Dense(3)]), "needs input_shape"),
        (lambda: Architecture([Dense(3)], (2, 2)), "put a Flatten before it"),
        (lambda: Architecture([Dense(3, name="a"), Dense(3, name="a")], (2,)), "must be unique"),
        (lambda: Dense(0), "expected a positive integer. Received: units=0"),
        (lambda: Dense(2.5), "expected a positive integer"),
        (lambda: Dense(3, activation="relo"), "unknown activation 'relo'; did you mean 'relu'?"),
        (lambda: Dense(3, kernel_initializer="glorot"), "unknown initializer"),
        (lambda: Dropout(1.1), "Expected a float value between 0 and 1"),
        (lambda: Activation("nothing"), "unknown activation"),
    ],
)
def test_refused(build, message):
    with pytest.raises(ConfigError, match=message.replace("?", r"\?")):
        build()


def test_cross_entropy_takes_over_the_softmax_where_there_is_one():
    last = Dense(3, "softmax")
    model = Architecture([Dense(4), last], (2,))
    layers, fused = model.layers_for(SparseCategoricalCrossentropy())
    taken = layers[-1]
    assert fused
    assert (taken.final_activation, taken.name, last.activation) == ("linear", last.name, "softmax")
    for loss in (SparseCategoricalCrossentropy(from_logits=True), MeanSquaredError(), BinaryCrossentropy()):
        assert model.layers_for(loss) == (model.layers, False)
    others = Architecture([Dense(3)], (2,))
    assert others.layers_for(SparseCategoricalCrossentropy()) == (others.layers, False)
