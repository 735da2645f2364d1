"""Classes and functions of a user's own in configurations and files, as in Keras' guide to serialization."""

import json

import numpy as np
import pytest

import dptrain as keras
from dptrain import layers as L  # noqa: N812
from dptrain import ops
from dptrain.errors import ConfigError, DataError

X = np.array([[1.0, -2.0, 0.5]], np.float32)


@keras.saving.register_keras_serializable("testing")
def twofold(x):
    return 2 * x


@keras.saving.register_keras_serializable("testing")
def halves(shape, dtype=None):
    return np.full(shape, 0.5, dtype)


@keras.saving.register_keras_serializable("testing")
def total(w):
    return ops.sum(w)


def tripled(x):
    return 3 * x


class Shift(L.Layer):
    def __init__(self, by, **options):
        super().__init__(**options)
        self.by = by

    def call(self, x):
        return x + self.by


def model(activation=twofold):
    dense = L.Dense(2, activation, kernel_initializer=halves, kernel_regularizer=total)
    return keras.Sequential([keras.Input((3,)), dense])


def test_registered_functions_are_found_in_files(tmp_path):
    pytest.importorskip("h5py")
    net = model()
    net.save(tmp_path / "m.keras")
    loaded = keras.models.load_model(tmp_path / "m.keras")
    np.testing.assert_array_equal(loaded.predict(X, verbose=0), [[-0.5, -0.5]])
    layer = loaded.layers[0]
    assert (layer.activation, layer.kernel_initializer, layer.kernel_regularizer) == (twofold, halves, total)
    assert float(loaded.losses[0]) == 3


def test_a_function_is_described_as_keras_does():
    assert keras.activations.serialize(twofold) == {
        "module": "builtins",
        "class_name": "function",
        "config": "testing>twofold",
        "registered_name": "function",
    }
    assert keras.activations.get("testing>twofold") is twofold
    assert keras.initializers.deserialize(keras.initializers.serialize(halves)) is halves
    assert keras.regularizers.deserialize(keras.regularizers.serialize(total)) is total


def test_other_functions_need_custom_objects(tmp_path):
    pytest.importorskip("h5py")
    model(tripled).save(tmp_path / "m.keras")
    with pytest.raises(DataError, match="custom function 'tripled' of module 'builtins'; pass it in custom_objects"):
        keras.models.load_model(tmp_path / "m.keras")
    loaded = keras.models.load_model(tmp_path / "m.keras", custom_objects={"tripled": tripled})
    assert loaded.layers[0].activation is tripled


def test_functions_of_keras_3_6_are_named_without_their_package():
    @keras.saving.register_keras_serializable(package="of_3_6")
    def squared_of_3_6(x):
        return x * x

    description = {"module": "builtins", "class_name": "function", "config": "squared_of_3_6"}
    for registered in ("function", None, ""):
        assert keras.saving.deserialize_keras_object(description | {"registered_name": registered}) is squared_of_3_6
        layer = L.deserialize({"class_name": "Dense", "config": {"units": 2, "activation": description}})
        assert layer.activation is squared_of_3_6
    keras.saving.register_keras_serializable("another", "squared_of_3_6")(lambda x: x)
    with pytest.raises(ConfigError, match="not supported: custom function 'squared_of_3_6'"):  # of which package?
        keras.saving.deserialize_keras_object(description)


@pytest.mark.parametrize("value", [np.arange(12.0).reshape(4, 3), np.float32([[1, 2, 3]]), np.full((4, 3), 7)])
def test_models_with_arrays_as_initializers_come_back(tmp_path, value):
    """As embeddings of words that others have trained."""
    constant = keras.initializers.Constant(value)
    model = keras.Sequential([L.Input((5,), dtype="int32"), L.Embedding(4, 3, embeddings_initializer=constant)])
    model.save(tmp_path / "m.keras")
    loaded = keras.models.load_model(tmp_path / "m.keras")
    again = [loaded.layers[0], L.deserialize(L.serialize(model.layers[0])), keras.models.clone_model(model).layers[0]]
    again += [keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(model.layers[0]))]
    for layer in again:
        initializer = layer.embeddings_initializer
        np.testing.assert_array_equal(initializer.value, value)
        assert initializer.value.dtype == value.dtype
    np.testing.assert_array_equal(loaded.get_weights()[0], np.broadcast_to(value, (4, 3)))


