"""Configurations of users' layers: what their constructors were given, in files and in `from_config`."""

import copy
import json
from typing import Any

import numpy as np
import pytest

import dptrain as dp
from dptrain import layers
from dptrain.errors import ConfigError
from dptrain.layers import Dense, Layer

X = np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3)


class NoAttributes(Layer):
    """Arguments that are no attributes."""

    def __init__(self, units, activation="relu", **options):
        super().__init__(**options)
        self.inner = Dense(units, activation)

    def call(self, inputs):
        return self.inner(inputs)


class OtherSelf(Layer):
    """Another first argument, and attributes that differ from the arguments of their names."""

    def __init__(this, units, *, sizes=(1,)):  # noqa: N805
        super().__init__()
        this.units, this.sizes = 2 * units, [*sizes, 2]
        this.inner = Dense(this.units)

    def call(this, inputs):  # noqa: N805
        return this.inner(inputs)


class HandsOn(Dense):
    """A Dense whose arguments are handed on."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)


class HandsOnMore(HandsOn):
    """Another one, with an argument of its own."""

    def __init__(self, factor, *args, shift=0.0, **kwargs):
        super().__init__(*args, **kwargs)
        self._factor, self.shift = factor, shift

    def call(self, inputs):
        return self._factor * super().call(inputs) + self.shift


class Fixed(Dense):
    """A Dense of which the user's class says how large it is."""

    def __init__(self, **kwargs):
        super().__init__(4, **kwargs)


class WithConfig(Dense):
    """A `get_config` that adds to that of Dense."""

    def __init__(self, units, factor=1.0, **kwargs):
        super().__init__(units, **kwargs)
        self.factor = factor

    def call(self, inputs):
        return self.factor * super().call(inputs)

    def get_config(self):
        return {**super().get_config(), "factor": self.factor}


class Around(Layer):
    """Layers as arguments, one of them in a list, and a function."""

    def __init__(self, inner, others=(), function=None, **options):
        super().__init__(**options)
        self.around, self.others, self.function = inner, list(others), function

    def call(self, inputs):
        for layer in (self.around, *self.others):
            inputs = layer(inputs)
        return inputs if self.function is None else self.function(inputs)


class AroundByConfig(Around):
    """The same by a `get_config` that has the layers themselves, as Keras allows."""

    def get_config(self):
        return {**super().get_config(), "inner": self.around, "others": self.others, "function": self.function}


class Kept(dp.Model):
    """A model of one's own."""

    def __init__(self, units, head=None, **options):
        super().__init__(**options)
        self.body, self.tail = Dense(units), Dense(1) if head is None else head

    def call(self, inputs):
        return self.tail(self.body(inputs))


LAYERS: dict[str, Any] = {
    "no attributes": lambda: NoAttributes(2, name="mine"),
    "another self": lambda: OtherSelf(2),
    "args and kwargs": lambda: HandsOn(2, "tanh", use_bias=False),
    "handed on twice": lambda: HandsOnMore(3.0, 2, shift=1.5, activation="softplus", kernel_initializer="ones"),
    "fixed": lambda: Fixed(activation="tanh"),
    "get_config": lambda: WithConfig(2, 3.0, activation="tanh", kernel_regularizer="l2"),
    "layers": lambda: Around(Dense(3), [dp.Sequential([Dense(2)]), NoAttributes(2)], dp.activations.tanh),
    "layers by get_config": lambda: AroundByConfig(HandsOn(3), [Around(Dense(2))], dp.activations.tanh),
}
OBJECTS = {cls.__name__: cls for cls in Layer.__subclasses__() if cls.__module__ == __name__}
OBJECTS |= {cls.__name__: cls for cls in (HandsOn, HandsOnMore, Fixed, WithConfig, AroundByConfig, Kept)}


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_comes_back_from_a_file(tmp_path, name):
    pytest.importorskip("h5py")
    model = dp.Sequential([layers.Input((3,)), LAYERS[name]()])
    model.save(tmp_path / "m.keras")
    loaded = dp.models.load_model(tmp_path / "m.keras", OBJECTS)
    np.testing.assert_array_equal(loaded(X), model(X))
    assert json.dumps(dp.saving.serialize_keras_object(loaded)) == json.dumps(dp.saving.serialize_keras_object(model))


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_comes_back_from_its_configuration(name):
    layer = LAYERS[name]()
    layer(X)
    for restored in (
        type(layer).from_config(layer.get_config()),
        dp.saving.deserialize_keras_object(dp.saving.serialize_keras_object(layer), OBJECTS),
        dp.models.clone_model(dp.Sequential([layer])).layers[0],
        copy.deepcopy(layer),
    ):
        restored(X)
        restored.set_weights(layer.get_weights())
        np.testing.assert_array_equal(restored(X), layer(X))
        assert restored.get_config().keys() == layer.get_config().keys()


def test_a_model_with_arguments_that_are_no_attributes(tmp_path):
    pytest.importorskip("h5py")
    for model in (Kept(3, seed=5), Kept(2, head=NoAttributes(2), name="kept")):
        model(X)
        model.save(tmp_path / "m.keras")
        loaded = dp.models.load_model(tmp_path / "m.keras", OBJECTS)
        np.testing.assert_array_equal(loaded(X), model(X))
        assert (loaded.name, loaded.seed) == (model.name, model.seed)


def test_an_attribute_that_was_changed_counts():
    class Scaled(Layer):
        def __init__(self, factor=1.0, sizes=()):
            super().__init__()
            self.factor, self.sizes = factor, sizes
            sizes.append(1)

        def call(self, inputs):
            return inputs * self.factor

    layer = Scaled(2.0, [3])
    assert layer.get_config()["sizes"] == [3]  # as given, not what the constructor made of it
    layer.factor = 4.0
    assert layer.get_config()["factor"] == 4.0


def test_what_no_file_can_hold_is_named():
    circle: list[Any] = [1]
    circle.append(circle)
    with pytest.raises(ConfigError, match="a list of a configuration contains itself, which cannot be saved"):
        dp.saving.serialize_keras_object(Around(Dense(2), others=(), function=None, name="a") and WithCircle(circle))
    with pytest.raises(ConfigError, match="writing the lambda"):
        dp.saving.serialize_keras_object(Around(Dense(2), function=lambda x: x))


class WithCircle(Layer):
    """A list that contains itself."""

    def __init__(self, circle):
        super().__init__()
        self.circle = circle


def test_what_a_constructor_was_given_is_no_part_of_the_layer():
    layer, other = Dense(2), Dense(2)

    class Unused(Layer):
        def __init__(self, inner):
            super().__init__()
            self.mine = other

    assert Unused(layer)._sublayers == [other]


def test_adapted_layers_of_a_subclass():
    class Lookup(layers.StringLookup):
        def __init__(self, **options):
            super().__init__(**options)

    lookup = Lookup()
    lookup.adapt(["a", "b", "b"])
    assert Lookup.from_config(lookup.get_config()).get_vocabulary() == ["[UNK]", "b", "a"]

    class Bins(layers.Discretization):
        def __init__(self, **options):
            super().__init__(**options)

    bins = Bins(num_bins=2)
    bins.adapt(np.arange(10.0))
    assert Bins.from_config(bins.get_config()).bin_boundaries == bins.bin_boundaries
