"""Shapes: what they are broadcast to, and axes."""

import pytest

from dptrain.errors import ConfigError
from dptrain.program.dims import Dim
from dptrain.program.shapes import broadcast, normalized_axes


def test_broadcast():
    n = Dim.rows(1)
    assert broadcast((3, 1), (4,), ()) == (3, 4)
    assert isinstance(broadcast((Dim.rows(3), 1), (3, 4))[0], Dim)
    assert isinstance(broadcast((1, 4), (n, 4))[0], Dim)
    with pytest.raises(ConfigError, match="cannot be broadcast together"):
        broadcast((2,), (3,))
    # One row of a batch is not a length of 1 to be spread: with more ranks than rows some would have none.
    with pytest.raises(ConfigError, match="cannot be broadcast together"):
        broadcast((n, 4), (3, 4))


def test_axes():
    assert normalized_axes(None, 3) == (0, 1, 2)
    assert normalized_axes((-1, 0), 3) == (0, 2)
    for wrong in (3, -4, (0, -3)):
        with pytest.raises(ConfigError, match=r"(out of bounds for|expected different axes of) 3 dimensions"):
            normalized_axes(wrong, 3)
