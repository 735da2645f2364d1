"""A model's layers, its shapes and what of it is trained, as in Keras."""

import itertools
import json

import numpy as np
import pytest

import dptrain as dp
from dptrain import layers
from dptrain.errors import ConfigError, DataError


def toy(rows: int = 24) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.standard_normal((rows, 4)), rng.standard_normal((rows, 2))


def stack() -> list[layers.Layer]:
    return [dp.Input((4,)), layers.Dense(3, "tanh"), layers.BatchNormalization(), layers.Dense(2)]


NOTHING = "ignore:The model does not have any trainable weights"


def compiled(model: dp.Sequential, optimizer: str = "adam") -> dp.Sequential:
    model.compile(optimizer, "mse", device="cpu", dtype="float64")
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
    restored = dp.Sequential.from_config(model.get_config())
    assert [type(layer).__name__ for layer in restored.layers] == kinds
    assert restored.input_shape == (None, 4)
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
        ((None, "a", 28), "expected positive integers"),
        ((None, 7.5), "expected positive integers"),
        ((None, 0), "expected positive integers"),
        (None, "needs input_shape"),
    ],
)
def test_shapes_that_build_refuses(input_shape, message):
    with pytest.raises(ConfigError, match=message):
        dp.Sequential([layers.Dense(3)]).build(input_shape)


def test_a_model_that_knows_its_input_is_built_at_once():
    model = dp.Sequential([dp.Input((4,)), layers.Dense(3), layers.Dense(2)])
    assert (model.built, model.count_params(), model.output_shape) == (True, 23, (None, 2))
    assert [tensor.shape[1:] for tensor in (*model.inputs, *model.outputs, model.input, model.output)] == [
        (4,),
        (2,),
    ] * 2
    assert [layer.output.shape[1:] for layer in model.layers] == [(3,), (2,)]
    assert dp.Sequential([layers.Dense(3, input_shape=(4,))]).built
    unknown = dp.Sequential([layers.Dense(3)])
    assert (unknown.built, unknown.weights) == (False, [])
    with pytest.raises(AttributeError, match="Sequential model 'sequential' has no defined inputs and outputs yet"):
        unknown.inputs  # noqa: B018


def test_layers_one_by_one_are_the_layers_at_once():
    model, twin = dp.Sequential(seed=5), dp.Sequential(stack(), seed=5)
    for layer in stack():
        model.add(layer)
        assert model.built == bool(model.layers)
    assert [weight.path for weight in model.weights] == [weight.path for weight in twin.weights]
    for mine, other in zip(model.get_weights(), twin.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, other)
    assert all(len(layer._nodes) == 1 for layer in model.layers)


def test_a_layer_that_cannot_follow_is_not_added():
    model = dp.Sequential([dp.Input((4,)), layers.Dense(3)])
    with pytest.raises(ConfigError, match="expected ndim=4, found ndim=2"):
        model.add(layers.Conv2D(2, 3))
    assert (model.built, len(model.layers), model.output_shape) == (True, 1, (None, 3))


def test_another_head_on_what_was_trained():
    x, y = toy()
    model = compiled(dp.Sequential([dp.Input((4,)), layers.Dense(3, "tanh"), layers.Dense(2)]))
    model.fit(x, y, verbose=0)
    trained = model.get_weights()
    assert model.pop().units == 2
    model.add(layers.Dense(5))
    assert model.output_shape == (None, 5)
    compiled(model).fit(x, np.zeros((24, 5)), epochs=2, verbose=0)
    np.testing.assert_allclose(model.get_weights()[0], trained[0], atol=0.1)
    assert model.get_weights()[2].dtype == np.float64
    x = x[:3]
    expected = np.tanh(x @ model.get_weights()[0] + model.get_weights()[1]) @ model.get_weights()[2]
    np.testing.assert_allclose(model.predict(x, verbose=0), expected + model.get_weights()[3], rtol=1e-12)


def test_a_model_emptied_by_pop():
    model = dp.Sequential([dp.Input((4,)), layers.Dense(3)])
    model.pop()
    assert (model.built, model.layers) == (False, [])
    with pytest.raises(ConfigError, match="There are no layers in the model"):
        model.pop()
    model.add(layers.Dense(2))
    assert model.output_shape == (None, 2)


