"""Constraints: what weights become, and when."""

import numpy as np
import pytest

import dptrain as keras
from dptrain import constraints, layers, ops
from dptrain.errors import ConfigError

W = np.array([[3.0, 0.3, -1.0], [-4.0, 0.4, 0.0]])  # columns of norm 5, 0.5 and 1


def columns(*norms):
    return W / [5, 0.5, 1] * norms


@pytest.mark.parametrize(
    ("constraint", "expected"),
    [
        (constraints.NonNeg(), np.maximum(W, 0)),
        (constraints.UnitNorm(), columns(1, 1, 1)),
        (constraints.UnitNorm(axis=[0, 1]), W / np.linalg.norm(W)),
        (constraints.MaxNorm(), columns(2, 0.5, 1)),
        (constraints.MaxNorm(0.7, axis=1), W / np.linalg.norm(W, axis=1, keepdims=True) * 0.7),
        (constraints.MinMaxNorm(0.8, 2), columns(2, 0.8, 1)),
        (constraints.MinMaxNorm(0.8, 2, rate=0.5), columns(3.5, 0.65, 1)),
        (constraints.Constraint(), W),
    ],
)
def test_values(constraint, expected):
    np.testing.assert_allclose(constraint(ops.convert_to_tensor(W)), expected, rtol=1e-6)
    restored = constraints.deserialize(constraints.serialize(constraint), {"Constraint": constraints.Constraint})
    assert (type(restored), restored.get_config()) == (type(constraint), constraint.get_config())


def test_a_weight_of_norm_0_stays():
    zeros = ops.convert_to_tensor(np.zeros((2, 2)))
    for constraint in (constraints.UnitNorm(), constraints.MaxNorm(), constraints.MinMaxNorm(1, 2)):
        np.testing.assert_array_equal(constraint(zeros), 0)


def test_names():
    for name, cls in {
        "max_norm": constraints.MaxNorm,
        "NonNeg": constraints.NonNeg,
        "unit_norm": constraints.unit_norm,
        "MinMaxNorm": constraints.min_max_norm,
    }.items():
        assert type(constraints.get(name)) is cls
    assert constraints.get(None) is constraints.serialize(None) is None
    assert constraints.get(abs) is abs
    with pytest.raises(ConfigError, match="unknown constraint 'min_nrm'; did you mean"):
        constraints.get("min_nrm")


def trained(jit_compile, optimizer, **dense):
    x, y = np.random.default_rng(1).normal(size=(2, 12, 3))
    model = keras.Sequential([keras.Input((3,)), layers.Dense(3, **dense)], seed=1)
    model.compile(optimizer, "mse", device="cpu", dtype="float64", jit_compile=jit_compile)
    model.fit(x, y, batch_size=5, epochs=3, verbose=0)
    return model


@pytest.mark.parametrize("jit_compile", [False, "auto"])
def test_a_constraint_holds_after_every_update(jit_compile):
    model = trained(jit_compile, "adam", kernel_constraint=constraints.UnitNorm(), bias_constraint="non_neg")
    kernel, bias = model.get_weights()
    np.testing.assert_allclose(np.linalg.norm(kernel, axis=0), 1, rtol=1e-6)
    assert (bias >= 0).all()
    assert (trained(jit_compile, "adam").get_weights()[1] < 0).any()


def test_an_update_is_the_optimizers_and_then_the_constraint():
    x, y = np.ones((1, 2)), np.full((1, 1), -10.0)
    model = keras.Sequential([keras.Input((2,)), layers.Dense(1, use_bias=False, kernel_constraint=ops.absolute)])
    model.compile(keras.optimizers.SGD(0.25), "mse", dtype="float64")
    model.set_weights([np.array([[1.0], [2.0]])])
    model.train_on_batch(x, y)  # each weight loses 0.25 * 2 * (3 + 10) = 6.5
    np.testing.assert_allclose(model.get_weights()[0], [[5.5], [4.5]], rtol=1e-12)


def test_every_layer_hands_its_constraints_to_its_weights():
    bound = constraints.MaxNorm(1)
    for layer, names in (
        (layers.Dense(2, kernel_constraint=bound, bias_constraint=bound), ("kernel", "bias")),
        (layers.Conv2D(2, 1, kernel_constraint=bound, bias_constraint=bound), ("kernel", "bias")),
        (layers.Conv2DTranspose(2, 1, kernel_constraint=bound, bias_constraint=bound), ("kernel", "bias")),
        (layers.Embedding(2, 2, embeddings_constraint=bound), ("embeddings",)),
        (layers.BatchNormalization(gamma_constraint=bound, beta_constraint=bound), ("gamma", "beta")),
        (layers.LayerNormalization(gamma_constraint=bound, beta_constraint=bound), ("gamma", "beta")),
    ):
        layer.build((None, 3, 3, 2))
        assert [getattr(layer, name).constraint for name in names] == [bound] * len(names)
        config = layers.deserialize(layers.serialize(layer)).get_config()
        for name in names:
            assert config[f"{name}_constraint"]["config"] == {"max_value": 1, "axis": 0}


def test_a_pack_has_the_bits_of_runs_alone():
    x, y = np.random.default_rng(2).normal(size=(2, 12, 3))

    def build():
        model = keras.Sequential([layers.Dense(3, kernel_constraint=constraints.MaxNorm(0.5))])
        model.compile("adam", "mse")
        return model

    ensemble = keras.Ensemble(build, seeds=[4, 7])
    ensemble.fit(x, y, batch_size=5, epochs=2, verbose=0)
    for seed, member in zip((4, 7), ensemble.members, strict=True):
        keras.utils.set_random_seed(seed)
        alone = build()
        keras.utils.set_random_seed(0)
        alone.fit(x, y, batch_size=5, epochs=2, verbose=0)
        kernel = member.get_weights()[0]
        assert (np.linalg.norm(kernel, axis=0) <= 0.5 + 1e-6).all()
        np.testing.assert_array_equal(kernel, alone.get_weights()[0])
