"""Copies of models: the same layers, weights of their own."""

import inspect

import numpy as np
import pandas as pd
import pytest

import dptrain as keras
from dptrain import layers as L  # noqa: N812
from dptrain.data.preprocessing import Column, Preprocessing
from dptrain.errors import ConfigError
from dptrain.models import clone_model

X = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32)


def sequential():
    return keras.Sequential([keras.Input((3,), name="x"), L.Dense(4, "tanh", name="a"), L.Dropout(0.5), L.Dense(2)])


def branched():
    x = keras.Input((3,), name="x")
    shared = L.Dense(2, name="shared")
    return keras.Model(x, [L.Add(name="sum")([shared(x), 2 * shared(x * 3)]), shared.output], name="branched")


def copied(model, **options):
    """Return a clone that has been given the model's weights."""
    clone = clone_model(model, **options)
    assert not {id(weight) for weight in clone.weights} & {id(weight) for weight in model.weights}
    assert [weight.path for weight in clone.weights] == [weight.path for weight in model.weights]
    model.set_weights([value + 0.5 for value in model.get_weights()])
    clone.set_weights(model.get_weights())
    return clone


@pytest.mark.parametrize("build", [sequential, branched])
def test_a_clone_computes_the_same(build):
    model = build()
    clone = copied(model)
    assert (type(clone), clone.name, clone.input_names) == (type(model), model.name, ["x"])
    assert [layer.name for layer in clone.layers] == [layer.name for layer in model.layers]
    for mine, other in zip(model.predict(X, verbose=0), clone.predict(X, verbose=0), strict=True):
        np.testing.assert_array_equal(mine, other)


def test_a_clone_function_says_what_layers_become():
    def regular(layer):
        config = layer.get_config()
        if isinstance(layer, L.Dense):
            config["kernel_regularizer"] = "l2"
        return type(layer).from_config(config)

    clone = clone_model(sequential(), clone_function=regular)
    assert [type(layer.kernel_regularizer).__name__ for layer in (clone.layers[0], clone.layers[2])] == ["L2", "L2"]
    assert clone_model(branched(), clone_function=lambda layer: layer).get_layer("shared") is not None


def test_a_call_function_puts_layers_between():
    model = branched()
    clone = clone_model(
        model,
        clone_function=lambda layer: layer,
        call_function=lambda layer, *tensors: L.Rescaling(2.0)(layer(*tensors)),
    )
    added, first = model.predict(X, verbose=0)
    plain, doubled = clone.predict(X, verbose=0)
    np.testing.assert_allclose(doubled, 2 * first, rtol=1e-6)
    np.testing.assert_allclose(plain, 4 * added, rtol=1e-5, atol=1e-6)
    assert clone.get_layer("shared") is model.get_layer("shared")


def test_other_inputs():
    inputs = keras.Input((3,), name="other")
    clone = clone_model(branched(), input_tensors=inputs)
    assert clone.inputs[0] is inputs
    assert clone_model(sequential(), input_tensors=keras.Input((5,))).input_shape == (None, 5)
    for wrong in (3, [inputs, inputs]):
        with pytest.raises(ConfigError, match="must contain a single tensor"):
            clone_model(sequential(), wrong)
    with pytest.raises(ConfigError, match="must be KerasTensors"):
        clone_model(branched(), 3)


def test_models_in_a_model():
    inner = sequential()
    model = keras.Sequential([keras.Input((3,)), inner, L.Dense(1)])
    copied_layers = []

    def note(layer):
        copied_layers.append(type(layer).__name__)
        return type(layer).from_config(layer.get_config())

    clone = clone_model(model, clone_function=note)
    assert copied_layers == ["Sequential", "Dense"]
    assert clone.layers[0] is not inner
    copied_layers.clear()
    clone_model(model, clone_function=note, recursive=True)
    assert copied_layers == ["Dense", "Dropout", "Dense", "Dense"]


