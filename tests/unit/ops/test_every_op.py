"""Every op of the registry: gradients, types, traces, and the same on several ranks."""

import numpy as np
import pytest

import dptrain.ops
from dptrain.errors import ConfigError
from dptrain.program.dims import Dim
from dptrain.program.execute import evaluate
from dptrain.program.gradient import gradients
from dptrain.program.lowering import Gather, Scatter
from dptrain.program.program import trace
from dptrain.program.sharding.placement import place
from dptrain.program.tensor import OPS, constant, differentiable
from tests.unit.ops.cases import CASES, ROWS
from tests.unit.program.virtual_ranks import run_on_ranks

ALL = [pytest.param(name, case, id=f"{name}-{n}") for name, cases in CASES.items() for n, case in enumerate(cases)]


def inputs_of(case):
    rng = np.random.default_rng(7)
    return [make(rng) for make in case.inputs]


def test_every_op_has_cases():
    assert set(CASES) == set(OPS)


@pytest.mark.parametrize(("name", "case"), ALL)
def test_shape_and_type_are_those_of_the_value(name, case):
    output = OPS[name](*inputs_of(case), **case.attributes)
    assert output.numpy().shape == output.shape
    assert output.numpy().dtype == output.dtype
    if not OPS[name].is_view:  # all of the output is written, whatever was there
        for filler in (7, 1):
            out = np.full(output.shape, filler, output.dtype)
            OPS[name].compute(*inputs_of(case), **case.attributes, out=out)
            assert out.tobytes() == output.numpy().tobytes()


@pytest.mark.parametrize(("name", "case"), ALL)
def test_gradient_by_central_differences(name, case):
    arrays = inputs_of(case)
    numbers = [n for n, array in enumerate(arrays) if array.dtype.kind == "f"]
    sources = [differentiable(array) for array in arrays]
    output = OPS[name](*sources, **case.attributes)
    if output.dtype.kind != "f" or not numbers:
        with pytest.raises(ConfigError, match="has no gradient"):
            gradients(constant(np.arange(3)), [])
        return
    if OPS[name].gradient_rule is None:
        with pytest.raises(ConfigError, match="has no gradient"):
            gradients(output, [sources[n] for n in numbers])
        return
    weights = np.random.default_rng(3).normal(size=output.shape)
    actual = gradients(output, [sources[n] for n in numbers], weights)

    def value(changed):
        return float(np.sum(OPS[name](*changed, **case.attributes).numpy() * weights))

    for n, gradient in zip(numbers, actual, strict=True):
        expected = np.zeros_like(arrays[n])
        for at in np.ndindex(arrays[n].shape):
            ends = []
            for step in (1e-6, -1e-6):
                changed = [array.copy() for array in arrays]
                changed[n][at] += step
                ends.append(value(changed))
            expected[at] = (ends[0] - ends[1]) / 2e-6
        if name == "round_to":  # steps of half precision; the gradient is that of what is rounded
            np.testing.assert_array_equal(gradient.numpy(), weights.astype(output.dtype))
            continue
        if name == "stop_gradient":
            assert gradient is None
        else:
            result = np.zeros_like(arrays[n]) if gradient is None else gradient.numpy()
            assert result.shape == arrays[n].shape
            np.testing.assert_allclose(result, expected, rtol=1e-6, atol=1e-7)


def step_of(name, case):
    def step(*xs):
        output = OPS[name](*xs, **case.attributes)
        numbers = [x for x in xs if x.dtype.kind == "f"]
        if output.dtype.kind != "f" or not numbers or OPS[name].gradient_rule is None:
            return {"y": output}
        loss = dptrain.ops.sum(output * output)
        slopes = gradients(loss, numbers)
        return {"y": output, "loss": loss} | {f"d{n}": slope for n, slope in enumerate(slopes) if slope is not None}

    return step


def program_of(name, case):
    """Return a step that computes the op and its gradients, and the values of its inputs."""
    arrays = inputs_of(case)
    specs, values = {}, {}
    for n, (array, axis) in enumerate(zip(arrays, case.rows, strict=True)):
        shape = list(array.shape)
        if axis is not None:
            shape[axis] = Dim.rows(shape[axis])
        specs[f"x{n}"], values[f"x{n}"] = (tuple(shape), array.dtype), array

    return trace(step_of(name, case), specs), values


@pytest.mark.parametrize(("name", "case"), ALL)
def test_a_trace_has_the_bits_of_eager_execution(name, case):
    program, values = program_of(name, case)
    (outputs, _) = evaluate(program, values)
    eager = OPS[name](*inputs_of(case), **case.attributes).numpy()
    assert outputs["y"].tobytes() == eager.tobytes()


@pytest.mark.parametrize("shards", [[ROWS], [2, 3], [0, 5], [2, 0, 3], [1, 1, 1, 1, 1]], ids=str)
@pytest.mark.parametrize(("name", "case"), ALL)
def test_ranks_compute_what_one_computes(name, case, shards):
    program, values = program_of(name, case)
    single_rank, _ = evaluate(program, values)
    placed = place(program)
    axes = {f"x{n}": axis for n, axis in enumerate(case.rows)}
    per_rank, _ = run_on_ranks(placed, values, shards, axes)
    starts = np.cumsum([0, *shards])
    for rank, (outputs, _) in enumerate(per_rank):
        for key, expected in single_rank.items():
            axis = placed.placements[placed.outputs[key]].axis("batch") if key in placed.outputs else None
            rank_part = (slice(None),) * (axis or 0) + (slice(starts[rank], starts[rank + 1]),)
            expected = expected if axis is None else expected[rank_part]
            np.testing.assert_allclose(outputs[key], expected, rtol=1e-12, atol=1e-12, err_msg=key)


LOOKING_UP = [
    pytest.param(*case.values, id=case.id) for case in ALL if isinstance(OPS[case.values[0]].lowering, Gather | Scatter)
]


@pytest.mark.parametrize(("name", "case"), LOOKING_UP)
def test_what_looks_up_rows_refuses_indices_outside_at_any_position(name, case):
    values, indices = inputs_of(case)
    batch = getattr(OPS[name].lowering, "batch", 0)
    length = case.attributes.get("length", values.shape[batch])
    for outside in (-1, -length, length):
        for position in np.ndindex(indices.shape):
            changed = indices.copy()
            changed[position] = outside
            with pytest.raises(IndexError):
                OPS[name](values, changed, **case.attributes).numpy()
