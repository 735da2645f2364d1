"""Steps that are left out change nothing."""

import numpy as np
import pytest

import dptrain as dp
from dptrain.backend.cpu.compile import compiler
from dptrain.errors import ConfigError
from dptrain.layers import BatchNormalization, Dense, Dropout
from dptrain.optimizers import SGD, Adam


def toy(rows: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(rows, 6)).astype(np.float32), rng.integers(0, 3, rows)


def build(jit_compile: bool = False) -> dp.Sequential:
    stack = [Dense(8, "relu", input_shape=(6,)), BatchNormalization(), Dropout(0.3), Dense(3, "softmax")]
    model = dp.Sequential(stack, seed=1)
    optimizer = Adam(0.01, weight_decay=0.01, use_ema=True)
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"], jit_compile=jit_compile)
    return model


def state(model: dp.Sequential) -> list[bytes]:
    return [variable.numpy().tobytes() for variable in (*model.variables, *model.optimizer.variables)]


@pytest.mark.parametrize("jit_compile", [False, True])
def test_a_training_with_steps_left_out_has_the_bits_of_one_without_them(jit_compile):
    """Weights, slots, moving statistics, draws of dropout, metrics: as if the two batches were not there."""
    if jit_compile and compiler() is None:
        pytest.skip("no C++ compiler")
    x, y = toy(80)
    bad = x.copy()
    bad[15], bad[70] = np.nan, np.inf
    kept_rows = np.r_[0:10, 20:70]
    arguments = {"batch_size": 10, "epochs": 2, "shuffle": False, "verbose": 0}
    models = [build(jit_compile) for _ in range(3)]
    skipping = models[0].fit(bad, y, **arguments, on_nonfinite="skip").history
    without = models[1].fit(x[kept_rows], y[kept_rows], **arguments, on_nonfinite="skip").history
    plain = models[2].fit(x[kept_rows], y[kept_rows], **arguments).history
    assert skipping.pop("skipped_steps") == [2, 2]
    assert without.pop("skipped_steps") == [0, 0]
    assert skipping == without == plain
    assert state(models[0]) == state(models[1]) == state(models[2])
    models[0].fit(x, y, **arguments)
    models[1].fit(x, y, **arguments)
    assert state(models[0]) == state(models[1]), "a later training leaves nothing out"


def test_a_callback_that_predicts_lets_steps_be_left_out():
    x, y = toy(80)
    x[15] = np.nan
    model = build()
    predicts = dp.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: model.predict(x, verbose=0))
    arguments = {"batch_size": 10, "epochs": 3, "shuffle": False, "verbose": 0, "callbacks": [predicts]}
    assert model.fit(x, y, **arguments, on_nonfinite="skip").history["skipped_steps"] == [1, 1, 1]


def regression(rows: int) -> tuple[dp.Sequential, np.ndarray, np.ndarray]:
    x, _ = toy(rows)
    model = dp.Sequential([Dense(1, input_shape=(6,))], seed=1)
    model.compile(SGD(1e-3), "mse")
    return model, x, x.sum(axis=1)


def test_gradients_far_above_those_before_are_left_out():
    model, x, y = regression(600)
    y[455] = 1e4
    history = model.fit(x, y, batch_size=10, epochs=2, shuffle=False, verbose=0, skip_outliers=8).history
    assert history["skipped_steps"] == [1, 1]
    assert history["loss"][0] < 100
    other, x, y = regression(600)
    assert other.fit(x, y, batch_size=10, epochs=2, verbose=0, skip_outliers=8).history["skipped_steps"] == [0, 0]


def test_gradients_that_stay_larger_are_followed():
    """Were a norm that is left out to count for nothing, nothing would be learnt any more."""
    model, x, y = regression(3000)
    y[500:] *= 30
    history = model.fit(x, y, batch_size=10, shuffle=False, verbose=0, skip_outliers=8).history
    assert 1 <= history["skipped_steps"][0] < 30


def test_a_step_of_ones_own_without_an_optimizer_cannot_be_left_out():
    class Own(dp.Model):
        def __init__(self):
            super().__init__()
            self.dense = Dense(1, input_shape=(6,))

        def call(self, x, training=None):
            return self.dense(x)

        def train_step(self, data):
            x, y = data
            loss = self.compute_loss(x, y, self(x))
            loss.backward()
            for weight in self.trainable_weights:
                weight.assign(weight - 0.1 * weight.value.grad)
            return {"loss": loss}

    x, _ = toy(20)
    model = Own()
    model.compile("sgd", "mse")
    with pytest.raises(
        ConfigError, match="not supported: skipping steps of a train_step that never calls an optimizer's"
    ):
        model.fit(x, x[:, :1], verbose=0, on_nonfinite="skip")


def test_a_value_that_is_read_after_it_was_assigned_is_kept_as_well():
    """The count is read again on the way to the gradient, which decides."""

    class Counting(dp.Model):
        def __init__(self):
            super().__init__()
            self.dense = Dense(1, input_shape=(6,))
            self.count = self.add_weight((), initializer="ones", trainable=False, name="count")

        def call(self, x, training=None):
            if training:
                self.count.assign_add(1.0)
            return self.dense(x) * self.count

    x, _ = toy(40)
    x[15] = np.nan
    model = Counting()
    model.compile("sgd", "mse")
    model.fit(x, np.nan_to_num(x[:, :1]), batch_size=10, shuffle=False, verbose=0, on_nonfinite="skip")
    assert float(model.count) == 4
