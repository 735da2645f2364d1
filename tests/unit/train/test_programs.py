"""A model's steps as programs: what is sent, traced and looked up."""

import re

import numpy as np
import pytest

import dptrain as dp
from dptrain.backend.cpu.backend import CpuBackend
from dptrain.errors import DeviceError, DeviceMemoryError
from dptrain.layers import Dense
from dptrain.optimizers import OPTIMIZERS
from dptrain.program import messages
from dptrain.program.memory import plan
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


class SmallBackend(CpuBackend):
    """A device with so many bytes for a program's intermediate results."""

    def __init__(self, memory):
        super().__init__(jit_compile=False)
        self.memory = memory

    def executable(self, program, arrays, *, rows, **place):
        asked = plan(program, rows).size
        if asked > self.memory:
            raise DeviceMemoryError("out of memory", "intermediate results", asked, self.memory, {})
        return super().executable(program, arrays, rows=rows, **place)


def train(memory, rows):
    model = dp.Sequential([Dense(50, "relu", input_shape=(100,)), dp.layers.Dropout(0.5), Dense(10, "softmax")])
    model.compile("adam", "sparse_categorical_crossentropy")
    model.put_on(SmallBackend(memory))
    model.train_on_batch(np.zeros((rows, 100), np.float32), np.zeros(rows, np.int64))


@pytest.mark.parametrize("memory", [200_000, 1_000_000, 7_654_321])
def test_the_batch_that_would_fit_fits(memory):
    with pytest.raises(DeviceError, match=r"would fit instead of 20000$") as caught:
        train(memory, 20_000)
    fitting = int(re.search(r"about (\d+) rows", str(caught.value)).group(1))
    train(memory, fitting)
    with pytest.raises(DeviceError):
        train(memory, int(fitting * 1.3) + 20)


def test_what_no_batch_size_can_mend():
    with pytest.raises(DeviceError, match=r"the model alone takes \d+\.\d KiB: make it smaller"):
        train(100, 1)
