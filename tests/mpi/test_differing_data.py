"""Ranks that call the same method with other data or arguments end together, before anything is computed of them."""

import json

import pytest

from tests.conftest import ROOT
from tests.launching import mpirun

SCRIPT = str(ROOT / "tests/mpi/scripts/differing_data.py")
DATA, ARGUMENT = "the data (shapes, dtypes, checksum) differ: rank 0 has ", "arguments: rank 0 has ["
MODEL, COMPILED = "the models (checksum of the layers) differ: rank 0 has ", "compiled: rank 0 has "
DIFFERING = {
    "predict, parts": DATA,
    "predict, a value": DATA,
    "predict, shuffled": DATA,
    "predict, dtype": DATA,
    "predict, batch_size": ARGUMENT,
    "predict, steps": ARGUMENT,
    "predict, dataset": DATA,
    "predict_on_batch, parts": DATA,
    "predict_on_batch, a value": DATA,
    "evaluate, parts": DATA,
    "evaluate, batch_size": ARGUMENT,
    "evaluate, steps": ARGUMENT,
    "test_on_batch, parts": DATA,
    "test_on_batch, targets": DATA,
    "test_on_batch, weights": DATA,
    "train_on_batch, parts": DATA,
    "train_on_batch, a value": DATA,
    "train_on_batch, targets": DATA,
    "train_on_batch, class_weight": DATA,
    "train_on_batch, loss": COMPILED,
    "train_on_batch, momentum": COMPILED,
    "test_on_batch, loss": COMPILED,
    "evaluate, metrics": COMPILED,
    "predict, activation": MODEL,
    "train_on_batch, activation": MODEL,
}
ADAPTED = ["fit, adapted", "predict, adapted", "fit, adapted on one rank"]
SAME = [
    "fit, adapted alike",
    "fit, adapted on rank 0",
    "predict",
    "predict_on_batch",
    "evaluate",
    "test_on_batch",
    "train_on_batch",
]


@pytest.fixture(scope="module", params=[(2, 0), (3, 1)], ids=str)
def outcomes(request, once):
    """What has become of each call, on so many ranks of which one differs."""
    ranks, odd = request.param
    words = (str(odd), *DIFFERING, *ADAPTED, *SAME)
    done = once(f"differing data on {ranks}", lambda _: mpirun(ranks, SCRIPT, *words, timeout=90))
    assert done.code == 0, done.err
    return json.loads(done.out) | {"odd": odd}


@pytest.mark.parametrize("way", DIFFERING)
def test_a_rank_with_other_data_or_arguments_is_refused_on_all(outcomes, way):
    method = way.partition(",")[0]
    code, message = outcomes[way]
    assert code == 2
    assert message.startswith(f"the ranks call {method} differently: {DIFFERING[way]}")
    if DIFFERING[way] == DATA:
        assert "; every rank needs the same data: seed random numbers, with dp.utils.set_random_seed(0) at " in message


@pytest.mark.parametrize("way", ADAPTED)
def test_layers_that_ranks_adapt_to_different_data_are_refused(outcomes, way):
    if outcomes["odd"] == 0 and way.endswith("one rank"):
        assert outcomes[way] == "done"  # rank 0's moments are everyone's
        return
    code, message = outcomes[way]
    assert code == 2
    assert message.startswith("layers are adapted to different data: ")
    assert "call adapt with the same data on every rank, or on rank 0 alone" in message


@pytest.mark.parametrize("way", SAME)
def test_what_is_the_same_on_all_ranks_is_computed(outcomes, way):
    assert outcomes[way] == "done"