def test_arrays_in_descriptions_may_be_damaged():
    for config in (None, {"value": [1, [2]], "dtype": "float32"}, {"value": 1, "dtype": "no type"}):
        described = {"class_name": "__numpy__", "config": config}
        constant = {"module": "keras.initializers", "class_name": "Constant", "config": {"value": described}}
        for description in (described, constant):
            with pytest.raises(ConfigError, match="'__numpy__'"):
                keras.saving.deserialize_keras_object(description)


@pytest.mark.parametrize("name", ["mse", "MAE", "mean_squared_error", "relu"])
def test_functions_come_back_by_any_of_their_names(name):
    function = keras.saving.deserialize_keras_object({"class_name": "function", "config": name})
    assert function is (keras.activations.relu if name == "relu" else keras.losses.get(name))
    if name != "relu":
        metric = keras.metrics.MeanMetricWrapper.from_config({"fn": name, "name": "m", "dtype": "float32"})
        assert float(metric([[1.0, 2.0]], [[1.0, 4.0]])) == {"MAE": 1.0}.get(name, 2.0)


def test_an_empty_registered_name_is_none():
    description = {"module": "keras.layers", "class_name": "Dense", "config": {"units": 2}, "registered_name": ""}
    assert isinstance(keras.saving.deserialize_keras_object(description), L.Dense)


def test_a_scope_holds_for_every_deserialize():
    described = L.serialize(Shift(2.0, name="s"))
    with pytest.raises(ConfigError, match="unknown layer 'Shift'"):
        L.deserialize(described)
    with keras.saving.custom_object_scope({"Shift": Shift, "tripled": tripled}):
        assert L.deserialize(described).by == 2.0
        assert keras.activations.deserialize("tripled") is L.Dense(1, "tripled").activation is tripled
    assert L.deserialize(described, {"Shift": Shift}).by == 2.0
    with pytest.raises(ConfigError, match="unknown activation 'tripled'"):
        keras.activations.get("tripled")


def test_a_layer_serves_as_an_activation():
    layer = L.Dense(2, L.LeakyReLU(0.5))
    restored = L.deserialize(json.loads(json.dumps(L.serialize(layer))))
    assert (type(restored.activation), restored.activation.negative_slope) == (L.LeakyReLU, 0.5)


@pytest.mark.parametrize(
    "described_object",
    [
        *(None, 3, "word", [1, {"a": 2.5}], (1, 2)),
        *(keras.losses.Huber(0.5), keras.optimizers.SGD(0.1), keras.initializers.HeNormal(), keras.metrics.Recall()),
        *(L.Dense(2, "relu"), model(), keras.optimizers.schedules.CosineDecay(0.1, 5)),
    ],
)
def test_objects_come_back(described_object):
    described = keras.saving.serialize_keras_object(described_object)
    restored = keras.saving.deserialize_keras_object(described)
    assert type(restored) is type(described_object)
    if hasattr(described_object, "get_config"):
        assert json.dumps(restored.get_config()) == json.dumps(described_object.get_config())
    else:
        assert restored == described == described_object


@pytest.mark.parametrize("dtype", ["float16", "float64", "mixed_bfloat16"])
def test_policies_come_back(dtype):
    layer = L.Dense(3, dtype=dtype)
    described = json.loads(json.dumps(keras.saving.serialize_keras_object(layer)))
    of_keras = {**layer.get_config(), "dtype": described["config"]["dtype"]}
    for restored in (keras.saving.deserialize_keras_object(described), L.Dense.from_config(of_keras)):
        restored.build((None, 2))
        assert restored.dtype_policy.name == dtype
        assert restored.kernel.dtype == layer.dtype
    described = keras.saving.serialize_keras_object(Around(layer))
    inner = keras.saving.deserialize_keras_object(described, {"Around": Around})
    assert inner.inner.dtype_policy.name == dtype


