"""Models train on any mesh of ranks, with weights and slots wherever they lie, what they train on one rank."""

import json
import re

import numpy as np
import pytest

from tests.conftest import ROOT
from tests.launching import in_turn
from tests.sample import sample

SCRIPT = str(ROOT / "tests/mpi/scripts/meshes.py")
FORMS = {
    2: ["model=2"],
    3: ["--shard-optimizer", "--shard-weights"],
    4: ["batch=2,model=2 --shard-weights", "--stages=2"],
}
STEPS = 8  # 200 agree as well, but take minutes where four ranks share two cores


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a function that trains on so many ranks (0: alone) and returns what came out."""
    folder = tmp_path_factory.mktemp("meshes")
    kept = {}

    def trained(ranks):
        if ranks not in kept:
            case = {"meshes": [SCRIPT, str(folder / f"{ranks}.npz"), str(STEPS), *FORMS.get(ranks, [])]}
            done = in_turn(ranks, case, folder / f"on {ranks}", limit=150, seeds=True)["meshes"]
            assert (done.code, done.err) == (0, "")
            with np.load(folder / f"{ranks}.npz") as saved:
                kept[ranks] = dict(saved)
        return kept[ranks]

    return trained


@pytest.mark.slow
@pytest.mark.parametrize("ranks", sample(FORMS, 3))
def test_steps_in_float64_agree_to_1e_12(trained, ranks):
    alone, together = trained(0), trained(ranks)
    assert len(together) == len(alone) * len(FORMS[ranks])
    for key, array in together.items():
        expected = alone["|" + key.partition("|")[2]]
        np.testing.assert_allclose(array, expected, rtol=1e-12, atol=1e-12 * np.abs(expected).max(), err_msg=key)


@pytest.mark.long
@pytest.mark.parametrize(
    ("form", "most", "checkpoints"),
    [("FSDP", 8, True), ("pipeline", 8, False), ("ZeRO-1", 12, False)],
)
def test_a_model_trains_of_which_no_rank_holds_all(tmp_path, form, most, checkpoints):
    """Weights, gradients and Adam's slots take 16 bytes a parameter on one device; each of four ranks has 4.

    With ZeRO-1 it has 10: all weights and gradients. Memory that ranks share takes another. A checkpoint is written
    from a copy of the rank's weights and slots, 3 bytes, and early stopping keeps one byte.
    """
    script = str(ROOT / "benchmarks/sharded_memory.py")
    kept = ["--checkpoints", str(tmp_path / "checkpoints")] if checkpoints else []
    case = {form: [script, "--form", form, "--units", "768", "--layers", "12", *kept]}
    done = in_turn(4, case, tmp_path / form, limit=120)[form]
    assert (done.code, done.err) == (0, "")
    facts = json.loads(done.out)
    assert facts["bytes_a_parameter"] < most
    assert facts.get("with_checkpoints", 0) < 12
    assert ("with_checkpoints" in facts) == checkpoints


REFUSED = {
    # The first: the others are refused for their own reasons, so it sets nothing.
    "a mesh": ("--stages 2 --mesh model=2", "stages = 2: not supported on the mesh batch=1,model=2; leave out one of"),
    "3 stages": (
        "--stages 3",
        r"stages = 3: the number of ranks, 2, is not a multiple of it; start 3 ranks \(",
    ),
    "as many as layers": (
        "--stages 2 --hidden=",
        "stages = 2: the model has 1 layer with weights; expected at least one per",
    ),
    "the axis of pipelines": ("--mesh stage=2", "the axis .stage. is reserved for pipelines; use --stages instead"),
    "FSDP": ("--stages 2 --shard-weights", "stages = 2: not supported with shard_weights; leave out one of them"),
    "shards": ("--stages 2 --reproducible", "stages = 2: not supported with shards_per_batch; leave out one of them"),
    "no stages": ("--microbatches 4", "microbatches = 4: needs stages as well"),
}


def test_stages_that_do_not_go_are_refused_in_one_line(small_npz, tmp_path):
    command = ["-m", "dptrain", "--data", str(small_npz), "--epochs", "1"]
    cases = {name: [*command, *flags.split()] for name, (flags, _) in REFUSED.items()}
    for name, done in in_turn(2, cases, tmp_path / "refused").items():
        assert done.code == 2, name
        (line,) = done.messages
        assert re.search(REFUSED[name][1], line), line
