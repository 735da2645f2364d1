"""Initializers: bounds and moments of what they draw, seeds, configurations."""

import json
import math

import numpy as np
import pytest

from dptrain import initializers, optimizers, random, saving
from dptrain.errors import ConfigError
from dptrain.initializers import INITIALIZERS

SHAPE = (300, 500)  # 150,000 draws: a variance is within 2 %, a mean within 4 deviations / 387


def truncated(deviation: float) -> tuple[float, float]:
    """Return (deviation after truncation at 2, bound)."""
    return deviation, 2 * deviation / 0.87962566103423978


# name -> (arguments, standard deviation, largest magnitude or None)
EXPECTED = {
    "GlorotUniform": ({}, math.sqrt(2 / 800), math.sqrt(6 / 800)),
    "GlorotNormal": ({}, *truncated(math.sqrt(2 / 800))),
    "HeUniform": ({}, math.sqrt(2 / 300), math.sqrt(6 / 300)),
    "HeNormal": ({}, *truncated(math.sqrt(2 / 300))),
    "LecunUniform": ({}, math.sqrt(1 / 300), math.sqrt(3 / 300)),
    "LecunNormal": ({}, *truncated(math.sqrt(1 / 300))),
    "RandomUniform": ({}, 0.1 / math.sqrt(12), 0.05),
    "RandomNormal": ({}, 0.05, None),
    "TruncatedNormal": ({}, 0.05 * 0.87962566103423978, 0.1),
    "VarianceScaling": (
        {"scale": 3.0, "mode": "fan_out", "distribution": "untruncated_normal"},
        math.sqrt(3 / 500),
        None,
    ),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_moments_and_bounds(name):
    arguments, deviation, bound = EXPECTED[name]
    values = INITIALIZERS[name](**arguments)(SHAPE, 3, 0)
    assert (values.shape, values.dtype) == (SHAPE, np.float64)
    np.testing.assert_allclose(values.std(), deviation, rtol=0.01)
    assert abs(values.mean()) < 4 * deviation / math.sqrt(values.size)
    if bound is None:
        assert np.abs(values).max() > 3.9 * deviation
    else:
        assert 0.99 * bound < np.abs(values).max() <= bound


@pytest.mark.parametrize("name", EXPECTED)
def test_seeds(name):
    arguments, *_ = EXPECTED[name]

    def draw(own_seed: int | None, seed: int, position: int) -> bytes:
        return INITIALIZERS[name](seed=own_seed, **arguments)((20, 30), seed, position).tobytes()

    assert draw(None, 1, 2) == draw(None, 1, 2)
    assert len({draw(None, 1, 2), draw(None, 1, 3), draw(None, 2, 2), draw(5, 1, 2), draw(6, 1, 2)}) == 5
    assert draw(5, 1, 2) == draw(5, 9, 9), "a seed of its own gives the same values everywhere"


def test_values_that_are_not_random():
    assert np.array_equal(initializers.Zeros()((2, 3), 0, 0), np.zeros((2, 3)))
    assert np.array_equal(initializers.get("one")((2,), 0, 0), np.ones(2))
    assert np.array_equal(initializers.Constant(0.25)((2,), 0, 0), [0.25, 0.25])
    assert np.array_equal(initializers.Identity(3.0)((2, 3), 0, 0), [[3, 0, 0], [0, 3, 0]])


@pytest.mark.parametrize("shape", [(40, 40), (40, 7), (7, 40), (3, 4, 5)])
def test_orthogonal(shape):
    values = initializers.Orthogonal(gain=2.0)(shape, 1, 2)
    assert values.shape == shape
    matrix = values.reshape(-1, shape[-1])
    product = matrix @ matrix.T if matrix.shape[0] < matrix.shape[1] else matrix.T @ matrix
    np.testing.assert_allclose(product, 4 * np.eye(len(product)), atol=1e-13)
    assert not np.array_equal(values, initializers.Orthogonal(gain=2.0)(shape, 1, 3))


@pytest.mark.parametrize(("shape", "expected"), [((), (1, 1)), ((7,), (7, 7)), ((3, 5), (3, 5)), ((2, 3, 5), (6, 10))])
def test_fans(shape, expected):
    from dptrain.initializers.variance_scaling import fans

    assert fans(shape) == expected


@pytest.mark.parametrize("name", sorted(INITIALIZERS))
def test_configurations_come_back(name):
    initializer = initializers.get(name)
    again = initializers.deserialize(initializers.serialize(initializer))
    assert type(again) is type(initializer)
    assert again.get_config() == initializer._get_config()
    assert initializers.get({"class_name": name, "config": {}})._get_config() == initializer._get_config()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: initializers.get("glorot"), "unknown initializer 'glorot'"),
        (lambda: initializers.get({"config": {}}), "expected"),
        (lambda: initializers.get({"class_name": "Ones", "config": {"value": 1}}), "initializer Ones"),
        (lambda: initializers.VarianceScaling(scale=0), "must be positive float. Received: scale=0"),
        (lambda: initializers.VarianceScaling(mode="fan"), "Invalid `mode` argument: fan"),
        (lambda: initializers.VarianceScaling(distribution="even"), "Invalid `distribution` argument: even"),
        (lambda: initializers.GlorotUniform(seed=-1), "seed=-1"),
        (lambda: initializers.GlorotUniform(seed=1.5), "should be an integer"),
        (lambda: initializers.RandomUniform(1.0, 0.0), "minval <= maxval"),
        (lambda: initializers.RandomNormal(stddev=-1.0), "stddev >= 0"),
        (lambda: initializers.Orthogonal()((3,), 0, 0), "at least two-dimensional"),
        (lambda: initializers.Identity()((3,), 0, 0), "only be used for 2D"),
    ],
)
def test_refused(build, message):
    with pytest.raises(ConfigError, match=message):
        build()


