"""Ranks that call different methods end together, with a line that says which ranks call what."""

import functools
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.launching import Finished, in_turn, mpirun
from tests.sample import sample

SCRIPT = str(ROOT / "tests/mpi/scripts/differ.py")
METHODS = [("fit", "evaluate"), ("predict", "fit"), ("predict", "fit", "later"), ("fit", "evaluate", "again")]
AGAIN = [
    ("barrier", "broadcast", "barrier", "broadcast"),
    ("evaluate", "barrier", "evaluate", "user code"),
]
COLLECTIVES = [
    ("barrier", "agree", "in barrier"),
    ("broadcast", "barrier", "in broadcast"),
    ("agree", "broadcast", "in agree('lunch')"),
    ("save", "fit", "in saving"),
]
COMPILED = [
    ("fit in bfloat16", "fit", "dtype", ("'mixed_bfloat16'", "'float32'")),
    ("train_on_batch in float16", "train_on_batch", "dtype", ("'mixed_float16'", "'float32'")),
    ("evaluate a layer in float16", "evaluate", "dtype", ("'float32, dense in float16'", "'float32'")),
    ("fit with a bucket", "fit", "bucket_mb", ("1", "25.0")),
]
CALLS = {2: [*((odd_call, others) for odd_call, others, _ in COLLECTIVES), *METHODS]}
CALLS[2] += [(odd_call, others, "again") for odd_call, others, *_ in AGAIN]
CALLS[3] = [*METHODS, *((odd_call, others) for odd_call, others, *_ in COMPILED)]


@pytest.fixture(scope="module")
def differ(once):
    """Return a function that returns how N ranks end of which one calls something else; all that they call in turn."""

    def call_all(ranks: int, folder: Path) -> dict[str, Finished]:
        cases = {f"{odd} {call}": [SCRIPT, *call[:2], str(odd), *call[2:]] for call in CALLS[ranks] for odd in (0, 1)}
        return in_turn(ranks, cases, folder / "in turn", TMPDIR=str(folder))

    def differ(ranks: int, odd: int, *calls: str) -> Finished:
        return once(f"differing calls on {ranks}", functools.partial(call_all, ranks))[f"{odd} {calls}"]

    return differ


@pytest.mark.parametrize(("ranks", "odd"), sample([(2, 0), (2, 1), (3, 0), (3, 1)], 3))
@pytest.mark.parametrize("calls", METHODS)
def test_methods(differ, calls, ranks, odd):
    done, (odd_call, others, *_) = differ(ranks, odd, *calls), calls
    assert done.code == 2, done.err
    (line,) = (line for line in done.err.splitlines() if "AgreedError: " in line)
    others_ranks = [str(rank) for rank in range(ranks) if rank != odd]
    assert "the ranks call different methods: " in line
    assert f"rank {odd} in {odd_call}" in line
    assert f"rank{'s' * (ranks == 3)} {', '.join(others_ranks)} in {others}" in line
    assert "KeyError" not in done.err


@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize(("odd_call", "others", "message"), [*COLLECTIVES, ("barrier", "fit", "in fit")])
def test_collectives_in_user_code(differ, odd_call, others, message, odd):
    if (odd_call, others) in CALLS[2]:
        done = differ(2, odd, odd_call, others)
    else:  # with the start of MPI as what `fit` agrees on first
        done = mpirun(2, SCRIPT, odd_call, others, str(odd), timeout=90)
    assert done.code == 2, done.err
    (line,) = (line for line in done.err.splitlines() if "AgreedError: " in line)
    assert "the ranks call different methods: " in line
    assert message in line


@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize(("odd_call", "others", "odd_name", "other"), AGAIN)
def test_a_second_message_does_not_repeat_the_names_of_one_that_was_caught(
    differ, odd_call, others, odd_name, other, odd
):
    done = differ(2, odd, odd_call, others, "again")
    assert done.code == 2, done.err
    (line,) = (line for line in done.err.splitlines() if "AgreedError: " in line)
    assert f"rank {odd} in {odd_name}" in line
    assert f"rank {1 - odd} in {other}" in line


@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize(("odd_call", "others", "name", "values"), COMPILED)
def test_what_a_model_computes_in_is_compared_before_the_first_step(differ, odd_call, others, name, values, odd):
    done = differ(3, odd, odd_call, others)
    assert done.code == 2, done.err
    (line,) = (line for line in done.err.splitlines() if "AgreedError: " in line)
    shown = ", ".join(f"rank {rank} has {values[rank != odd]}" for rank in range(3))
    assert f"AgreedError: the ranks have compiled the model differently: {name}: {shown}" in line
