"""Recurrent layers: Keras' numbers, masks and states, what batches leave to others, files; and what is refused."""

import json

import numpy as np
import pytest

import dptrain as dp
from dptrain import layers as L  # noqa: N812
from dptrain import ops, tree
from dptrain.errors import ConfigError
from dptrain.layers.recurrent import cell as cell_module
from dptrain.program.tensor import mask_of
from tests.unit.layers import golden_recurrent as golden

GOLDEN = json.loads(golden.PAGE.read_text())
X = golden.X.astype(np.float32)
MASK = golden.MASK


@pytest.mark.parametrize("name", golden.layers(L))
def test_outputs_and_states_are_those_of_keras(name):
    layer, states = golden.layers(L)[name]
    layer._set_dtype("float64")
    outputs = golden.results(layer, states, np.asarray, tree.flatten)
    for mine, theirs in zip(outputs, GOLDEN[name], strict=True):
        for actual, other in zip(mine, theirs, strict=True):
            np.testing.assert_allclose(actual, other, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("make", [L.LSTM, lambda units: L.Bidirectional(L.GRU(units, dropout=0.2, seed=3))])
def test_several_steps_an_execution_have_the_bits_of_single_ones(make):
    """Loops within the loop over batches."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(28, 6, 3)).astype(np.float32), rng.normal(size=(28, 2)).astype(np.float32)
    runs = []
    for steps in (1, 3):
        dp.utils.set_random_seed(1)
        model = dp.Sequential([L.Input((6, 3)), make(4), L.Dense(2)])
        model.compile("adam", "mse", steps_per_execution=steps)
        model.fit(x, y, batch_size=4, epochs=2, verbose=0)
        runs.append(model.get_weights())
    for single, other in zip(*runs, strict=True):
        np.testing.assert_array_equal(single, other)


class Counter(L.Layer):
    """A cell that adds up its inputs, with two states of different ranks."""

    state_size, output_size = (3, 1), 3

    def call(self, inputs, states):
        total, steps = states
        return total + inputs, (total + inputs, steps + 1.0)


class Plain:
    """A cell that is no layer."""

    state_size = 3

    def call(self, inputs, states):
        return inputs + states[0], inputs + states[0]


def test_masked_steps_of_a_stack_of_ones_own_whose_last_cell_has_a_single_state():
    class Own(L.StackedRNNCells):
        """Steps through its cells together."""

    rng = np.random.default_rng(0)
    x, mask = rng.normal(size=(3, 4, 2)).astype(np.float32), rng.random((3, 4)) < 0.5
    cells = [L.LSTMCell(3), Plain()]
    expected = L.RNN(cells, return_sequences=True)(x, mask=mask)
    np.testing.assert_allclose(L.RNN(Own(cells), return_sequences=True)(x, mask=mask), expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda x, h: x + h, r"cell Wrong must return \(output, states\), found <tensor"),
        (lambda x, h: (x, [h, h]), r"cell Wrong returned 2 state\(s\), expected 1: see its state_size"),
        (lambda x, h: (x, [h[:, :1]]), r"an RNN's state\) from float32 \(None, 3\) to float32 \(None, 1\)"),
    ],
)
def test_a_cell_with_a_mistake_is_told_which(returned, message):
    class Wrong(Plain):
        def call(self, inputs, states):
            return returned(inputs, states[0])

    with pytest.raises(ConfigError, match=message):
        L.RNN(Wrong())(dp.Input((4, 3)))


@pytest.mark.parametrize("eagerly", [False, True])
def test_a_cell_adds_losses_only_where_steps_run_eagerly(eagerly):
    class Adding(Counter):
        def call(self, inputs, states):
            self.add_loss(ops.mean(inputs))
            return super().call(inputs, states)

    model = dp.Sequential([dp.Input(X.shape[1:]), L.RNN(Adding()), L.Dense(1)])
    model.compile("sgd", "mse", run_eagerly=eagerly, device="cpu", jit_compile=False)
    if eagerly:
        assert np.isfinite(model.fit(X, X[:, 0, :1], verbose=0).history["loss"]).all()
        return
    with pytest.raises(ConfigError, match=r"^layer 'adding' calls add_loss, .* inside a loop .*; compute it outside"):
        model.fit(X, X[:, 0, :1], verbose=0)


@pytest.mark.parametrize("cell", [Counter, Plain])
def test_a_cell_of_ones_own(cell):
    output, total, *steps = L.RNN(cell(), return_sequences=True, return_state=True)(X)
    np.testing.assert_allclose(output, X.cumsum(1), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(total, X.sum(1), rtol=1e-6, atol=1e-6)
    if steps:
        np.testing.assert_array_equal(steps[0], np.full((2, 1), 4.0))


def test_a_stack_of_ones_own_cells_skips_masked_steps():
    masked = np.where(MASK[..., None], X, 0.0)
    output = L.RNN([Plain(), Counter()])(X, mask=MASK)
    np.testing.assert_allclose(
        output, [step.cumsum(0).sum(0) for step in (x[m] for x, m in zip(X, MASK, strict=True))], rtol=1e-5, atol=1e-6
    )
    np.testing.assert_allclose(L.RNN(Plain())(X, mask=MASK), masked.sum(1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("make", [L.SimpleRNN, L.LSTM, L.GRU])
def test_unrolled_layers_compute_the_same(make):
    rolled, unrolled = make(3, return_sequences=True), make(3, return_sequences=True, unroll=True)
    rolled(X), unrolled(X)
    unrolled.set_weights(rolled.get_weights())
    for options in ({}, {"mask": MASK | [[True, False, False, False]]}):
        np.testing.assert_array_equal(rolled(X, **options), unrolled(X, **options))


def test_a_mask_goes_on_with_all_steps_and_ends_with_the_last():
    masked = L.Masking()(np.where(MASK[..., None], X, 0.0))
    np.testing.assert_array_equal(mask_of(L.LSTM(2, return_sequences=True)(masked)), MASK)
    assert mask_of(L.LSTM(2)(masked)) is None
    output, h, c = L.LSTM(2, return_sequences=True, return_state=True)(masked)
    np.testing.assert_array_equal(mask_of(output), MASK)
    assert mask_of(h) is mask_of(c) is None
    np.testing.assert_array_equal(mask_of(L.Bidirectional(L.GRU(2, return_sequences=True))(masked)), MASK)
    np.testing.assert_array_equal(mask_of(L.TimeDistributed(L.Dense(2))(masked)), MASK)


def test_masked_steps_are_as_if_they_were_not_there():
    layer = L.GRU(3)
    output = layer(X, mask=MASK).numpy()
    for row, x, counts in zip(output, X, MASK, strict=True):
        np.testing.assert_allclose(row, layer(x[None, counts])[0], rtol=1e-6)


# States


def test_states_of_one_layer_begin_another():
    inputs = dp.Input((None, 3))
    _, *states = L.LSTM(2, return_state=True)(inputs)
    model = dp.Model(inputs, L.LSTM(2)(inputs, initial_state=states))
    first, second = model.layers[1:]
    _, h, c = first(X)
    np.testing.assert_allclose(model.predict(X, verbose=0), second(X, initial_state=[h, c]), rtol=1e-6)


def test_a_stateful_layer_goes_on_where_the_batch_before_ended():
    layer, parts = L.LSTM(2), L.LSTM(2, stateful=True)
    expected = layer(X)
    parts(X[:, :2])
    parts.set_weights(layer.get_weights())
    parts.reset_state()
    parts(X[:, :2])
    np.testing.assert_allclose(parts(X[:, 2:]), expected, rtol=1e-6)
    assert len(parts.weights) == 3
    with pytest.raises(ConfigError, match=r"- Expected batch size: 2\n- Received batch size: 1"):
        parts(X[:1])


def stateful(rows=2):
    model = dp.Sequential([dp.Input(batch_shape=(rows, 2, 3)), L.GRU(3, stateful=True, seed=1), L.Dense(1)], seed=4)
    model.compile(dp.optimizers.SGD(0.1), "mse")
    return model


@pytest.mark.parametrize("eager", [False, True])
def test_a_stateful_model_trains_over_batches(eager):
    """Truncated backpropagation: each batch begins with the states before it, of which it has no gradient."""
    x, y = golden.numbers((8, 2, 3)).astype(np.float32), golden.numbers((8, 1), 3).astype(np.float32)
    model, other = stateful(), stateful()
    model.run_eagerly = eager
    model.fit(x, y, batch_size=2, epochs=2, shuffle=False, verbose=0)
    state = np.zeros((2, 3), np.float32)
    for start in (0, 2, 4, 6) * 2:
        other.layers[0].states[0].assign(state)
        other.train_on_batch(x[start : start + 2], y[start : start + 2])
        state = other.layers[0].states[0].numpy()
    for weight, two in zip(model.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_allclose(weight, two, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(model.layers[0].states[0], state, rtol=1e-5)
    assert np.abs(state).min() > 0


@pytest.mark.parametrize("ending", ["keras", "h5", "weights.h5"])
def test_files_have_no_states(ending, tmp_path):
    """As in Keras; checkpoints have them."""
    model, other = stateful(), stateful()
    model.predict(X[:, :2], batch_size=2, verbose=0)
    path = tmp_path / f"model.{ending}"
    if ending == "weights.h5":
        model.save_weights(path)
        other.load_weights(path)
    else:
        model.save(path)
        other = dp.models.load_model(path)
    assert np.abs(model.layers[0].states[0]).min() > 0
    model.layers[0].reset_state()
    np.testing.assert_array_equal(other.predict(X[:, :2], verbose=0), model.predict(X[:, :2], verbose=0))


def test_reset_states_of_both_directions():
    layer = L.Bidirectional(L.GRU(2, stateful=True))
    first = layer(X).numpy()
    assert np.abs(layer(X) - first).max() > 1e-4
    layer.reset_states()
    np.testing.assert_array_equal(layer(X), first)
    assert len(layer.states) == 2
    with pytest.raises(AttributeError, match="must be stateful"):
        L.Bidirectional(L.GRU(2)).reset_state()


# Dropout


@pytest.mark.parametrize("make", [L.SimpleRNN, L.LSTM, L.GRU])
def test_dropout_leaves_out_the_same_inputs_in_all_steps(make):
    x = np.ones((200, 3, 1), np.float32)
    options = {"kernel_initializer": "ones", "recurrent_initializer": "zeros", "return_sequences": True}
    layer = make(2, dropout=0.5, **options)
    outputs = layer(x, training=True).numpy()
    dropped = (outputs[:, :, 0] == layer(0 * x, training=False).numpy()[0, :, 0]).all(1)
    assert 60 < dropped.sum() < 140
    assert np.abs(layer(x, training=True) - outputs).max() > 0.1, "another batch drops others"
    np.testing.assert_array_equal(layer(x), layer(x, training=False))


# In models


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "float64"])
def test_types_of_outputs_and_weights(policy):
    for layer in (L.LSTM(3, dtype=policy), L.Bidirectional(L.GRU(2, dtype=policy), dtype=policy)):
        kinds = dp.mixed_precision.DTypePolicy(policy)
        assert layer(X).dtype.name == kinds.compute_dtype
        assert {weight.dtype.name for weight in layer.weights} == {kinds.variable_dtype}


def test_half_precision_is_near():
    wide, half = L.LSTM(3), L.LSTM(3, dtype="mixed_bfloat16")
    expected = wide(X)
    half(X)
    half.set_weights(wide.get_weights())
    np.testing.assert_allclose(half(X).numpy().astype(np.float32), expected, atol=0.02)


def test_a_model_and_its_files(tmp_path):
    inputs = dp.Input((None,), dtype="int32")
    hidden = L.Embedding(7, 3, mask_zero=True)(inputs)
    hidden = L.Bidirectional(L.LSTM(2, return_sequences=True))(hidden)
    hidden = L.RNN([L.GRUCell(3), L.LSTMCell(2)], return_sequences=True)(hidden)
    model = dp.Model(inputs, L.TimeDistributed(L.Dense(2))(hidden))
    ids = np.array([[1, 2, 0, 0], [6, 5, 4, 3]])
    model.compile("adam", "mse", metrics=["mae"])
    model.fit(ids, np.ones((2, 4, 2)), verbose=0)
    expected = model.predict(ids, verbose=0)
    assert model.weights[1]._path == "bidirectional/forward_lstm/lstm_cell/kernel"
    for name in ("m.keras", "m.h5"):
        model.save(tmp_path / name)
        np.testing.assert_array_equal(dp.models.load_model(tmp_path / name).predict(ids, verbose=0), expected)
    np.testing.assert_allclose(dp.models.clone_model(model).count_params(), model.count_params())


def test_the_forget_gate_begins_open():
    (_, _, bias) = L.LSTM(2, bias_initializer="zeros").build((None, 4, 3)) or _built(L.LSTM(2))
    np.testing.assert_array_equal(bias, [0, 0, 1, 1, 0, 0, 0, 0])
    np.testing.assert_array_equal(_built(L.LSTM(2, unit_forget_bias=False))[2], np.zeros(8))


def _built(layer):
    layer(X)
    return layer.get_weights()


def test_time_distributed_normalizes_each_step_by_itself():
    layer = L.TimeDistributed(L.BatchNormalization(epsilon=0.0, momentum=0.0))
    outputs = layer(X, training=True).numpy()
    np.testing.assert_allclose(outputs, (X - X.mean(0)) / X.std(0), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(layer.layer.moving_mean, X[:, -1].mean(0), rtol=1e-5)


def test_time_distributed_checks_masks():
    layer = L.TimeDistributed(L.Dense(1))
    with pytest.raises(ConfigError, match="must be at least 2D"):
        layer(X, mask=np.ones(2, bool))
    with pytest.raises(ConfigError, match="incompatible with the input shape"):
        layer(X, mask=np.ones((2, 3), bool))
    with pytest.raises(ConfigError, match="at least 3 dimensions"):
        L.TimeDistributed(L.Dense(1))(X[:, 0])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: L.LSTM(0), "invalid value for `units`, expected a positive integer"),
        (lambda: L.LSTM(2, use_cudnn=True), "not supported: use_cudnn=True"),
        (lambda: L.GRU(2, use_cudnn="no"), "Expected one of {'auto', True, False}"),
        (lambda: L.LSTM(2, unknown=1), "Unrecognized keyword arguments passed to LSTM"),
        (lambda: L.RNN(3), "should have a `call` method"),
        (lambda: L.RNN(L.Dense(2)), "should have a `state_size` attribute"),
        (lambda: L.StackedRNNCells([L.Dense(2)]), "must have a `state_size` attribute"),
        (lambda: L.Bidirectional(3), "Please initialize `Bidirectional` layer"),
        (lambda: L.Bidirectional(L.GRU(2), "min"), "Invalid merge mode"),
        (lambda: L.Bidirectional(L.GRU(2), backward_layer=L.GRU(2)), "different `go_backwards` value"),
        (
            lambda: L.Bidirectional(L.GRU(2), backward_layer=L.GRU(2, return_state=True, go_backwards=True)),
            'the same value for attribute "return_state"',
        ),
        (lambda: L.GRU(2, stateful=True)(dp.Input((3, 2))), "the batch size must be static"),
        (lambda: L.ConvLSTM2D(2, 3, 2, dilation_rate=2), "`strides > 1` is not compatible with `dilation_rate > 1`"),
        (lambda: L.ConvLSTM1D(2, 3)(dp.Input((3, None, 2))), "only support static input shapes"),
        (lambda: L.TimeDistributed(3), "Please initialize `TimeDistributed` layer"),
    ],
)
def test_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_a_cell_alone():
    cell = L.GRUCell(2)
    output, state = cell(X[:, 0], ops.zeros((2, 2)))
    np.testing.assert_array_equal(output, state)
    output, states = cell(X[:, 0], [ops.zeros((2, 2))])
    np.testing.assert_array_equal(output, states[0])
    assert [state.shape for state in L.LSTMCell(3).get_initial_state(4)] == [(4, 3), (4, 3)]


def _by_gates(x, masks, kernel):
    """Return the products of x with each gate's columns, each with a mask of its own."""
    parts = np.split(kernel, len(masks), -1)
    return [(x * mask) @ part for mask, part in zip(masks, parts, strict=True)]


def _sigmoid(x):
    return 1 / (1 + np.exp(-x))


def _step_with_masks(kind, weights, x, states, masks, recurrent_masks):
    kernel, recurrent, bias = weights
    h, of_x = states[0], _by_gates(x, masks, kernel)
    if kind == "LSTM":
        of_h = _by_gates(h, recurrent_masks, recurrent)
        i, f, new, o = (a + b + c for a, b, c in zip(of_x, of_h, np.split(bias, 4), strict=True))
        c = _sigmoid(f) * states[1] + _sigmoid(i) * np.tanh(new)
        return _sigmoid(o) * np.tanh(c)
    if kind == "GRU":
        of_h = [a + b for a, b in zip(_by_gates(h, recurrent_masks, recurrent), np.split(bias[1], 3), strict=True)]
        of_x = [a + b for a, b in zip(of_x, np.split(bias[0], 3), strict=True)]
        z, r = _sigmoid(of_x[0] + of_h[0]), _sigmoid(of_x[1] + of_h[1])
        return z * h + (1 - z) * np.tanh(of_x[2] + r * of_h[2])
    of_x = [a + b for a, b in zip(of_x, np.split(bias, 3), strict=True)]
    of_h = _by_gates(h, recurrent_masks, recurrent)
    z, r = _sigmoid(of_x[0] + of_h[0]), _sigmoid(of_x[1] + of_h[1])
    return z * h + (1 - z) * np.tanh(of_x[2] + _by_gates(r * h, recurrent_masks, recurrent)[2])


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "GRU, reset before"])
def test_each_gate_has_masks_of_its_own(monkeypatch, kind):
    rng, drawn = np.random.default_rng(0), []

    def dropout(like, rate, seed):
        drawn.append(rng.integers(0, 2, like.shape) / (1 - rate))
        return ops.convert_to_tensor(drawn[-1])

    monkeypatch.setattr(cell_module.random, "dropout", dropout)
    options = {"dropout": 0.5, "recurrent_dropout": 0.25, "implementation": 1, "dtype": "float64"}
    options |= {} if kind == "LSTM" else {"reset_after": kind == "GRU"}
    cell = (L.LSTMCell if kind == "LSTM" else L.GRUCell)(3, **options)
    cell.build((None, 5))
    cell.set_weights([rng.normal(size=weight.shape) for weight in cell.get_weights()])
    x, states = rng.normal(size=(4, 5)), [rng.normal(size=(4, 3)) for _ in range(2 if kind == "LSTM" else 1)]
    output, _ = cell(x, states, training=True)
    gates = 4 if kind == "LSTM" else 3
    assert len({mask.tobytes() for mask in drawn}) == 2 * gates
    expected = _step_with_masks(kind, cell.get_weights(), x, states, drawn[:gates], drawn[gates:])
    np.testing.assert_allclose(output, expected, rtol=1e-12)
