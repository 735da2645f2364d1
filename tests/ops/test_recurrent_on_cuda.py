"""Loops in one launch, by kernels/recurrent.cuh, and their gradients, against NumPy in float64."""

import functools
import itertools

import numpy as np
import pytest

import dptrain as dp
from dptrain import ops
from dptrain.backend.cuda import persistent
from dptrain.layers import GRU, LSTM, RNN, Bidirectional, GRUCell, LSTMCell, SimpleRNN
from dptrain.program.dims import Dim
from dptrain.program.execute import evaluate
from dptrain.program.gradient import gradients
from dptrain.program.program import trace
from tests.sample import sample
from tests.tolerances import assert_near

LAYERS = {
    "LSTM": LSTM,
    "GRU": GRU,
    "GRU of Keras 1": functools.partial(GRU, reset_after=False),
    "SimpleRNN": SimpleRNN,
}
# Rows, steps, features and units: around the rows of a block, of columns in fours, slices of terms and threads.
SIZES = [
    (5, 3, 2, 3),
    (1, 2, 1, 1),
    (4, 2, 3, 4),
    (9, 7, 1, 33),
    (3, 1, 4, 65),
    (3, 2, 4, 65),
    (2, 2, 1, 128),
    (8, 5, 3, 12),
]


def program_of(layer, rows, steps, features, masked=False):
    """Return a step with a layer's results and all its gradients, and values of its inputs."""
    layer.build((None, steps, features))
    rng = np.random.default_rng(rows + 10 * steps + 100 * features)
    new = [rng.normal(size=weight.shape) / np.sqrt(weight.shape[0]) for weight in layer.weights]
    layer.set_weights([weight.astype(np.float32) for weight in new])

    def step(x, w, mask=None):
        y = layer(x, mask=mask)
        grads = gradients(ops.sum(y * w), [x, *(weight.value for weight in layer.trainable_weights)])
        return {"y": y, **{f"d{number}": grad for number, grad in enumerate(grads)}}

    shapes = {"x": (steps, features), "w": layer.compute_output_shape((None, steps, features))[1:]}
    shapes |= {"mask": (steps,)} if masked else {}
    values = {name: rng.normal(size=(rows, *shape)).astype(np.float32) for name, shape in shapes.items()}
    if masked:
        values["mask"] = values["mask"] > 0
    specs = {name: ((Dim.rows(rows), *value.shape[1:]), value.dtype.name) for name, value in values.items()}
    return trace(step, specs), values


def outputs_of(cuda_backend, program, values, rows):
    executable = cuda_backend.executable(program, values, rows=rows)
    executable.run()
    first = {name: np.array(value) for name, value in executable.outputs.items()}
    executable.run()
    for name, value in executable.outputs.items():
        assert value.tobytes() == first[name].tobytes(), f"{name} has other bits in the next step"
    return executable, first


def check(cuda_backend, program, values, rows, loops, scale=1.0):
    """Run a program whose source has so many loops in one launch, and compare it with NumPy in float64."""
    executable, actual = outputs_of(cuda_backend, program, values, rows)
    assert executable.source.count("for (int turn = 0;") == loops
    exact = {name: value if value.dtype == np.bool_ else value.astype(np.float64) for name, value in values.items()}
    state = {variable: variable.numpy().astype(np.float64) for variable in program.state}
    for name, value in evaluate(program, exact, state, rows=rows)[0].items():
        try:
            assert_near(actual[name], value, "float32", 4 * scale * max(1.0, np.abs(value).max(initial=0)))
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None
    return executable


@pytest.mark.parametrize(("size", "name"), sample(itertools.product(SIZES, LAYERS), 29))
def test_recurrent_layers(cuda_backend, name, size):
    rows, steps, features, units = size
    program, values = program_of(LAYERS[name](units, return_sequences=rows % 2 == 1), rows, steps, features)
    check(cuda_backend, program, values, rows, 2 if steps > 1 else 0, np.sqrt(rows * steps))


@pytest.mark.parametrize(
    ("name", "masked"), sample([(name, masked) for name in LAYERS for masked in (True, False)], 8, 4)
)
def test_reversed_steps_and_masks(cuda_backend, name, masked):
    layer = LAYERS[name](5, return_sequences=True, go_backwards=True)
    check(cuda_backend, *program_of(layer, 6, 4, 3, masked), 6, 2, 5)


@pytest.mark.long
def test_both_directions_in_one_launch(cuda_backend):
    program, values = program_of(Bidirectional(LSTM(4)), 5, 3, 2)
    executable = check(cuda_backend, program, values, 5, 4, 4)
    launches = [line for line in executable.source.splitlines() if line.startswith("    run_loop")]
    assert len(launches) == 2


@pytest.mark.long
def test_stacked_cells(cuda_backend):
    program, values = program_of(RNN([LSTMCell(3), GRUCell(6)], return_sequences=True), 6, 3, 4)
    check(cuda_backend, program, values, 6, 4, 5)


@pytest.mark.long
@pytest.mark.parametrize(("rows", "of_block"), sample([(129, 4), (128, 2), (257, 8), (0, 2)], 4))
def test_more_rows_for_a_block(cuda_backend, rows, of_block):
    program, values = program_of(GRU(3), rows, 3, 1)
    executable = check(cuda_backend, program, values, rows, 2, 40)
    assert f"rows_product<{of_block}>" in executable.source