# Inputs of another rank or size


@pytest.mark.parametrize(
    ("declared", "shape"), [((4, 4, 1), (4, 4)), ((1,), ()), ((3,), (3, 1)), ((2, 2), (2, 2)), ((), (1,))]
)
def test_a_last_axis_of_one_is_added_or_left_out(declared, shape):
    """As in Keras: images without channels, a feature without an axis."""
    x = np.arange(2.0 * np.prod(shape, dtype=int)).reshape(2, *shape)
    model = compiled(dp.Sequential([dp.Input(declared), layers.Rescaling(2.0)]))
    expected = 2 * x.reshape(2, *declared)
    np.testing.assert_array_equal(model.predict(x, verbose=0), expected)
    np.testing.assert_array_equal(model(x), expected)
    assert model.evaluate(x, expected, verbose=0) == 0
    np.testing.assert_array_equal(model.predict(itertools.repeat((x,)), steps=1, verbose=0), expected)
    model.add(layers.Flatten())
    model.add(layers.Dense(1, kernel_initializer="zeros"))
    assert compiled(model).fit(x, np.ones(2), verbose=0).history["loss"] == [1.0]


def test_two_axes_are_one_too_many():
    model = dp.Sequential([dp.Input((3,)), layers.Dense(1)])
    with pytest.raises(DataError, match=r"model expects 3 features of shape \(3,\), data has 3 of shape \(3, 1, 1\)"):
        model.predict(np.ones((2, 3, 1, 1)), verbose=0)


def images(size: int) -> np.ndarray:
    return np.random.default_rng(size).random((3, size, size, 2))


def test_images_of_another_size_than_the_first():
    model = compiled(dp.Sequential([layers.Conv2D(2, 3), layers.GlobalAveragePooling2D()]))
    model.fit(images(6), np.zeros((3, 2)), verbose=0)
    kernel, bias = model.get_weights()
    for size in (9, 6, 4):
        x = images(size)
        windows = np.lib.stride_tricks.sliding_window_view(x, (3, 3), (1, 2)).mean((1, 2))
        expected = np.einsum("bchw,hwco->bo", windows, kernel) + bias
        np.testing.assert_allclose(model.predict(x, verbose=0), expected, rtol=1e-10)
        np.testing.assert_allclose(model(x), expected, rtol=1e-10)
        assert model.evaluate(x, expected, verbose=0) < 1e-20
    assert model.output_shape == (None, 2)
    with pytest.raises(DataError, match=r"model expects 72 features of shape \(6, 6, 2\), data has 8 of shape"):
        model.predict(images(2), verbose=0)


def test_batches_of_different_sizes():
    model = compiled(dp.Sequential([layers.Conv2D(2, 3, kernel_initializer="zeros"), layers.ReLU()]), "sgd")
    batches = [(images(size), np.ones((3, size - 2, size - 2, 2))) for size in (6, 9, 7)]
    logs = model.fit(iter([*batches, *batches]), steps_per_epoch=3, shuffle=False, verbose=0).history
    assert logs["loss"][0] > 0
    expected = [model(x).numpy() for x, _ in batches]
    for (x, _), expected_batch in zip(batches, expected, strict=True):
        np.testing.assert_array_equal(model.predict(iter([(x,), (x,)]), steps=1, verbose=0), expected_batch)
    declared = compiled(dp.Sequential([dp.Input((6, 6, 2)), layers.Conv2D(2, 3)]))
    with pytest.raises(DataError, match=r"model expects 72 features of shape \(6, 6, 2\), data has 162"):
        declared.fit(iter(batches[1:]), steps_per_epoch=1, shuffle=False, verbose=0)


def test_a_declared_size_is_the_size():
    model = dp.Sequential([dp.Input((6, 6, 2)), layers.Conv2D(2, 3)])
    with pytest.raises(DataError, match=r"model expects 72 features of shape \(6, 6, 2\), data has 128"):
        model.predict(images(8), verbose=0)


