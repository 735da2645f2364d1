"""A step placed on several ranks computes what it computes on one, with as few messages as linearity allows."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dptrain import ops
from dptrain.comm.node_sum import tree_sum
from dptrain.program.dims import Dim
from dptrain.program.execute import evaluate
from dptrain.program.explain import explain
from dptrain.program.gradient import gradients
from dptrain.program.program import trace
from dptrain.program.sharding.messages import stages
from dptrain.program.sharding.placement import place
from dptrain.program.tape import GradientTape
from dptrain.program.tensor import OPS, Variable
from tests.sample import examples
from tests.unit.program.virtual_ranks import run_on_ranks

ROWS = 11
SHARDS = [[11], [4, 4, 3], [0, 11], [6, 5], [5, 0, 1, 2, 3]]
RNG = np.random.default_rng(0)
DATA = {
    "x": RNG.normal(size=(ROWS, 4)),
    "y": RNG.integers(0, 3, ROWS),
    "weights": np.where(RNG.random(ROWS) < 0.3, 0.0, RNG.random(ROWS)),
}
SPECS = {name: ((Dim.rows(ROWS), *array.shape[1:]), array.dtype) for name, array in DATA.items()}
AXES = dict.fromkeys(DATA, 0)


def weights(**shapes):
    rng = np.random.default_rng(1)
    return {name: Variable(rng.normal(size=shape), name) for name, shape in shapes.items()}


def compare(step, variables, shards):
    """Assert that ranks compute what one does; return the messages of a rank, and the placed program."""
    program = trace(step, SPECS)
    assert set(program.state) <= set(variables.values())
    outputs, updates = evaluate(program, DATA)
    placed = place(program)
    results, messages = run_on_ranks(placed, DATA, shards, AXES)
    for own_outputs, own_updates in results:
        for expected, actual in ((outputs, own_outputs), (updates, own_updates)):
            assert actual.keys() == expected.keys()
            for name, value in actual.items():
                np.testing.assert_allclose(value, expected[name], rtol=1e-13, atol=1e-14, err_msg=str(name))
    return messages, placed


def cross_entropy(logits, y):
    return -ops.sum(ops.one_hot(y, 3, dtype="float64") * ops.log_softmax(logits), -1)


def descend(variables, rate=0.1):
    for variable in variables.values():
        variable.assign(variable - rate * variable.value.grad)


def batch_normalization(h, gamma):
    mean = ops.mean(h, 0)
    return (h - mean) / ops.sqrt(ops.mean(ops.square(h - mean), 0) + 1e-3) * gamma


@pytest.mark.parametrize("shards", SHARDS, ids=str)
def test_a_perceptron(shards):
    variables = weights(w1=(4, 6), b1=6, w2=(6, 3))

    def step(x, y, sample_weight):
        w1, b1, w2 = variables.values()
        loss = ops.mean(cross_entropy(ops.relu(x @ w1 + b1) @ w2, y))
        loss.backward()
        descend(variables)
        return {"loss": loss}

    messages, placed = compare(step, variables, shards)
    # Sums of three gradients and of the loss, which do not need each other; a single rank sends none.
    assert messages == (0 if len(shards) == 1 else 1)
    assert ", 4 all-reduces in 1 message of " in explain(placed)


@pytest.mark.parametrize("shards", SHARDS, ids=str)
def test_normalization_weights_penalties_and_clipping(shards):
    variables = weights(w1=(4, 6), b1=6, gamma=6, w2=(6, 3))

    def step(x, y, sample_weight):
        w1, b1, gamma, w2 = variables.values()
        logits = ops.relu(batch_normalization(x @ w1 + b1, gamma)) @ w2
        loss = ops.sum(cross_entropy(logits, y) * sample_weight) / ops.sum(sample_weight)
        loss = loss + 0.01 * ops.sum(ops.square(w1)) + 0.01 * ops.sum(ops.absolute(w2))
        loss.backward()
        norm = ops.sqrt(sum(ops.sum(ops.square(variable.value.grad)) for variable in variables.values()))
        scale = ops.minimum(1.0, 0.5 / norm)
        for variable in variables.values():
            variable.assign(variable - 0.1 * scale * variable.value.grad)
        right = ops.cast(ops.equal(ops.argmax(logits, -1), y), "float64")
        return {"loss": loss, "accuracy": ops.mean(right), "norm": norm, "highest": ops.max(logits)}

    compare(step, variables, shards)


@pytest.mark.parametrize("shards", SHARDS, ids=str)
def test_rows_that_a_step_makes_itself(shards):
    """As a GAN does: generated rows beside real ones, labels for both."""
    variables = weights(generator=(4, 4), discriminator=(4, 1))

    def step(x, y, sample_weight):
        generator, discriminator = variables.values()
        n = x.shape[0]
        joined = ops.concatenate([x @ generator, x], axis=0)
        labels = ops.concatenate([ops.ones((n, 1), "float64"), ops.zeros((n, 1), "float64")], axis=0)
        logits = joined @ discriminator
        loss = ops.mean(ops.softplus(logits) - labels * logits)
        fake = ops.mean(ops.sigmoid(logits[:n]))
        loss.backward()
        descend(variables)
        return {"loss": loss, "fake": fake, "of both": ops.sum(ops.ones((2 * n,), "float64"))}

    compare(step, variables, shards)


def test_sums_of_gradients_and_of_weights_wait_for_each_other():
    """The division by the sum of the weights comes after the backward pass, not in the middle of it."""
    variables = weights(v=(4, 6), w=(6, 3))

    def step(x, y, sample_weight):
        logits = ops.relu(x @ variables["v"]) @ variables["w"]
        loss = ops.sum(cross_entropy(logits, y) * sample_weight) / ops.sum(sample_weight)
        loss.backward()
        descend(variables)
        return {"loss": loss}

    messages, placed = compare(step, variables, [4, 7])
    assert messages == 1  # the loss, the gradient and the weights, in it
    (first, last) = stages(placed)
    assert [len(message) for message in first.messages] == [4]
    # All products are made before the message, all quotients by the sum of the weights after it.
    assert [tensor.op.name for tensor in last.tensors if tensor.op and tensor.op.name == "batch_matmul"] == []
    assert sum(tensor.op is OPS["divide"] for tensor in last.tensors) == 3


def test_normalization_meets_five_times():
    """For the mean, the variance, the gradient in the variance, that in the mean, and the weights' gradients."""
    variables = weights(w1=(4, 6), gamma=6, w2=(6, 3))

    def step(x, y, sample_weight):
        w1, gamma, w2 = variables.values()
        loss = ops.mean(cross_entropy(batch_normalization(x @ w1, gamma) @ w2, y))
        loss.backward()
        descend(variables)
        return {"loss": loss}

    messages, _ = compare(step, variables, [6, 5])
    assert messages == 5


