"""Programs by name, which every way of executing programs must compute: NumPy, C++ and CUDA, alone, on ranks, in packs.

A step is a function of its inputs and variables, each of which is described as in `Case.leaves`, with `T` for the type
of the table's column. It makes a case for each of its types and sizes; those of the first are in every run.
`tests/unit/backend/test_conformance.py` executes the table on the CPU, `tests/ops/test_conformance_on_cuda.py` on a
GPU, emulated or not.
"""

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dptrain import ops
from dptrain.ops.indexing import take_rows
from dptrain.ops.loops import remat
from dptrain.ops.nn.convolution import max_pool2d, max_pool2d_input, max_pool2d_take
from dptrain.ops.random import SeedGenerator, dropout
from dptrain.program.gradient import gradients
from dptrain.program.tensor import OPS, Tensor, Variable
from tests.programs.case import Case

Step = Callable[..., dict[str, Any]]
TABLE: dict[str, "Entry"] = {}


@dataclass(frozen=True)
class Entry(Case):
    """A case whose step is a function.

    Attributes:
        step: returns outputs of inputs, variables, and `seeds` where it takes them; assigns variables.
        is_long: it is left out of short runs.
        eager: its ops may be called one by one.
    """

    step: Step = dict
    is_long: bool = False
    eager: bool = True

    @property
    def is_trainable(self) -> bool:
        return True

    def computed(
        self, inputs: Mapping[str, Tensor], variables: Mapping[str, Variable], seeds: SeedGenerator
    ) -> dict[str, Any]:
        """Return the step's outputs."""
        leaves = {name: inputs[name] if name in inputs else variables[name] for name in self.leaves}
        if "seeds" in inspect.signature(self.step).parameters:
            return self.step(**leaves, seeds=seeds)
        return self.step(**leaves)


