"""Keras' rooms of ops: `ops.nn` and `ops.numpy` have the same functions as `ops`."""

import pytest

from dptrain import ops
from dptrain.ops import nn, numpy


@pytest.mark.parametrize("room", [nn, numpy], ids=["nn", "numpy"])
def test_functions_are_those_of_ops(room):
    assert len(room.__all__) > 20
    for name in room.__all__:
        assert getattr(room, name) is getattr(ops, name)


def test_the_division_is_keras():
    assert ops.nn.relu is ops.relu
    assert ops.numpy.sum is ops.sum
    with pytest.raises(AttributeError, match=r"not supported: ops\.nn\.polar"):
        nn.polar  # noqa: B018
    with pytest.raises(AttributeError, match=r"not supported: ops\.numpy\.softmax"):
        numpy.softmax  # noqa: B018
