"""Which loops are one launch, and what their text depends on."""

import functools
import itertools
import re

import numpy as np
import pytest

from dptrain import ops
from dptrain.backend.cuda.compose import Composition
from dptrain.backend.cuda.cost.loads import loads
from dptrain.backend.cuda.loops import LoopCall
from dptrain.layers import GRU, LSTM, SimpleRNN
from dptrain.program.dims import Dim
from dptrain.program.program import trace
from dptrain.program.tensor import Variable
from tests.ops.test_recurrent_on_cuda import LAYERS, of_cell, program_of


def loop_of(cell, rows=4, steps=3, dtype="float32", whole=False):
    """Return a loop over x with carry h, by a cell of h, xt and a matrix; `whole`: the rows are no batch's."""
    batch = rows if whole else Dim.rows(rows)
    specs = {
        "x": ((steps, batch, 6), dtype),
        "h": ((batch, 6), dtype),
        "u": ((6, 6), dtype),
    }

    def step(x, h, u):
        h, ys = ops.scan(lambda h, xt: cell(h, xt, u), h, x)
        return {"h": h, "ys": ys}

    return trace(step, specs)


def usual(h, xt, u):
    return ops.tanh(h @ u + xt), h


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("options", [{}, {"go_backwards": True, "return_sequences": True}])
@pytest.mark.parametrize("masked", [False, True])
def test_layers_and_their_gradients(name, options, masked):
    program, _ = program_of(LAYERS[name](4, **options), 6, 3, 2, masked)
    assert Composition(program).in_one_launch == [3, 3]


def test_cells_that_drop_inputs_and_states():
    program, _ = program_of(GRU(4, dropout=0.5, recurrent_dropout=0.5), 6, 3, 2)
    assert Composition(program).in_one_launch == [3, 3]


@pytest.mark.parametrize(
    ("layer", "units"),
    [
        (LSTM, (181, 182)),
        (GRU, (209, 210)),
        (SimpleRNN, (362, 363)),
        (functools.partial(GRU, reset_after=False), (209, 210)),
        (functools.partial(LSTM, dtype="mixed_bfloat16"), (256, 257)),  # which steps read in half precision
        (functools.partial(GRU, dtype="mixed_float16"), (295, 296)),
    ],
)
def test_large_weights_are_left_to_launches(layer, units):
    for number, in_one in zip(units, ([2, 2], []), strict=True):
        assert Composition(program_of(layer(number), 2, 2, 1)[0]).in_one_launch == in_one


