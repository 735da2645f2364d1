"""Which ops become which kernels."""

from itertools import chain

import numpy as np
import pytest

from dptrain import ops
from dptrain.backend.cpu.compiled import CompiledExecutable
from dptrain.ops import random
from dptrain.ops.indexing import take_rows
from dptrain.program.codegen.cpp import operand_dtypes
from dptrain.program.codegen.fuse import fuse
from dptrain.program.codegen.kernels import Call, Loop, ProductKernel
from dptrain.program.dims import Dim
from dptrain.program.execute import HostMemory, evaluate
from dptrain.program.passes import without_ranks
from dptrain.program.program import trace
from dptrain.program.sharding.placement import place
from dptrain.program.tensor import Variable

B = Dim.rows(8)


def described(kernel):
    if isinstance(kernel, Loop):
        return [one.tensor.op.name for one in kernel.members]
    return type(kernel).__name__


def kernels(step, inputs, **options):
    fused = fuse(trace(step, inputs), **options)
    return [described(one) for one in fused.kernels], fused


def network(adam=False):
    w1, w2 = (Variable(np.zeros(shape, np.float32), name) for name, shape in (("w1", (6, 5)), ("w2", (5, 3))))
    slots = [Variable(np.zeros(one.shape, np.float32), "slot", trainable=False) for one in (w1, w2)]

    def step(images, labels, rows):
        x = ops.cast(take_rows(images, rows), "float32") / 255
        logits = ops.relu(x @ w1) @ w2
        y = take_rows(labels, rows)
        loss = ops.mean(-ops.sum(ops.one_hot(y, 3) * ops.log_softmax(logits), -1))
        loss.backward()
        for one, slot in zip((w1, w2), slots, strict=True):
            slot.assign(slot * 0.9 + one.value.grad)
            one.assign(one - 0.1 * slot)
        return {"loss": loss, "right": ops.sum(ops.cast(ops.equal(ops.argmax(logits, -1), y), "float64"))}

    return step, {"images": ((20, 6), "uint8"), "labels": ((20,), "int64"), "rows": ((B,), "int64")}


def test_a_step():
    """Gathered rows are cast on the way, the loss with its gradient is one loop, and a relu's mask is no array."""
    found, _ = kernels(*network())
    assert [one if isinstance(one, str) else one[0] for one in found if one != "ProductKernel"][1:3] == [
        "take_rows",
        "relu",
    ]
    (loss,) = [one for one in found if "argmax_along" in one]
    assert {"take_rows", "one_hot_last", "reduce_max", "exp", "log", "reduce_sum", "equal"} <= set(loss)
    (mask,) = [one for one in found if "greater" in one]
    assert mask == ["greater", "where"]
    assert found.count("ProductKernel") == 5
    assert not any(one == "Call" for one in found)
    # Weights are updated by a loop each, beside their slot.
    assert [one for one in found if "subtract" in one and len(one) == 4] == [
        ["multiply", "add", "multiply", "subtract"]
    ] * 2


def test_without_joining_every_op_is_a_kernel():
    found, _ = kernels(*network(), join=False)
    assert all(one in ("ProductKernel", "Call") or len(one) == 1 for one in found)
    assert len(found) > 30


def test_messages_are_made_where_they_are_sent():
    step, inputs = network()
    program = place(trace(step, inputs))
    fused = fuse(program)
    assert len(fused.stages) == 2
    assert [part.op.name for message in fused.stages[0].messages for part, _ in message].count("batch_matmul") == 2
    assert "copy" not in [one.op.name for kernel in fused.kernels for one in kernel.tensors]
    alone = fuse(without_ranks(program))
    assert len(alone.stages) == 1


def test_equal_ops_are_computed_once():
    found, _ = kernels(lambda x: {"a": ops.exp(x) + 1, "b": ops.exp(x) * 2}, {"x": ((B, 3), "float32")})
    assert found == [["exp", "add", "multiply"]]


def test_what_is_the_same_everywhere_is_a_single_number():
    w = Variable(np.float32(3), "w")
    found, fused = kernels(lambda x: {"y": x * ops.broadcast_to(ops.exp(w), (B, 3))}, {"x": ((B, 3), "float32")})
    assert found == [["exp"], ["multiply"]]
    assert [one.space for one in fused.kernels] == [(), (B, 3)]


