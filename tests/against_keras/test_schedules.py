"""Every schedule at 300 steps, as in Keras."""

import numpy as np
import pytest

from dptrain.optimizers import schedules

CASES = [
    ("ExponentialDecay", (0.1, 37, 0.9), {}),
    ("ExponentialDecay", (0.1, 37, 0.9), {"staircase": True}),
    ("PiecewiseConstantDecay", ([10, 100, 250], [0.5, 0.25, 1.5, 0.125]), {}),
    ("PiecewiseConstantDecay", ([10.9, 100.5], [0.5, 0.25, 1.5]), {}),
    ("PolynomialDecay", (0.1, 130), {}),
    ("PolynomialDecay", (0.1, 130, 0.01, 0.5), {}),
    ("PolynomialDecay", (0.1, 70, 0.01), {"power": 2.0, "cycle": True}),
    ("InverseTimeDecay", (0.1, 13, 0.5), {}),
    ("InverseTimeDecay", (0.1, 13, 0.5), {"staircase": True}),
    ("CosineDecay", (0.1, 200), {}),
    ("CosineDecay", (0.1, 200, 0.2), {}),
    ("CosineDecay", (0.0, 150, 0.2), {"warmup_target": 0.1, "warmup_steps": 40}),
    ("CosineDecay", (0.3, 150), {"warmup_target": 0.1, "warmup_steps": 0}),
    ("CosineDecayRestarts", (0.1, 40), {}),
    ("CosineDecayRestarts", (0.1, 16, 2.0, 0.8, 0.1), {}),
    ("CosineDecayRestarts", (0.1, 33, 1.0, 0.9), {}),
    ("CosineDecayRestarts", (0.1, 10, 1.7), {}),
]


@pytest.mark.parametrize(("name", "arguments", "options"), CASES)
def test_three_hundred_steps(keras, name, arguments, options):
    mine = getattr(schedules, name)(*arguments, **options)
    theirs = getattr(keras.optimizers.schedules, name)(*arguments, **options)
    assert mine.get_config() == theirs.get_config()
    expected = [float(theirs(step)) for step in range(300)]
    np.testing.assert_allclose([float(mine(step)) for step in range(300)], expected, rtol=1e-11, atol=1e-15)
    assert schedules.serialize(mine) == keras.optimizers.schedules.serialize(theirs)
    restored = keras.optimizers.schedules.deserialize(schedules.serialize(mine))
    assert restored.get_config() == mine.get_config()
