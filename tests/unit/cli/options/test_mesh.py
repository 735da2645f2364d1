"""`--mesh` as words."""

import pytest

from dptrain.cli.options.mesh import arranged, lengths_of
from dptrain.comm import current
from dptrain.distribution import distribution
from dptrain.errors import AgreedError, ConfigError


def test_axes_in_order_and_that_of_the_batch_first_where_it_is_missing():
    assert list(lengths_of("model=2,batch=3").items()) == [("model", 2), ("batch", 3)]
    assert list(lengths_of("model=2").items()) == [("batch", 1), ("model", 2)]


def test_the_axis_of_pipelines_is_refused():
    with pytest.raises(ConfigError, match="the axis 'stage' is reserved for pipelines; use --stages"):
        lengths_of("batch=2,stage=2")


def test_a_mesh_is_not_set_where_pipelines_do_not_go_on_it():
    with pytest.raises(AgreedError, match="stages = 2: not supported on the mesh batch=1,model=1; leave out one"):
        arranged("model=1", current(), stages=2)
    assert distribution() is None
