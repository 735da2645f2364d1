"""Ranks train recurrent layers, attention, masked losses and states that batches leave to others as one rank does."""

import numpy as np
import pytest

from tests.conftest import ROOT
from tests.launching import python
from tests.sample import sample

SCRIPT = str(ROOT / "tests/mpi/scripts/sequences.py")


def run(ranks, case, folder):
    return python(
        ranks, SCRIPT, str(folder / f"{ranks} {case}.npz"), case, str(folder / f"{ranks} backup"), timeout=120
    )


def trained(ranks, case, folder):
    """Return what the script saves on N ranks (0: without mpirun)."""
    path = folder / f"{ranks} {case}.npz"
    done = run(ranks, case, folder)
    assert (done.code, done.err) == (0, "")
    with np.load(path) as saved:
        return dict(saved)


CASES = [("labelled", 3), ("stateful", 3), ("stateful", 2)]
CASES += [("labelled sharded", 2), ("labelled by heads", 2)]
CASES += [(f"attention{form}", ranks) for ranks in (3, 2) for form in ("", " sharded", " by heads")]


@pytest.mark.sample(3)
@pytest.mark.parametrize(("case", "ranks"), [*sample(CASES, 5), ("branches", 2), ("branches sharded", 2), ("until", 2)])
def test_ranks_train_what_one_trains(tmp_path, case, ranks):
    alone, together = trained(0, case.partition(" ")[0], tmp_path), trained(ranks, case, tmp_path)
    atol = 1e-9 if "attention" in case else 1e-12  # a key's bias has no gradient but of rounding, which Adam enlarges
    np.testing.assert_allclose(together["params"], alone["params"], rtol=1e-10, atol=atol)
    np.testing.assert_allclose(together["logs"], alone["logs"], rtol=1e-6)
    np.testing.assert_allclose(together["scores"], alone["scores"], rtol=1e-6)
    assert alone["logs"][-1][-1] < alone["logs"][0][-1], "it learns"


@pytest.mark.sample(2, 1)
@pytest.mark.parametrize("ranks", sample([0, 2], 1))
def test_states_come_back_in_the_middle_of_an_epoch(tmp_path, ranks):
    assert "stopped" in run(ranks, "stopped", tmp_path).err
    whole, resumed = trained(ranks, "stateful", tmp_path), trained(ranks, "resumed", tmp_path)
    np.testing.assert_array_equal(resumed["params"], whole["params"])
    np.testing.assert_array_equal(resumed["scores"], whole["scores"])
