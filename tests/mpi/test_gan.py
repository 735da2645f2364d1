"""Two models that are trained against each other: any number of ranks trains what one rank trains."""

import json

import numpy as np
import pytest

from tests.conftest import ROOT
from tests.launching import python

SCRIPT = str(ROOT / "tests" / "mpi" / "scripts" / "gan.py")


def train(ranks: int, folder) -> tuple[dict, list[np.ndarray]]:
    out = folder / f"{ranks}.npz"
    done = python(ranks, SCRIPT, str(out))
    assert (done.code, done.err) == (0, "")
    with np.load(out) as arrays:
        saved = dict(arrays)
    return json.loads(str(saved.pop("history"))), list(saved.values())


@pytest.mark.long
def test_losses_and_weights(tmp_path):
    (history, weights), (other_history, others) = train(0, tmp_path), train(3, tmp_path)
    assert list(other_history) == list(history) == ["d_loss", "g_loss"]
    for name, losses in history.items():
        np.testing.assert_allclose(other_history[name], losses, rtol=1e-11)
    for weight, expected in zip(weights, others, strict=True):
        np.testing.assert_allclose(expected, weight, rtol=1e-9, atol=1e-12)
