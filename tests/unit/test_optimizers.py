"""Each optimizer: one step by hand, and a trajectory computed in exact steps."""

import math

import numpy as np
import pytest

from dptrain import optimizers
from dptrain.backend.numpy import NumpyBackend
from dptrain.errors import ConfigError
from dptrain.optimizers import OPTIMIZERS, SGD, Adam, RMSprop

OPS = NumpyBackend(np.float64)


def run(optimizer: optimizers.Optimizer, gradients: list[float], weight: float = 2.0) -> list[float]:
    """Return a parameter's values that starts at 1 and sees these mean gradients."""
    p = np.array([1.0])
    slots = {name: np.zeros(1) for name in optimizer.slots}
    values = []
    for iteration, gradient in enumerate(gradients, start=1):
        optimizer.apply(OPS, p, np.array([gradient * weight]), slots, np.array([weight]), iteration)
        values.append(float(p[0]))
    return values


def test_adam_first_step_by_hand():
    # m = 0.1 * 0.5 = 0.05, v = 0.001 * 0.25 = 2.5e-4, alpha = 0.1 * sqrt(0.001) / 0.1 = 0.0316227766
    # p = 1 - 0.0316227766 * 0.05 / (0.0158113883 + 1e-7)
    assert run(Adam(0.1), [0.5]) == pytest.approx(
        [1 - 0.0316227766016838 * 0.05 / (0.0158113883008419 + 1e-7)], rel=1e-14
    )


def test_rmsprop_first_step_by_hand():
    # v = 0.1 * 0.25 = 0.025
    assert run(RMSprop(0.01), [0.5]) == pytest.approx([1 - 0.01 * 0.5 / math.sqrt(0.025 + 1e-7)], rel=1e-14)


def test_sgd_steps_by_hand():
    assert run(SGD(0.1), [0.5, -1.0]) == pytest.approx([0.95, 1.05], rel=1e-14)
    # m = -0.05, then 0.9 * -0.05 + 0.1 = 0.055
    assert run(SGD(0.1, momentum=0.9), [0.5, -1.0]) == pytest.approx([0.95, 1.005], rel=1e-14)


def test_adam_trajectory_with_corrected_moments():
    """The textbook form with corrected moments equals ours when its epsilon is divided by sqrt(1 - beta_2^t)."""
    gradients = [0.5, -0.25, 1.0, 0.0, 3.0, -2.0, 1e-3, 0.1, 0.2, -0.4]
    m = v = 0.0
    p, expected = 1.0, []
    for t, g in enumerate(gradients, start=1):
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        corrected = math.sqrt(v / (1 - 0.999**t)) + 1e-7 / math.sqrt(1 - 0.999**t)
        p -= 0.01 * m / (1 - 0.9**t) / corrected
        expected.append(p)
    assert run(Adam(0.01), gradients) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("weight", [1.0, 3.0, 128.0])
@pytest.mark.parametrize("optimizer", [Adam, RMSprop, SGD])
def test_the_update_divides_by_the_weight(optimizer, weight):
    gradients = [0.5, -0.25, 1.0]
    assert run(optimizer(0.01), gradients, weight) == pytest.approx(run(optimizer(0.01), gradients, 1.0), rel=1e-12)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_config_rebuilds_the_optimizer(name):
    optimizer = OPTIMIZERS[name](learning_rate=0.25)
    again = OPTIMIZERS[name](**optimizer.config())
    assert again.config() == optimizer.config()
    assert optimizers.get(name).config() == OPTIMIZERS[name]().config()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Adam(0), "learning_rate = 0: expected a number > 0"),
        (lambda: Adam(float("nan")), "learning_rate = nan"),
        (lambda: Adam(beta_1=1.0), "beta_1 = 1: expected a number >= 0 and < 1"),
        (lambda: Adam(epsilon=0), "epsilon = 0"),
        (lambda: SGD(momentum=-0.1), "momentum = -0.1"),
        (lambda: RMSprop(rho=2), "rho = 2"),
        (lambda: optimizers.get("adma"), "unknown optimizer 'adma'; did you mean 'adam'"),
    ],
)
def test_refused(build, message):
    with pytest.raises(ConfigError, match=message):
        build()
