"""Ranks train on batches of many lengths by the C++ that these share: with its bits for each, and as one rank does."""

import numpy as np
import pytest

from tests.conftest import ROOT
from tests.launching import python
from tests.sample import sample

SCRIPT = str(ROOT / "tests/mpi/scripts/lengths.py")


def trained(ranks, name, folder):
    path = folder / f"{ranks}.npz"
    done = python(ranks, SCRIPT, str(path), name, timeout=300)
    assert (done.code, done.err) == (0, "")
    with np.load(path) as saved:
        return list(saved.values())


@pytest.mark.parametrize("name", sample(["masked attention", "language model", "convolutions"], 3, single=True))
def test_ranks_share_texts_across_lengths(tmp_path, name):
    for value, other in zip(trained(2, name, tmp_path), trained(0, name, tmp_path), strict=True):
        np.testing.assert_allclose(value, other, rtol=2e-3, atol=2e-4)
