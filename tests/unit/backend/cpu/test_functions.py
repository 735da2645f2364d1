"""Functions of single elements in compiled float32 programs: their accuracy, and the same bits in any place."""

import math

import numpy as np
import pytest

from dptrain import ops
from dptrain.backend.cpu.compile import compiler
from dptrain.backend.cpu.compiled import CompiledExecutable
from dptrain.program.execute import HostMemory
from dptrain.program.program import trace

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
COUNT = 200_003
# Errors in ulp of the result, as kernels/scalar.h promises.
MOST = {"exp": 1, "log": 1, "elu": 1, "log1p": 2, "tanh": 2, "erf": 2}
LARGEST = {"exp": 87, "log": 3e38, "elu": 88, "log1p": 3e38, "tanh": 12, "erf": 5}


def computed(x):
    """Return the functions' values as a compiled program computes them."""
    program = trace(
        lambda x: {name: getattr(ops, name)(x) for name in MOST},
        {"x": (x.shape, "float32")},
    )
    executable = CompiledExecutable(program, HostMemory(), {"x": x})
    executable.run()
    return {name: executable.outputs[name].copy() for name in MOST}


@pytest.mark.parametrize("name", MOST)
def test_within_ulps_of_the_truth(name):
    rng = np.random.default_rng(0)
    near, far = 10.0 ** rng.uniform(-30, 0, COUNT // 2), rng.uniform(0, LARGEST[name], COUNT - COUNT // 2)
    x = (np.concatenate([near, far]) * rng.choice([-1, 1], COUNT)).astype(np.float32)
    x = x[x > {"log": 0, "log1p": -1}.get(name, -np.inf)]
    values = computed(x)[name].astype(np.float64)
    function = getattr(math, name, lambda number: number if number > 0 else math.expm1(number))
    truth = np.array(list(map(function, x.tolist())))
    is_normal = np.abs(truth) > 1.2e-38  # what is smaller may be 0
    errors = np.abs(values - truth)[is_normal] / np.spacing(np.abs(truth[is_normal]).astype(np.float32))
    assert is_normal.mean() > 0.6
    assert errors.max() < MOST[name]


def test_special_numbers():
    x = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-40, 3.9, 4.0, -4.0, 1e30], np.float32)
    values = computed(x)
    np.testing.assert_array_equal(values["erf"][[1, 2, 7, 8, 9]], np.float32([1, -1, 1, -1, 1]))
    np.testing.assert_array_equal(values["tanh"][[1, 2, 9]], np.float32([1, -1, 1]))
    np.testing.assert_array_equal(values["exp"][[1, 2, 3, 4, 9]], np.float32([np.inf, 0, 1, 1, np.inf]))
    np.testing.assert_array_equal(values["log"][[1, 3, 4]], np.float32([np.inf, -np.inf, -np.inf]))
    np.testing.assert_array_equal(values["elu"][[1, 2, 9]], np.float32([np.inf, -1, 1e30]))
    np.testing.assert_array_equal(values["log1p"][[1, 9]], np.float32([np.inf, math.log1p(1e30)]))
    for name in ("erf", "elu", "log1p"):
        assert values[name][3] == values[name][4] == 0
        assert np.signbit(values[name][[3, 4]]).tolist() == [False, True]
    edges = computed(np.float32([-1, -2]))
    assert edges["log1p"][0] == -np.inf
    assert np.isnan(edges["log1p"][1])
    for name in MOST:
        assert np.isnan(values[name][0])


def test_an_element_has_its_bits_wherever_it_stands():
    x = np.random.default_rng(1).normal(0, 2, 67).astype(np.float32)
    whole = computed(x)
    for first in (1, 5, 62):
        part = computed(x[first:].copy())
        for name in MOST:
            np.testing.assert_array_equal(part[name], whole[name][first:])
