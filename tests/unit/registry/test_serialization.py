"""What objects of every kind have in common: being named, described and made again."""

import json

import numpy as np
import pytest

import dptrain as dp
from dptrain import initializers, layers, losses, metrics, regularizers
from dptrain.errors import ConfigError
from dptrain.optimizers import SGD, schedules

# Of each kind: what takes an argument, a class of the kind, and its module in Keras.
KINDS = {
    "initializer": (initializers, initializers.HeNormal, "keras.initializers"),
    "loss": (losses, losses.Huber, "keras.losses"),
    "metric": (metrics, metrics.Recall, "keras.metrics"),
    "regularizer": (regularizers, regularizers.L2, "keras.regularizers"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_an_argument_may_be_an_object_a_class_a_name_or_a_description(kind):
    module, cls, _ = KINDS[kind]
    instance = cls()
    assert module.get(instance) is instance
    for identifier in (cls, cls.__name__, {"class_name": cls.__name__, "config": {}}):
        assert type(module.get(identifier)) is cls
    for wrong in (3, [cls]):
        with pytest.raises(ConfigError, match=f"Could not interpret {kind} identifier"):
            module.get(wrong)
    assert module.get(len) is len  # a function is one by itself
    with pytest.raises(ConfigError, match="expected a dictionary with 'class_name' and 'config'"):
        module.get({"class_name": cls.__name__})


@pytest.mark.parametrize("kind", KINDS)
def test_configurations_have_keras_names(kind):
    module, cls, keras_module = KINDS[kind]
    instance = cls()
    assert (
        type(instance).from_config(instance.get_config()).get_config()
        == instance.get_config()
        == instance._get_config()
    )
    described = module.serialize(instance)
    assert (described["module"], described["registered_name"]) == (keras_module, None)


def test_classes_of_the_users_own_are_not_said_to_be_keras():
    class Far(losses.Huber): ...

    class Scaled(layers.Rescaling): ...

    for described in (losses.serialize(Far(2.0)), layers.serialize(Scaled(0.5, name="scaled"))):
        assert described["module"] == __name__
        assert described["registered_name"] == described["class_name"]
    again = losses.deserialize(losses.serialize(Far(2.0)), {"Far": Far})
    assert (type(again), again.delta) == (Far, 2.0)


def test_numbers_of_numpy_become_pythons(tmp_path):
    number = np.float32(0.5)
    piecewise = schedules.PiecewiseConstantDecay(np.array([1, 2]), np.array([0.5, 0.25, 0.125]))
    for rate in (piecewise, schedules.ExponentialDecay(number, np.int64(3), number)):
        again = SGD.from_config(json.loads(json.dumps(SGD(rate).get_config())))
        assert [float(again._schedule(step)) for step in range(4)] == [float(rate(step)) for step in range(4)]
    model = dp.Sequential([layers.Dense(1, input_shape=(2,))])
    measured = [metrics.BinaryAccuracy(threshold=number), metrics.Recall(np.array([0.5]).tolist())]
    model.compile(SGD(piecewise), losses.Huber(number), metrics=measured)
    for loss in (losses.Huber(number), losses.BinaryCrossentropy(label_smoothing=number)):
        assert json.loads(json.dumps(loss._get_config())) == loss._get_config()
    pytest.importorskip("h5py", reason="Keras' files need the extra 'keras-files'")
    model.save(tmp_path / "model.keras")
    assert dp.models.load_model(tmp_path / "model.keras").optimizer.get_config() == model.optimizer.get_config()
