"""Which variables are sharded over a mesh of ranks."""

from types import SimpleNamespace

import numpy as np
import pytest

from dptrain.errors import ConfigError
from dptrain.program.tensor import Variable
from dptrain.train import sharding
from dptrain.train.sharding import Sharding
from tests.thread_ranks import on_mesh


@pytest.mark.parametrize(
    ("axes", "said"),
    [
        (
            ("model", None),
            r"layout \('model', None\) of 'w', of shape \(2, 3\): axis 0 of length 2 cannot be sharded over",
        ),
        (
            (None, "model", "batch"),
            "layout .* of 'w', of shape .*: expected an axis of the mesh or None for each of its",
        ),
    ],
)
def test_a_layout_that_does_not_fit_its_variable_is_refused(monkeypatch, axes, said):
    weight = Variable(np.ones((2, 3)), "w")
    owner = SimpleNamespace(weights=[weight], optimizers=[])
    chosen = [(None, "model"), axes]
    monkeypatch.setattr(sharding, "layout_of", lambda *given: chosen[0])

    def layouts(comm):
        return Sharding(comm, owner, None).layouts([weight])

    assert on_mesh(layouts, batch=1, model=3) == [{weight: (None, "model")}] * 3
    chosen.pop(0)
    with pytest.raises(ConfigError, match=said):
        on_mesh(layouts, batch=1, model=3)
