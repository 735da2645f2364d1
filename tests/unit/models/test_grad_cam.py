"""Gradients in the outputs of inner layers, as Grad-CAM computes them by Keras' idiom."""

import numpy as np
import pytest

import dptrain as dp
from dptrain import GradientTape, layers, ops

IMAGES = np.random.default_rng(0).normal(size=(2, 8, 8, 3)).astype(np.float32)


def classifier():
    inputs = dp.Input((8, 8, 3))
    features = layers.Conv2D(4, 3, activation="relu", name="last_conv")(inputs)
    outputs = layers.Dense(3, name="scores")(layers.GlobalAveragePooling2D()(features))
    return dp.Model(inputs, outputs)


def maps(model):
    return dp.Model(model.inputs, [model.get_layer("last_conv").output, model.output])


def expected(model):
    """Return d score 1 / d features: of a mean over 36 pixels, and a product."""
    return np.broadcast_to(model.get_layer("scores").get_weights()[0][:, 1] / 36, (2, 6, 6, 4))


def test_the_heat_map_of_a_class():
    model = classifier()
    with GradientTape() as tape:
        features, scores = maps(model)(IMAGES)
        score = scores[:, 1]
    gradient = tape.gradient(score, features)
    np.testing.assert_allclose(gradient, expected(model), rtol=1e-6)
    weights = ops.mean(gradient, axis=(0, 1, 2))
    assert ops.squeeze(features[0] @ weights[..., None], -1).shape == (6, 6)


def test_in_a_model_of_its_own():
    class HeatMaps(dp.Model):
        def __init__(self, model):
            super().__init__()
            self.maps = maps(model)

        def call(self, x):
            with GradientTape() as tape:
                features, scores = self.maps(x)
                score = scores[:, 1]
            return tape.gradient(score, features)

    model = classifier()
    for eager in (False, True):
        heat_maps = HeatMaps(model)
        heat_maps.compile(run_eagerly=eager)
        np.testing.assert_allclose(heat_maps.predict(IMAGES, verbose=0), expected(model), rtol=1e-6)


@pytest.mark.parametrize("watches", [False, True])
def test_what_no_variable_has_part_in_is_watched_or_has_none(watches):
    model = classifier()
    model.get_layer("last_conv").trainable = False
    with GradientTape() as tape:
        features = maps(model)(IMAGES)[0]
        if watches:
            tape.watch(features)
        scores = model.get_layer("scores")(ops.mean(features, (1, 2)))
        score = scores[:, 1]
    gradient = tape.gradient(score, features)
    assert (gradient is None) != watches
    if watches:
        np.testing.assert_allclose(gradient, expected(model), rtol=1e-6)


def test_tapes_that_watch_no_variables():
    model = classifier()
    with GradientTape(persistent=True, watch_accessed_variables=False) as tape:
        x = ops.convert_to_tensor(IMAGES)
        tape.watch(x)
        features, scores = maps(model)(x)
    assert tape.gradient(scores, model.trainable_variables) == [None] * 4
    assert tape.gradient(scores, features).shape == (2, 6, 6, 4)
    with GradientTape(watch_accessed_variables=False) as tape:
        features, scores = maps(model)(IMAGES)
    assert tape.gradient(scores, features) is None
