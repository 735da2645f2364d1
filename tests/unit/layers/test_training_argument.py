"""Whatever holds other layers hands `training` on to them, and a teacher is never in training."""

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest

import dptrain as dp
from dptrain import layers as L  # noqa: N812
from dptrain.distillation import Distiller, FeatureDistillation, LogitsDistillation

X = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)
STEPS = X.reshape(4, 3, 2)


@dp.saving.register_keras_serializable()
class Probe(L.Layer):
    """A layer, or a cell, that notes with which `training` it is called: it or a copy."""

    seen: ClassVar[list[bool]] = []
    state_size = output_size = 2

    def call(self, inputs, states=None, training=None):
        if inputs.value is not None:  # not to find shapes
            self.seen.append(bool(training))
        return inputs if states is None else (inputs, states)


class Kernel(Probe):
    """With a weight, for layers that change it."""

    def build(self, input_shape):
        self.kernel = self.add_weight((input_shape[-1], 2), name="kernel")

    def call(self, inputs, training=None):
        return super().call(inputs @ self.kernel, training=training)


class Holder(dp.Model):
    """A model of a user."""

    def __init__(self, probe: Probe) -> None:
        super().__init__()
        self.probe = probe

    def call(self, inputs):
        return self.probe(inputs)  # as in Keras it hears what its model hears


def functional(layer: Any, shape: Any = (6,)) -> dp.Model:
    inputs = dp.Input(shape)
    return dp.Model(inputs, layer(inputs))


HOLDERS: dict[str, tuple[Callable[[Any], Any], type[Probe], np.ndarray]] = {
    "Sequential": (lambda probe: dp.Sequential([dp.Input((6,)), probe]), Probe, X),
    "functional model": (functional, Probe, X),
    "model in a model": (lambda probe: functional(functional(probe)), Probe, X),
    "model in a Sequential": (lambda probe: dp.Sequential([dp.Input((6,)), functional(probe)]), Probe, X),
    "subclass": (Holder, Probe, X),
    "subclass in a model": (lambda probe: functional(Holder(probe)), Probe, X),
    "TimeDistributed": (L.TimeDistributed, Probe, STEPS),
    "RNN": (L.RNN, Probe, STEPS),
    "RNN of stacked cells": (lambda probe: L.RNN([L.SimpleRNNCell(2), probe]), Probe, STEPS),
    "Bidirectional": (lambda probe: L.Bidirectional(L.RNN(probe)), Probe, STEPS),
    "SpectralNormalization": (L.SpectralNormalization, Kernel, X),
    "student": (lambda probe: distiller(dp.Sequential([probe, L.Dense(6)]), taught(L.Identity())), Probe, X),
}


def taught(probe: Probe, **options: Any) -> dp.Sequential:
    return dp.Sequential([dp.Input((6,)), probe, L.Dense(6, **options)])


def distiller(student: Any, teacher: Any, loss: Any = None) -> Distiller:
    model = Distiller(teacher, student, loss or LogitsDistillation())
    model.compile("sgd", "mse", run_eagerly=True)
    return model


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", HOLDERS)
def test_what_holds_a_layer_hands_training_on(name, training):
    make, kind, data = HOLDERS[name]
    probe = kind()
    holder = make(probe)
    Probe.seen.clear()
    holder(data, training=training)
    assert set(Probe.seen) == {training}


@pytest.mark.parametrize("name", [name for name in HOLDERS if HOLDERS[name][1] is Probe])
def test_fit_trains_and_others_do_not(name):
    make, kind, data = HOLDERS[name]
    probe = kind()
    holder = make(probe)
    model = holder if isinstance(holder, dp.Model) else dp.Sequential([dp.Input(data.shape[1:]), holder])
    if not isinstance(model, Distiller):
        model = dp.Sequential([model, L.Dense(1)])  # something to train
        model.compile("sgd", "mse", run_eagerly=True)
    targets = np.zeros((4, 6) if isinstance(model, Distiller) else model.predict(data, verbose=0).shape)
    for method, arguments, training in (
        ("fit", (data, targets), True),
        ("evaluate", (data, targets), False),
        ("predict", (data,), False),
    ):
        Probe.seen.clear()
        getattr(model, method)(*arguments, verbose=0)
        assert set(Probe.seen) == {training}, method


@pytest.mark.parametrize("loss", [LogitsDistillation(), FeatureDistillation("mse", "a", "a"), FeatureDistillation()])
@pytest.mark.parametrize("method", ["fit", "evaluate"])
def test_a_teacher_is_never_in_training(loss, method):
    probe = Probe()
    model = distiller(taught(L.Identity(), name="a"), taught(probe, name="a"), loss)
    Probe.seen.clear()
    getattr(model, method)(X, X, verbose=0)
    assert set(Probe.seen) == {False}
