"""A model's variables by their paths, and nested data that do not end."""

import numpy as np
import pytest

from dptrain import Input, Model, Sequential, layers
from dptrain.errors import ConfigError


def made():
    inputs = Input((3,))
    model = Model(inputs, layers.BatchNormalization(name="norm")(layers.Dense(2, name="dense")(inputs)))
    model.compile("adam", "mse")
    return model


def test_a_state_tree_is_read_and_set():
    model, other = made(), made()
    model.fit(np.ones((4, 3)), np.ones((4, 2)), verbose=0)
    other.fit(np.zeros((4, 3)), np.ones((4, 2)), verbose=0)
    tree = model.get_state_tree(value_format="numpy_array")
    assert sorted(tree) == [
        "metrics_variables",
        "non_trainable_variables",
        "optimizer_variables",
        "trainable_variables",
    ]
    assert sorted(tree["non_trainable_variables"]["norm"]) == ["moving_mean", "moving_variance"]
    assert sorted(tree["trainable_variables"]) == ["dense", "norm"]
    np.testing.assert_array_equal(tree["trainable_variables"]["dense"]["kernel"], model.layers[1].kernel)
    assert int(tree["optimizer_variables"]["adam"]["iteration"]) == 1
    other.set_state_tree(tree)
    for actual, expected in zip(other.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(actual, expected)
    for actual, expected in zip(other.optimizer.variables, model.optimizer.variables, strict=True):
        np.testing.assert_array_equal(actual, expected)
    other.set_state_tree({"trainable_variables": {"dense": {"bias": [0.5, 1.5]}}})
    np.testing.assert_array_equal(other.layers[1].bias, [0.5, 1.5])
    np.testing.assert_array_equal(other.layers[1].kernel, model.layers[1].kernel)


def test_state_trees_that_are_refused():
    model = made()
    with pytest.raises(ConfigError, match="Unknown variable name: weights"):
        model.set_state_tree({"weights": {}})
    with pytest.raises(ConfigError, match="Invalid `value_format` argument"):
        model.get_state_tree("torch")
    model = Sequential([Input((3,)), layers.Dense(2, name="a")])
    assert model.get_state_tree()["optimizer_variables"] == {}
    kernel, bias = model.layers[0].weights
    bias._scope_path = kernel.path
    with pytest.raises(ConfigError, match=r"variable path is found twice in the model: '.*a/kernel'"):
        model.get_state_tree()


@pytest.mark.parametrize("method", ["predict", "fit", "evaluate", "train_on_batch", "__call__"])
def test_data_that_contain_themselves(method):
    loop: list = [np.ones((2, 3))]
    loop.append({"again": loop})
    call = getattr(made(), method)
    with pytest.raises(ConfigError, match="a list contains itself"):
        call(loop, *([np.ones((2, 2))] if "predict" != method != "__call__" else []))


def test_an_export_says_where_the_file_is(tmp_path, capsys):
    made().export(tmp_path / "model.program", verbose=True)
    assert f"Saved artifact at '{tmp_path / 'model.program'}'." in capsys.readouterr().out
    made().export(tmp_path / "model.program", verbose=False)
    assert capsys.readouterr().out == ""
