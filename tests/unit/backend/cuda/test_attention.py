"""Attention as kernels of a GPU: the program that they make, its memory, its costs."""

import numpy as np
import pytest

from dptrain.backend.cuda import compose
from dptrain.backend.cuda.compose import Composition
from dptrain.backend.cuda.cost.loads import loads
from dptrain.backend.cuda.generate import with_steps
from dptrain.program.execute import evaluate
from dptrain.program.program import trace
from tests.ops.test_attention_on_cuda import inputs_of, step_of
from tests.ops.test_convolutions_on_cuda import HALVES
from tests.unit.backend.cpu.test_attention import program_of


def functions(composition):
    kernels = with_steps(kernel for stage in composition.stages for kernel in stage)
    return [function for kernel in kernels for function in kernel.functions]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_the_pass_changes_no_value(causal, masked):
    program, values = program_of((2, 5, 7, 3, 4, 2), causal, masked, "float32")
    composition = Composition(program)
    names = [function.name.rstrip("_0123456789") for function in functions(composition)]
    assert [name for name in names if name.startswith("attention")] == [
        "attention_attend_with_sums",
        "attention_attend_query_gradients",
        "attention_attend_key_gradients",
    ]
    expected, actual = evaluate(program, values)[0], evaluate(composition.program, values)[0]
    for name, value in expected.items():
        np.testing.assert_allclose(actual[name], value, rtol=1e-6, atol=1e-6)


def test_memory_grows_with_the_length(monkeypatch):
    def sizes():
        return [
            Composition(program_of((1, length, length, 2, 8, 8), True, False, "float32")[0]).plan.size
            for length in (512, 1024)
        ]

    by_kernel = sizes()
    assert by_kernel[1] < 2.1 * by_kernel[0]
    assert by_kernel[1] < 1024 * 1024, "one matrix of scores has 8 MiB"
    monkeypatch.setattr(compose, "attention_precision", lambda operands, of_halves: None)
    composed = sizes()
    assert composed[1] > 3.5 * composed[0] > 16 * by_kernel[0]


def test_costs():
    B, T, S, N, H, V = shape = 3, 70, 50, 2, 8, 5
    composition = Composition(program_of(shape, False, False, "float32")[0])
    of_functions = {load.name: load for load in loads(composition)}
    products = sum(
        sum(load.operations.values()) for name, load in of_functions.items() if name.startswith("run_attention_")
    )
    # The scores three times, and what the output and three gradients are made of.
    assert products == 2 * B * N * T * S * ((H + V) + (2 * H + V) + (2 * H + V + V))
    output = next(load for name, load in of_functions.items() if "with_sums" in name)
    assert (output.blocks, output.threads) == (B * N * 2, 128)
    assert output.shared == 4 * ((64 + 32) * 36 + 64 * 36)
    assert output.read == 4 * B * N * (T * H + S * H + S * V)
    assert output.written == 4 * B * N * T * (V + 2)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("of_halves", ["half", "float32"])
def test_halves_are_read_as_they_are(dtype, of_halves):
    specs, values = inputs_of((5, 7, 2, 3, 4), "B11S")
    program = trace(step_of(False, dtype), specs)
    composition = Composition(program, of_halves=of_halves)
    source = composition.source()
    tile = "HalfTile" if of_halves == "half" else "FloatTile"
    assert source.count(f"    attention<{tile}, ") == 1
    assert source.count(f", {tile}, ") == 2
    expected, actual = evaluate(program, values)[0], evaluate(composition.program, values)[0]
    for name, value in expected.items():
        np.testing.assert_allclose(actual[name], value, rtol=0.01, atol=0.01)
    kernels = [function for function in functions(composition) if function.nest and function.nest.frame == "attention"]
    assert all(sum(tensor.dtype.name == dtype for tensor in function.reads) >= 3 for function in kernels)
