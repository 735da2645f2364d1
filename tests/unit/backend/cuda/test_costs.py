"""What kernels ask of a GPU: bytes and operations of small programs, by hand."""

import numpy as np
import pytest

from dptrain import ops
from dptrain.backend.cuda.compile import Resources
from dptrain.backend.cuda.compose import Composition
from dptrain.backend.cuda.cost.loads import loads, short, table
from dptrain.backend.cuda.cost.roofline import GPUS, predict
from dptrain.backend.cuda.generate import blocks_of
from dptrain.ops.indexing import take_rows
from dptrain.program.dims import Dim
from dptrain.program.program import ROWS, trace
from dptrain.program.tensor import Variable

B = 8


def composed(function, precision="float32", **inputs):
    shapes = {name: (shape if isinstance(shape, tuple) else (shape,), dtype) for name, (shape, dtype) in inputs.items()}
    return Composition(trace(function, shapes), precision=precision)


def dense(precision="float32", inner=4):
    w = Variable(np.ones((inner, 5), np.float32), "w")
    b = Variable(np.ones((5,), np.float32), "b")
    return composed(lambda x: {"y": ops.relu(x @ w + b)}, precision, x=((Dim.rows(B), inner), "float32"))


def test_a_product_with_what_is_computed_of_it():
    (load,) = loads(dense())
    assert (load.blocks, load.threads) == (1, 256)
    assert load.read == 4 * (8 * 4 + 4 * 5 + 5)
    assert load.written == 4 * 8 * 5
    assert load.operations == {"FP32": 2 * 8 * 4 * 5 + 8 * 5 + 8 * 5}
    assert load.shared == 2 * 64 * (32 + 4 + 32 + 4) * 4, "two stages of 64 terms of both factors, padded"
    assert (load.registers, load.spilled) == (None, None)


def test_tensor_cores_compute_the_product_alone():
    (load,) = loads(dense("tf32"))
    assert load.operations == {"TF32": 320, "FP32": 80}


def test_slices_of_a_long_sum_meet_in_memory():
    composition = dense(inner=1024)
    (load,) = loads(composition)
    (parts,) = [
        argument.value for argument in composition.stages[0][0].functions[0].arguments if argument.name == "parts"
    ]
    assert parts == load.blocks * 32 * 32 * 4
    assert load.blocks > 1
    assert load.read == 4 * (8 * 1024 + 1024 * 5 + 5) + parts
    assert load.written == 4 * 8 * 5 + parts


def test_rows_that_are_gathered_are_read_and_no_others():
    def step(x, rows):
        return {"y": ops.cast(take_rows(x, rows), "float32") * 2.0}

    load, counter = loads(composed(step, x=((1000, 4), "uint8"), **{ROWS: (Dim.rows(B), "int64")}))
    assert load.read == 8 * 4 * 1 + 8 * 8
    assert load.written == 8 * 4 * 4
    assert (counter.read, counter.written, counter.operations) == (8, 8, {}), "the number of the step"


def test_parts_that_are_viewed_are_read_and_no_others():
    (load,) = loads(composed(lambda x: {"y": ops.relu(x[:, :3])}, x=((Dim.rows(B), 100), "float32")))
    assert (load.read, load.written, load.operations) == (4 * 8 * 3, 4 * 8 * 3, {"FP32": 24})


def test_sums_read_all_and_what_is_read_twice_counts_once():
    def step(x):
        return {"total": ops.sum(x * x + x)}

    (load,) = loads(composed(step, x=((Dim.rows(B), 100), "float32")))
    assert load.operations == {"FP32": 3 * 800}
    assert load.read == 4 * 800 + 8, "and a part of the sum"
    assert load.written == 4 + 8


def test_state_is_read_and_written_where_it_is():
    w = Variable(np.ones((6, 5), np.float32), "w")

    def step(x):
        w.assign(w - 0.1 * x)
        return {}

    (load,) = loads(composed(step, x=((6, 5), "float32")))
    assert (load.read, load.written, load.operations) == (240, 120, {"FP32": 60})


@pytest.fixture
def training():
    """A training step of several kernels."""
    v = Variable(np.ones((30, 7), np.float32), "v")

    def step(x):
        loss = ops.mean(ops.square(ops.tanh(x @ v)))
        loss.backward()
        v.assign(v - 0.1 * v.value.grad)
        return {"loss": loss}

    return composed(step, x=((Dim.rows(B), 30), "float32"))


def test_loads_are_those_of_the_launches(training):
    kernels = [kernel for stage in training.stages for kernel in stage]
    kernel_loads = loads(training)
    assert [load.name for load in kernel_loads] == [kernel.name for kernel in kernels]
    for load, kernel in zip(kernel_loads, kernels, strict=True):
        assert load.blocks == sum(blocks_of(function, kernel.threads) for function in kernel.functions)
    products = 2 * 2 * 8 * 30 * 7  # forward, and the gradient of the kernel
    assert sum(load.operations["FP32"] for load in kernel_loads) >= products


def test_the_table(training):
    first, *others = loads(training)
    kernel_loads = loads(training, {first.name: Resources(40, 16, 5000)})
    assert (kernel_loads[0].registers, kernel_loads[0].spilled, kernel_loads[0].shared) == (40, 16, 5000)
    assert kernel_loads[1:] == others
    lines = table(kernel_loads, {"measured": [1e-6 * (number + 1) for number in range(len(kernel_loads))]})
    assert max(map(len, table(kernel_loads))) <= 100
    head, *rows, step, rate = (line.split() for line in lines)
    assert " ".join(head) == "blocks thr shared regs spill /SM read written ops A100 H100 H200 measured"
    assert len(rows) == len(kernel_loads)
    assert rows[0][:6] == ["1", str(first.blocks), str(first.threads), "5.00k", "40", "16"]
    assert rows[1][4:6] == ["-", "-"]
    for row, load in zip(rows, kernel_loads, strict=True):
        assert row[7:10] == [short(load.read), short(load.written), short(sum(load.operations.values()))]
        assert row[10::2][:3] == [f"{1e6 * predict(load, gpu).seconds:.1f}" for gpu in GPUS]
    assert step[0] == "step"
    assert step[-1] == f"{sum(range(len(kernel_loads) + 1)):.1f}"
    assert rate[0] == "steps/s"
    assert int(rate[1].replace(",", "")) == pytest.approx(1e6 / float(step[1]), rel=0.01)


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"), (999, "999"), (1000, "1.00k"), (9994, "9.99k"), (9996, "10.0k"), (99_940, "99.9k"), (99_960, "100k"),
        (999_400, "999k"), (999_600, "1.00M"), (123_456_789, "123M"), (68_719_476_736, "68.7G"), (10**15, "1.00P"),
    ],
)  # fmt: skip
def test_numbers_in_five_columns(number, text):
    assert short(number) == text
