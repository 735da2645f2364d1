"""Masks are the same on all ranks, wherever weights lie, and as on one rank; ranks that prune differently are told."""

import numpy as np
import pytest

from tests.conftest import ROOT
from tests.launching import in_turn
from tests.sample import sample

SCRIPT = str(ROOT / "tests/mpi/scripts/pruning.py")
FORMS = {2: ["--shard-weights"], 3: ["whole", "--shard-optimizer"], 4: ["batch=2,model=2"]}


def train(folder, ranks, *forms):
    cases = {"train": [SCRIPT, str(folder / f"{ranks}.npz"), *forms]}
    if ranks == 3:
        cases["different"] = [SCRIPT, str(folder / "none.npz"), "different"]
    done = in_turn(ranks, cases, folder / f"on {ranks}", limit=100)
    assert (done["train"].code, done["train"].err) == (0, "")
    if ranks == 3:
        assert done["different"].code == 2
        (line,) = done["different"].messages
        assert "the ranks call fit differently" in line
        assert "'final_sparsity': 0.5" in line
    with np.load(folder / f"{ranks}.npz") as saved:
        return dict(saved)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return train(tmp_path_factory.mktemp("pruning"), 0)


@pytest.mark.long
@pytest.mark.parametrize("ranks", sample(FORMS, 3))
def test_masks_and_weights_as_on_one_rank(alone, tmp_path, ranks):
    together = train(tmp_path, ranks, *FORMS[ranks])
    assert len(together) == len(alone) * len(FORMS[ranks])
    for key, array in together.items():
        expected = alone["|" + key.partition("|")[2]]
        if "mask" in key or "sparsity" in key:
            np.testing.assert_array_equal(array, expected, err_msg=key)
        np.testing.assert_allclose(array, expected, rtol=1e-11, atol=1e-12, err_msg=key)
    assert alone["|polynomial/sparsity"][-1] == pytest.approx(0.75, abs=0.01)
