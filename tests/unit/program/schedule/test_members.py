"""Nests compute what NumPy computes, each element, reduction and result once, by what their statements say alone."""

import numpy as np
import pytest

from dptrain.backend.cuda.policy import POLICY
from dptrain.errors import ConfigError
from dptrain.program.schedule.fuse import fuse
from dptrain.program.schedule.statements import Compute, Draw, For, Join, Whole, walk
from dptrain.program.shapes import local, size
from tests.programs.case import Case
from tests.programs.draw import program as drawn
from tests.programs.table import TABLE
from tests.sample import sample
from tests.unit.program.schedule.interpreted import NestInterpreter
from tests.unit.program.schedule.reference import arrays_of

MOST = 6000  # elements of a program's nests


def executed(case):
    """Execute the nests of a case's program; return how many, by frame, that compute elements."""
    if any("special" in leaf for leaf in case.leaves.values()):  # sums of numbers that are none have any order
        return {}
    program = case.trace()
    try:
        schedule = fuse(program, POLICY)
    except ConfigError:  # a GPU has it lowered before
        return {}
    nests = sorted(schedule.nests, key=lambda nest: (nest.stage, nest.level))
    if sum(size(local((*nest.lead, *nest.inner), case.rows)) for nest in nests if nest.body) > MOST:
        return {}
    expected = arrays_of(program, case)
    expected |= {copy: expected[new] for new, copy in schedule.copies.items()}
    leaves = {tensor: array for tensor, array in expected.items() if tensor.op is None}
    frames = {}
    for nest in nests:
        if any(not is_executed(statement) for statement in walk([*nest.body, *nest.finals])):
            nest.results, nest.body, nest.finals = tuple(nest.writes), (), ()
            del nest.writes
        frames[nest.frame] = frames.get(nest.frame, 0) + bool(nest.body)
    with np.errstate(all="ignore"):
        stored = NestInterpreter(leaves, expected, case.rows).execute(nests)
    assert stored.keys() >= {tensor for tensor in program.results if tensor.op is not None}
    for tensor, array in stored.items():
        wide = np.float64 if tensor.dtype.kind in "fV" else tensor.dtype
        scale = np.abs(expected[tensor].astype(wide)).max(initial=1) if wide is np.float64 else 1
        tolerance = (1e-2 if tensor.dtype.itemsize == 2 else 2e-4) * (scale if np.isfinite(scale) else 1)
        np.testing.assert_allclose(
            array.astype(wide), expected[tensor].astype(wide), rtol=1e-2, atol=tolerance, err_msg=str(tensor)
        )
    return frames


def is_executed(statement):
    rounded = isinstance(statement, Compute) and statement.tensor.dtype.kind == "V"
    return not isinstance(statement, Draw | Whole) and not rounded


@pytest.mark.parametrize("seed", sample(range(80), 8))
def test_nests_of_random_programs(seed):
    executed(drawn(seed))


@pytest.mark.parametrize(
    ("name", "frame"),
    [
        *(("network, float64", "rows"), ("training_on_gathered_rows, float32", "product")),
        *(("sums_over_rows, n=17", "columns"), ("group_normalization, n=1, s=4", "rows")),
    ],
)
def test_nests_of_each_frame(name, frame):
    frames = executed(TABLE[name])
    assert frames.get(frame), frames


def test_nests_of_totals():
    """Of long sums around few columns."""
    leaves, lines = {"x": "input n a b float32 normal"}, ("y = ops.sum(x * x, (0, 2))", "z = ops.sqrt(y) * 2")
    assert executed(Case({"n": 40, "a": 2, "b": 60}, leaves, lines, ("y", "z"))) == {"totals": 1}


def test_reductions_that_do_not_need_each_other_share_a_pass_over_a_row():
    leaves = {"x": "input n a float32 normal"}
    lines = ("m = ops.max(x, 1)", "s = ops.sum(x * x, 1)", "v = ops.sum(ops.exp(x - m[:, None]), 1)")
    case = Case({"n": 5, "a": 7}, leaves, lines, ("m", "s", "v"))
    assert executed(case) == {"rows": 1}
    (nest,) = fuse(case.trace(), POLICY).nests
    passes = [statement for statement in nest.loop.body if isinstance(statement, For)]
    joined = [sum(isinstance(statement, Join) for statement in walk(each.body)) for each in passes]
    assert joined == [2, 1]


def test_a_nest_of_a_convolution_and_the_sums_of_its_results():
    leaves = {"x": "input n a a b float32 normal", "k": "variable b b b d float32 normal"}
    lines = ("y = ops.conv(x, k)", "s = ops.sum(y, (0, 1, 2)) * 0.5")
    assert executed(Case({"n": 3, "a": 4, "b": 2, "d": 5}, leaves, lines, ("y", "s"))) == {"product": 1}


def test_random_programs_have_every_frame():
    frames = {}
    for seed in range(40):
        for frame, count in executed(drawn(seed)).items():
            frames[frame] = frames.get(frame, 0) + count
    assert frames.keys() >= {"map", "rows", "columns", "product"}, frames
    assert min(frames[frame] for frame in ("map", "rows", "columns", "product")) > 2, frames
