"""An op of two values is one record: executed once, differentiated once, divided among ranks by its letters."""

import numpy as np
import pytest

from dptrain import ops
from dptrain.backend.cpu.compiled import CompiledExecutable
from dptrain.errors import ConfigError
from dptrain.program.dims import Dim
from dptrain.program.execute import HostMemory, evaluate
from dptrain.program.op import Op
from dptrain.program.program import trace
from dptrain.program.sharding.placement import place
from dptrain.program.sharding.sharding_rule import parse_rule
from dptrain.program.tensor import Variable
from tests.unit.program.virtual_ranks import run_on_ranks

CALLS = []


def centered(x, *, out):
    """x without the mean along its last axis, and that mean."""
    CALLS.append([array is not None for array in out])
    mean = x.mean(-1)
    if out[0] is not None:
        out[0][...] = x - mean[:, None]
    if out[1] is not None:
        out[1][...] = mean


CENTERED = Op(centered, lambda x: [x, x[:1]], "aB->aB,a", lambda x: [x, x], has_values=True)


@CENTERED.gradient
def _centered(tensor, dys, x):
    d_rest, d_mean = dys
    dx = 0.0
    if d_rest is not None:
        dx = d_rest - ops.mean(d_rest, -1, keepdims=True)
    if d_mean is not None:
        dx = dx + ops.expand_dims(d_mean, -1) / x.shape[-1]
    return dx + 0 * x


X = np.random.default_rng(0).normal(size=(5, 3))
INPUTS = {"x": ((Dim.rows(5), 3), np.float64)}


def step(w, use):
    def function(x):
        w._gradient = None
        loss = use(*CENTERED.values(x * w))
        loss.backward()
        return {"loss": loss, "grad": w.value.grad}

    return function


USES = {
    "both": lambda rest, mean: ops.sum(rest**3) + ops.sum(ops.exp(mean)),
    "first": lambda rest, mean: ops.sum(rest**3),
    "second": lambda rest, mean: ops.sum(mean * mean),
}


@pytest.mark.parametrize("use", USES)
def test_values_are_made_once_and_only_where_they_are_read(use):
    w = Variable(np.array([0.5, -1, 2]), "w")
    function = step(w, USES[use])
    eager = {name: tensor.numpy() for name, tensor in function(ops.convert_to_tensor(X)).items()}
    shift = 1e-6 * np.eye(3)
    numeric = []
    for change in shift:
        losses = [
            float(step(Variable(w.numpy() + sign * change), USES[use])(ops.convert_to_tensor(X))["loss"])
            for sign in (1, -1)
        ]
        numeric.append((losses[0] - losses[1]) / 2e-6)
    np.testing.assert_allclose(eager["grad"], numeric, rtol=1e-6, atol=1e-8)
    program = trace(function, INPUTS)
    CALLS.clear()
    evaluated = evaluate(program, {"x": X})[0]
    assert [[use != "second", use != "first"]] == CALLS
    compiled = CompiledExecutable(place(program), HostMemory(), {"x": X})
    CALLS.clear()
    compiled.run()
    assert [[use != "second", use != "first"]] == CALLS
    for name, value in eager.items():
        np.testing.assert_allclose(evaluated[name], value, rtol=1e-13)
        np.testing.assert_allclose(compiled.outputs[name], value, rtol=1e-12)
    for outputs, _ in run_on_ranks(place(program), {"x": X}, [2, 0, 3], {"x": 0})[0]:
        for name, value in eager.items():
            np.testing.assert_allclose(outputs[name], value, rtol=1e-12)


def test_letters_name_every_value():
    rule = parse_rule("aB->aB,a", "centered")
    assert (rule.of(0).output, rule.of(1).output, str(rule)) == ("aB", "a", "aB->aB,a")
    with pytest.raises(ConfigError, match="'a' names two axes"):
        parse_rule("aB->aB,aa", "centered")