@pytest.mark.parametrize("shards", SHARDS, ids=str)
def test_a_constant_beside_a_concatenation_has_the_rows_of_each_part(shards):
    """Of a concatenation a rank has its rows of every part, not a part of all rows."""
    table = RNG.normal(size=(3 * ROWS, 4))

    def step(x, y, sample_weight):
        both = ops.concatenate([x, 2 * x], axis=0)
        three = ops.concatenate([both, 3 * x], axis=0)
        columns = ops.concatenate([ops.transpose(x), ops.transpose(2 * x)], axis=1)
        return {
            "two": ops.sum(both * table[: 2 * ROWS], 0),
            "three": ops.sum(three * table, 0),
            "columns": ops.sum(columns * table[: 2 * ROWS].T, 1),
            "repeated": ops.sum(ops.repeat(x, 2, axis=0) * table[: 2 * ROWS], 0),
        }

    compare(step, {}, shards)


@pytest.mark.parametrize("shards", SHARDS, ids=str)
def test_no_rows_are_the_same_everywhere(shards):
    def step(x, y, sample_weight):
        empty = x[:0]
        return {
            "nothing": empty,
            "sum": ops.sum(empty, 0),
            "joined": ops.sum(ops.concatenate([empty, x, empty]), 0),
        }

    compare(step, {}, shards)


def test_a_table_is_cut_to_the_rows_that_it_meets():
    table = np.arange(ROWS * 2.0).reshape(ROWS, 2)

    def step(x, y, sample_weight):
        return {"sum": ops.sum(table * ops.reshape(sample_weight, (-1, 1)), 0)}

    compare(step, {}, [4, 0, 7])


SMOOTH = st.sampled_from([ops.tanh, ops.sigmoid, ops.softplus, ops.sin, lambda t: ops.exp(-ops.square(t))])
POINTWISE = st.sampled_from([ops.add, ops.subtract, ops.multiply, lambda a, b: a / (1.5 + ops.sin(b))])


