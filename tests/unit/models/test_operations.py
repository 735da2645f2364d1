"""Operations of Keras' functional models: read, computed, and written as they were."""

import copy
import json
from typing import Any

import numpy as np
import pytest

import dptrain as dp
from dptrain.errors import ConfigError
from dptrain.models.operations import operation
from tests.unit.models import golden_masks as golden

GOLDEN = json.loads(golden.PAGE.read_text())
NUMPY = "keras.src.ops.numpy"


def loaded(name: str, config: Any = None) -> Any:
    model = dp.models.model_from_json(json.dumps(config or GOLDEN[name]["config"]))
    model.set_weights(golden.weights(model))
    return model


def assert_golden(name: str, model: Any) -> None:
    result = model(golden.MODELS[name][1])
    np.testing.assert_allclose(result, GOLDEN[name]["output"], rtol=1e-9, atol=1e-11)


def operations(config: Any) -> list[tuple[str, str, list[Any]]]:
    """Return module, class and calls of each operation, with the names of what these take."""
    layers = config["config"]["layers"]
    return [
        (layer["module"], layer["class_name"], layer["inbound_nodes"]) for layer in layers if ".ops" in layer["module"]
    ]


@pytest.mark.parametrize("name", golden.MODELS)
def test_models_with_masks_compute_what_they_do_in_keras(name):
    model = loaded(name)
    assert_golden(name, model)
    predicted = model.predict(golden.MODELS[name][1], verbose=0)
    np.testing.assert_allclose(predicted, GOLDEN[name]["output"], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", golden.MODELS)
@pytest.mark.parametrize("form", ["written", "cloned"])
def test_their_operations_are_written_as_keras_does(name, form):
    model = loaded(name)
    if form == "cloned":
        model = dp.models.clone_model(model)
    written = json.loads(model.to_json())
    kinds = [
        sorted((module, kind) for module, kind, _ in operations(config)) for config in (written, GOLDEN[name]["config"])
    ]
    assert kinds[0] == kinds[1]
    assert kinds[0]
    restored = loaded(name, written)
    assert_golden(name, restored)
    assert operations(json.loads(restored.to_json())) == operations(written)


@pytest.mark.parametrize("name", golden.MODELS)
def test_a_model_of_ours_computes_what_it_does_in_keras(name):
    model = golden.MODELS[name][0](dp)
    model._set_dtype("float64")
    model.set_weights(golden.weights(model))
    assert_golden(name, model)


def test_they_are_no_layers_but_stand_in_pictures():
    model = loaded("operating")
    assert len(model.layers) == 3
    text = dp.utils.model_to_dot(model)
    assert "zeros_like" in text


def symbol() -> Any:
    return dp.Input((4, 3))


@pytest.mark.parametrize(
    "class_name",
    ["Map", "Scan", "WhileLoop", "Vectorize", "CustomGradient", "Jvp", "Op", "Not_There", "__Doc__", "Annotations"],
)
def test_functions_that_call_others_are_no_operations(class_name):
    for module in (
        NUMPY,
        "keras.src.ops.core",
        "keras.src.ops.nn",
        "keras.src.ops.math",
        "os",
        "keras.src.ops.symbolic",
    ):
        with pytest.raises(ConfigError, match="not supported: operation"):
            operation({"module": module, "class_name": class_name})


@pytest.mark.parametrize(
    ("class_name", "arguments", "config", "message"),
    [
        ("Tile", [2**40], {}, "a number greater than 2147483648"),
        ("Any", [], {"axes": 1}, "'Any': .*unexpected keyword argument 'axes'"),
        ("Reshape", [], {"newshape": "x"}, "operation 'Reshape'"),
        ("Concatenate", [], {"axis": {}}, "operation 'Concatenate'"),
        ("Ndim", [], {}, "its output is not a tensor"),
    ],
)
def test_arguments_that_an_operation_does_not_take(class_name, arguments, config, message):
    with pytest.raises(ConfigError, match=message) as raised:
        operation({"module": NUMPY, "class_name": class_name}).call([symbol(), *arguments], {}, config)
    assert "\n" not in str(raised.value)


def test_an_operation_needs_a_tensor():
    with pytest.raises(ConfigError, match="operation 'Arange' without a symbolic tensor"):
        operation({"module": NUMPY, "class_name": "Arange"}).call([10], {}, {})


def test_damaged_descriptions_end_in_one_line():
    for name, change in [("class_name", "Nothing"), ("config", None), ("inbound_nodes", [{"args": [1]}])]:
        config = copy.deepcopy(GOLDEN["merged"]["config"])
        layer = next(layer for layer in config["config"]["layers"] if layer["class_name"] == "NotEqual")
        layer[name] = change
        with pytest.raises((ConfigError, TypeError, AttributeError)):
            dp.models.model_from_json(json.dumps(config))


def test_operations_are_written_alike_once_they_are_read():
    x = dp.Input((4, 6), name="x")
    y = dp.ops.sort(x[:, 1], axis=-1) + dp.ops.mean(x[:, ::2], axis=1)
    model = dp.Model(x, [y, dp.ops.flip(x, 1)])
    written = json.loads(model.to_json())
    assert json.loads(dp.models.model_from_json(json.dumps(written)).to_json()) == written
    assert (
        next(layer["name"] for layer in written["config"]["layers"] if layer["class_name"] == "GetItem") == "get_item"
    )