def entry(
    types: Sequence[str] = ("float32",),
    sizes: Sequence[Mapping[str, int]] = ({"n": 7},),
    steps: int = 1,
    on_ranks: bool = True,
    pack: bool = False,
    is_long: bool = False,
    eager: bool = True,
    name: str = "",
    **leaves: str,
) -> Callable[[Step], Step]:
    """Add a step to the table.

    Args:
        types: what `T` stands for.
        sizes: lengths by name, as in `Case`.
        steps: of one call.
        on_ranks: three ranks execute it too, of which one has no rows.
        pack: GPUs execute it in a pack too.
        is_long: it is left out of short runs.
        eager: as in `Entry`.
        name: of the entry; that of the function without.
        leaves: by name; without "input" or "variable" before, an input.
    """

    def add(step: Step) -> Step:
        for dtype, lengths in itertools.product(types, sizes):
            words = {leaf: text.split() for leaf, text in leaves.items()}
            texts = {leaf: " ".join(dtype if word == "T" else word for word in text) for leaf, text in words.items()}
            label = name or step.__name__
            label += f", {dtype}" if len(types) > 1 else ""
            label += "".join(f", {key}={length}" for key, length in lengths.items()) if len(sizes) > 1 else ""
            assert label not in TABLE, label
            rows = lengths["n"]
            TABLE[label] = Entry(
                lengths=lengths,
                leaves={
                    leaf: text if text.startswith(("input ", "variable ")) else f"input {text}"
                    for leaf, text in texts.items()
                },
                lines=(),
                outputs=(),
                steps=steps,
                shards=(rows // 3, 0, rows - rows // 3) if on_ranks else (),
                pack=pack,
                step=step,
                # The same text may be for any number of rows.
                is_long=is_long or dtype != types[0] or {**lengths, "n": 0} != {**sizes[0], "n": 0},
                eager=eager,
            )
        return step

    return add


def descend(loss: Tensor, *variables: Variable, rate: float = 0.1) -> list[Tensor]:
    """Move variables against their gradients, which are returned."""
    slopes = gradients(loss, [variable.value for variable in variables])
    for variable, slope in zip(variables, slopes, strict=True):
        if slope is not None:
            variable.assign(variable - rate * slope)
    return slopes


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of each row."""
    return -ops.sum(ops.one_hot(labels, logits.shape[-1], dtype=logits.dtype) * ops.log_softmax(logits), -1)


# Trainings


@entry(
    types=("float64", "float32"),
    sizes=({"n": 11},),
    steps=10,
    pack=True,
    x="n 4 T normal",
    y="n int64 below 3",
    weights="n T whole",
    w1="variable 4 6 T normal",
    b1="variable 6 T normal",
    gamma="variable 6 T normal",
    w2="variable 6 3 T normal",
)
def network(x, y, weights, w1, b1, gamma, w2, seeds):
    """Batch normalization, dropout, weights of samples, a metric."""
    weights = ops.square(weights)
    hidden = x @ w1 + b1
    mean = ops.mean(hidden, 0)
    hidden = (hidden - mean) / ops.sqrt(ops.mean(ops.square(hidden - mean), 0) + 1e-3) * gamma
    hidden = dropout(ops.relu(hidden), 0.3, seed=seeds)
    logits = hidden @ w2
    loss = ops.sum(cross_entropy(logits, y) * weights) / ops.sum(weights)
    descend(loss, w1, b1, gamma, w2, rate=0.01)
    return {"loss": loss, "right": ops.sum(ops.cast(ops.equal(ops.argmax(logits, -1), y), "float64"))}


@entry(
    types=("float64", "float32"),
    sizes=({"n": 8},),
    steps=5,
    images="40 7 uint8 below 256",
    labels="40 int64 below 3",
    rows="n int64 below 40",
    w1="variable 7 6 T normal",
    w2="variable 6 3 T normal",
)
def training_on_gathered_rows(images, labels, rows, w1, w2):
    logits = ops.relu(ops.cast(take_rows(images, rows), w1.dtype) @ w1 / 255) @ w2
    losses = cross_entropy(logits, take_rows(labels, rows))
    descend(ops.mean(losses), w1, w2)
    return {"losses": losses}


@entry(
    types=("float64", "float32"),
    sizes=({"n": 12},),
    steps=3,
    numbers="n 2 int64 below 9",
    table="variable 9 4 T normal",
)
def a_table_that_is_trained(numbers, table):
    """By rows of any number, some of them several times."""
    descend(ops.sum(ops.square(take_rows(table, numbers))), table)
    return {"columns": ops.take(table.value, [-1, 1], 1)}


@entry(
    types=("float64", "float32"),
    sizes=({"n": 10},),
    steps=2,
    x="n 4 T normal",
    generator="variable 4 4 T normal",
    critic="variable 4 1 T normal",
)
def rows_that_a_step_makes_itself(x, generator, critic):
    """As a GAN does: generated rows beside real ones, labels for both."""
    n = x.shape[0]
    joined = ops.concatenate([x @ generator, x], axis=0)
    labels = ops.concatenate([ops.ones((n, 1), x.dtype), ops.zeros((n, 1), x.dtype)], axis=0)
    logits = joined @ critic
    loss = ops.mean(ops.softplus(logits) - labels * logits)
    fake = ops.mean(ops.sigmoid(logits[:n]))
    descend(loss, generator, critic)
    return {"loss": loss, "fake": fake, "of both": ops.sum(ops.ones((2 * n,), x.dtype))}


# State


@entry(
    types=("float64", "float32"),
    sizes=({"n": 6},),
    steps=3,
    x="n 3 T normal",
    a="variable 4 4 T normal",
    b="variable 4 4 T normal",
    transposed="variable 4 4 T normal",
    shifted="variable 6 T normal",
    number="variable T normal",
    kept="variable 3 T normal",
    early="variable 5 T normal",
)
def new_values_of_what_is_still_read(x, a, b, transposed, shifted, number, kept, early):
    """Variables change places, are transposed, move within themselves, come out as they were, and parts of them."""
    old, unshifted, read_late, first, second = kept.value, shifted.value, early.value, a.value, b.value
    a.assign(second)
    b.assign(first)
    transposed.assign(ops.transpose(transposed.value) * 0.9 + transposed.value @ transposed.value * 0.1)
    shifted.assign(ops.concatenate([unshifted[1:], unshifted[:1]], -1))
    number.assign(number.value * 0.5 + ops.sum(x) * ops.sum(unshifted * number.value))
    kept.assign(old + number.value)
    early.assign(read_late * 0.5)
    late = read_late * ops.sum(ops.square(x))
    return {
        "old": old,
        "new": kept.value,
        "a": first,
        "a view of it": first[1:],
        "of a": a * 1,
        "sum": ops.sum(first * second) + number.value,
        "late": late,
    }


@entry(types=("float64", "float32"), steps=3, x="n T normal", w="variable 3 3 T normal", v="variable 3 4 T normal")
def views_of_state(x, w, v):
    """Of one element, of strides that no reshape can keep, of nothing."""
    w.assign(ops.transpose(w))
    before = v.value
    v.assign(v + ops.sum(x))
    columns = ops.transpose(v)
    return {
        "an element": v[1, 2],
        "row": v[-1] + 1,
        "flat": ops.reshape(columns, (-1,)) + v[1, 2],
        "none": columns[2:2],
        "spread": ops.broadcast_to(v[:, 1], (2, 3)),
        "before": before * 2,
    }


@entry(types=("float64", "float32"), steps=2, x="n 4 T normal", w="variable 3 T normal")
def inputs_that_nothing_reads(x, w):
    w.assign(w * 2)
    return {"twice": w.value}


@entry(sizes=({"n": 6},), steps=2, on_ranks=False, x="n 40 T normal", last="variable n T normal")
def a_number_that_a_row_replaces(x, last):
    """All lanes of the row read it before."""
    shifted = x / 100 + ops.reshape(last.value, (6, 1))
    last.assign(ops.sum(shifted * shifted, -1) / 40)
    return {"shifted": ops.softmax(shifted)}


# Numbers of every type


@entry(
    types=("int32", "int8", "int64", "uint8", "uint32"),
    sizes=({"n": 6},),
    a="n T values 5 7 100 1 0 127",
    b="n T values 2 3 7 1 5 100",
)
def whole_numbers(a, b):
    names = ["add", "subtract", "multiply", "divide", "floor_divide", "power", "maximum", "minimum", "less_equal"]
    results = {name: OPS[name](a, b) for name in names}
    if a.dtype.kind == "i":
        results |= {"below": OPS["floor_divide"](-a, b), "negative": -a, "absolute": ops.absolute(-a)}
    results |= {f"as {name}": ops.cast(a * 3, name) for name in ("float32", "int16", "uint8", "bool")}
    if a.dtype.itemsize > 1:  # of which NumPy takes roots in half precision
        results["root"] = ops.sqrt(a)
    return results | {"sum": ops.sum(a), "max": ops.max(b), "right": ops.sum(ops.equal(a, b))}


@entry(
    sizes=[{"n": n} for n in (1, 2, 3, 4, 5, 341, 342, 683)],
    x="n 3 float32 whole",
    wide="n 3 int64 below 99",
    total="variable float32 whole",
)
def maps_of_any_length(x, wide, total):
    """A thread takes four elements: of one to eight bytes, in sums and without, up to the end and no further."""
    total.assign_add(ops.sum(x))
    positive, half = x > 0, ops.cast(x, "bfloat16")
    return {
        "float32": x * 2 + ops.cast(wide, "float32"),
        "int64": wide + 1,
        "bool": positive,
        "bfloat16": half * half,
        "int8": ops.cast(x, "int8"),
        "shifted": ops.concatenate([x[:, 1:], x[:, :1]], 1) + x,
        "sum": ops.sum(x * x),
        "greatest": ops.max(x),
        "least of the integers": ops.min(wide),
        "count": ops.sum(ops.cast(positive, "int64")),
    }


@entry(
    sizes=({"n": 4},),
    x="n 4 float32 values 1 nan 3 nan nan 1 2 0 2 1 0 -1 -inf -inf -inf -inf",
)
def not_a_number(x):
    """Stays one."""
    return {
        "best": ops.argmax(x, -1),
        "of the rows": ops.max(x, -1),
        "of the columns": ops.max(x, 0),
        "of all": ops.max(x),
        "relu": ops.relu(x),
        "greater": ops.maximum(x, 1.5),
        "lesser": ops.minimum(1.5, x),
        "sum": ops.sum(x, 0),
    }


@entry(sizes=({"n": 6},), steps=2, pack=True, x="n 9 float32 values 1")
def random_numbers(x, seeds):
    """They are those of the global row."""
    return {
        "bits": seeds.bits((x.shape[0], 11)),
        "dropped": dropout(x, 0.3, seed=seeds),
        "few": seeds.bits((x.shape[0], 3)),
    }


# Sums


@entry(
    sizes=[{"n": 4, "a": length} for length in (3, 40, 1024, 1025, 5000)],
    on_ranks=False,
    x="4 a float32 normal",
    batch="n a float32 normal",
)
def reductions_of_any_length(x, batch):
    length = x.shape[1]
    whole = ops.cast(ops.cast(x, "int32"), "float32")
    return {
        "softmax": ops.softmax(x),
        "log softmax": ops.log_softmax(x),
        "sum": ops.sum(x),
        "squares": ops.sum(x * x),
        "columns": ops.sum(x, 0),
        "rows": ops.sum(x, -1),
        "highest": ops.max(x, -1),
        "all": ops.max(x),
        "place": ops.argmax(x, -1),
        "first of equals": ops.argmax(whole, -1),
        "over both": ops.sum(ops.reshape(x, (2, 2, length)), (0, 2)),
        "over the middle": ops.sum(ops.reshape(x, (2, 2, length)), 1),
        "of rows": ops.softmax(ops.transpose(batch)),
    }


@entry(sizes=[{"n": n} for n in (1, 16, 17, 700, 1025)], x="n 40 float32 normal")
def sums_over_rows(x):
    """In a loop of their own over an axis, over two axes, or beside others."""
    squares = ops.sum(ops.square(x), axis=1)
    return {
        "columns": ops.sum(x, axis=0),
        "mean of columns": ops.mean(x * x, 0) + 1.0,
        "all": ops.sum(x),
        "total": ops.sum(squares),
        "of": ops.max(x, axis=0),
        "lengths": ops.sum(ops.sqrt(squares)),
        "most": ops.max(squares),
        "half": ops.sum(ops.reshape(x, (-1, 5, 8)), (0, 2)),
    }


@entry(sizes=({"n": 40},), on_ranks=False, x="n 0 float32 normal")
def sums_over_rows_of_no_columns(x):
    return {"none": ops.sum(ops.square(x), axis=0), "twice": x + x}


@entry(sizes=({"n": 40, "many": 70_000},), on_ranks=False, is_long=True, y="n many float32 whole")
def sums_over_rows_of_many_columns(y):
    """Too many to be kept for each block."""
    return {"many": ops.sum(ops.square(y), axis=0)}


@entry(
    sizes=({"n": 5, "s": 8}, {"n": 1, "s": 4}, {"n": 3, "s": 24}),
    steps=2,
    x="n s s 16 float32 normal",
    target="n s s 16 float32 normal",
    gamma="variable 16 float32 normal",
    beta="variable 16 float32 normal",
    kernel="variable 16 16 float32 normal",
)
def group_normalization(x, target, gamma, beta, kernel):
    """As a user would write it, with the gradients of its weights."""
    rows, height, width, features = x.shape
    grouped = ops.reshape(ops.tanh(x @ kernel.value), (rows, height, width, 4, features // 4))
    mean = ops.mean(grouped, (1, 2, 4), keepdims=True)
    variance = ops.var(grouped, (1, 2, 4), keepdims=True)
    y = ops.reshape((grouped - mean) / ops.sqrt(variance + 1e-2), x.shape) * gamma.value + beta.value
    loss = ops.mean(ops.square(y - target))
    descend(loss, gamma, beta, kernel)
    return {"loss": loss, "y": y}


@entry(types=("float64", "float32"), sizes=({"n": 3},), x="n 300 T whole", y="n 40 T normal")
def cumulative(x, y):
    """In kernels whose work is linear."""
    y = 1 + y / 10
    sums, products = ops.cumsum(x, 1), ops.cumprod(y, 1)
    slopes = gradients(ops.sum(ops.square(sums)) / 100 + ops.sum(products), [x, y])
    return {"sums": sums, "products": products, "of sums": slopes[0], "of products": slopes[1]}


# Products


@entry(types=("float64", "float32"), sizes=({"n": 11},), x="n 4 T normal", w="variable 4 3 T normal")
def products_of_every_kind(x, w):
    cube = ops.reshape(ops.concatenate([x, x * 2, x - 1], -1), (x.shape[0], 3, 4))
    return {
        "batch": cube @ w,
        "transposed": ops.transpose(cube, (0, 2, 1)) @ cube,
        "vector": ops.matmul(x, w[:, 1]),
        "columns": ops.matmul(x[:, ::2], w[::2]),
        "spread": ops.matmul(ops.broadcast_to(x[:, :1], (x.shape[0], 4)), w),
        "outer": ops.matmul(ops.transpose(x[:, :1]), x),
        "mixed": ops.matmul(ops.cast(x, "float32"), w),
    }


@entry(
    sizes=[{"n": n} for n in (1, 70, 700)], x="n 21 float32 normal", a="21 65 float32 normal", b="65 21 float32 normal"
)
def products_of_every_layout(x, a, b):
    long = ops.reshape(ops.concatenate([x] * 2, -1), (-1, 6, 7))
    return {
        "nn": ops.relu(x @ a),
        "nt": x @ ops.transpose(b),
        "tn": ops.transpose(x) @ x,
        "tt": ops.transpose(a) @ ops.transpose(x),
        "batch": ops.reshape(a, (3, 7, 65)) @ ops.reshape(b[:, :21], (3, 65, 7)),
        "rows of a batch": long @ ops.ones((7, 3)),
        "half": ops.sum(ops.reshape(x, (-1, 3, 7)) @ a[:7], (0, 2)),
    }


# Images


@entry(
    types=("float64", "float32"),
    sizes=({"n": 5}, {"n": 0}),
    steps=2,
    x="n 7 9 2 T normal",
    first="variable 3 3 2 4 T normal",
    second="variable 2 2 4 3 T normal",
)
def images(x, first, second, seeds):
    """Convolutions, pooling, padding and dropout."""
    image = ops.pad(x, [(0, 0), (1, 1), (1, 0), (0, 0)])
    hidden = ops.relu(ops.conv(image, first, strides=(1, 2), padding="same"))
    pooled = dropout(ops.max_pool(hidden, 2, 1, "same"), 0.5, seed=seeds)
    y = ops.conv(ops.concatenate([pooled, pooled * 2], 0), second, dilation_rate=2)
    of_views = ops.conv(image[:, ::2], first)  # so is its gradient, one number for all of a mean
    descend(ops.sum(ops.square(y)) / 100 + ops.sum(of_views) / 100, first, second, rate=0.01)
    return {"y": y}


@entry(types=("float64", "float32"), sizes=({"n": 30},), x="n 12 12 8 T normal", kernel="3 3 8 4 T normal")
def many_images(x, kernel):
    """More than are computed at once."""
    y = ops.conv(x, kernel)
    return {"y": y, "gradient": gradients(ops.sum(ops.square(y)), [kernel])[0]}


@entry(
    types=("float64", "float32"),
    sizes=({"n": 5},),
    on_ranks=False,
    x="n 2 4 6 T whole",
)
def rows_of_a_batch_as_channels(x):
    """Also of a rank that has others than the program was traced for."""
    turned = ops.transpose(x, (1, 2, 3, 0))
    convolved = ops.conv(turned, ops.ones((2, 2, x.shape[0], 3), x.dtype))
    of_each = ops.depthwise_conv(turned, ops.ones((2, 2, x.shape[0], 1), x.dtype))
    return {"pooled": ops.max_pool(turned, 2), "conv": convolved, "of each": of_each}


@entry(
    types=("float64", "float32"),
    sizes=({"n": 5, "c": 75}, {"n": 130, "c": 3}, {"n": 5, "c": 32}),
    x="n 7 6 c T normal",
    kernel="variable 3 2 c 1 T normal",
    wide="variable 2 3 c 1 T normal",
)
def depthwise_convolutions(x, kernel, wide):
    """Channels that fill blocks of 32, and those that are left; more images than a byte counts."""
    y = ops.depthwise_conv(x, kernel, strides=(2, 1), padding="same")
    y = ops.depthwise_conv(y, wide, padding="same", dilation_rate=(1, 2))
    (dx,) = gradients(ops.sum(ops.square(y)), [x])
    descend(ops.sum(ops.square(dx)) + ops.sum(ops.square(y)), kernel, wide, rate=1e-6)
    return {"y": y, "dx": dx}


@entry(types=("float64", "float32"), sizes=({"n": 9},), x="n 15 14 24 T normal", kernel="3 3 24 1 T normal")
def windows_that_overlap(x, kernel):
    """Of pooling, between threads; convolutions of each channel."""
    pooled = ops.max_pool(ops.depthwise_conv(x, kernel, padding="same"), 3, 2, "same")
    (dx,) = gradients(ops.sum(pooled**3), [x])
    (ddx,) = gradients(ops.sum(ops.square(dx)) / 100, [x])
    return {"pooled": pooled, "dx": dx, "ddx": ddx}


# Channels, type, image, window, strides, before: vectors that are filled, and their parts down to single numbers;
# windows of two by two, at the edges too, and others; pixels that no window sees, and windows that see none.
POOLED = [
    *((n, "float32", (4, 6), (2, 2), (2, 2), (0, 0)) for n in (15, 16, 34)),
    *((n, "float64", (5, 7), (3, 3), (2, 1), (1, 1)) for n in (6, 11)),
    (5, "int32", (3, 5), (2, 2), (1, 2), (1, 0)),
    (6, "float32", (7, 8), (1, 2), (3, 3), (0, 0)),
    (6, "float32", (3, 3), (2, 2), (1, 1), (3, 0)),
    (4, "float32", (5, 5), (4, 5), (1, 1), (2, 3)),
]


def pooled_size(image: tuple[int, int], window: tuple[int, int], strides: tuple[int, int], before: tuple[int, int]):
    """Return the size of what is pooled; as much as before an image lies behind it."""
    return tuple((n + 2 * a - k) // s + 1 for n, a, k, s in zip(image, before, window, strides, strict=True))


def _pooling_leaves() -> dict[str, str]:
    leaves = {}
    for number, (channels, dtype, image, *attributes) in enumerate(POOLED):
        cotangents = "whole" if dtype == "int32" else "values 1 -3 2 0 3 -1 inf 2 -2 1 0"
        for name, (height, width), fill in (
            ("x", image, "whole special"),
            ("dy", pooled_size(image, *attributes), cotangents),
            ("values", image, cotangents),
        ):
            leaves[f"{name}{number}"] = f"n {height} {width} {channels} {dtype} {fill}"
    return leaves


@entry(sizes=({"n": 2},), **_pooling_leaves())
def pooling(**leaves):
    """The first of equals is taken, and nothing of a window whose greatest is not a number."""
    results = {}
    for number, (_, _, image, window, strides, before) in enumerate(POOLED):
        x, dy, values = (leaves[f"{name}{number}"] for name in ("x", "dy", "values"))
        attributes = {"window": window, "strides": strides, "before": before}
        y = max_pool2d(x, **attributes, size=pooled_size(image, window, strides, before))
        results |= {f"y{number}": y, f"dx{number}": max_pool2d_input(x, y, dy, **attributes)}
        results[f"taken{number}"] = max_pool2d_take(x, y, values, **attributes)
    return results


# Loops

Loss = Callable[[Tensor, Variable, Variable], Tensor]
LOOPS: dict[str, Loss] = {}


def loop(sizes: Sequence[Mapping[str, int]] = ({"n": 5, "t": 4},), **options: Any) -> Callable[[Loss], Loss]:
    """Add a loss with loops to the table: its gradients, and a descent along one of them."""

    def add(loss_of: Loss) -> Loss:
        def step(x, u, b):
            loss = loss_of(x, u, b)
            slopes = gradients(loss, [u.value, b.value])
            if slopes[0] is not None:
                u.assign(u - 0.1 * slopes[0])
            return {"loss": loss} | {name: slope for name, slope in zip("ub", slopes, strict=True) if slope is not None}

        LOOPS[loss_of.__name__] = loss_of
        leaves = {"x": "t n 3 T normal", "u": "variable 3 3 T normal", "b": "variable 3 T normal"}
        types = ("float32", "float64")
        entry(types, sizes, steps=2, name=f"loop_{loss_of.__name__}", **options, **leaves)(step)
        return loss_of

    return add


@loop()
def recurrent(x, u, b, reverse=False):
    def cell(h, xt):
        h = ops.tanh(xt @ u + h @ u + b)
        return h, h * h

    h, ys = ops.scan(cell, ops.zeros((x.shape[1], 3), x.dtype), x, reverse=reverse)
    return ops.sum(h) + ops.mean(ys)


@loop()
def reversed_steps(x, u, b):
    return recurrent(x, u, b, reverse=True)


@loop()
def of_last(x, u, b):
    return ops.sum(ops.scan(lambda h, xt: (ops.sigmoid(xt @ u - h), None), x[0], x)[0] ** 2)


@loop()
def of_stacked(x, u, b):
    return ops.mean(ops.map(lambda xt: ops.softmax(xt @ u + b), x))


@loop()
def of_carries_that_nobody_reads(x, u, b):
    """The last carry lies where no other tensor does, though it is read by nobody."""
    return ops.mean(ops.scan(lambda h, xt: (ops.tanh(xt + h @ u), h * b), x[0], x)[1])


@loop()
def nested(x, u, b):
    def outer(h, xt):
        h, ys = ops.scan(lambda g, n: (ops.tanh(g @ u) + n, g * b), h, ops.cast(np.arange(3), x.dtype), reverse=True)
        return h + xt, ops.sum(ys, 0)

    h, ys = ops.scan(outer, x[0], x)
    return ops.mean(h * h) + ops.mean(ys)


@loop(pack=True)
def nested_over_slices(x, u, b):
    """The inner loop goes over a slice of the outer one, stacks what the outer one stacks, and captures its carry."""

    def outer(h, xt):
        g, ys = ops.scan(lambda g, part: (g + part * h, ops.tanh(part @ u)), h, xt)
        return h - ops.mean(ys) + 0.1 * g, ys

    h, ys = ops.scan(outer, x[0], ops.stack([x, 2 * x]) * b)
    return ops.mean(h * h) + ops.mean(ys * ys)


@loop()
def of_counter(x, u, b):
    return ops.sum(ops.fori_loop(0, 3, lambda n, h: ops.sin(h @ u) * ops.cast(n + 1, h.dtype), x[1]))


@loop()
def of_first(x, u, b):
    """What each step passes on is what the step before has read."""
    h, ys = ops.scan(lambda h, xt: ((xt, h[0] * b), h[1]), (x[0], x[1]), x)
    return ops.sum(ys * ys) + ops.sum(h[1])


@loop(pack=True)
def chained(x, u, b):
    """A loop over what another one has stacked, which begins with its last carry."""
    h, ys = ops.scan(lambda h, xt: (ops.tanh(h + xt @ u), h * xt), x[0] * 0.5, x)
    g, zs = ops.scan(lambda g, yt: (ops.tanh(g @ u + yt) + h, (g, g * b)), h, ys, reverse=True)
    return ops.mean(g * h) + ops.mean(zs[0]) + ops.mean(zs[1])


@loop()
def of_blocks_computed_again(x, u, b):
    block = remat(lambda x, k: ops.tanh(x @ u + k * b) * ops.sigmoid(x))
    h, ys = ops.scan(lambda h, xt: (block(h, 1) + xt, block(xt, 2)), x[0], x)
    return ops.mean(block(block(h, 3), 4)) + ops.mean(ys * ys)


@loop(sizes=[{"n": 5, "t": 0}], eager=False)  # which has no parts to stack
def of_no_steps(x, u, b):
    return of_any_number_of_steps(x, u, b)


@loop(sizes=[{"n": 5, "t": length} for length in (1, 2, 7)])
def of_any_number_of_steps(x, u, b):
    h, ys = ops.scan(lambda h, xt: (ops.tanh(h @ u + xt), h), ops.ones((x.shape[1], 3), x.dtype), x)
    return ops.sum(h * b) + ops.sum(ys * ys)
