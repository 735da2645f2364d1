"""A fixed number of shards a batch: the same bits on any number of ranks."""

import numpy as np
import pytest

from tests.conftest import ROOT
from tests.launching import python

SCRIPT = str(ROOT / "tests" / "mpi" / "scripts" / "shards.py")


# Two ranks add as they come, three exchange subtrees, four add in shared memory.
@pytest.mark.parametrize(("how", "worlds"), [("compiled", (2, 3, 4)), ("numpy", (3,)), ("fit", (3,))])
def test_float32_bit_for_bit(tmp_path, how, worlds):
    saved = []
    for ranks in (0, *worlds):
        out = tmp_path / f"{ranks}.npz"
        reproducible = "1" if how == "fit" else "0"
        done = python(ranks, SCRIPT, str(out), how, DPTRAIN_REPRODUCIBLE=reproducible)
        assert (done.code, done.err) == (0, "")
        with np.load(out) as found:
            saved.append({name: found[name].tobytes() for name in found})
    assert len(saved[0]) == 4 + 4 + (5 if how == "fit" else 0)  # weights; losses and accuracies
    assert all(one == saved[0] for one in saved)
