"""What is generated of loops on the CUDA backend; `test_conformance_on_cuda.py` has what they compute."""

import dataclasses
import functools

import numpy as np
import pytest

from dptrain import ops
from dptrain.backend.cuda import persistent
from dptrain.backend.cuda.compose import Composition
from dptrain.errors import DataError
from dptrain.ops.indexing import take_rows
from dptrain.program.dims import Dim
from dptrain.program.program import ROWS, trace
from dptrain.program.tensor import Variable
from tests.programs.check import wrong_on_cuda
from tests.programs.draw import program, seeds_of
from tests.programs.files import wrong_from_file
from tests.programs.table import LOOPS, TABLE
from tests.sample import sample

BLOCKS = "loop_of_blocks_computed_again, float32"


def loop_of(name, length):
    """Return an entry of the table that makes so many steps."""
    case = TABLE[f"loop_{name}, float32"]
    return dataclasses.replace(case, lengths={**case.lengths, "t": length})


@pytest.mark.parametrize("name", sorted(set(LOOPS) - {"of_any_number_of_steps", "of_no_steps"}))
def test_the_text_of_a_loop_is_as_long_for_many_steps_as_for_few(name):
    short, long = (Composition(loop_of(name, length).trace()) for length in (10, 1000))
    assert short.in_one_launch or any(kernel.loop is not None for stage in short.stages for kernel in stage)
    assert short.source().count("\n") == long.source().count("\n")
    assert len(long.source()) - len(short.source()) < 100


def test_a_step_looks_up_rows_that_are_not_there(cuda_backend):
    """By numbers that it computes of its slice, and by those of the batch's samples."""
    table = Variable(np.arange(8, dtype=np.float32).reshape(4, 2), "table")

    def step(x, rows):
        return {"y": ops.map(lambda n: take_rows(table, rows + n), x)}

    traced = trace(step, {"x": ((3,), "int64"), ROWS: ((Dim.rows(2),), "int64")})
    x, rows = np.arange(3), np.array([1, 0, 1])
    executable = cuda_backend.executable(traced, {"x": x, ROWS: rows})
    for start in (0, 1):
        executable.run([start])
        expected = table.numpy()[rows[start : start + 2] + x[:, None]]
        np.testing.assert_array_equal(executable.outputs["y"], expected)
    executable = cuda_backend.executable(traced, {"x": x, ROWS: rows + 2})
    executable.run([0])
    with pytest.raises(DataError, match="row"):
        _ = executable.outputs["y"]


@pytest.mark.long
def test_what_remat_computes_again_without_a_graph(cuda_backend, monkeypatch):
    monkeypatch.setattr(cuda_backend, "graph", False)
    assert not wrong_on_cuda(dataclasses.replace(TABLE[BLOCKS], shards=()), cuda_backend)


@pytest.mark.parametrize("seed", sample(seeds_of("loops", 8), 8))
def test_random_loops_from_files(cuda_backend, seed):
    case = program(seed, "cuda")
    make = functools.partial(_made_by, cuda_backend)
    assert case.trace().shape_specialised or not wrong_from_file(case, {"CUDA": make}), case


def _made_by(backend, program, values, **place):
    return backend.executable(program, dict(values), **place)


def test_each_step_is_launched_once(cuda_backend, monkeypatch):
    monkeypatch.setattr(persistent, "_WEIGHTS", 0)
    short, long = (
        cuda_backend.executable(case.trace(), case.values()).launches
        for case in (loop_of("of_last", length) for length in (3, 13))
    )
    per_step = (long - short) / 10
    assert 0 < per_step <= 6
    assert per_step == int(per_step)
