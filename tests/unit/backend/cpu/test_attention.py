"""Attention without the matrix of scores, beside NumPy: values, gradients, bits, memory."""

import itertools

import numpy as np
import pytest

from dptrain import ops
from dptrain.backend.cpu.compiled import CompiledExecutable
from dptrain.program.dims import Dim
from dptrain.program.execute import HostMemory, evaluate
from dptrain.program.program import trace
from dptrain.program.sharding.placement import place
from dptrain.program.tensor import Variable
from tests.sample import sample

# Batch, targets, sources, heads, lengths of queries and of values: blocks of one target, several, with a rest.
SHAPES = [(2, 5, 7, 3, 4, 2), (1, 130, 64, 2, 32, 17), (3, 1, 9, 1, 1, 1), (2, 64, 130, 1, 16, 16)]


def program_of(shape, causal, masked, dtype, rows=slice(None)):
    """Return a step with attention and all its gradients, and its inputs, or only some rows of them."""
    B, T, S, N, H, V = shape
    rng = np.random.default_rng(5)
    arrays = [rng.normal(size=size) for size in ((T, N, H), (S, N, H), (S, N, V))]
    heads = [Variable(array.astype(dtype), name) for array, name in zip(arrays, "qkv", strict=True)]
    mask = rng.random((B, 1, T, S)) < 0.6
    mask[0, 0, T // 2] = False
    values = {"x": rng.normal(size=B).astype(dtype), "mask": mask, "w": rng.normal(size=(B, T, N, V)).astype(dtype)}

    def step(x, mask, w):
        for variable in heads:
            variable._gradient = None
        q, k, v = (variable * ops.reshape(x, (-1, 1, 1, 1)) for variable in heads)
        y = ops.dot_product_attention(q, k, v, mask=mask if masked else None, is_causal=causal)
        ops.sum(y * w).backward()
        return {"y": y, **{variable.name: variable.value.grad for variable in heads}}

    values = {name: array[rows] for name, array in values.items()}
    inputs = {name: ((Dim.rows(len(array)), *array.shape[1:]), array.dtype) for name, array in values.items()}
    return trace(step, inputs), values


def compiled(program, values, threads=1):
    executable = CompiledExecutable(place(program), HostMemory(), values, threads=threads)
    assert "dp_Heads" in executable.code.source
    return executable


@pytest.mark.parametrize(
    ("shape", "causal", "masked"), sample(itertools.product(SHAPES, [False, True], [False, True]), 10)
)
def test_it_computes_what_numpy_computes(shape, causal, masked):
    for dtype, close in (("float64", 1e-12), ("float32", 1e-5)):
        program, values = program_of(shape, causal, masked, dtype)
        expected, _ = evaluate(program, values)
        executable = compiled(program, values)
        executable.run()
        for name, value in expected.items():
            error = np.abs(np.asarray(executable.outputs[name], np.float64) - value).max()
            assert error <= close * max(1, np.abs(value).max()), (name, dtype)


def test_a_sequence_has_the_bits_that_it_has_alone():
    program, values = program_of((3, 70, 70, 2, 8, 8), True, True, "float32")
    together = compiled(program, values)
    together.run()
    for row in range(3):
        alone = compiled(*program_of((3, 70, 70, 2, 8, 8), True, True, "float32", slice(row, row + 1)))
        alone.run()
        assert alone.outputs["y"].tobytes() == together.outputs["y"][row : row + 1].tobytes()


def test_threads_have_one_threads_bits():
    program, values = program_of((1, 230, 230, 2, 8, 8), True, False, "float32")
    outputs = []
    for threads in (1, 2, 3):
        executable = compiled(program, values, threads)
        executable.run()
        outputs.append({name: value.tobytes() for name, value in executable.outputs.items()})
    assert outputs[0] == outputs[1] == outputs[2]


def test_only_the_gradients_that_are_read_are_computed():
    q, k = np.random.default_rng(1).normal(size=(2, 2, 5, 1, 3))
    v = Variable(np.ones((2, 5, 1, 3)), "v")

    def step(x):
        v._gradient = None
        ops.sum(ops.dot_product_attention(q, k, v * x) ** 2).backward()
        return {"dv": v.value.grad}

    program = trace(step, {"x": ((), "float64")})
    executable = compiled(program, {"x": np.array(1.5)})
    executable.run()
    np.testing.assert_allclose(executable.outputs["dv"], evaluate(program, {"x": np.array(1.5)})[0]["dv"], rtol=1e-12)
    assert "nullptr, nullptr, " in executable.code.source


def test_memory_grows_with_the_length():
    sizes = []
    for length in (512, 1024):
        program, values = program_of((1, length, length, 2, 8, 8), True, False, "float32")
        sizes.append(compiled(program, values).nbytes)
    assert sizes[1] < 2.1 * sizes[0]
    assert sizes[1] < 2 * 1024 * 1024, "one matrix of scores has 8 MiB"


def test_no_sources_and_no_targets():
    for targets, sources in ((3, 0), (0, 3)):
        q, k = (np.ones((2, length, 1, 2), np.float32) for length in (targets, sources))
        attended = ops.dot_product_attention(q, k, k)
        assert attended.shape == (2, targets, 1, 2)
        assert not np.abs(attended.numpy()).any()
