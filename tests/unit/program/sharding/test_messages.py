"""Which sums travel together, and in what order."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dptrain import ops
from dptrain.comm.node_sum import TreeSum
from dptrain.comm.parts import cut
from dptrain.program.dims import Dim
from dptrain.program.execute import HostMemory, ReferenceExecutable, evaluate
from dptrain.program.program import trace
from dptrain.program.sharding import messages
from dptrain.program.sharding.local import MeshPosition, localized
from dptrain.program.sharding.placement import place
from dptrain.program.tensor import Variable
from tests import thread_ranks
from tests.sample import examples
from tests.unit.program.virtual_ranks import on_ranks

ROWS, FEATURES = 6, 4
DATA = {"x": np.random.default_rng(0).normal(size=(ROWS, FEATURES))}


def chain(layers):
    """Return a step of some layers in a row, and their weights."""
    rng = np.random.default_rng(1)
    weights = [Variable(rng.normal(size=(FEATURES, FEATURES)), f"w{number}") for number in range(layers)]

    def step(x):
        for weight in weights:
            x = ops.tanh(x @ weight)
        loss = ops.mean(ops.square(x))
        loss.backward()
        for weight in weights:
            weight.assign(weight - 0.1 * weight.value.grad)
        return {"loss": loss}

    return trace(step, {"x": ((Dim.rows(ROWS), FEATURES), np.float64)}), weights


WEIGHT_BYTES = FEATURES * FEATURES * 8


@pytest.mark.parametrize(
    ("bucket", "expected"),
    [
        (None, [["loss", "w2", "w1", "w0"]]),
        (1, [["loss"], ["w2"], ["w1"], ["w0"]]),
        (2 * WEIGHT_BYTES, [["loss", "w2"], ["w1", "w0"]]),
    ],
)
def test_buckets_in_the_order_of_the_backward_pass(bucket, expected):
    program, weights = chain(3)
    placed = place(program, bucket_bytes=bucket)
    (stage, last) = messages.stages(placed)
    assert not last.messages
    of = {id(placed.outputs["loss"]): "loss"}
    for variable in weights:
        of |= {id(tensor): variable.name for tensor in placed.updates[variable].inputs}
    assert [[of[id(tensor)] for tensor in message] for message in stage.messages] == expected
    assert messages.count(placed) == len(expected)


@pytest.mark.parametrize("bucket", [1, 2 * WEIGHT_BYTES])
def test_buckets_change_nothing(bucket):
    results = []
    for most in (None, bucket):
        program, weights = chain(3)
        placed = place(program, bucket_bytes=most)

        def work(comm, placed=placed, weights=weights):
            rows, start = (4, 0) if comm.rank == 0 else (2, 4)
            memory = HostMemory()
            inputs = {"x": DATA["x"][start : start + rows]}
            executable = ReferenceExecutable(placed, memory, inputs, rows=rows, first_row=start, comm=comm)
            executable.run()
            return [memory.array(weight).copy() for weight in weights]

        results.append(on_ranks(2, work)[0])
    for weight, other in zip(*results, strict=True):
        np.testing.assert_array_equal(weight, other)


@settings(max_examples=examples(40), deadline=None)
@given(st.data())
def test_sums_of_shards_have_the_same_bits_on_any_number_of_ranks(data):
    shards = data.draw(st.integers(1, 21))
    ranks = data.draw(st.integers(1, min(shards, 8)))
    rng = np.random.default_rng(data.draw(st.integers(0, 9)))
    summands = [
        [rng.normal(size=(3, 5)).astype(np.float32), rng.normal(size=4), rng.normal(size=2).astype(np.float32)]
        for _ in range(shards)
    ]

    def sums(comm):
        start, stop = cut(0, shards, comm.size)[comm.rank]
        tree = TreeSum(start)
        for summand in summands[start:stop]:
            tree.add(summand)
        return messages.tree_reduced(tree, shards, comm)

    (expected,) = on_ranks(1, sums)
    # Threads add up in a tree themselves, where each has one complete subtree.
    for totals in [*on_ranks(ranks, sums), *thread_ranks.on_ranks(ranks, sums)]:
        for total, other in zip(totals, expected, strict=True):
            assert (total.dtype, total.shape, total.tobytes()) == (other.dtype, other.shape, other.tobytes())


def test_sums_of_shards_travel_in_pieces(monkeypatch):
    monkeypatch.setattr(messages, "_GATHERED", 40)  # five elements
    values = np.random.default_rng(0).normal(size=(7, 23)) * 10.0 ** np.arange(7)[:, None]

    def sums(comm):
        start, stop = cut(0, 7, comm.size)[comm.rank]
        tree = TreeSum(start)
        for row in values[start:stop]:
            tree.add([row])
        return messages.tree_reduced(tree, 7, comm)[0].tobytes()

    assert set(on_ranks(3, sums)) == set(on_ranks(1, sums))


@pytest.mark.parametrize("shards", [(1,), (0, 1), (1, 1, 0)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_the_greatest_of_all_ranks_keeps_the_sign_of_zero(dtype, shards):
    """So the least of zeros is 0 on any number of ranks, and not -0, by which a quotient is -inf."""

    def step(x):
        return {"least": 1 / ops.min(x, 0), "greatest": 1 / ops.max(-x, 0)}

    program = place(trace(step, {"x": ((Dim.rows(sum(shards)), 3), dtype)}))

    def work(comm):
        rows = shards[comm.rank]
        with np.errstate(divide="ignore"):
            return evaluate(program, {"x": np.zeros((rows, 3), dtype)}, rows=rows, comm=comm)[0]

    for outputs in on_ranks(len(shards), work):
        np.testing.assert_array_equal(outputs["least"], np.full(3, np.inf))
        np.testing.assert_array_equal(outputs["greatest"], np.full(3, -np.inf))


def test_what_travels_together():
    """Sums of one type over one axis of the mesh; what is the greatest by itself."""
    w = Variable(np.ones(4), "w")

    def step(x):
        sums = {"x": ops.sum(x, 0), "2x": ops.sum(2 * x), "narrow": ops.sum(ops.cast(x, "float32"))}
        return sums | {"most": ops.max(x, 0), "of weights": x * ops.sum(w)}

    program = place(trace(step, {"x": ((Dim.rows(ROWS), FEATURES), np.float64)}), layouts={w: ("model",)})
    at = MeshPosition({"batch": 2, "model": 2}, {"batch": 0, "model": 0})
    local = localized(program, at, {w: Variable(np.ones(2), "w")})
    sent_messages = [message for stage in messages.stages(local) for message in stage.messages]
    kinds = [
        {(tensor.attributes["mesh"], tensor.attributes["over"], tensor.dtype.name) for tensor in message}
        for message in sent_messages
    ]
    assert all(len(kind) == 1 for kind in kinds)
    assert sorted((*kind, len(message)) for (kind,), message in zip(kinds, sent_messages, strict=True)) == [
        ("batch", "max", "float64", 1),
        ("batch", "sum", "float32", 1),
        ("batch", "sum", "float64", 2),
        ("model", "sum", "float64", 1),
    ]
    numbers = [tensor.attributes["number"] for message in sent_messages for tensor in message]
    assert sorted(numbers) == [*range(len(numbers))]