def test_rows_of_a_block():
    program = loop_of(usual, rows=512)
    for rows, of_block in ((0, 2), (1, 2), (128, 2), (129, 4), (256, 4), (257, 8), (512, 8), (513, None)):
        composition = Composition(program, rows)
        assert composition.in_one_launch == ([3] if of_block else [])
        if of_block:
            assert f"rows_product<{of_block}>" in composition.source()
            (load,) = (load for load in loads(composition) if "loop" in load.name)
            assert (load.blocks, load.threads, load.shared) == (-(-rows // of_block), 256, 4096 * of_block)


def mixing_rows(h, xt, u):
    return ops.tanh(h @ u + xt) - ops.mean(h, 0, keepdims=True), h


def shifting_rows(h, xt, u):
    return ops.tanh(ops.roll(h, 1, 0) @ u + xt), h


def of_changing_matrix(h, xt, u):
    return ops.tanh(h @ (ops.transpose(xt) @ h)), h


def without_product(h, xt, u):
    return ops.tanh(h * u[0] + xt), h


def nested(h, xt, u):
    return ops.fori_loop(0, 2, lambda n, h: ops.tanh(h @ u + xt), h), h


def normalized(h, xt, u):
    h = ops.tanh(h @ u + xt)
    return h / ops.sum(h * h, -1, keepdims=True), h


def of_reversed_columns(h, xt, u):
    return ops.tanh((h @ u)[:, ::-1] + xt), h[:, :2]


def of_other_rows_of_a_stack(h, xt, u):
    """Which no step changes, so it may be read anywhere."""
    return ops.tanh(h @ u + xt[::-1]), h


def of_many_matrices(h, xt, u):
    matrices = ops.reshape(h, (-1, 2, 3)) @ u[:3, :3]
    return ops.tanh(ops.reshape(matrices, h.shape) + xt), h


@pytest.mark.parametrize(
    ("cell", "in_one"),
    [
        (usual, True),
        (of_reversed_columns, True),
        (of_other_rows_of_a_stack, True),
        (mixing_rows, False),
        (shifting_rows, False),
        (of_changing_matrix, False),
        (without_product, False),
        (nested, False),
        (normalized, False),
        (of_many_matrices, False),
    ],
)
def test_steps_that_need_other_rows_are_launched(cell, in_one):
    assert Composition(loop_of(cell, whole=True)).in_one_launch == ([3] if in_one else [])


def test_a_state_is_no_matrix_that_all_steps_share():
    """Though it has the shape of one, where there are as many rows as columns."""
    assert not Composition(loop_of(lambda h, xt, u: (ops.tanh(h @ h + xt @ u), h), rows=6, whole=True)).in_one_launch


@pytest.mark.parametrize(
    ("dtype", "added", "in_one"),
    [
        ("float32", lambda total, terms: (total + ops.sum(terms, 0), terms), True),
        ("float32", lambda total, terms: (total + ops.sum(terms, 0), terms + total), False),
        ("float32", lambda total, terms: (total + ops.sum(terms, 0), ops.sum(terms, 0)), False),
        ("float32", lambda total, terms: (total + ops.sum(terms, 0), ops.sum(ops.sin(terms), 0)), False),
        ("float32", lambda total, terms: (total - ops.sum(terms, 0), terms), False),
        ("float32", lambda total, terms: (total + ops.max(terms, 0), terms), False),
        ("float64", lambda total, terms: (total + ops.sum(terms, 0), terms), False),
    ],
    ids=["usual", "total read", "sum read", "another sum", "subtracted", "greatest", "float64"],
)
def test_sums_over_rows_are_a_blocks_own_while_nobody_reads_them(dtype, added, in_one):
    def step(x, h, u):
        def cell(carries, xt):
            h, total = carries
            total, value = added(total, ops.cast(h * xt, dtype))
            return (ops.tanh(h @ u + xt), total), value

        (h, total), values = ops.scan(cell, (h, ops.zeros((6,), dtype)), x)
        return {"h": h, "total": total, "values": values}

    specs = {"x": ((3, Dim.rows(4), 6), "float32"), "h": ((Dim.rows(4), 6), "float32"), "u": ((6, 6), "float32")}
    assert Composition(trace(step, specs)).in_one_launch == ([3] if in_one else [])


def test_a_transposed_input_is_no_state_by_rows():
    """Though it has the shape of one, where there are as many rows as columns."""
    assert not Composition(
        loop_of(lambda h, xt, u: (ops.tanh(ops.transpose(xt) @ u + h), h), rows=6, whole=True)
    ).in_one_launch


@pytest.mark.parametrize("steps", [0, 1])
def test_a_single_step_is_launched(steps):
    assert not Composition(loop_of(usual, steps=steps)).in_one_launch


def test_float64_is_launched():
    assert not Composition(loop_of(usual, dtype="float64")).in_one_launch


def test_a_librarys_products_are_launched():
    composition = Composition(loop_of(usual), provider=lambda problem: "cublaslt")
    assert not composition.in_one_launch


def test_loops_within_loops_are_launched():
    def outer(h, xt, u):
        return ops.scan(lambda h, n: usual(h, xt * n, u), h, ops.cast(np.arange(3), "float32"))[0], h

    assert not Composition(loop_of(outer)).in_one_launch


def test_a_counter_is_launched():
    """Which has no rows; nothing but the product does."""
    table = Variable(np.eye(6, dtype=np.float32), "table")

    def step(x):
        n, ys = ops.scan(lambda n, xt: (n + 1, xt @ table * ops.cast(n, "float32")), ops.cast(0, "int32"), x)
        return {"n": n, "ys": ys}

    assert not Composition(trace(step, {"x": ((3, Dim.rows(4), 6), "float32")})).in_one_launch


def test_the_text_depends_on_neither_rows_nor_steps():
    texts = {
        Composition(
            trace(
                of_cell(5, 9),
                {
                    "x": ((steps, Dim.rows(rows), 5), "float32"),
                    "u": ((5, 9), "float32"),
                    "h": ((Dim.rows(rows), 5), "float32"),
                },
            )
        ).source()
        for steps in (2, 30)
        for rows in (1, 17)
    }
    assert len(texts) == 1


def test_memory_of_what_blocks_write_is_apart():
    """Blocks are at different steps at a time: nothing that they write may lie where others read."""
    composition = Composition(program_of(GRU(8, return_sequences=True), 6, 3, 2)[0])
    functions = (function for stage in composition.stages for kernel in stage for function in kernel.functions)
    loops = [function for function in functions if function.name.startswith("loop")]
    assert len(loops) == 2
    for function in loops:
        carries = set(LoopCall(next(iter(function.nest.members)).node, 0).first_carries)
        parts = sorted(
            (composition.plan.offsets[tensor], (1 + (tensor in carries)) * 4 * composition.sizes.count(tensor.shape))
            for tensor in function.pointers
            if tensor in composition.plan.offsets
        )
        assert len(parts) > 5
        for (start, size), (following, _) in itertools.pairwise(parts):
            assert start + size <= following


def test_compilers_are_told_that_a_blocks_threads_write_what_others_read():
    source = Composition(program_of(GRU(8, return_sequences=True), 6, 3, 2)[0]).source()
    loops = re.findall(r" loop_\w+\((.*?)\) \{", source)
    assert len(loops) == 2
    written = [text for parameters in loops for text in parameters.split(", ") if re.match(r"float \*", text)]
    assert len(written) >= 10
    assert "__restrict__" not in " ".join(written)
