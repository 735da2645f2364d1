"""Each schedule: numbers computed by hand."""

import math

import numpy as np
import pytest

import dptrain as dp
from dptrain.errors import ConfigError
from dptrain.optimizers import SGD, schedules
from dptrain.optimizers.schedules import (
    SCHEDULES,
    CosineDecay,
    CosineDecayRestarts,
    ExponentialDecay,
    InverseTimeDecay,
    LearningRateSchedule,
    PiecewiseConstantDecay,
    PolynomialDecay,
)
from dptrain.optimizers.schedules import CosineDecay as CosineDecayWhereKerasHasIt
from dptrain.program.execute import evaluate
from dptrain.program.program import trace
from dptrain.program.tensor import Variable


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (ExponentialDecay(0.8, 10, 0.25), {0: 0.8, 5: 0.4, 10: 0.2, 20: 0.05}),
        (ExponentialDecay(0.8, 10, 0.25, staircase=True), {0: 0.8, 9: 0.8, 10: 0.2, 19: 0.2, 20: 0.05}),
        (InverseTimeDecay(1.0, 10, 0.5), {0: 1.0, 20: 0.5, 5: 0.8}),
        (InverseTimeDecay(1.0, 10, 0.5, True), {0: 1.0, 9: 1.0, 19: 2 / 3, 20: 0.5}),
        (PiecewiseConstantDecay([10, 12.7], [1.0, 0.5, 0.1]), {0: 1.0, 10: 1.0, 11: 0.5, 12: 0.5, 13: 0.1, 99: 0.1}),
        (PolynomialDecay(1.0, 10, 0.5), {0: 1.0, 5: 0.75, 10: 0.5, 11: 0.5}),
        (PolynomialDecay(1.0, 10, 0.0, 2.0), {0: 1.0, 5: 0.25, 10: 0.0}),
        (PolynomialDecay(1.0, 10, 0.0, cycle=True), {0: 1.0, 10: 0.0, 15: 0.25, 20: 0.0, 25: 1 / 6}),
        (CosineDecay(1.0, 10, 0.5), {0: 1.0, 5: 0.75, 10: 0.5, 30: 0.5}),
        (CosineDecay(0.0, 10, warmup_target=1.0, warmup_steps=4), {0: 0.0, 1: 0.25, 4: 1.0, 9: 0.5, 14: 0.0, 99: 0.0}),
        (CosineDecay(0.5, 10, warmup_target=1.0), {0: 1.0, 5: 0.5}),
        (CosineDecayRestarts(1.0, 10), {0: 1.0, 5: 0.5, 10: 1.0, 20: 0.5, 30: 1.0, 50: 0.5}),
        (CosineDecayRestarts(1.0, 10, 1.0, 0.5), {5: 0.5, 10: 0.5, 15: 0.25, 20: 0.25, 25: 0.125}),
        (CosineDecayRestarts(2.0, 10, alpha=0.5), {0: 2.0, 5: 1.5, 9: 1.5 + 0.5 * math.cos(0.9 * math.pi)}),
    ],
)
def test_by_hand(schedule, expected):
    assert {step: float(schedule(step)) for step in expected} == pytest.approx(expected, rel=1e-12, abs=1e-15)
    assert all(schedule(np.float32(step)).dtype == np.float64 for step in expected)
    count, rate = Variable(np.array(0, np.int64)), Variable(np.array(0.0))
    program = trace(lambda: (rate.assign(schedule(count)), {})[1], {})
    for step in expected:
        _, updates = evaluate(program, {}, {count: np.array(step)})
        assert updates[rate] == float(schedule(step)), "a traced schedule has the bits of the eager one"
    restored = schedules.deserialize(schedules.serialize(schedule))
    assert type(restored) is type(schedule)
    assert restored.get_config() == schedule.get_config()


