"""Branches on a GPU: all are computed, and those that are not taken have no effect."""

import numpy as np
import pytest

from dptrain import ops
from dptrain.program.execute import evaluate
from dptrain.program.gradient import gradients
from dptrain.program.program import trace
from dptrain.program.tensor import Variable

X = np.array([1.0, 4.0, 9.0], np.float32)


@pytest.mark.parametrize("sign", [1, -1])
def test_numbers_that_are_none_stay_in_the_branch_that_is_not_taken(cuda_backend, sign):
    """In steps of a loop, too; a branch has a loop."""
    w, calls = Variable(np.float32([0.5, -0.25, 1]), "w"), Variable(np.float32(0), "calls")

    def step(x):
        def of_part(carry, part):
            def yes():
                calls.assign_add(1.0)
                return ops.scan(lambda a, b: (ops.tanh(a * w + b), None), ops.sqrt(part), ops.stack([part, carry]))[0]

            return ops.cond(ops.sum(part) > 0, yes, lambda: carry - part * w), ops.max(carry)

        last, outputs = ops.scan(of_part, ops.zeros_like(x), ops.stack([x, -x, 2 * x]))
        y = ops.cond(ops.sum(x) > 0, lambda: ops.log(x), lambda: 0 * x)
        first = gradients(ops.sum(last * y) + ops.sum(y), [x, w.value])
        (second,) = gradients(ops.sum(first[0]), [x])
        return {"last": last, "outputs": outputs, "dx": first[0], "dw": first[1], "second": second}

    program = trace(step, {"x": (X.shape, np.float32)})
    expected, updates = evaluate(program, {"x": sign * X})
    executable = cuda_backend.executable(program, {"x": sign * X})
    executable.run()
    assert not any(np.isnan(value).any() for value in expected.values())
    for name, value in expected.items():
        np.testing.assert_allclose(executable.outputs[name], value, rtol=1e-4, atol=1e-4, err_msg=name)
    assert calls.numpy() == updates[calls] == (2 if sign > 0 else 1)
