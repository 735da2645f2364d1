"""Random numbers inside layers: a variational autoencoder learns and predicts the same on any number of ranks."""

import json

import numpy as np
import pytest

from dptrain.program import tree
from tests.conftest import ROOT
from tests.launching import python

SCRIPT = str(ROOT / "tests" / "mpi" / "scripts" / "vae.py")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Return what comes out on 1, 2 and 3 ranks."""
    found = {}
    for ranks in (0, 2, 3):
        out = tmp_path_factory.mktemp("vae") / "out.json"
        done = python(ranks, SCRIPT, str(out))
        assert (done.code, done.err) == (0, "")
        found[ranks] = dict(tree.flatten(json.loads(out.read_text())))
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_float64_agrees_to_1e_12(results, ranks):
    alone = results[0]
    assert [f"{n}/kl_loss/1" in alone for n in (0, 3, 6, 8)] == [True] * 4
    for name, value in alone.items():
        np.testing.assert_allclose(results[ranks][name], value, rtol=1e-12, err_msg=name)
