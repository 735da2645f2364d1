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
from dptrain.program.program import trace
from dptrain.program.sharding.placement import place
from dptrain.program.steps import without_ranks
from dptrain.program.tensor import Variable

B = Dim.rows(8)


def described(kernel):
    if isinstance(kernel, Loop):
        return [member.tensor.op.name for member in kernel.members]
    return type(kernel).__name__


def kernels(step, inputs, **options):
    fused = fuse(trace(step, inputs), **options)
    return [described(kernel) for kernel in fused.kernels], fused


def network(adam=False):
    w1, w2 = (Variable(np.zeros(shape, np.float32), name) for name, shape in (("w1", (6, 5)), ("w2", (5, 3))))
    slots = [Variable(np.zeros(weight.shape, np.float32), "slot", trainable=False) for weight in (w1, w2)]

    def step(images, labels, rows):
        x = ops.cast(take_rows(images, rows), "float32") / 255
        logits = ops.relu(x @ w1) @ w2
        y = take_rows(labels, rows)
        loss = ops.mean(-ops.sum(ops.one_hot(y, 3) * ops.log_softmax(logits), -1))
        loss.backward()
        for weight, slot in zip((w1, w2), slots, strict=True):
            slot.assign(slot * 0.9 + weight.value.grad)
            weight.assign(weight - 0.1 * slot)
        return {"loss": loss, "right": ops.sum(ops.cast(ops.equal(ops.argmax(logits, -1), y), "float64"))}

    return step, {"images": ((20, 6), "uint8"), "labels": ((20,), "int64"), "rows": ((B,), "int64")}


def test_a_step():
    """Gathered rows are cast on the way, the loss with its gradient is one loop, and a relu's mask is no array."""
    kinds, _ = kernels(*network())
    assert [kind if isinstance(kind, str) else kind[0] for kind in kinds if kind != "ProductKernel"][1:3] == [
        "take_rows",
        "relu",
    ]
    (loss,) = [kind for kind in kinds if "argmax_along" in kind]
    assert {"take_rows", "one_hot_last", "reduce_max", "exp", "log", "reduce_sum", "equal"} <= set(loss)
    (mask,) = [kind for kind in kinds if "greater" in kind]
    assert mask == ["greater", "where"]
    assert kinds.count("ProductKernel") == 5
    assert not any(kind == "Call" for kind in kinds)
    # Weights are updated by a loop each, beside their slot.
    assert [kind for kind in kinds if "subtract" in kind and len(kind) == 4] == [
        ["multiply", "add", "multiply", "subtract"]
    ] * 2


def test_without_joining_every_op_is_a_kernel():
    kinds, _ = kernels(*network(), join=False)
    assert all(kind in ("ProductKernel", "Call") or len(kind) == 1 for kind in kinds)
    assert len(kinds) > 30


def test_messages_are_made_where_they_are_sent():
    step, inputs = network()
    program = place(trace(step, inputs))
    fused = fuse(program)
    assert len(fused.stages) == 2
    assert [part.op.name for message in fused.stages[0].messages for part, _ in message].count("batch_matmul") == 2
    assert "copy" not in [tensor.op.name for kernel in fused.kernels for tensor in kernel.tensors]
    alone = fuse(without_ranks(program))
    assert len(alone.stages) == 1


def test_equal_ops_are_computed_once():
    kinds, _ = kernels(lambda x: {"a": ops.exp(x) + 1, "b": ops.exp(x) * 2}, {"x": ((B, 3), "float32")})
    assert kinds == [["exp", "add", "multiply"]]


def test_what_is_the_same_everywhere_is_a_single_number():
    w = Variable(np.float32(3), "w")
    kinds, fused = kernels(lambda x: {"y": x * ops.broadcast_to(ops.exp(w), (B, 3))}, {"x": ((B, 3), "float32")})
    assert kinds == [["exp"], ["multiply"]]
    assert [kernel.space for kernel in fused.kernels] == [(), (B, 3)]


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

    kinds, _ = kernels(step, {"x": ((B, 3), "float32")})
    assert kinds.count("ProductKernel") == 2
    assert sorted(chain(*(kind for kind in kinds if kind != "ProductKernel"))) == ["add", "multiply", "multiply"]
    # A reshape across a transpose has to be made.
    kinds, _ = kernels(lambda x: {"y": ops.reshape(ops.transpose(x), (-1,)) * 2}, {"x": ((B, 3), "float32")})
    assert kinds == [["copy"], ["multiply"]]


def test_what_has_no_code_is_called():
    seed = random.SeedGenerator(1)
    kinds, fused = kernels(lambda x: {"y": random.dropout(x, 0.5, seed=seed)}, {"x": ((B, 3), "float32")})
    assert "Call" in kinds
    assert sum(isinstance(kernel, Call) for kernel in fused.kernels) == 1


def test_outputs_of_the_state_before_the_step_are_kept():
    w = Variable(np.zeros(3), "w")

    def step(x):
        old = w.value
        w.assign(w + ops.sum(x))
        return {"old": old}

    kinds, fused = kernels(step, {"x": ((B, 3), "float64")})
    assert sorted(chain(*kinds)) == ["add", "copy", "reduce_sum"]
    assert fused.outputs["old"].root is not fused.program.state[w]


def test_what_only_outputs_need_is_told_apart():
    w = Variable(np.zeros(3, np.float32), "w")

    def step(x):
        w.assign(w + ops.sum(x, 0))
        return {"mean": ops.mean(ops.exp(x))}

    _, fused = kernels(step, {"x": ((B, 3), "float32")})
    names = {tensor.op.name: tensor in fused.every_step for kernel in fused.kernels for tensor in kernel.tensors}
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
    assert [dtype.name for dtype in operand_dtypes(program.outputs["y"])] == expected


def test_products_of_batches():
    _, fused = kernels(lambda x, w: {"y": x @ w}, {"x": ((B, 4, 5), "float32"), "w": ((5, 2), "float32")})
    assert [type(kernel) for kernel in fused.kernels] == [ProductKernel]


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
        products = [kernel for kernel in compiled.fused.kernels if isinstance(kernel, ProductKernel)]
        assert [product.tensor.ndim for product in products] == [2, 2]
        compiled.run()
        for name, value in evaluate(program, values)[0].items():
            np.testing.assert_allclose(compiled.outputs[name], value, rtol=1e-12, atol=1e-13)
