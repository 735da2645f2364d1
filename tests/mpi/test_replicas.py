"""Ranks that do not have the same any more, and numbers that are not finite on one rank: both end a training on all."""

import json

import pytest

from tests.conftest import ROOT
from tests.launching import mpirun
from tests.sample import sample

SCRIPT = str(ROOT / "tests/mpi/scripts/replicas.py")
WAYS = ["parameter", "slot", "rate", "between", "never", "stream", "data", "last", "skip", "row", "slots"]


@pytest.fixture(scope="module", params=sample([2, 3], 2))
def outcomes(request, once):
    """What has become of each training, on so many ranks."""
    done = once(f"replicas on {request.param}", lambda _: mpirun(request.param, SCRIPT, *WAYS, timeout=90))
    assert done.code == 0, done.err
    return json.loads(done.out)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("way", "names"),
    [
        ("parameter", "'dense/kernel'. Either"),
        ("slot", "'dense/kernel', 'adam/dense_kernel_velocity'. Either"),
        ("rate", "'dense/kernel', 'dense/bias', 'dense_1/kernel', 'dense_1/bias' and 1 more"),
    ],
)
def test_what_changes_on_one_rank_is_found_within_an_interval_and_named(outcomes, way, names):
    """On two ranks as well, where no majority tells who is right."""
    code, message = outcomes[way]
    assert code == 76
    assert message.startswith("the replicas differ after step 16 of epoch 1: rank 1 (host ")
    assert f") from the others in {names}" in message


def test_what_changes_on_one_rank_between_epochs_is_found_and_named(outcomes):
    """What callbacks change on all ranks there does not matter."""
    code, message = outcomes["between"]
    assert code == 76
    assert message.startswith("the replicas differ after step 4 of epoch 2: rank 1 (host ")


def test_slots_that_the_first_step_makes_are_compared_too(outcomes):
    """Where batches are gone, two ranks are not told apart."""
    code, message = outcomes["stream"]
    assert code == 76
    assert "'adam/dense_kernel_velocity'" in message


def test_without_digests_nobody_sees_it(outcomes):
    assert outcomes["never"][0] == "done"


def test_the_rank_and_the_sample_are_named_that_are_not_finite(outcomes):
    code, message = outcomes["data"]
    assert code == 76
    assert message.startswith("training diverged in step 2 of epoch 1: x is not finite in sample 23 (rank ")


def test_the_sample_is_named_where_other_ranks_have_no_rows(outcomes):
    code, message = outcomes["last"]
    assert code == 76
    assert message.startswith("training diverged in step 2 of epoch 1: x is not finite in sample 299 (rank ")


def test_all_ranks_leave_out_the_same_step(outcomes):
    ended, history, same, as_without = outcomes["skip"]
    assert ended == "done"
    assert history["skipped_steps"] == [1]
    assert same
    assert as_without


def test_a_row_that_differs_on_one_rank_is_found_before_the_training(outcomes):
    code, message = outcomes["row"]
    assert code == 2
    assert "the training sets (shapes, dtypes, checksum) differ: rank 0 has [[300, 6], 'float32', [300], " in message


def test_a_training_begins_with_rank_0s_slots_too(outcomes):
    ended, _, same = outcomes["slots"]
    assert ended == "done"
    assert same
