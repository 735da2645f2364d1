"""`--mesh` as words."""

import pytest

from dptrain.cli.mesh import lengths_of
from dptrain.errors import ConfigError


def test_axes_in_order_and_that_of_the_batch_first_where_it_is_missing():
    assert list(lengths_of("model=2,batch=3").items()) == [("model", 2), ("batch", 3)]
    assert list(lengths_of("model=2").items()) == [("batch", 1), ("model", 2)]


def test_the_axis_of_pipelines_is_refused():
    with pytest.raises(ConfigError, match="the axis 'stage' is that of pipelines; use --stages"):
        lengths_of("batch=2,stage=2")
