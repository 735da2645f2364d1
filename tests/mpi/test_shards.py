"""A fixed number of shards a batch: the same bits on any number of ranks that shares them out."""

import numpy as np
import pytest

from tests.conftest import ROOT
from tests.launching import python

SCRIPT = str(ROOT / "tests" / "mpi" / "scripts" / "shards.py")


@pytest.mark.parametrize("how", ["compiled", "numpy"])
def test_float32_bit_for_bit(tmp_path, how):
    saved = []
    for ranks in (0, 2, 4):
        out = tmp_path / f"{ranks}.npz"
        done = python(ranks, SCRIPT, str(out), how)
        assert (done.code, done.err) == (0, "")
        with np.load(out) as found:
            saved.append({name: found[name].tobytes() for name in found})
    assert len(saved[0]) == 6
    assert saved[0] == saved[1] == saved[2]
