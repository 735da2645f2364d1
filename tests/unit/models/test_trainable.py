"""`trainable` of models, layers and what is in them: the counts are Keras 3.15's."""

import numpy as np
import pytest

import dptrain as keras
from dptrain import layers as L  # noqa: N812


def _counts(model):
    return len(model.trainable_weights), len(model.non_trainable_weights)


def _normalized(**options):
    x = keras.Input((3,))
    dense = L.Dense(2)
    return keras.Model(x, L.BatchNormalization()(dense(x)), **options), dense


def test_a_layer_that_is_turned_on_within_a_frozen_base_is_trained():
    base = keras.Sequential([keras.Input((3,)), L.Dense(4), L.Dense(4), L.Dense(4)])
    model = keras.Sequential([keras.Input((3,)), base, L.Dense(1)])
    base.trainable = False
    base.layers[-2].trainable = True
    assert _counts(model) == (4, 4)
    assert _counts(base) == (0, 6)
    before = [array.copy() for array in model.get_weights()]
    model.compile(keras.optimizers.SGD(0.1), "mse")
    model.fit(np.ones((4, 3)), np.zeros((4, 1)) + 5, verbose=0)
    moved = [bool((array != was).any()) for array, was in zip(model.get_weights(), before, strict=True)]
    assert moved == [False, False, True, True, False, False, True, True]


def test_a_model_that_is_made_untrainable_leaves_its_layers_alone(tmp_path):
    model, dense = _normalized(trainable=False)
    assert not model.trainable
    assert dense.trainable
    assert _counts(model) == (0, 6)
    x = keras.Input((3,))
    outer = keras.Model(x, L.Dense(1)(model(x)))
    assert _counts(outer) == (6, 2)
    model.save(tmp_path / "m.keras")
    loaded = keras.models.load_model(tmp_path / "m.keras")
    assert not loaded.trainable
    assert loaded.layers[1].trainable


def test_setting_it_reaches_the_layers():
    model, dense = _normalized()
    model.trainable = False
    assert not dense.trainable
    dense.trainable = True
    assert _counts(model) == (0, 6)
    model.trainable = True
    assert _counts(model) == (4, 2)


def test_subclasses_and_layers_within_layers():
    class Own(keras.Model):
        def __init__(self, **options):
            super().__init__(**options)
            self.dense = L.Dense(2)

        def call(self, x):
            return self.dense(x)

    model = Own(trainable=False)
    model(np.ones((2, 3)))
    assert model.dense.trainable
    assert _counts(model) == (0, 2)


@pytest.mark.parametrize(
    "make", [lambda: keras.Sequential([L.Dense(2)], trainable="yes"), lambda: _normalized(trainable=1)]
)
def test_it_is_a_boolean(make):
    with pytest.raises(ValueError, match="Expected `trainable` to be a boolean"):
        make()
