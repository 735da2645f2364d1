"""A profile of several ranks: one trace of all, with messages, and one table."""

import json

import pytest

from tests.conftest import ROOT
from tests.launching import mpirun
from tests.sample import sample

SCRIPT = str(ROOT / "tests/mpi/scripts/profiled.py")


@pytest.mark.sample(2)
@pytest.mark.parametrize(("ranks", "compiled"), sample([(2, "1"), (2, "0"), (3, "0")], 2))
def test_one_trace_has_all_ranks(ranks, compiled, tmp_path):
    path = tmp_path / "trace.json"
    finished = mpirun(ranks, SCRIPT, str(path), timeout=90, DPTRAIN_JIT_COMPILE=compiled)
    assert finished.code == 0, finished.err
    assert finished.out.count(f"profile, rank 0 of {ranks}: 3 steps of") == 1
    assert {"first", "dense", "messages", "update"} <= set(json.loads(finished.out.splitlines()[-1]))
    spans = [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]
    assert {event["pid"] for event in spans} == set(range(ranks))
    for rank in range(ranks):
        messages = [event for event in spans if event["pid"] == rank and event["cat"] == "message"]
        assert {event["args"]["step"] for event in messages} == {1, 2, 3}
    begins = {rank: min(event["ts"] for event in spans if event["pid"] == rank) for rank in range(ranks)}
    longest = max(event["ts"] + event["dur"] for event in spans) - min(begins.values())
    assert max(begins.values()) - min(begins.values()) < longest  # one clock


def test_a_trace_that_cannot_be_written_ends_all_ranks(tmp_path):
    finished = mpirun(2, SCRIPT, str(tmp_path / "nowhere" / "trace.json"), timeout=90)
    assert finished.code == 74
    assert "choose another `path` of Profiler" in finished.err
