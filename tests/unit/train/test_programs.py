"""A model's steps as programs: what is sent, traced and looked up."""

import re
from types import SimpleNamespace

import numpy as np
import pytest

import dptrain as dp
from dptrain.backend.cpu.backend import CpuBackend
from dptrain.errors import DeviceError, DeviceMemoryError
from dptrain.layers import Dense
from dptrain.optimizers import OPTIMIZERS
from dptrain.program.dims import Dim
from dptrain.program.program import trace
from dptrain.program.sharding import messages
from dptrain.program.sharding.placement import place
from dptrain.train.programs import Programs
from tests.thread_ranks import on_ranks

OPTIONS = [{}, {"clipnorm": 1.0}, {"global_clipnorm": 1.0}, {"clipvalue": 0.5}, {"gradient_accumulation_steps": 2}]


def placed(model: dp.Sequential):
    model.build()
    step = model._make_step("train")
    inputs = {"x": ((Dim.rows(8), 6), np.float32), "y": ((Dim.rows(8),), np.int64)}
    return place(trace(lambda x, y: step.function((x, y)), inputs))


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: next(iter(options), "plain"))
@pytest.mark.parametrize("name", sorted({optimizer.__name__ for optimizer in OPTIMIZERS.values()}))
def test_a_step_sends_one_message_with_each_sum_once(name, options):
    """Four gradients, the loss and the hits: whatever an optimizer makes of gradients, it makes of their sums."""
    layers = [Dense(8, "relu", input_shape=(6,), kernel_regularizer="l2"), Dense(3, "softmax")]
    model = dp.Sequential(layers)
    optimizer = getattr(dp.optimizers, name)(**options)
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    (stage, _) = messages.stages(placed(model))
    ((*sums,),) = stage.messages
    assert sorted(one.shape for one in sums) == [(), (), (3,), (6, 8), (8,), (8, 3)]


def test_logs_fetch_no_weights():
    """Reading the means of a step needs their totals alone, wherever the weights are."""
    model = dp.Sequential([Dense(8, "relu", input_shape=(6,)), Dense(3, "softmax")])
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    derived = placed(model).derived
    assert sorted(derived.outputs) == ["accuracy", "loss"]
    assert {variable.name for variable in derived.state} == {"total", "count"}
    assert len(derived.state) == 4


class SmallBackend(CpuBackend):
    """A device with so many bytes for a program's intermediate results."""

    def __init__(self, memory):
        super().__init__(jit_compile=False)
        self.memory = memory

    def executable(self, program, arrays, *, rows, **place):
        nbytes = self.planned_bytes(program, rows)
        if nbytes > self.memory:
            raise DeviceMemoryError("out of memory", "intermediate results", nbytes, self.memory, {})
        return super().executable(program, arrays, rows=rows, **place)


def train(memory, rows):
    model = dp.Sequential([Dense(50, "relu", input_shape=(100,)), dp.layers.Dropout(0.5), Dense(10, "softmax")])
    model.compile("adam", "sparse_categorical_crossentropy")
    model._put_on(SmallBackend(memory))
    model.train_on_batch(np.zeros((rows, 100), np.float32), np.zeros(rows, np.int64))


@pytest.mark.parametrize("memory", [500_000, 1_000_000, 7_654_321])
def test_the_batch_that_would_fit_fits(memory):
    with pytest.raises(DeviceError, match=r"would fit instead of 20000$") as caught:
        train(memory, 20_000)
    fitting = int(re.search(r"about (\d+) rows", str(caught.value)).group(1))
    train(memory, fitting)
    with pytest.raises(DeviceError):
        train(memory, int(fitting * 1.3) + 20)


def test_what_no_batch_size_can_mend():
    with pytest.raises(DeviceError, match=r"the model alone takes \d+\.\d KiB: make it smaller"):
        train(100, 1)


class Recorded:
    """A prepared program."""

    def __init__(self):
        self.closed = False

    def close(self):
        self.closed = True


class LinkedBackend(CpuBackend):
    """A device whose messages NCCL sends; with room for a second program, or not."""

    def __init__(self, has_room):
        super().__init__(jit_compile=False)
        self.transport, self.has_room, self.prepared = "nccl", has_room, []

    def executable(self, program, arrays, **place):
        if not self.has_room and any(not other.closed for other in self.prepared):
            raise DeviceMemoryError("out of memory", "intermediate results", 1, 0, {})
        self.prepared.append(Recorded())
        return self.prepared[-1]


def test_ranks_record_messages_between_gpus_together():
    """If one rank has no memory for a second program, all ranks drop the first and prepare the second again."""
    model = dp.Sequential([Dense(3, "softmax", input_shape=(6,))])
    model.compile("sgd", "sparse_categorical_crossentropy")
    program, batch = placed(model), SimpleNamespace(names=[])

    def prepare(comm):
        backend = LinkedBackend(has_room=comm.rank != 1)
        programs = Programs(backend, comm)
        for order in (np.arange(8), np.arange(8)[::-1]):
            rows = SimpleNamespace(order=order, arrays=[], samples=None)
            programs._executable(program, batch, rows, SimpleNamespace(rows=4, first_row=0), comm)
        return [recorded.closed for recorded in backend.prepared]

    # Ranks 0 and 2 had prepared the second beside the first.
    assert on_ranks(3, prepare) == [[True, True, False], [True, False], [True, True, False]]


