"""Garbage collection is paused while steps are traced and compiled, and runs again whatever happens there."""

import gc

import numpy as np
import pytest

import dptrain as dp
from dptrain.runtime.garbage import uncollected


@pytest.fixture(autouse=True)
def restored():
    was_enabled = gc.isenabled()
    yield
    (gc.enable if was_enabled else gc.disable)()


@pytest.mark.parametrize("before", [True, False])
def test_it_runs_again_after_the_last_block_if_it_ran_before_the_first(before):
    (gc.enable if before else gc.disable)()
    with uncollected():
        with uncollected():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled() == before


def test_an_error_in_a_block_does_not_stop_it():
    gc.enable()
    with pytest.raises(ValueError, match="broken"), uncollected():
        raise ValueError("broken")
    assert gc.isenabled()


def test_it_is_paused_while_a_step_is_traced_and_runs_afterwards():
    states = []

    class Layer(dp.layers.Layer):
        def call(self, x):
            states.append(gc.isenabled())
            return x * 2

    gc.enable()
    model = dp.Sequential([Layer()])
    model.compile(loss="mse")
    x = np.zeros((4, 3), np.float32)
    model.build((None, 3))
    states.clear()
    model.evaluate(x, x, verbose=0)
    assert states == [False]
    assert gc.isenabled()