def test_views_are_no_kernels():
    w = Variable(np.zeros((4, 3), np.float32), "w")

    def step(x):
        transposed = ops.transpose(x) + 1
        return {
            "product": ops.matmul(ops.transpose(x), x @ ops.transpose(w)),
            "slice": x[:, 1:] * 2,
            "flat": ops.reshape(x, (-1,)) * 2,
            "transposed": ops.reshape(transposed, (-1,)),
        }

    found, _ = kernels(step, {"x": ((B, 3), "float32")})
    assert found.count("ProductKernel") == 2
    assert sorted(chain(*(one for one in found if one != "ProductKernel"))) == ["add", "multiply", "multiply"]
    # A reshape across a transpose has to be made.
    found, _ = kernels(lambda x: {"y": ops.reshape(ops.transpose(x), (-1,)) * 2}, {"x": ((B, 3), "float32")})
    assert found == [["copy"], ["multiply"]]


def test_what_has_no_code_is_called():
    seed = random.SeedGenerator(1)
    found, fused = kernels(lambda x: {"y": random.dropout(x, 0.5, seed=seed)}, {"x": ((B, 3), "float32")})
    assert "Call" in found
    assert sum(isinstance(one, Call) for one in fused.kernels) == 1


def test_outputs_of_the_state_before_the_step_are_kept():
    w = Variable(np.zeros(3), "w")

    def step(x):
        old = w.value
        w.assign(w + ops.sum(x))
        return {"old": old}

    found, fused = kernels(step, {"x": ((B, 3), "float64")})
    assert sorted(chain(*found)) == ["add", "copy", "reduce_sum"]
    assert fused.outputs["old"].root is not fused.program.state[w]


def test_what_only_outputs_need_is_told_apart():
    w = Variable(np.zeros(3, np.float32), "w")

    def step(x):
        w.assign(w + ops.sum(x, 0))
        return {"mean": ops.mean(ops.exp(x))}

    _, fused = kernels(step, {"x": ((B, 3), "float32")})
    names = {one.op.name: one in fused.every_step for kernel in fused.kernels for one in kernel.tensors}
    assert names["add"]
    assert not names["exp"]
    assert not names["divide"]


@pytest.mark.parametrize(
    ("function", "dtypes", "expected"),
    [
        (ops.add, ("float32", "float64"), ["float64", "float64"]),
        (ops.divide, ("int32", "int32"), ["float64", "float64"]),
        (ops.less, ("uint8", "int16"), ["int16", "int16"]),
        (ops.where, ("bool", "float32", "int8"), ["bool", "float32", "float32"]),
    ],
)
def test_operand_types(function, dtypes, expected):
    inputs = {f"x{n}": ((B,), dtype) for n, dtype in enumerate(dtypes)}
    program = trace(lambda *xs: {"y": function(*xs)}, inputs)
    assert [one.name for one in operand_dtypes(program.outputs["y"])] == expected


def test_products_of_batches():
    _, fused = kernels(lambda x, w: {"y": x @ w}, {"x": ((B, 4, 5), "float32"), "w": ((5, 2), "float32")})
    assert [type(one) for one in fused.kernels] == [ProductKernel]


def test_products_that_are_only_added_up_are_one_kernel():
    """Nothing of the size of all products lies in memory; lines that follow each other are one product's."""
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(4, 5, 3)), rng.normal(size=(4, 5, 2))

    def step(a, b):
        along = ops.sum(ops.transpose(a, (0, 2, 1)) @ b, 0)
        apart = ops.sum(a[:, 1:4] @ ops.transpose(a[:, ::2], (0, 2, 1)), 0)
        return {"along": along, "apart": apart}

    for rows in (4, 0):
        shapes = {"a": ((Dim.rows(rows), 5, 3), np.float64), "b": ((Dim.rows(rows), 5, 2), np.float64)}
        program = place(trace(step, shapes))
        values = {"a": a[:rows], "b": b[:rows]}
        compiled = CompiledExecutable(program, HostMemory(), values)
        products = [one for one in compiled.fused.kernels if isinstance(one, ProductKernel)]
        assert [one.tensor.ndim for one in products] == [2, 2]
        compiled.run()
        for name, value in evaluate(program, values)[0].items():
            np.testing.assert_allclose(compiled.outputs[name], value, rtol=1e-12, atol=1e-13)
