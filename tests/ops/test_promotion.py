"""Operands of several types: each backend promotes them as NumPy does, and rounds once, to the type that comes out."""

import numpy as np

from dptrain import ops
from dptrain.backend.cpu.compiled import CompiledExecutable
from dptrain.program.dims import Dim
from dptrain.program.execute import HostMemory, evaluate
from dptrain.program.program import trace
from dptrain.program.sharding.placement import place

INPUTS = {
    "whole": np.array([2**24 + 1, -(2**53) - 1, 3, 0], np.int64),
    "small": np.array([16777217, -7, 5, 2**31 - 1], np.int32),
    "tiny": np.array([3, 200, 16, 255], np.uint8),
    "true": np.array([True, False, True, False]),
    "x": np.array([0.1, -3.0, 1e9, -0.5], np.float32),
    "wide": np.array([0.1, 1e300, -2.5, 3.0], np.float64),
}
CASES = {
    "an integer and a float": lambda s: s["whole"] + s["x"],
    "beyond float32's digits": lambda s: s["small"] * s["x"],
    "a difference that float32 loses": lambda s: (s["whole"] - ops.cast(s["small"], "float32")) - s["x"],
    "two integers divided": lambda s: s["small"] / s["tiny"],
    "a function of integers": lambda s: ops.log(s["tiny"]) + ops.sqrt(ops.absolute(s["small"])),
    "integers of two types compared": lambda s: s["tiny"] < s["small"],
    "an integer and a float compared": lambda s: s["small"] == s["x"],
    "bytes to a power": lambda s: s["tiny"] ** 2,
    "truth values added": lambda s: s["true"] + s["x"],
    "truth values times bytes": lambda s: s["true"] * s["tiny"],
    "float32 and float64": lambda s: s["x"] * s["wide"],
    "chosen": lambda s: ops.where(s["tiny"], s["small"], s["x"]),
    "cut off and back": lambda s: ops.cast(ops.cast(s["x"] * 1, "int32"), "float32") * ops.cast(s["true"], "float32"),
}
KINDS = {name: ((Dim.rows(4),), array.dtype.name) for name, array in INPUTS.items()}


def step(*inputs):
    tensors = dict(zip(INPUTS, inputs, strict=True))
    return {name: case(tensors) for name, case in CASES.items()}


def traced():
    return place(trace(step, KINDS))


def check(outputs):
    for name, expected in evaluate(traced(), INPUTS)[0].items():
        np.testing.assert_allclose(outputs[name], expected, rtol=3e-7, atol=0, err_msg=name)
        assert outputs[name].dtype == expected.dtype, name
        if not any(word in name for word in ("function", "power")):  # of which libraries differ in the last digit
            np.testing.assert_array_equal(np.signbit(outputs[name]), np.signbit(expected), err_msg=name)
            np.testing.assert_array_equal(outputs[name], expected, err_msg=name)


def test_compiled():
    executable = CompiledExecutable(traced(), HostMemory(), INPUTS)
    executable.run([0])
    check(executable.outputs)


def test_on_cuda(cuda_backend):
    executable = cuda_backend.executable(traced(), INPUTS)
    executable.run([0])
    check({name: np.asarray(output) for name, output in executable.outputs.items()})
