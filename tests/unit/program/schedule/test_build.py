"""Statements compute what NumPy's functions do, element by element, from whatever is stored."""

import itertools

import numpy as np
import pytest

from dptrain.program.codegen.index_expr import offset_by, unravel
from dptrain.program.lowering import (
    Element,
    Insert,
    Join,
    ViewMap,
    lowering_of,
)
from dptrain.program.schedule.build import Builder
from dptrain.program.shapes import local
from tests.programs.case import Case
from tests.programs.draw import program as drawn
from tests.programs.table import TABLE
from tests.sample import sample
from tests.unit.program.schedule.interpreted import Interpreter
from tests.unit.program.schedule.reference import arrays_of, is_interpreted, is_known


def check(case, seed, most=3):
    """Compare some elements of each tensor, at most so many, computed from some others."""
    program, generator = case.trace(), np.random.default_rng(seed)
    computed = [tensor for tensor in program.tensors if tensor.op is not None]
    arrays = arrays_of(program, case)
    pointwise = Element | ViewMap | Insert | Join
    inner = {tensor for tensor in computed if is_interpreted(tensor) and isinstance(lowering_of(tensor), pointwise)}
    compared = 0
    for tensor in filter(is_interpreted, computed):
        count = int(np.prod(local(tensor.shape, program.rows)))
        again = {read for read in tensor.inputs if read in inner and generator.random() < 0.5}  # not stored
        for flat in generator.choice(count, min(count, most), replace=False):
            builder = Builder(
                lambda t, tensor=tensor, again=again: t is not tensor and t not in again and not is_known(t)
            )
            value = builder.computed(tensor, unravel(offset_by((int(flat), 0)), tensor.shape))
            interpreter = Interpreter(arrays, program.rows)
            with np.errstate(all="ignore"):
                interpreter.run(builder.statements)
            expected, result = arrays[tensor].reshape(-1)[flat], interpreter.of(value)
            wide = np.float64 if tensor.dtype.kind in "fV" else tensor.dtype
            tolerance = 1e-2 if tensor.dtype.itemsize == 2 else 2e-4
            np.testing.assert_allclose(
                np.asarray(result).astype(wide), expected.astype(wide), rtol=tolerance, atol=1e-4, err_msg=str(tensor)
            )
            compared += 1
    return compared


@pytest.mark.parametrize("seed", sample(range(40), 12))
def test_elements_of_random_programs(seed):
    assert check(drawn(seed), seed) > 0


@pytest.mark.sample(1)
@pytest.mark.parametrize("length", [1, 2, 5, 6])
def test_every_element_of_every_slice_and_of_its_gradient(length):
    """From any place to any other by any step: ends that are those of the axis, or not."""
    keys = dict.fromkeys(range(length)[start : stop + 1 : step] for start, stop, step in places(length))
    lines = []
    for number, key in enumerate(keys):
        stop = key.stop if key.stop >= 0 else None
        lines += [
            f"t{2 * number} = x[:, {key.start}:{stop}:{key.step}]",
            f"t{2 * number + 1} = gradients(ops.sum(ops.square(t{2 * number})), [x])[0]",
        ]
    outputs = tuple(f"t{number}" for number in range(len(lines)))
    case = Case({"n": 2, "a": length}, {"x": "input n a float32 normal"}, tuple(lines), outputs)
    assert check(case, 0, 2 * length) >= 2 * length * len(keys)


def places(length):
    forwards = itertools.product(range(length), range(length), (1, 2, 3))
    return [place for place in forwards if place[0] <= place[1]]


@pytest.mark.parametrize("name", ["products_of_every_kind, float64", "images, float64, n=5", "cumulative, float32"])
def test_elements_of_programs(name):
    assert check(TABLE[name], 0) > 0
