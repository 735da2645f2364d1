"""The order of equal elements: 1,000 of three values, in every type, by every way of executing ops."""

import numpy as np
import pytest

from dptrain import layers, ops
from dptrain.backend.cpu.compile import compiler
from dptrain.data.holdout import fold_rows
from dptrain.metrics import Recall
from dptrain.program.program import trace
from dptrain.random import Purpose, stream
from tests.programs.check import by_numpy, compiled
from tests.sample import sample

FLOATS = ["float16", "bfloat16", "float32", "float64"]
DTYPES = ["bool", *(f"{sign}int{bits}" for bits in (8, 16, 32, 64) for sign in ("", "u")), *FLOATS]
COUNT = 1000
WAYS = {"eager": None, "NumPy": by_numpy, "C++": compiled()}


def values(dtype, shape=(2, COUNT)):
    """Return three values in random order, two of bool."""
    return np.random.default_rng(len(dtype)).integers(0, 2 if dtype == "bool" else 3, shape)


def expected(x):
    """Return each op's result for x (rows, n), of integers, by a definition without NumPy's sorts."""
    rising = [sorted(range(len(row)), key=row.__getitem__) for row in x.tolist()]
    falling = [sorted(range(len(row)), key=lambda at, row=row: -row[at]) for row in x.tolist()]
    first = [[row.index(value) for value in sorted(set(row))] for row in x.tolist()]
    best, least = [[indices[0] for indices in order] for order in (falling, rising)]
    return {
        "argsort": rising,
        "sort": [sorted(row) for row in x.tolist()],
        "argsort twice": [np.argsort(order, kind="stable") for order in rising],
        "argmax": best,
        "argmin": least,
        "argmax over rows": np.where(x[0] >= x[1], 0, 1),
        "top_k": [order[:5] for order in falling],
        "top_k values": [[row[at] for at in order[:5]] for row, order in zip(x.tolist(), falling, strict=True)],
        "unique": first[0],
        "partition": [row[17] for row in rising],
    }


def computed(x):
    """Return the same by ops."""
    highest, places = ops.top_k(x, 5)
    return {
        "argsort": ops.argsort(x),
        "sort": ops.cast(ops.sort(x), "int32"),
        "argsort twice": ops.argsort(ops.argsort(x)),
        "argmax": ops.argmax(x, -1),
        "argmin": ops.argmin(x, -1),
        "argmax over rows": ops.argmax(x, 0),
        "top_k": places,
        "top_k values": ops.cast(highest, "int32"),
        "unique": ops.unique(x[0], return_index=True, size=2 if x.dtype == np.bool_ else 3)[1],
        "partition": ops.argpartition(x, 17)[:, 17],
    }


def wrong(make, dtype):
    """Return the names of ops that put equal elements in another order, by executables of `make`; None is eager."""
    x = values(dtype).astype(np.int32)
    if make is None:
        results = {name: np.asarray(value) for name, value in computed(ops.cast(x, dtype)).items()}
    else:
        program = trace(lambda x: computed(ops.cast(x, dtype)), {"x": (x.shape, "int32")})
        executable = make(program, {"x": x})
        executable.run()
        results = {name: np.asarray(executable.outputs[name]) for name in executable.outputs}
    definitions = expected(x)
    return [name for name, result in results.items() if not np.array_equal(result, definitions[name])]


@pytest.mark.parametrize(
    ("way", "dtype"),
    [
        *((way, dtype) for way in ("eager", "NumPy") for dtype in DTYPES),
        *sample([("C++", dtype) for dtype in DTYPES], 4, 2),
    ],
)
def test_equal_elements_keep_their_order(way, dtype):
    if way == "C++" and compiler() is None:
        pytest.skip("no C++ compiler")
    assert wrong(WAYS[way], dtype) == []


def test_the_greater_token_is_first_among_equally_frequent_ones():
    tokens = [f"word{number:04}" for number in range(COUNT)]
    frequency = {token: 1 + number % 3 for number, token in enumerate(tokens)}
    order = sorted(tokens, key=lambda token: (frequency[token], token), reverse=True)
    data = np.random.default_rng(0).permutation([token for token in tokens for _ in range(frequency[token])])
    lookup, vectorization = layers.StringLookup(), layers.TextVectorization()
    lookup.adapt(data)
    vectorization.adapt(data)
    assert lookup.get_vocabulary()[1:] == vectorization.get_vocabulary()[2:] == order
    numbers = layers.IntegerLookup()
    numbers.adapt(np.array([int(token[4:]) for token in data]))
    assert numbers.get_vocabulary()[1:] == [int(token[4:]) for token in order]


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if "int" in dtype])
def test_splits_keep_the_drawn_order_within_a_class(dtype):
    y = values(dtype, (COUNT,)).astype(dtype)
    for seed in (0, 5):
        drawn = stream(seed, Purpose.HOLD_OUT).permutation(COUNT).tolist()
        ordered = np.array(sorted(drawn, key=lambda row: y[row]))
        for fold in range(3):
            training, held = fold_rows(y, fold, 3, seed)
            np.testing.assert_array_equal(held, np.sort(ordered[fold::3]))
            np.testing.assert_array_equal(training, np.setdiff1d(np.arange(COUNT), held))


def test_earlier_classes_are_among_the_highest():
    for row in values("float32", (1, COUNT)).astype(np.float32) / 2:
        order = sorted(range(COUNT), key=lambda at: -row[at])
        for k in (1, 400):
            for place in (order[k - 1], order[k]):
                metric = Recall(top_k=k)
                metric.update_state(np.eye(COUNT, dtype=np.float32)[[place]], row[None])
                assert float(metric.result()) == (place == order[k - 1])
