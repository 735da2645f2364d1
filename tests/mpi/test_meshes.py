"""Models train on any mesh of ranks, with weights and slots wherever they lie, what they train on one rank."""

import json

import numpy as np
import pytest

from tests.conftest import ROOT
from tests.launching import in_turn

SCRIPT = str(ROOT / "tests/mpi/scripts/meshes.py")
FORMS = {
    2: ["model=2", "--stages=2"],
    3: ["--shard-optimizer", "--shard-weights"],
    4: ["batch=2,model=2 --shard-weights", "model=4", "--stages=2"],
}
STEPS = 12  # 200 agree as well, but take minutes where four ranks share two cores


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a function that trains on so many ranks (0: alone) and returns what came out."""
    folder = tmp_path_factory.mktemp("meshes")
    kept = {}

    def trained(ranks):
        if ranks not in kept:
            case = {"meshes": [SCRIPT, str(folder / f"{ranks}.npz"), str(STEPS), *FORMS.get(ranks, [])]}
            done = in_turn(ranks, case, folder / f"on {ranks}", limit=150)["meshes"]
            assert (done.code, done.err) == (0, "")
            with np.load(folder / f"{ranks}.npz") as saved:
                kept[ranks] = dict(saved)
        return kept[ranks]

    return trained


@pytest.mark.slow
@pytest.mark.parametrize("ranks", FORMS)
def test_steps_in_float64_agree_to_1e_12(trained, ranks):
    alone, together = trained(0), trained(ranks)
    assert len(together) == len(alone) * len(FORMS[ranks])
    for key, found in together.items():
        expected = alone["|" + key.partition("|")[2]]
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12 * np.abs(expected).max(), err_msg=key)


@pytest.mark.parametrize(("checkpoints", "most"), [([], 8), (["--checkpoints"], 10)])
def test_a_model_trains_of_which_no_rank_holds_half(tmp_path, checkpoints, most):
    """Weights, gradients and Adam's slots take 16 bytes a parameter on one device; of FSDP each of four ranks has 4.

    A checkpoint is written from a copy of the rank's weights and slots, 3 bytes.
    """
    script = str(ROOT / "benchmarks/sharded_memory.py")
    kept = [*checkpoints, str(tmp_path / "checkpoints")] if checkpoints else []
    case = {"FSDP": [script, "--form", "FSDP", "--units", "1024", "--layers", "12", *kept]}
    done = in_turn(4, case, tmp_path / "FSDP", limit=120)["FSDP"]
    assert (done.code, done.err) == (0, "")
    assert json.loads(done.out)["bytes_a_parameter"] < most