def test_the_names_of_keras():
    kinds = (CosineDecay, CosineDecayRestarts, ExponentialDecay, InverseTimeDecay, PiecewiseConstantDecay)
    assert set(SCHEDULES.values()) == {*kinds, PolynomialDecay}
    assert list(SCHEDULES)[:2] == ["CosineDecay", "CosineDecayRestarts"]
    assert dp.optimizers.schedules.CosineDecay is CosineDecayWhereKerasHasIt is CosineDecay
    assert schedules.serialize(ExponentialDecay(0.1, 2, 0.5)) == {
        "module": "keras.optimizers.schedules",
        "class_name": "ExponentialDecay",
        "config": {
            "initial_learning_rate": 0.1,
            "decay_steps": 2,
            "decay_rate": 0.5,
            "staircase": False,
            "name": "ExponentialDecay",
        },
        "registered_name": None,
    }


class Halving(LearningRateSchedule):
    """A user's own, as in Keras' documentation: nothing but `__call__`."""

    def __call__(self, step):
        return 0.5**step


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: ExponentialDecay(0.1, 0, 0.5), r"Argument `decay_steps` must be > 0. Received: decay_steps=0"),
        (lambda: InverseTimeDecay(0.1, -1, 0.5), "decay_steps=-1"),
        (lambda: PolynomialDecay(0.1, 0), "decay_steps=0"),
        (lambda: CosineDecay(0.1, 0), "decay_steps=0"),
        (lambda: CosineDecayRestarts(0.1, 0), "first_decay_steps=0"),
        (lambda: CosineDecayRestarts(0.1, 5, 0.5), "not supported: t_mul=0.5 below 1"),
        (lambda: PiecewiseConstantDecay([1, 2], [0.1]), "boundaries should be 1 less than the length of values"),
        (lambda: PiecewiseConstantDecay([2, 1], [0.1, 0.2, 0.3]), "expected increasing steps"),
        (
            lambda: schedules.deserialize({"class_name": "CosineDecai", "config": {}}),
            "unknown learning rate schedule 'CosineDecai'; did you mean 'CosineDecay'",
        ),
        (
            lambda: schedules.deserialize({"class_name": "CosineDecay", "config": {"steps": 1}}),
            "CosineDecay.* unexpected keyword argument 'steps'",
        ),
        (lambda: schedules.deserialize("CosineDecay"), "CosineDecay.* missing 2 required positional arguments"),
    ],
)
def test_refused(build, message):
    with pytest.raises(ConfigError, match=message):
        build()


def test_a_users_own_schedule_trains():
    kernel = Variable(np.zeros(1))
    optimizer = SGD(Halving())
    program = trace(lambda: optimizer.apply([np.ones(1)], [kernel]) or {}, {})
    for _ in range(3):
        _, updates = evaluate(program, {})
        for variable, value in updates.items():
            variable.assign(value)
    assert list(kernel.numpy()) == [-1.75]
    with pytest.raises(NotImplementedError, match="Halving' must override `get_config"):
        schedules.serialize(Halving())
    with pytest.raises(NotImplementedError, match="must override `__call__"):
        LearningRateSchedule()(0)


def test_restarts_are_not_missed_by_rounding():
    """At the end of each cosine the rate is the highest again, though the logarithms there are rounded."""
    for factor in (1.5, 2.0, 3.0, 10.0):
        schedule, end = CosineDecayRestarts(1.0, 64, factor), 0.0
        for restart in range(12):
            end += 64 * factor**restart
            if end == int(end):
                assert float(schedule(int(end))) == pytest.approx(1, abs=1e-9), (factor, restart)


def test_a_decision_by_the_step_is_refused():
    class Stepwise(LearningRateSchedule):
        def __call__(self, step):
            return 0.1 if step < 10 else 0.01

    optimizer, kernel = SGD(Stepwise()), Variable(np.zeros(1))
    optimizer.apply([np.ones(1)], [kernel])
    assert list(kernel.numpy()) == [-0.1]
    with pytest.raises(ConfigError, match="compute with ops"):
        trace(lambda: optimizer.apply([np.ones(1)], [kernel]) or {}, {})
