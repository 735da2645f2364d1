"""Ops that the host computes in the middle of a GPU's step: between graphs, in packs, beside messages."""

import numpy as np

import dptrain as dp
from dptrain import ops
from dptrain.models.explaining import explain
from dptrain.program.execute import evaluate
from dptrain.program.program import trace
from dptrain.program.tensor import Variable
from tests.unit.ops.test_host_ops import program_and_values


def test_a_step_goes_by_way_of_the_host(cuda_backend):
    program, values = program_and_values()
    expected, _ = evaluate(program, values)
    executable = cuda_backend.executable(program, values)
    executable.run()
    assert executable.pack_key is None
    assert len(executable._stages[0]) > 3  # graphs around the calls
    for _ in range(2):
        for name, value in expected.items():
            np.testing.assert_allclose(executable.outputs[name], value, rtol=3e-5, atol=3e-5, err_msg=name)
        executable.run([0] * 3)


def test_state_that_a_call_reads_and_writes(cuda_backend):
    w = Variable(np.array([3.0, 1.0, 2.0], np.float32), "w")

    def step(x):
        w.assign(ops.sort(w) + x)
        return {"new": w + x * 0}

    program = trace(step, {"x": ((3,), "float32")})
    executable = cuda_backend.executable(program, {"x": np.array([5, 0, 0], np.float32)})
    executable.run([0, 0])
    np.testing.assert_array_equal(executable.outputs["new"], [7, 3, 6])


def test_explain_names_them():
    class Ordered(dp.layers.Layer):
        def call(self, inputs):
            return ops.sort(inputs)

    model = dp.Sequential([dp.Input((4,)), dp.layers.Dense(3), Ordered(), dp.layers.Dense(1)])
    model.compile("sgd", "mse", device="cuda")
    assert "on the host, between two copies: sort_last, argsort_last\n" in explain(model) + "\n"
