"""Layers in nested containers: every kind of save has every variable, and a file that would lack one is refused."""

import itertools
from collections import OrderedDict, deque, namedtuple
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

import dptrain as dp
from dptrain import layers
from dptrain.callbacks import ModelCheckpoint
from dptrain.errors import ConfigError, DataError
from dptrain.saving import saveables, state

h5py = pytest.importorskip("h5py", reason="Keras' files need the extra 'keras-files'")

X = np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3)
Pair = namedtuple("Pair", ("first", "second"))
CONTAINERS = {
    "list": lambda layer: [layer],
    "tuple": lambda layer: (layer, None),
    "dict": lambda layer: {"z": 1, "a": layer},
}


class Scale(layers.Layer):
    """One weight, and a draw of random numbers."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.seed_generator = dp.random.SeedGenerator(1)

    def build(self, input_shape):
        self.factor = self.add_weight((1,), "uniform", name="factor")

    def call(self, inputs):
        return inputs * (1 + self.factor) + 0 * dp.random.normal((1,), seed=self.seed_generator)


class Nested(layers.Layer):
    """Layers in containers nested three deep, of all kinds in each other."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.blocks = {
            "-".join(names): self.nested([CONTAINERS[name] for name in names])
            for names in itertools.product(CONTAINERS, repeat=3)
        }
        self.others = [Pair(Scale(), OrderedDict(a=Scale())), MappingProxyType({"b": [Scale()]})]
        self.others.append({"q": deque([Scale(), [Scale()]])})
        self.others.append(self.others)  # a list that contains itself

    def nested(self, makers):
        if not makers:
            return Scale()
        return makers[0](self.nested(makers[1:]))

    def call(self, inputs):
        for layer in self._sublayers:
            inputs = layer(inputs)
        return inputs