def test_a_subclass_takes_images_of_another_size():
    class Wide(dp.Model):
        def __init__(self):
            super().__init__()
            self.convolution = layers.Conv2D(2, 3)

        def call(self, x):
            return self.convolution(x)

    model = compiled(Wide())
    model.fit(images(6), np.zeros((3, 4, 4, 2)), verbose=0)
    assert model.predict(images(9), verbose=0).shape == (3, 7, 7, 2)
    assert model.evaluate(images(9), model.predict(images(9), verbose=0), verbose=0) < 1e-20
    with pytest.raises(DataError, match=r"expected targets of shape \(4, 4, 2\)"):
        model.evaluate(images(6), np.zeros((3, 7, 7, 2)), verbose=0)


# Training


@pytest.mark.filterwarnings(NOTHING)
def test_a_model_that_is_not_trained(capsys):
    x, y = toy()
    model = dp.Sequential(stack())
    model.trainable = False
    assert [layer.trainable for layer in model.layers] == [False] * 3
    compiled(model)
    model.summary()
    assert " Trainable params: 0 (0.00 B)\n Non-trainable params: 35 (280.00 B)" in capsys.readouterr().out
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
    restored = dp.Sequential.from_config(json.loads(json.dumps(model.get_config())))
    assert (restored.trainable, restored.layers[0].trainable) == (False, True)
    assert restored.trainable_weights == []


@pytest.mark.filterwarnings(NOTHING)
@pytest.mark.parametrize("how_frozen", ["model", "layer"])
def test_trainable_changed_after_compile_holds_from_the_next_fit(how_frozen, capsys):
    """As in Keras; the optimizer goes on with what it knows of the parameters that it still trains."""
    x, y = toy()

    def change(trainable: bool) -> None:
        (model if how_frozen == "model" else model.layers[0]).trainable = trainable

    model = compiled(dp.Sequential([layers.Dense(3, "tanh"), layers.Dense(2)], seed=3))
    model.fit(x, y, verbose=0)
    change(False)
    model.summary()
    assert f" Trainable params: {0 if how_frozen == 'model' else 8} (" in capsys.readouterr().out
    before = model.get_weights()
    model.fit(x, y, verbose=0)
    assert changed(before, model) == ([False] * 4 if how_frozen == "model" else [False, False, True, True])
    assert int(model.optimizer.iterations) == (1 if how_frozen == "model" else 2)
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
    loaded = dp.models.load_model(tmp_path / "layer.keras", device="cpu")
    assert [layer.trainable for layer in loaded.layers] == [False, True]
    for net in (model, loaded):
        net.train_on_batch(x, y)
    assert changed(model.get_weights(), loaded) == [False] * 4
    model.train_on_batch(x, y)
    model.trainable = False
    model.save(tmp_path / "model.keras")
    loaded = dp.models.load_model(tmp_path / "model.keras", device="cpu")
    assert not loaded.trainable
    assert changed(model.get_weights(), loaded) == [False] * 4
    loaded.load_weights(tmp_path / "layer.keras")
    assert changed(model.get_weights(), loaded) == [False, False, True, True]


# Nothing to train


@pytest.mark.filterwarnings(NOTHING)
@pytest.mark.parametrize(
    "stack",
    [
        lambda: [layers.Rescaling(2.0)],
        lambda: [layers.Rescaling(2.0, 0.0), layers.Flatten()],
        lambda: [layers.Flatten(), layers.Rescaling(2.0)],
        lambda: [layers.Flatten(), layers.Rescaling(2.0), layers.Flatten()],
        lambda: [layers.Rescaling(4.0), layers.Rescaling(0.5)],
    ],
)
def test_a_model_without_weights(stack):
    x = toy()[0]
    model = compiled(dp.Sequential([dp.Input((4,)), *stack()]))
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


def test_a_layer_of_two_inputs_is_refused():
    class Adds(dp.layers.Layer):
        def call(self, first, other):
            return first + other

    with pytest.raises(ConfigError, match=r"can only have a single required positional argument.*Layer Adds has mult"):
        dp.Sequential([dp.Input((3,)), Adds()])
