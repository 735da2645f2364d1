"""Random numbers inside layers: a variational autoencoder learns and predicts the same on any number of ranks."""

import json

import numpy as np
import pytest

from dptrain.program import tree
from tests.conftest import ROOT
from tests.launching import python

SCRIPT = str(ROOT / "tests" / "mpi" / "scripts" / "vae.py")


def results(ranks, out):
    done = python(ranks, SCRIPT, str(out))
    assert (done.code, done.err) == (0, "")
    return dict(tree.flatten(json.loads(out.read_text())))


@pytest.mark.long
def test_float64_agrees_to_1e_12(tmp_path):
    alone, together = (results(ranks, tmp_path / f"{ranks}.json") for ranks in (0, 3))
    assert [f"{n}/kl_loss/1" in alone for n in (0, 3, 6, 8)] == [True] * 4
    for name, value in alone.items():
        np.testing.assert_allclose(together[name], value, rtol=1e-12, err_msg=name)