class NestedModel(dp.Model):
    """The same in a model of one's own."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.nested = Nested()
        self.blocks = ([Scale(), {"a": (Scale(),)}], [[[Scale()]]])
        self.head = layers.Dense(1)

    def call(self, inputs):
        for layer in self._sublayers:
            inputs = layer(inputs)
        return inputs


def built(kind: str) -> dp.Model:
    """Return a model with weights that differ from each other, and from those that it begins with."""
    model = NestedModel() if kind == "subclass" else dp.Sequential([layers.Input((3,)), Nested(), layers.Dense(1)])
    model(X)
    model.set_weights([np.full(weight.shape, number / 100) for number, weight in enumerate(model.weights, 1)])
    return model


def datasets(file: Any) -> list[str]:
    names: list[str] = []
    file.visititems(lambda name, item: names.append(name) if isinstance(item, h5py.Dataset) else None)
    return names


def objects() -> dict[str, Any]:
    return {"Nested": Nested, "NestedModel": NestedModel, "Scale": Scale}


@pytest.mark.sample(6)
@pytest.mark.parametrize("kind", ["sequential", "subclass"])
def test_every_save_has_every_weight(tmp_path, kind):
    model = built(kind)
    count = 27 + 5 + 2 + (3 if kind == "subclass" else 0)
    assert len(model.weights) == count
    paths = [tmp_path / name for name in ("m.keras", "m.weights.h5", "m.safetensors")]
    model.save(paths[0])
    model.save_weights(paths[1])
    model.save_weights(paths[2])
    with h5py.File(paths[1]) as file:
        assert len(datasets(file)) == len(model.variables) == 2 * count - 2
    assert len(safetensors.numpy.load_file(paths[2])) == count
    other = built(kind)
    for path in paths:
        other.set_weights([0 * weight for weight in other.get_weights()])
        other.load_weights(path)
        np.testing.assert_equal(other.get_weights(), model.get_weights())
    loaded = dp.models.load_model(paths[0], objects())
    np.testing.assert_equal(loaded.get_weights(), model.get_weights())
    np.testing.assert_array_equal(loaded(X), model(X))
    if kind == "sequential":  # Keras 2's files hold no subclasses
        model.save(tmp_path / "m.h5")
        with h5py.File(tmp_path / "m.h5") as file:
            assert len(datasets(file["model_weights"])) == count
        np.testing.assert_equal(dp.models.load_model(tmp_path / "m.h5", objects()).get_weights(), model.get_weights())
    arrays = state.decode(state.encode(model, {}), "backup")[1]
    assert len(arrays) >= len(model.variables)
    other.set_weights([0 * weight for weight in other.get_weights()])
    state.restore(other, arrays)
    np.testing.assert_equal(other.get_weights(), model.get_weights())


@pytest.mark.parametrize("ending", [".keras", ".weights.h5"])
def test_checkpoints_of_a_training_have_layers_in_nested_lists(tmp_path, ending):
    class Blocks(layers.Layer):
        def __init__(self, **options):
            super().__init__(**options)
            self.blocks = [[layers.Dense(3), layers.Dense(3)], [layers.Dense(1)]]

        def call(self, inputs):
            for layer in itertools.chain(*self.blocks):
                inputs = layer(inputs)
            return inputs

    def model():
        net = dp.Sequential([layers.Input((3,)), Blocks()])
        net.compile("sgd", "mse", run_eagerly=True, device="cpu")
        return net

    path = tmp_path / f"m{ending}"
    trained, other = model(), model()
    callback = ModelCheckpoint(path, save_weights_only=ending == ".weights.h5")
    trained.fit(X, X[:, :1], verbose=0, callbacks=[callback])
    other.load_weights(path)
    np.testing.assert_equal(other.get_weights(), trained.get_weights())
    assert not np.array_equal(trained.get_weights()[0], model().get_weights()[0])


def test_groups_of_containers_are_keras_own():
    layer = layers.Dense(2)
    members = [layer, [layers.Dense(2)], {"a": layer}, (), 3, layers.Dense(2)]
    assert saveables.group_names(members) == ["dense", "container", "container_1", "container_2", "", "dense_1"]


def test_files_of_versions_that_did_not_go_into_nested_containers(tmp_path):
    """They list all layers of a model as `layers`, and lack those of a layer."""
    model = NestedModel(name="model")
    model.nested = layers.Activation("linear")
    model(X)
    values = [np.full(weight.shape, number / 10) for number, weight in enumerate(model.weights, 1)]
    names = ["scale", "scale_1", "scale_2", "dense"]
    with h5py.File(tmp_path / "m.weights.h5", "w") as file:
        for name, arrays in zip(names, [*([array] for array in values[:3]), values[3:]], strict=True):
            for number, array in enumerate(arrays):
                file[f"layers/{name}/vars/{number}"] = array
    model.load_weights(tmp_path / "m.weights.h5")
    np.testing.assert_allclose([weight.flat[0] for weight in model.get_weights()], [value.flat[0] for value in values])
    model = dp.Sequential([layers.Input((3,)), Nested()])
    with h5py.File(tmp_path / "m.weights.h5", "w") as file:
        file.create_group("layers/nested/vars")
    with pytest.raises(DataError, match="the weights do not fit the model: nested/scale/factor: not in the file"):
        model.load_weights(tmp_path / "m.weights.h5")


def test_a_layer_under_a_name_that_models_have(tmp_path):
    class Named(layers.Layer):
        def __init__(self, **options):
            super().__init__(**options)
            self.history = layers.Dense(3)

        def call(self, inputs):
            return self.history(inputs)

    model, other = (dp.Sequential([layers.Input((3,)), Named()]) for _ in range(2))
    model.save_weights(tmp_path / "m.weights.h5")
    other.set_weights([weight + 1 for weight in other.get_weights()])
    other.load_weights(tmp_path / "m.weights.h5")
    np.testing.assert_equal(other.get_weights(), model.get_weights())


@pytest.mark.parametrize("ending", [".keras", ".weights.h5"])
def test_a_file_that_would_lack_a_variable_is_refused(tmp_path, ending):
    class Hidden(layers.Layer):
        @property
        def weights(self):
            return [*super().weights, self.variable]

        @property
        def variables(self):
            return [*super().variables, self.variable]

    path, hidden = tmp_path / f"m{ending}", Hidden()
    hidden.__class__.variable = dp.Variable(np.zeros(2), name="hidden")  # no attribute of the layer itself
    hidden.call = lambda inputs: inputs
    model = dp.Sequential([layers.Input((3,)), hidden])
    save = model.save if ending == ".keras" else model.save_weights
    with pytest.raises(ConfigError, match=r"would lack 1 of its 1 variables \(hidden\)"):
        save(path)
    assert not path.exists()


def test_weights_of_one_name_have_paths_of_their_own(tmp_path):
    class Named(layers.Layer):
        def build(self, input_shape):
            self.all = [self.add_weight((1,), "uniform", name=name) for name in ("w", "w", "w_1", "dense/kernel")]
            self.dense = layers.Dense(1)

        def call(self, inputs):
            return self.dense(inputs) + sum(weight * 1 for weight in self.all)

    def model():
        return dp.Sequential([layers.Input((3,)), Named(name="named")])

    first, other = model(), model()
    values = [np.full(weight.shape, number / 10) for number, weight in enumerate(first.weights, 1)]
    first.set_weights(values)
    first.save_weights(tmp_path / "w.safetensors")
    other.load_weights(tmp_path / "w.safetensors")
    np.testing.assert_equal(other.get_weights(), first.get_weights())
    names = ["w", "w_1", "w_1_1", "dense/kernel", "dense/kernel_1", "dense/bias"]
    assert list(first._weights_by_path()) == [f"named/{name}" for name in names]
    assert len(safetensors.numpy.load_file(tmp_path / "w.safetensors")) == 6


@pytest.mark.parametrize("kind", [set, frozenset])
@pytest.mark.parametrize("wrap", [lambda parts: parts, lambda parts: [{"a": parts}]])
def test_layers_in_a_set_are_refused(kind, wrap):
    """A set has another order in every process: weights would come in another order on each rank and at each load."""

    class Own(layers.Layer):
        def __init__(self):
            super().__init__()
            self.plain, self.parts = {"a", (1, 2)}, wrap(kind([layers.Dense(1)]))

        def call(self, inputs):
            return inputs

    with pytest.raises(ConfigError, match=f"a {kind.__name__} holds Dense: use a list instead"):
        Own()(X)


def test_layers_in_a_deque_are_trained():
    class Own(dp.Model):
        def __init__(self):
            super().__init__()
            self.blocks = deque([layers.Dense(3), layers.Dense(1)])

        def call(self, inputs):
            for layer in self.blocks:
                inputs = layer(inputs)
            return inputs

    model = Own()
    model.compile("sgd", "mse")
    model.build((None, 3))
    before = model.get_weights()
    model.fit(X, np.ones((2, 1)), verbose=0)
    assert len(before) == 4
    assert all((after != was).any() for after, was in zip(model.get_weights(), before, strict=True))
