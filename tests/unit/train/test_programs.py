"""A model's steps as programs: what is sent, traced and looked up."""

import numpy as np
import pytest

import dptrain as dp
from dptrain.layers import Dense
from dptrain.optimizers import OPTIMIZERS
from dptrain.program import messages
from dptrain.program.placement import place
from dptrain.program.program import trace
from dptrain.program.shapes import Rows

OPTIONS = [{}, {"clipnorm": 1.0}, {"global_clipnorm": 1.0}, {"clipvalue": 0.5}, {"gradient_accumulation_steps": 2}]


def placed(model: dp.Sequential):
    model.build()
    step = model.step("train")
    inputs = {"x": ((Rows(8), 6), np.float32), "y": ((Rows(8),), np.int64)}
    return place(trace(lambda x, y: step.function((x, y)), inputs))


@pytest.mark.parametrize("options", OPTIONS, ids=lambda one: next(iter(one), "plain"))
@pytest.mark.parametrize("name", sorted({one.__name__ for one in OPTIMIZERS.values()}))
def test_a_step_sends_one_message_with_each_sum_once(name, options):
    """Four gradients, the loss and the hits: whatever an optimizer makes of gradients, it makes of their sums."""
    layers = [Dense(8, "relu", input_shape=(6,), kernel_regularizer="l2"), Dense(3, "softmax")]
    model = dp.Sequential(layers)
    optimizer = getattr(dp.optimizers, name)(**options)
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    (stage, _) = messages.stages(placed(model))
    ((*sums,),) = stage.messages
    assert sorted(one.shape for one in sums) == [(), (), (3,), (6, 8), (8,), (8, 3)]


def test_logs_fetch_no_weights():
    """Reading the means of a step needs their totals alone, wherever the weights are."""
    model = dp.Sequential([Dense(8, "relu", input_shape=(6,)), Dense(3, "softmax")])
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    readings = placed(model).readings
    assert sorted(readings.outputs) == ["accuracy", "loss"]
    assert {one.name for one in readings.state} == {"total", "count"}
    assert len(readings.state) == 4