@st.composite
def steps(draw):
    """A random acyclic step over (rows, 3) tensors, with sums over rows and columns in between, and its variables."""
    plan = draw(
        st.lists(
            st.tuples(
                st.sampled_from(["smooth", "pair", "product", "center", "share", "scale"]),
                SMOOTH,
                POINTWISE,
                st.integers(0, 99),
            ),
            min_size=2,
            max_size=7,
        )
    )
    reduce = draw(st.sampled_from(["mean", "weighted", "both"]))

    def step(variables, x, y, sample_weight):
        tensors = [x @ variables["first"]]
        for kind, smooth, pair, pick in plan:
            a, b = tensors[pick % len(tensors)], tensors[pick // 7 % len(tensors)]
            tensors.append(
                {
                    "smooth": lambda a=a, f=smooth: f(a),
                    "pair": lambda a=a, b=b, f=pair: f(a, b),
                    "product": lambda a=a: ops.tanh(a @ variables["square"]),
                    "center": lambda a=a: a - ops.mean(a, 0),
                    "share": lambda a=a: ops.softmax(a),
                    "scale": lambda a=a, b=b: a / (1 + ops.sum(ops.square(b)) / b.shape[0]),
                }[kind]()
            )
        values = ops.sum(tensors[-1] * tensors[len(tensors) // 2], -1)
        loss = ops.mean(values)
        if reduce != "mean":
            weighted = ops.sum(values * sample_weight) / ops.sum(sample_weight)
            loss = weighted if reduce == "weighted" else loss + weighted
        return loss

    return step


@settings(max_examples=examples(60), deadline=None)
@given(step=steps(), shards=st.sampled_from(SHARDS[1:]))
def test_random_steps(step, shards):
    """Eager, traced and placed on ranks they agree, and gradients are those of central differences."""
    variables = weights(first=(4, 3), square=(3, 3))

    def traced(x, y, sample_weight):
        loss = step(variables, x, y, sample_weight)
        slopes = gradients(loss, [variable.value for variable in variables.values()])
        return {"loss": loss} | {
            name: slope for name, slope in zip(variables, slopes, strict=True) if slope is not None
        }

    program = trace(traced, SPECS)
    expected, _ = evaluate(program, DATA)
    eager = step(variables, *(ops.add(array, 0) for array in DATA.values()))
    assert eager.numpy().tobytes() == expected["loss"].tobytes()
    for outputs, _ in run_on_ranks(place(program), DATA, shards, AXES)[0]:
        for name, value in outputs.items():
            np.testing.assert_allclose(value, expected[name], rtol=1e-10, atol=1e-11, err_msg=name)
    for name, variable in variables.items():
        direction = np.random.default_rng(2).normal(size=variable.shape)
        ends = []
        for size in (1e-6, -1e-6):
            moved = variables | {name: Variable(variable.numpy() + size * direction)}
            ends.append(float(step(moved, *(ops.add(array, 0) for array in DATA.values()))))
        slope = float(np.sum(expected[name] * direction)) if name in expected else 0.0
        np.testing.assert_allclose(slope, (ends[0] - ends[1]) / 2e-6, rtol=1e-5, atol=1e-7)


COUNTS = {
    "rows": (lambda n, other: n * 1.0, True),
    "rows times what is known": (lambda n, other: 3.0 * n, True),
    "rows over what is known": (lambda n, other: n / 4.0, True),
    "rows and again": (lambda n, other: n + 2 * n, False),
    "rows times rows": (lambda n, other: n * n, False),
    "one over rows": (lambda n, other: 4.0 / n, False),
    "rows and one": (lambda n, other: n + 1.0, False),
    "rows times a state": (lambda n, other: n * other, False),
    "a root": (lambda n, other: ops.sqrt(n), False),
}


@pytest.mark.parametrize("shards", SHARDS, ids=str)
@pytest.mark.parametrize("name", COUNTS)
def test_totals_to_which_numbers_of_rows_are_added(name, shards):
    """A rank adds its own rows to its summand of a total, or the total is whole on every rank."""
    count, stays = COUNTS[name]
    total, other = Variable(0.0, "total", dtype="float64"), Variable(2.5, "other", dtype="float64")

    def step(x, y, weight):
        n = ops.cast(x.shape[0], "float64")
        total.assign(total + (ops.sum(x) + count(n, other.value)))
        return {}

    program = trace(step, SPECS)
    _, updates = evaluate(program, DATA)
    placed = place(program, [total])
    results, _ = run_on_ranks(placed, DATA, shards, AXES)
    values = [own_updates[total] for _, own_updates in results]
    assert (total in placed.summed) == stays
    np.testing.assert_allclose(sum(values) if stays else values[-1], updates[total], rtol=1e-13)


# Gradients that travel in half precision


def as_half(array, dtype):
    with np.errstate(over="ignore"):
        return array.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


@pytest.mark.parametrize("shards", [[4, 4, 3], [6, 5], [5, 0, 1, 2, 3]])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_ranks_round_their_summands_and_the_sum_of_these(shards, dtype):
    """On all ranks to the same bits; a number that float16 does not hold is infinite."""
    x = RNG.random((ROWS, 4)).astype(np.float32) * np.float32([1e-3, 1, 100, 70_000])
    w = Variable(np.zeros(4, np.float32), "w")

    def step(x):
        ops.sum(x * w).backward()
        w.assign(w - 0.5 * w.value.grad)
        return {}

    program = trace(step, {"x": ((Dim.rows(ROWS), 4), np.float32)})
    results, messages = run_on_ranks(place(program, comm_dtype=dtype), {"x": x}, shards, {"x": 0})
    summands = [as_half(part.sum(0), dtype) for part in np.split(x, np.cumsum(shards)[:-1])]
    expected = -0.5 * as_half(tree_sum(summands), dtype).astype(np.float32)
    assert messages == 1
    for _, updates in results:
        np.testing.assert_array_equal(updates[w], expected)
    assert np.isinf(expected).any() == (dtype == "float16")


@pytest.mark.parametrize("policy", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("shards", SHARDS)
def test_nothing_but_gradients_in_weights_travels_in_half_precision(shards, policy):
    """Neither the loss, nor its sum of weights, nor statistics of a batch that gradients go through."""
    variables = weights(w1=(4, 5), slope=(5,), w2=(5, 3))

    def step(x, y, weights):
        w1, slope, w2 = (ops.cast(variable.value, policy) for variable in variables.values())
        z = ops.cast(x, policy) @ w1
        centred = z - ops.cast(ops.mean(ops.cast(z, "float64"), 0), policy)
        logits = (centred * slope) @ w2
        penalty = ops.sum(ops.square(variables["w1"])) * 0.01
        loss = ops.sum(cross_entropy(ops.cast(logits, "float64"), y) * weights) / ops.sum(weights)
        (loss + penalty).backward()
        descend(variables)
        return {"loss": loss, "norm": ops.sum(ops.square(variables["w2"].value.grad))}

    program = trace(step, SPECS)
    placed = place(program, comm_dtype="bfloat16")
    travelling = [tensor for stage in stages(placed) for message in stage.messages for tensor in message]
    in_half = [tensor.shape for tensor in travelling if tensor.dtype.itemsize == 2]
    assert sorted(in_half) == sorted(variable.shape for variable in variables.values())
    expected, updates = evaluate(program, DATA)
    results, _ = run_on_ranks(placed, DATA, shards, AXES)
    for outputs, updated in results:
        np.testing.assert_allclose(outputs["loss"], expected["loss"], rtol=1e-12 if policy != "bfloat16" else 0.02)
        np.testing.assert_allclose(outputs["norm"], expected["norm"], rtol=0.05)
        for name, variable in variables.items():
            scale = np.abs(updates[variable] - variable.numpy()).max()
            np.testing.assert_allclose(updated[variable], updates[variable], atol=0.02 * scale, err_msg=name)
            np.testing.assert_array_equal(updated[variable], results[0][1][variable])


def test_a_sum_that_is_more_than_a_gradient_stays_exact():
    w = weights(w=(4,))["w"]

    def step(x, y, weights):
        total = ops.sum(x, 0)
        ops.sum(w * ops.tanh(total) * total).backward()
        w.assign(w - w.value.grad)
        return {"total": total}

    placed = place(trace(step, SPECS), comm_dtype="bfloat16")
    travelling = [tensor for stage in stages(placed) for message in stage.messages for tensor in message]
    assert [tensor.dtype.name for tensor in travelling] == ["float64", "bfloat16"]
    assert placed.outputs["total"] is travelling[0]


def test_a_gradient_of_a_tape_travels_in_half_precision():
    w = weights(w=(4,))["w"]

    def step(x, y, weights):
        with GradientTape() as tape:
            loss = ops.mean(ops.square(ops.sum(x * w, -1)))
        (gradient,) = tape.gradient(loss, [w])
        w.assign(w - gradient)
        return {"loss": loss}

    placed = place(trace(step, SPECS), comm_dtype="float16")
    travelling = [tensor for stage in stages(placed) for message in stage.messages for tensor in message]
    assert [(tensor.shape, tensor.dtype.name) for tensor in travelling] == [((), "float64"), ((4,), "float16")]


@pytest.mark.parametrize("is_read", [False, True])
def test_a_numerator_that_is_more_than_a_gradient_stays_exact(is_read):
    """The quotient goes on as its numerator, which an output may be too."""
    w = weights(w=(4,))["w"]

    def step(x, y, weights):
        numerator = ops.sum(x, 0)
        ops.sum(w * (numerator / ops.sum(weights))).backward()
        w.assign(w - w.value.grad)
        return {"numerator": numerator} if is_read else {}

    program = trace(step, SPECS)
    outputs, updates = evaluate(program, DATA)
    results, _ = run_on_ranks(place(program, comm_dtype="bfloat16"), DATA, [6, 5], AXES)
    for own_outputs, own_updates in results:
        for name, value in outputs.items():
            np.testing.assert_allclose(own_outputs[name], value, rtol=1e-13)
        np.testing.assert_allclose(own_updates[w], updates[w], rtol=0.02)