def of_cell(units, columns):
    """Return a step of a loop whose product has so many columns, of which some are used."""

    def step(x, u, h):
        def cell(h, xt):
            z = h @ u
            h = ops.tanh(z[:, :units] + z[:, columns - units :] * xt)
            return h, h * 0.5

        h, ys = ops.scan(cell, h, x)
        return {"h": h, "ys": ys}

    return step


# One thread for four columns: 1,024 take all threads, with more each has several. Sums of 7 to 17 terms are cut into up
# to three slices of at least 8, those of 120 by threads that no column needs.
@pytest.mark.parametrize(
    ("units", "columns"),
    sample([(7, 9), (8, 1023), (9, 1025), (16, 1024), (17, 40), (120, 1090), (64, 512), (120, 127), (9, 2049)], 3),
)
def test_products_of_any_width(cuda_backend, units, columns):
    rng = np.random.default_rng(units)
    values = {
        "x": rng.normal(size=(3, 5, units)).astype(np.float32),
        "u": (rng.normal(size=(units, columns)) / np.sqrt(units)).astype(np.float32),
        "h": rng.normal(size=(5, units)).astype(np.float32),
    }
    specs = {
        "x": ((3, Dim.rows(5), units), "float32"),
        "u": ((units, columns), "float32"),
        "h": ((Dim.rows(5), units), "float32"),
    }
    check(cuda_backend, trace(of_cell(units, columns), specs), values, 5, 1)


@pytest.mark.parametrize(("rows", "steps"), sample([(9, 3), (1, 2), (130, 4), (8, 5), (0, 3)], 4))
def test_sums_over_rows_and_steps(cuda_backend, rows, steps):
    """The gradient of a gain is a sum of what nothing else needs, so blocks keep sums of their own rows."""

    def step(x, w, h, u, gain):
        last, ys = ops.scan(lambda h, xt: (ops.tanh(xt + (h @ u) * gain), h), h, x)
        grads = gradients(ops.sum(ys * w) + ops.sum(last), [x, h, u, gain])
        return dict(zip(("dx", "dh", "du", "dgain"), grads, strict=True))

    rng = np.random.default_rng(rows)
    shapes = {"x": (steps, rows, 7), "w": (steps, rows, 7), "h": (rows, 7), "u": (7, 7), "gain": (7,)}
    values = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    of_rows = Dim.rows(rows)
    shapes |= {"x": (steps, of_rows, 7), "w": (steps, of_rows, 7), "h": (of_rows, 7)}
    specs = {name: (shape, "float32") for name, shape in shapes.items()}
    executable = check(cuda_backend, trace(step, specs), values, rows, 2, np.sqrt(rows * steps))
    assert "parts_" in executable.source


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_halves(cuda_backend, monkeypatch, dtype):
    """Beside the usual launches, which round as often."""
    policy = dp.DTypePolicy(f"mixed_{dtype}")
    program, values = program_of(LSTM(6, return_sequences=True, dtype=policy), 5, 3, 4)
    executable, actual = outputs_of(cuda_backend, program, values, 5)
    assert executable.source.count("for (int turn = 0;") == 2
    monkeypatch.setattr(persistent, "_WEIGHTS", 0)
    executable, launched = outputs_of(
        cuda_backend, program_of(LSTM(6, return_sequences=True, dtype=policy), 5, 3, 4)[0], values, 5
    )
    assert "for (int turn = 0;" not in executable.source
    for name, value in launched.items():
        near = 2.0**-6 if dtype == "bfloat16" else 2.0**-9
        np.testing.assert_allclose(actual[name], value, rtol=near, atol=near * np.abs(value).max())


def test_a_last_batch_of_fewer_rows(cuda_backend):
    program, values = program_of(GRU(3), 6, 3, 2)
    few = {name: value[:5] for name, value in values.items()}
    check(cuda_backend, program, few, 5, 2, 4)


@pytest.mark.long
def test_a_text_classifier_trains_as_on_a_cpu(cuda_backend):
    """From texts to an LSTM: the same losses on both devices, and it learns."""
    texts = ["what a good film", "a bad film", "good good", "bad", "the actors are good", "no it is bad bad"] * 4
    labels = np.array([1, 0, 1, 0, 1, 0] * 4)
    vectorize = dp.layers.TextVectorization(max_tokens=20, output_sequence_length=6)
    vectorize.adapt(texts)
    ids = np.asarray(vectorize(texts))
    losses, weights = {}, None
    for device in ("cpu", "cuda"):
        model = dp.Sequential(
            [
                dp.Input((6,), dtype="int32"),
                dp.layers.Embedding(20, 8, mask_zero=True),
                LSTM(8),
                dp.layers.Dense(1, "sigmoid"),
            ]
        )
        model.compile(dp.optimizers.Adam(0.05), "binary_crossentropy", device=device)
        if weights is not None:
            model.set_weights(weights)
        weights = model.get_weights()
        losses[device] = model.fit(ids, labels, batch_size=10, epochs=6, shuffle=False, verbose=0).history["loss"]
    np.testing.assert_allclose(losses["cuda"], losses["cpu"], rtol=1e-4)
    assert losses["cuda"][-1] < 0.5 * losses["cuda"][0]
