"""A program is traced again after each change of what it depends on, in whichever part of an optimizer."""

import itertools

import numpy as np
import pytest

from dptrain.optimizers import SGD, Adam, LossScaleOptimizer, MultiOptimizer, Optimizer, OptimizerMap, schedules
from tests.unit.callbacks import build, toy

X, Y = toy(8)


def parts(count: int) -> list[Optimizer]:
    return [SGD(0.1), Adam(0.01), SGD(0.3, momentum=0.5)][:count]


def several(optimizers: list[Optimizer]) -> MultiOptimizer:
    first, *others = optimizers
    return MultiOptimizer(
        OptimizerMap(first, {f".*{name}": part for name, part in zip(("bias", "x"), others, strict=False)})
    )


WHOLES = {
    "one": lambda optimizers: optimizers[0],
    "scaled": lambda optimizers: LossScaleOptimizer(optimizers[0], 4.0),
    "several": several,
    "scaled, of several": lambda optimizers: LossScaleOptimizer(several(optimizers), 4.0),
}


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
@pytest.mark.parametrize("whole", WHOLES)
def test_each_change_of_a_part_gives_another_version(whole, order):
    optimizers = parts(3 if "several" in whole else 1)
    optimizer = WHOLES[whole](optimizers)
    versions = [optimizer._program_version]
    for number in (*order, *order):
        if number < len(optimizers):
            optimizers[number].learning_rate = schedules.ExponentialDecay(0.1, 3, 0.9)
            versions.append(optimizer._program_version)
    assert len(set(versions)) == len(versions)


@pytest.mark.sample(6)
@pytest.mark.parametrize("whole", WHOLES)
def test_a_model_trains_with_each_schedule_from_the_moment_it_is_set(whole):
    weights = []
    for eager in (False, True):
        optimizers = parts(2 if "several" in whole else 1)
        model = build(WHOLES[whole](optimizers), run_eagerly=eager)
        for step, part in enumerate((*optimizers, *optimizers)):
            model.train_on_batch(X, Y)
            part.learning_rate = schedules.InverseTimeDecay(0.5 / (step + 1), 2, 0.5)
            model.train_on_batch(X, Y)
        weights.append([weight.copy() for weight in model.get_weights()])
    for traced, expected in zip(*weights, strict=True):
        np.testing.assert_allclose(traced, expected, rtol=1e-9)
