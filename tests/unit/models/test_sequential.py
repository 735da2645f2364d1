"""A model's layers, its shapes and what of it is trained, as in Keras."""

import json

import numpy as np
import pytest

import dptrain as dp
from dptrain import layers
from dptrain.errors import ConfigError


def toy(rows: int = 24) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.standard_normal((rows, 4)), rng.standard_normal((rows, 2))


def stack() -> list[layers.Layer]:
    return [dp.Input((4,)), layers.Dense(3, "tanh"), layers.BatchNormalization(), layers.Dense(2)]


NOTHING = "ignore:The model does not have any trainable weights"


def compiled(model: dp.Sequential, optimizer: str = "adam") -> dp.Sequential:
    model.compile(optimizer, "mse", device="cpu", dtype="float64", jit_compile=False)
    return model


def changed(before: list[np.ndarray], model: dp.Sequential) -> list[bool]:
    return [not np.array_equal(old, new) for old, new in zip(before, model.get_weights(), strict=True)]


# Layers


def test_an_input_is_none_of_the_layers():
    model = compiled(dp.Sequential(stack()))
    kinds = ["Dense", "BatchNormalization", "Dense"]
    assert [type(layer).__name__ for layer in model.layers] == kinds
    assert model.input_shape == (None, 4)
    model.layers.clear()
    assert len(model.layers) == 3
    again = dp.Sequential.from_config(model.get_config())
    assert [type(layer).__name__ for layer in again.layers] == kinds
    assert again.input_shape == (None, 4)
    empty = dp.Sequential([dp.Input((4,))])
    assert empty.layers == []
    empty.add(layers.Dense(2))
    assert empty.count_params() == 10


# Shapes


@pytest.mark.parametrize("input_shape", [(None, 28, 28), (32, 28, 28), [None, 28, 28]])
def test_build_takes_the_shape_of_a_batch(input_shape):
    model = dp.Sequential([layers.Flatten(), layers.Dense(3)])
    model.build(input_shape)
    assert model.count_params() == 2355
    assert model.input_shape == (None, 28, 28)


def test_build_of_what_is_built():
    model = dp.Sequential([layers.Dense(3)])
    model.build((None, 4))
    model.build((7, 4))
    model.build()
    with pytest.raises(ConfigError, match=r"already been configured to use input shape \(None, 4\).*\(None, 5\)"):
        model.build((None, 5))
    with pytest.raises(ConfigError, match="already been configured"):
        dp.Sequential([dp.Input((4,)), layers.Dense(3)]).build((None, 5))


@pytest.mark.parametrize(
    ("input_shape", "message"),
    [
        ((784,), r"input_shape = \(784,\): expected \(batch size or None, \*shape of one sample\)"),
        ((), "expected"),
        ("abc", "expected"),
        (784, "expected"),
        ((None, None, 28), "expected positive integers"),
        ((None, 7.5), "expected positive integers"),
        ((None, 0), "expected positive integers"),
        (None, "needs input_shape"),
    ],
)
def test_shapes_that_build_refuses(input_shape, message):
    with pytest.raises(ConfigError, match=message):
        dp.Sequential([layers.Dense(3)]).build(input_shape)


# Training


@pytest.mark.filterwarnings(NOTHING)
def test_a_model_that_is_not_trained(capsys):
    x, y = toy()
    model = dp.Sequential(stack())
    model.trainable = False
    assert [layer.trainable for layer in model.layers] == [False] * 3
    compiled(model)
    model.summary()
    assert "Trainable params: 0\nNon-trainable params: 35" in capsys.readouterr().out
    before = model.get_weights()
    history = model.fit(x, y, epochs=2, verbose=0).history["loss"]
    assert changed(before, model) == [False] * 8
    assert int(model.optimizer.iterations) == 0
    assert history[0] == pytest.approx(history[1], rel=1e-12)
    assert history[0] == pytest.approx(model.evaluate(x, y, verbose=0), rel=1e-12)
    model.trainable = True
    assert [layer.trainable for layer in model.layers] == [True] * 3
    compiled(model).fit(x, y, verbose=0)
    assert changed(before, model) == [True] * 8


@pytest.mark.filterwarnings(NOTHING)
def test_a_layer_of_a_model_that_is_not_trained():
    x, y = toy()
    model = dp.Sequential(stack()[:2], trainable=False, name="frozen")
    assert (model.name, model.trainable, model.layers[0].trainable) == ("frozen", False, True)
    model.add(layers.Dense(2))
    before = compiled(model).get_weights()
    model.fit(x, y, verbose=0)
    assert changed(before, model) == [False] * 4
    again = dp.Sequential.from_config(json.loads(json.dumps(model.get_config())))
    assert (again.trainable, again.layers[0].trainable) == (False, True)
    assert again.trainable_weights == []