# Predictions of a few rows, one after another


def small_model() -> dp.Sequential:
    model = dp.Sequential([Dense(6, "gelu", input_shape=(5,)), Dense(3, "softmax")], seed=2)
    model.compile(device="cpu")
    return model


def count_prepared(model: dp.Model, monkeypatch) -> list[int]:
    """Note the rows of every program that the model's device prepares from now on."""
    results: list[int] = []
    prepare = CpuBackend.executable

    def prepared(self, *arguments, **place):
        results.append(place["rows"])
        return prepare(self, *arguments, **place)

    monkeypatch.setattr(CpuBackend, "executable", prepared)
    return results


def test_warm_predictions_prepare_nothing(monkeypatch):
    model, x = small_model(), np.random.default_rng(1).random((20, 5))
    prepared = count_prepared(model, monkeypatch)
    full = model.predict(x, verbose=0)
    for rows in [1, 7, 2, 3, 1, 5, 16, 8, 13, 4, 20]:
        for ask in (lambda part: model.predict(part, verbose=0), model.predict_on_batch):
            np.testing.assert_allclose(ask(x[:rows]), full[:rows], 1e-5)  # BLAS sums one row in another order
    assert sorted(prepared) == [1, 2, 4, 8, 16, 32]
    model.set_weights([2 * weight for weight in model.get_weights()])  # what was prepared reads the new ones
    np.testing.assert_allclose(model.predict(x[:1], verbose=0), model.predict(x, verbose=0)[:1], 1e-5)
    assert len(prepared) == 6


class Together(dp.Model):
    """Rows that depend on each other, or on how many there are."""

    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def call(self, inputs):
        return self.function(inputs)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x - dp.ops.mean(x, 0),
        lambda x: x / x.shape[0],
        lambda x: x * float(int(x.shape[0]) + 1),
        lambda x: dp.ops.softmax(x, 0),
        lambda x: dp.ops.concatenate([x, x]),
    ],
)
def test_rows_that_depend_on_each_other_are_not_padded(function):
    model, x = Together(function), np.random.default_rng(1).random((7, 2)).astype(np.float32)
    model.compile(device="cpu")
    for rows in (3, 7, 4, 3):
        expected = function(dp.ops.convert_to_tensor(x[:rows])).numpy()
        np.testing.assert_allclose(model.predict(x[:rows], verbose=0), expected, rtol=1e-5)


def test_many_sizes_of_batches_do_not_pile_up(monkeypatch):
    monkeypatch.setattr("dptrain.train.programs._MAX_SMALL", 70)
    model = small_model()
    model.compile("sgd", "sparse_categorical_crossentropy", device="cpu")
    for rows in [*range(1, 81), 3, 80]:
        x = np.random.default_rng(rows).random((rows, 5))
        loss = model.test_on_batch(x, np.arange(rows) % 3)
        expected = -np.log(model.predict(x, verbose=0)[np.arange(rows), np.arange(rows) % 3]).mean()
        assert loss == pytest.approx(expected, rel=1e-5)
    programs = model._programs
    assert len(programs._placed) == len(programs._traced) == 70
    assert len(programs._prepared) == 32


@pytest.mark.parametrize(
    ("function", "for_any"),
    [
        (lambda x: x * 2 + x.shape[0], True),
        (lambda x: x * int(x.shape[0]), False),
        (lambda x: dp.ops.reshape(x, (-1, 1)), True),
        (lambda x: x if int(x.shape[0]) > 8 else -x, False),
        (lambda x: x[: int(x.shape[0]) - 1], False),
    ],
)
def test_a_program_is_for_one_size_where_the_number_of_rows_is_a_number(function, for_any):
    program = trace(lambda x: {"y": function(x)}, {"x": ((Dim.rows(8), 2), np.float32)})
    assert program.shape_specialised is not for_any


def test_who_waits_for_a_compiler_is_told_which_step(monkeypatch):
    from dptrain.backend.cpu import compile as compiling
    from dptrain.runtime.storage import cache

    if compiling.compiler() is None:
        pytest.skip("no C++ compiler")
    purposes = []
    library = compiling._compiled
    monkeypatch.setattr(
        compiling, "_compiled", lambda *text: (purposes.append(cache._PURPOSE.get()), library(*text))[1]
    )
    model = dp.Sequential([dp.layers.Input((3,)), dp.layers.Dense(5)])
    model.compile("sgd", "mse", jit_compile=True)
    x = np.ones((16, 3), np.float32)
    monkeypatch.setattr(cache, "_checked", lambda path: (_ for _ in ()).throw(FileNotFoundError()))
    compiling.library.cache_clear()
    model.fit(x, np.ones((16, 5)), batch_size=8, verbose=0)
    compiling.library.cache_clear()
    assert "the train step for batches of 8 rows" in purposes
