"""What of Keras is not there says so, and what it may be instead."""

import copy
import importlib
import inspect
import pickle

import pytest

import dptrain as dp
from dptrain.errors import ConfigError
from dptrain.registry.names import suggestion

# Every module that users reach under a name that Keras has, or find beside these.
PUBLIC = [
    "activations",
    "applications",
    "applications.imagenet_utils",
    "applications.resnet",
    "applications.vgg19",
    "backend",
    "callbacks",
    "config",
    "constraints",
    "datasets",
    "distillation",
    "distribution",
    "dtype_policies",
    "datasets.fashion_mnist",
    "datasets.mnist",
    "initializers",
    "layers",
    "losses",
    "metrics",
    "mixed_precision",
    "models",
    "ops",
    "ops.image",
    "optimizers",
    "optimizers.schedules",
    "preprocessing",
    "preprocessing.image",
    "preprocessing.sequence",
    "pruning",
    "random",
    "regularizers",
    "saving",
    "testing",
    "tree",
    "utils",
]


@pytest.mark.parametrize(
    ("name", "candidates", "expected"),
    [
        ("relo", ["relu", "gelu", "tanh"], "; did you mean 'relu'?"),
        ("NADAN", ["Adam", "SGD", "Nadam"], "; did you mean 'Nadam' or 'Adam'?"),
        ("adamx", ["adam", "sgd", "adamw"], "; did you mean 'adam' or 'adamw'?"),
        ("aaab", [f"aaa{letter}" for letter in "cdefgh"], "; did you mean 'aaah' or 'aaag' or 'aaaf'?"),
        ("x", ["b", "a", "f", "e", "d", "c"], "; known: a, b, c, d, e, f"),
        ("red", ["green", "blue", "violet", "orange", "pink", "grey", "white"], ""),
        ("x", [], ""),
    ],
)
def test_suggestions(name, candidates, expected):
    assert suggestion(name, candidates) == expected


def test_a_word_of_keras_for_what_is_there():
    with pytest.raises(ConfigError, match=r"^unknown optimizer 'rm_sprop'; did you mean 'rmsprop'\?"):
        dp.optimizers.get("rm_sprop")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: dp.layers.deserialize({"class_name": "FlaxLayer", "config": {}}), "layer 'FlaxLayer'"),
        (lambda: dp.layers.deserialize({"class_name": "TFSMLayer", "config": {}}), "layer 'TFSMLayer'"),
    ],
)
def test_a_word_that_keras_knows(make, message):
    with pytest.raises(ConfigError, match=f"^not supported: {message}: Keras has it, dptrain does not yet$"):
        make()


@pytest.mark.parametrize(
    ("module", "name", "message"),
    [
        (dp, "Modle", "not supported: dptrain.Modle; did you mean 'Model'"),
        (dp.layers, "FlaxLayer", r"not supported: layers.FlaxLayer: Keras has it, dptrain does not yet$"),
        (dp, "visualization", r"not supported: dptrain.visualization: Keras has it, dptrain does not yet$"),
        (dp.layers, "Qwertyuiop", r"not supported: layers.Qwertyuiop$"),
        (dp.layers, "Densse", "not supported: layers.Densse; did you mean 'Dense'"),
        (dp.callbacks, "OrbaxCheckpoint", "not supported: callbacks.OrbaxCheckpoint"),
        (dp.metrics, "Preccision", "not supported: metrics.Preccision; did you mean"),
        (dp.models, "Sequantial", "not supported: models.Sequantial; did you mean 'Sequential'"),
        (dp.optimizers, "Nadem", "not supported: optimizers.Nadem; did you mean 'Nadam' or 'Adam'"),
        (dp.optimizers.schedules, "Halving", "not supported: optimizers.schedules.Halving"),
        (dp.callbacks, "RemoteMonitor", "not supported: callbacks.RemoteMonitor"),
        (dp.random, "binomal", "not supported: random.binomal; did you mean"),
        (dp.backend, "get_uid", "not supported: backend.get_uid: Keras has it, dptrain does not yet$"),
    ],
)
def test_a_name_that_is_not_there(module, name, message):
    assert not hasattr(module, name)
    with pytest.raises(AttributeError, match=message):
        getattr(module, name)


def test_the_public_modules_are_all_here():
    modules = {name for name in dp.__all__ if inspect.ismodule(getattr(dp, name))}
    assert modules <= {*PUBLIC, "errors"}  # which Keras has not


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_module(name):
    module = importlib.import_module(f"dptrain.{name}")
    for missing in ("NoSuchThing", "no_such_thing"):
        with pytest.raises(AttributeError, match=rf"^not supported: {name}\.{missing}"):
            getattr(module, missing)
    # What tools ask of any object gets Python's own answer.
    for attribute in ("__wrapped__", "__no_such__", "_repr_html_", "_private"):
        with pytest.raises(AttributeError, match=rf"^module '{name}' has no attribute '{attribute}'"):
            getattr(module, attribute)
    assert inspect.unwrap(module) is module
    assert dict(inspect.getmembers(module))
    for member in getattr(module, "__all__", ()):
        assert hasattr(module, member)


def test_what_python_does_with_modules():
    namespace: dict = {}
    exec("from dptrain.callbacks import early_stopping", namespace)  # a submodule, not a name of the package
    exec("from dptrain.layers import *", namespace)
    assert namespace["early_stopping"].EarlyStopping is dp.callbacks.EarlyStopping
    assert namespace["Dense"] is dp.layers.Dense
    with pytest.raises(ImportError, match="cannot import name 'FlaxLayer'"):
        exec("from dptrain.layers import FlaxLayer", namespace)
    for member in (dp.layers.Dense, dp.activations.relu, dp.utils.to_categorical):
        assert pickle.loads(pickle.dumps(member)) == copy.deepcopy(member) == member
