"""How inputs are handed over: by name, in order, nested; and what models make of the arguments of a call."""

from collections import namedtuple

import numpy as np
import pytest

import dptrain as keras
from dptrain import layers as L  # noqa: N812
from dptrain.errors import ConfigError, DataError

X, Y = np.arange(6.0).reshape(2, 3), np.ones((2, 3))


def difference(nested):
    a, b = keras.Input((3,), name="second"), keras.Input((3,), name="first")
    return keras.Model({"second": a, "first": b} if nested is dict else [a, b], L.subtract([a, b]))


def test_one_input_by_its_name():
    x = keras.Input((3,), name="x")
    model = keras.Model(x, L.Rescaling(2.0)(x))
    model.compile("sgd", "mse")
    for data in ({"x": X}, [X], X):
        np.testing.assert_array_equal(model(data), 2 * X)
        np.testing.assert_array_equal(model.predict(data, verbose=0), 2 * X)
        assert model.evaluate(data, 2 * X, verbose=0) == 0
    with pytest.raises(DataError, match="a dictionary with"):
        model.predict({"y": X}, verbose=0)


def test_a_list_does_not_stand_for_a_dictionary():
    """Whose order nobody has said: sorted by key, the difference would have the other sign."""
    model = difference(dict)
    np.testing.assert_array_equal(model({"first": X, "second": Y}), Y - X)
    for call in (model, lambda data: model.predict(data, verbose=0)):
        with pytest.raises(ValueError, match="The structure of `inputs` doesn't match the expected structure"):
            call([Y, X])


@pytest.mark.filterwarnings("ignore:The structure of `inputs` doesn't match:UserWarning")  # as in Keras
def test_a_list_stands_for_a_dictionary_that_was_declared_in_the_order_of_its_keys(tmp_path):
    """As in Keras, whose order of a dictionary is that of its sorted keys."""
    inputs_by_name = {name: keras.Input((3,), name=name) for name in ("minuend", "subtrahend")}
    sorted_keys = keras.Model(inputs_by_name, L.Subtract()(list(inputs_by_name.values())))
    sorted_keys.compile("sgd", "mse")
    for data in ([Y, X], (Y, X)):
        np.testing.assert_array_equal(sorted_keys(data), Y - X)
        np.testing.assert_array_equal(sorted_keys.predict(data, verbose=0), Y - X)
        assert sorted_keys.evaluate(data, Y - X, verbose=0) == 0
    dense = keras.Model(inputs_by_name, L.Dense(1)(sorted_keys.output))
    dense.compile("sgd", "mse")
    assert len(dense.fit([Y, X], Y[:, :1], verbose=0).history["loss"]) == 1
    for model, accepts in ((sorted_keys, True), (difference(dict), False)):
        model.save(tmp_path / "m.keras")
        loaded = keras.models.load_model(tmp_path / "m.keras")
        if accepts:
            np.testing.assert_array_equal(loaded([Y, X]), Y - X)
        else:
            with pytest.raises(ValueError, match="The structure of `inputs` doesn't match the expected structure"):
                loaded([Y, X])


@pytest.mark.parametrize("shape", [(4, 7), (4, 2), (4, 3, 2), (2, 4, 3)])
def test_inputs_of_another_shape_are_refused_though_the_layers_would_take_them(shape):
    x = keras.Input((3,), name="x")
    model = keras.Model(x, L.ReLU()(x), name="net")
    match = r"Input 0 with name 'x' of layer 'net' is incompatible .* expected shape=\(None, 3\), found shape="
    with pytest.raises(ValueError, match=match):
        model(np.ones(shape, np.float32))
    y = keras.Input(shape[1:])
    with pytest.raises(ValueError, match="is incompatible with the layer"):
        model(y)
    assert model(np.ones((4, 3, 1), np.float32)).shape == (4, 3)


