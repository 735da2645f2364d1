"""Every op of the registry on the CUDA backend, with its gradients, against NumPy in float64."""

import numpy as np
import pytest

import dptrain.ops
import dptrain.ops.random
from dptrain.program.dims import Dim
from dptrain.program.execute import evaluate
from dptrain.program.gradient import gradients
from dptrain.program.program import trace
from dptrain.program.tensor import OPS
from tests.sample import sample
from tests.unit.ops.cases import CASES, ROWS

ALL = [(f"{name}_{n}", name, case) for name, cases in CASES.items() for n, case in enumerate(cases)]


def program_of_all(dtype, labels=None):
    """Return one program of all cases, whose floating-point inputs are of a type, and the values of its inputs.

    Args:
        dtype: the type.
        labels: of the cases, where not all are wanted.
    """
    chosen = [entry for entry in ALL if labels is None or entry[0] in {"add_0", *labels}]
    specs, values = {}, {}
    for label, _, case in chosen:
        rng = np.random.default_rng(7)
        for n, (make, axis) in enumerate(zip(case.inputs, case.rows, strict=True)):
            array = make(rng)
            array = array.astype(np.float32).astype(dtype) if array.dtype.kind == "f" else array
            shape = list(array.shape)
            if axis is not None:
                shape[axis] = Dim.rows(shape[axis])
            specs[f"{label}_x{n}"], values[f"{label}_x{n}"] = (tuple(shape), array.dtype), array

    def step(*tensors):
        results, inputs = {}, dict(zip(specs, tensors, strict=True))
        for label, name, case in chosen:
            xs = [inputs[f"{label}_x{n}"] for n in range(len(case.inputs))]
            output = OPS[name](*xs, **case.attributes)
            results[label] = (
                output if output.value is None else output + inputs["add_0_x0"][0, 0]
            )  # else nothing is executed
            numbers = [x for x in xs if x.dtype.kind == "f"]
            if output.dtype.kind == "f" and numbers and OPS[name].gradient_rule is not None:
                weighted = dptrain.ops.sum(output * output)
                results |= {
                    f"{label}_d{n}": gradient
                    for n, gradient in enumerate(gradients(weighted, numbers))
                    if gradient is not None
                }
        results["full_of_rows"] = OPS["full"](shape=(Dim.rows(ROWS), 2), value=2.5, dtype=dtype)
        return results

    return trace(step, specs), values


@pytest.fixture(scope="module", params=sample(["float32", "float64"], 2))
def outputs(request, cuda_backend):
    """What the device makes of the cases that are tested, what NumPy does, and how much they may differ."""
    items = [item for item in request.session.items if item.path == request.path]
    labels = {item.callspec.params["label"] for item in items}
    program, values = program_of_all(request.param, labels)
    executable = cuda_backend.executable(program, values)
    executable.run()
    exact_program, exact = program_of_all("float64", labels)
    expected, _ = evaluate(exact_program, exact)
    return executable.outputs, expected, 3e-5 if request.param == "float32" else 1e-12


# Each op as it is used most, in every run.
@pytest.mark.parametrize(
    "label",
    [
        *(pytest.param(label, marks=[] if label.endswith("_0") else pytest.mark.long) for label, _, _ in ALL),
        "full_of_rows",
    ],
)
def test_op_and_its_gradients(outputs, label):
    actual, expected, tolerance = outputs
    keys = [key for key in expected if key == label or key.startswith(f"{label}_d")]
    assert label in keys
    for key in keys:
        assert actual[key].shape == expected[key].shape
        if expected[key].dtype.kind == "f":
            np.testing.assert_allclose(actual[key], expected[key], rtol=tolerance, atol=tolerance, err_msg=key)
        else:
            np.testing.assert_array_equal(actual[key], expected[key], err_msg=key)