def test_a_clone_is_compiled_as_the_model_is():
    model = sequential()
    model.compile(
        keras.optimizers.SGD(0.25), lambda y, p: (y - p) ** 2, metrics=[keras.metrics.MeanAbsoluteError("far")],
        dtype="float64",
    )  # fmt: skip
    model.fit(X, X[:, :2], verbose=0)
    clone = clone_model(model)
    assert float(clone.optimizer.learning_rate) == 0.25
    assert int(clone.optimizer.iterations) == 0
    assert clone.dtype == "float64"
    history = clone.fit(X, X[:, :2], verbose=0).history
    assert list(history) == ["far", "loss"] or list(history) == ["loss", "far"]
    assert not clone_model(sequential()).compiled


# Another value of each option of `compile`, and what it needs beside it.
OTHERS = {
    "loss_weights": {"loss_weights": 0.5},
    "weighted_metrics": {"weighted_metrics": ["mae"]},
    "run_eagerly": {"run_eagerly": True},
    "steps_per_execution": {"steps_per_execution": 3},
    "jit_compile": {"jit_compile": False},
    "auto_scale_loss": {"auto_scale_loss": False, "dtype": "mixed_float16"},
    "device": {"device": "cpu"},
    "dtype": {"dtype": "mixed_bfloat16"},
    "share_gpu": {"share_gpu": True},
    "comm": {"comm": "auto"},
    "bucket_mb": {"bucket_mb": 2.0},
    "device_mb": {"device_mb": 3.0},
    "gpu_select": {"gpu_select": "index"},
    "precision": {"precision": "tf32"},
    "gemm": {"gemm": "auto"},
    "conv": {"conv": "auto"},
    "cuda_graph": {"cuda_graph": False},
    "shards_per_batch": {"shards_per_batch": 3},
    "comm_dtype": {"comm_dtype": "bfloat16"},
    "shard_optimizer": {"shard_optimizer": True},
    "shard_weights": {"shard_weights": True},
    "stages": {"stages": 2},
    "microbatches": {"microbatches": 3, "stages": 2},
}


@pytest.mark.parametrize("option", [*inspect.signature(keras.Model.compile).parameters][1:])
def test_a_clone_has_every_option_of_compile(option):
    if option in ("optimizer", "loss", "metrics"):  # which are made anew: the test above
        return
    options, model = OTHERS[option], sequential()
    model.compile("sgd", "mse", **options)
    clone = clone_model(model)
    assert type(clone.optimizer) is type(model.optimizer)
    arguments = clone._compile_arguments
    assert {name: arguments[name] for name in options} == options


class Own(keras.Model):
    def __init__(self, units):
        super().__init__()
        self.units, self.dense = units, L.Dense(units)

    def call(self, x):
        return self.dense(x)


def test_a_class_of_ones_own_is_made_anew_from_its_configuration():
    clone = clone_model(Own(7))
    assert (type(clone), clone.units) == (Own, 7)
    with pytest.raises(ConfigError, match="only supported for Sequential models or Functional models"):
        clone_model(Own(7), clone_function=lambda layer: layer)
    with pytest.raises(ConfigError, match="`call_function` argument is not supported with Sequential"):
        clone_model(sequential(), call_function=lambda layer, x: layer(x))


def test_compiling_from_a_configuration():
    model = sequential()
    assert model.get_compile_config() == {}
    model.compile("adam", "mse", metrics=["mae"])
    other = sequential()
    other.compile_from_config(model.get_compile_config())
    assert (type(other.optimizer).__name__, other.loss.name) == ("Adam", "mean_squared_error")
    other.compile_from_config({})


def test_tensors_of_another_structure_are_no_inputs():
    x, y = keras.Input((3,)), keras.Input((3,))
    model = keras.Model({"x": x, "y": y}, x + y)
    assert clone_model(model, input_tensors={"x": x, "y": y}).output.shape == (None, 3)
    with pytest.raises(ConfigError, match=r"must have the same structure as model\.input"):
        clone_model(model, input_tensors=(x, y))