def test_layers_that_have_adapted_come_back(tmp_path):
    pytest.importorskip("h5py")
    layer = L.Discretization(num_bins=4)
    layer.adapt(np.arange(100.0))
    net = keras.Sequential([keras.Input((1,)), layer])
    net.save(tmp_path / "m.keras")
    values = np.array([[3.0], [30.0], [60.0], [99.0]])
    for restored in (
        keras.saving.load_model(tmp_path / "m.keras").layers[0],
        keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(layer)),
        L.deserialize(L.serialize(layer)),
    ):
        assert (restored.num_bins, restored.bin_boundaries) == (4, layer.bin_boundaries)
        np.testing.assert_array_equal(restored(values), [[0], [1], [2], [3]])


def test_functions_arrays_and_slices_come_back():
    for function in (keras.activations.relu, keras.activations.sigmoid, keras.losses.mean_squared_error, twofold):
        assert keras.utils.deserialize_keras_object(keras.utils.serialize_keras_object(function)) is function
    array = np.arange(6.0).reshape(2, 3)
    described = keras.saving.serialize_keras_object({"array": array, "tensor": ops.cast(array, "int32")})
    restored = keras.saving.deserialize_keras_object(json.loads(json.dumps(described)))
    np.testing.assert_array_equal(restored["array"], array)
    assert (restored["tensor"].dtype, restored["tensor"].shape) == (np.int32, (2, 3))
    assert keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(slice(1, None))) == slice(1, None)


class Around(L.Layer):
    """A layer around another one, whose `get_config` says so, as in Keras' guide."""

    def __init__(self, inner, **options):
        super().__init__(**options)
        self.inner = inner

    def call(self, x):
        return -self.inner(x)

    def get_config(self):
        return {**super().get_config(), "inner": keras.saving.serialize_keras_object(self.inner)}

    @classmethod
    def from_config(cls, config):
        return cls(keras.saving.deserialize_keras_object(config.pop("inner")), **config)


def test_a_layer_in_a_layer_in_a_file(tmp_path):
    pytest.importorskip("h5py")
    net = keras.Sequential([keras.Input((3,)), Around(L.Dense(2, twofold, kernel_initializer=halves), name="around")])
    net.save(tmp_path / "m.keras")
    with keras.utils.custom_object_scope({"Around": Around}):
        loaded = keras.saving.load_model(tmp_path / "m.keras")
    np.testing.assert_array_equal(loaded.predict(X, verbose=0), [[0.5, 0.5]])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: keras.saving.serialize_keras_object(object()), "must implement the `get_config"),
        (lambda: keras.saving.serialize_keras_object(L.Dense), "Cannot serialize object"),
        (lambda: keras.saving.serialize_keras_object(lambda x: x), "writing the lambda"),
        (lambda: keras.saving.deserialize_keras_object({"class_name": "__lambda__", "config": {}}), "a Python lambda"),
        (lambda: keras.saving.deserialize_keras_object({"class_name": "Nothing", "config": {}}), "Nothing"),
        (lambda: keras.saving.deserialize_keras_object({}, safe_mode=False), "runs no code from files"),
        (lambda: keras.saving.register_keras_serializable()(int), "does not have a get_config"),
    ],
)
def test_refused(wrong, message):
    with pytest.raises(ConfigError, match=message):
        wrong()


def test_registered_objects_by_name():
    assert keras.saving.get_registered_object("testing>twofold") is twofold
    assert keras.saving.get_registered_name(twofold) == "testing>twofold"
    assert keras.saving.get_registered_object("testing>nothing") is None
    assert keras.utils.get_custom_objects()["testing>halves"] is halves
    keras.saving.get_custom_objects()["put_there"] = tripled
    try:
        assert keras.activations.get("put_there") is tripled
    finally:
        del keras.saving.get_custom_objects()["put_there"]


def test_a_file_whose_class_does_not_take_what_it_says_is_not_called_damaged(tmp_path):
    keras.Sequential([L.Input((3,)), Shift(2.0)]).save(tmp_path / "m.keras")

    class Picky(Shift):
        def __init__(self, by, **options):
            raise ValueError("no shifts today")

    with pytest.raises(DataError, match=r"its model cannot be built \(ValueError: no shifts today\)"):
        keras.models.load_model(tmp_path / "m.keras", custom_objects={"Shift": Picky})