def test_a_constant_array():
    value = np.arange(4.0).reshape(2, 2)
    constant = initializers.Constant(value)
    again = initializers.deserialize(json.loads(json.dumps(initializers.serialize(constant))))
    for initializer in (constant, again, initializers.get(value)):
        np.testing.assert_array_equal(initializer((2, 2)), value)
    np.testing.assert_array_equal(initializers.Constant([1.0, 2.0])((3, 2)), [[1, 2]] * 3)
    with pytest.raises(ConfigError, match=r"a value of shape \(2, 2\); expected one that can be broadcast to \(3, 4\)"):
        constant((3, 4))


def test_none_and_the_names_of_keras_files():
    assert initializers.get(None) is None
    assert optimizers.get(None) is None
    for name, kind in (("OrthogonalInitializer", "Orthogonal"), ("IdentityInitializer", "Identity")):
        described = {"module": "keras.initializers", "class_name": name, "config": {"gain": 2.0}}
        assert type(initializers.deserialize(described)) is type(initializers.get(name)) is getattr(initializers, kind)


@pytest.mark.parametrize("make", [initializers.RandomNormal, initializers.GlorotUniform, initializers.Orthogonal])
def test_a_seed_generator_draws_other_values_each_time(make):
    generator = random.SeedGenerator(3, name="mine")
    initializer = make(seed=generator)
    first, second = initializer((3, 4)), initializer((3, 4))
    assert not np.array_equal(first, second)
    assert int(generator.count) == 2
    assert json.loads(json.dumps(initializer.get_config())) == initializer.get_config()
    described = initializers.serialize(initializer)
    assert described["config"]["seed"]["config"] == {"name": "mine", "seed": 3}
    again = initializers.deserialize(json.loads(json.dumps(described)))
    np.testing.assert_array_equal(again((3, 4)), first)
    np.testing.assert_array_equal(again((3, 4)), second)


def test_a_seed_generator_is_written_and_read():
    generator = random.SeedGenerator(3, name="mine")
    description = saving.serialize_keras_object(generator)
    assert (description["module"], description["class_name"]) == ("keras.random", "SeedGenerator")
    restored = saving.deserialize_keras_object(description)
    assert (restored.seed, restored.name) == (3, "mine")
    assert random.SeedGenerator().get_config() == {"name": "seed_generator", "seed": None}
    with pytest.raises(ConfigError, match=r"Unrecognized keyword arguments: \{'alpha': 1\}"):
        random.SeedGenerator(alpha=1)
    with pytest.raises(ConfigError, match="Argument `seed` must be an integer"):
        random.SeedGenerator("3")