def test_swapped_inputs_of_other_shapes_are_refused():
    a, b = keras.Input((3,), name="a"), keras.Input((2,), name="b")
    model = keras.Model([a, b], L.Concatenate()([a, b]))
    with pytest.raises(ValueError, match="Input 0 with name 'a'"):
        model([np.ones((4, 2)), np.ones((4, 3))])


def test_a_dictionary_stands_for_a_list_by_the_names():
    np.testing.assert_array_equal(difference(list)({"first": X, "second": Y}), Y - X)
    np.testing.assert_array_equal(difference(list)([Y, X]), Y - X)


def test_an_input_that_is_not_used_is_in_the_configuration():
    a, b = keras.Input((3,), name="a"), keras.Input((3,), name="b")
    model = keras.Model({"a": a, "b": b}, {"a": a * 2, "b": b})
    restored = keras.Model.from_config(model.get_config())
    result = restored({"a": X, "b": Y})
    np.testing.assert_array_equal(result["a"], 2 * X)
    np.testing.assert_array_equal(result["b"], Y)
    unused = keras.Model([a, b], L.Dense(2)(a))
    assert keras.Model.from_config(unused.get_config()).predict([X, Y], verbose=0).shape == (2, 2)


def test_an_output_of_another_input_names_it():
    a, b = keras.Input((3,), name="a"), keras.Input((3,), name="b")
    with pytest.raises(ConfigError, match="`inputs` not connected to `outputs`: an output needs 'b', which is not"):
        keras.Model(a, L.Dense(2)(b))


def test_layers_in_a_row_of_dictionaries_and_lists():
    class Swap(L.Layer):
        def call(self, inputs):
            return {"a": inputs["b"], "b": inputs["a"]} if isinstance(inputs, dict) else inputs[::-1]

    model = keras.Sequential([Swap()])
    np.testing.assert_array_equal(model({"a": X, "b": Y})["a"], Y)
    assert model.built
    swapped = keras.Sequential([Swap(), L.Add()])
    np.testing.assert_array_equal(swapped.predict([X, Y], verbose=0), X + Y)


def test_training_without_a_default_is_filled_in():
    class Doubles(L.Layer):
        def call(self, x, training):
            return 2 * x if training else x

    assert Doubles()(3.0 * Y).numpy()[0, 0] == 3
    assert Doubles()(Y, training=True).numpy()[0, 0] == 2
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'x'"):
        Doubles()()


def test_layers_are_not_to_be_set():
    with pytest.raises(AttributeError, match=r"Use `add\(\)` and `pop\(\)`"):
        keras.Sequential().layers = []

    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.layers = [L.Dense(2)]

    with pytest.raises(AttributeError, match=r"`Model\.layers` attribute is reserved"):
        Own()


@pytest.mark.parametrize("nested", [dict, lambda symbols: list(symbols.values())], ids=["dict", "list"])
def test_named_tuples_go_by_the_names_of_inputs_and_outputs(nested):
    inputs = {name: L.Input((2,), name=name) for name in ("a", "b")}
    joined = L.Concatenate()(list(inputs.values()))
    outputs = {"p": L.Dense(1, name="p")(joined), "q": L.Dense(1, name="q")(inputs["a"])}
    model = keras.Model(nested(inputs), outputs)
    model.compile("sgd", "mse")
    a, b, p, q = (np.full((3, columns), value) for columns, value in ((2, 1.0), (2, 2.0), (1, 3.0), (1, 4.0)))
    x, y = namedtuple("Inputs", "b a")(b, a), namedtuple("Outputs", "q p")(q, p)
    expected = model.predict({"a": a, "b": b}, verbose=0)
    for actual in (model.predict(x, verbose=0), model.predict_on_batch(x), model(x)):
        for name in outputs:
            np.testing.assert_allclose(actual[name], expected[name], rtol=1e-6)
    assert model.evaluate(x, y, verbose=0) == model.evaluate({"a": a, "b": b}, {"p": p, "q": q}, verbose=0)