@pytest.mark.filterwarnings(NOTHING)
@pytest.mark.parametrize("way", ["model", "layer"])
def test_trainable_changed_after_compile_holds_from_the_next_fit(way, capsys):
    """As in Keras; the optimizer goes on with what it knows of the parameters that it still trains."""
    x, y = toy()

    def change(trainable: bool) -> None:
        (model if way == "model" else model.layers[0]).trainable = trainable

    model = compiled(dp.Sequential([layers.Dense(3, "tanh"), layers.Dense(2)], seed=3))
    model.fit(x, y, verbose=0)
    change(False)
    model.summary()
    assert f"Trainable params: {0 if way == 'model' else 8}\n" in capsys.readouterr().out
    before = model.get_weights()
    model.fit(x, y, verbose=0)
    assert changed(before, model) == ([False] * 4 if way == "model" else [False, False, True, True])
    assert int(model.optimizer.iterations) == (1 if way == "model" else 2)
    change(True)
    model.train_on_batch(x, y)
    assert changed(before, model) == [True] * 4


def test_the_optimizer_keeps_what_it_knows_where_trainable_changes():
    x, y = toy()
    frozen, never = (compiled(dp.Sequential([layers.Dense(3), layers.Dense(2)], seed=3)) for _ in range(2))
    for model in (frozen, never):
        model.fit(x, y, epochs=2, verbose=0)
    frozen.layers[0].trainable = False
    for model in (frozen, never):
        model.train_on_batch(x, y)
    for ours, theirs in zip(frozen.get_weights()[2:], never.get_weights()[2:], strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.filterwarnings(NOTHING)
def test_files_say_what_is_trained(tmp_path):
    pytest.importorskip("h5py")
    x, y = toy()
    model = compiled(dp.Sequential([dp.Input((4,)), layers.Dense(3, "tanh"), layers.Dense(2)], seed=3), "sgd")
    model.fit(x, y, verbose=0)
    model.layers[0].trainable = False
    model.save(tmp_path / "layer.keras")
    again = dp.models.load_model(tmp_path / "layer.keras", device="cpu", jit_compile=False)
    assert [layer.trainable for layer in again.layers] == [False, True]
    for one in (model, again):
        one.train_on_batch(x, y)
    assert changed(model.get_weights(), again) == [False] * 4
    model.train_on_batch(x, y)
    model.trainable = False
    model.save(tmp_path / "model.keras")
    again = dp.models.load_model(tmp_path / "model.keras", device="cpu", jit_compile=False)
    assert not again.trainable
    assert changed(model.get_weights(), again) == [False] * 4
    again.load_weights(tmp_path / "layer.keras")
    assert changed(model.get_weights(), again) == [False, False, True, True]


# Nothing to train


@pytest.mark.filterwarnings(NOTHING)
@pytest.mark.parametrize(
    "made",
    [
        lambda: [layers.Rescaling(2.0)],
        lambda: [layers.Rescaling(2.0, 0.0), layers.Flatten()],
        lambda: [layers.Flatten(), layers.Rescaling(2.0)],
        lambda: [layers.Flatten(), layers.Rescaling(2.0), layers.Flatten()],
        lambda: [layers.Rescaling(4.0), layers.Rescaling(0.5)],
    ],
)
def test_a_model_without_weights(made):
    x = toy()[0]
    model = compiled(dp.Sequential([dp.Input((4,)), *made()]))
    np.testing.assert_array_equal(model.predict(x, verbose=0), 2 * x)
    loss = float((x**2).mean())
    assert model.evaluate(x, x, verbose=0) == pytest.approx(loss)
    history = model.fit(x, x, epochs=2, verbose=0, validation_data=(x, x)).history
    assert history["loss"] == pytest.approx([loss] * 2)
    assert history["val_loss"] == pytest.approx([loss] * 2)
    assert model.train_on_batch(x, x) == pytest.approx(loss)
    assert model.get_weights() == []


def test_nothing_to_train_is_said():
    x, y = toy()
    model = compiled(dp.Sequential([dp.Input((4,)), layers.Dense(2)], trainable=False))
    model.evaluate(x, y, verbose=0)
    with pytest.warns(UserWarning, match="The model does not have any trainable weights"):
        model.fit(x, y, verbose=0)
    with pytest.warns(UserWarning, match="The model does not have any trainable weights"):
        model.train_on_batch(x, y)