class Subclassed(keras.Model):
    def __init__(self, **keywords):
        super().__init__(**keywords)
        self.dense = L.Dense(1)

    def call(self, inputs):
        return self.dense(inputs)


@pytest.mark.parametrize(
    "build",
    [
        lambda: keras.Sequential([L.Input((3,)), L.Dense(1)]),
        lambda: keras.Model(x := L.Input((3,)), L.Dense(1)(x)),
        Subclassed,
    ],
)
def test_a_copy_takes_the_raw_data_that_the_model_takes(build):
    model = build()
    columns = (Column("a", "number"), Column("b", "one-hot", ("x", "y")))
    model.preprocessing = Preprocessing("regression", columns, "t")
    copy = clone_model(model)
    frame = pd.DataFrame({"b": ["y", "x"], "a": [3, 4]})
    assert copy.preprocessing == model.preprocessing
    model.predict(frame, verbose=0)
    assert copy.predict(frame, verbose=0).shape == (2, 1)


def test_floating_inputs_behind_integers_stay_floating():
    ids, amounts = keras.Input((1,), dtype="int64"), keras.Input((1,))
    outputs = L.Add()([L.Embedding(4, 1, "ones")(ids)[:, 0], amounts])
    x = [np.array([[1], [2]]), np.array([[0.25], [0.5]], "float32")]
    for model in (clone_model(keras.Model([ids, amounts], outputs)), keras.Function([ids, amounts], outputs)):
        np.testing.assert_array_equal(np.asarray(model(x)), [[1.25], [1.5]])


@keras.saving.register_keras_serializable()
class Sum(L.Layer):
    """Sums what there is."""

    def call(self, inputs, more=None):
        return inputs * 1.0 if more is None else inputs * 1.0 + more


def saved(model, directory, **options):
    model.save(directory / "model.keras")
    return keras.models.load_model(directory / "model.keras")


COPIES = {
    "clone": lambda model, _: clone_model(model),
    "clone of a clone": lambda model, _: clone_model(clone_model(model)),
    "clone with a function": lambda model, _: clone_model(
        model, clone_function=lambda layer: type(layer).from_config(layer.get_config())
    ),
    "from_config": lambda model, _: type(model).from_config(model.get_config()),
    "JSON": lambda model, _: keras.models.model_from_json(model.to_json()),
    "file": saved,
    "layers.deserialize": lambda model, _: L.deserialize(L.serialize(model)),
}
# What `Input` is given besides a shape.
INPUT_OPTIONS = {
    "nothing": {},
    "name": {"name": "another"},
    "dtype": {"dtype": "int32"},
    "batch_size": {"batch_size": 6},
    "unknown length": {"shape": (None,)},
    "optional": {"optional": True},
    "all": {"name": "another", "dtype": "int64", "batch_size": 6, "optional": True},
}


@pytest.mark.parametrize("option", INPUT_OPTIONS)
@pytest.mark.parametrize("way", COPIES)
def test_each_argument_of_an_input_is_that_of_the_copys(way, option, tmp_path):
    x, more = keras.Input((3,), name="x"), keras.Input(**{"shape": (3,), "name": "more"} | INPUT_OPTIONS[option])
    model = keras.Model({"x": x, more.name: more}, Sum(name="sum")(x, more), name="model")
    copy = COPIES[way](model, tmp_path)

    def facts(of):
        layers = [tensor.history.layer for tensor in of.inputs]
        return sorted((layer.name, layer.batch_shape, layer.dtype, layer.optional) for layer in layers)

    assert facts(copy) == facts(model)
    assert copy is not model
    values = {"x": X, more.name: None if "optional" in INPUT_OPTIONS[option] else np.ones((6, 3), "int32")}
    np.testing.assert_array_equal(copy(values), model(values))
