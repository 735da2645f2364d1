"""The benchmark that plants faults runs through, and says how each job ended."""

import re
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tests.launching import find_mpirun, run


@pytest.mark.long
def test_two_faults_are_planted_and_judged(tmp_path):
    find_mpirun()
    output = tmp_path / "out.md"
    arguments = ["--seed", "151", "--count", "2", "--output", str(output)]
    done = run([sys.executable, str(ROOT / "benchmarks/faults.py"), *arguments], timeout=120, cwd=tmp_path)
    assert done.code == 0, done.out + done.err
    text = output.read_text()
    assert "2 faults: 0 hung, 0 without a culprit (0 of them by kill -9), 0 with exit code 0; 0 not as they" in text
    assert re.search(r"^\| exception \| 1 \| 1 \| \d+ \(1\) \| 1 \| 0 \|", text, re.MULTILINE)


@pytest.fixture
def faults(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import faults

    return faults


@pytest.mark.parametrize(
    ("first", "second", "end", "wrong"),
    [
        (b"a\nb\nto", b"a\nb\nc\n", "exit 0", ""),
        (b"a\nb\nto", b"a\nc\nd\n", "exit 0", "a line of the journal is lost"),
        (b"a\nb\n", b"a\nb\n", "exit 0", "other lines"),
        (b"", b"", "echo no >&2; exit 74", "ended with 74: no"),
    ],
)
def test_a_job_that_is_killed_is_judged(faults, tmp_path, first, second, end, wrong):
    """What a kill tears may come again; whole lines stay, and the job ends as if nobody had killed it."""
    journal = tmp_path / "journal.jsonl"
    starts = iter([(first, "sleep 60"), (second, end)])

    def start() -> "subprocess.Popen[str]":
        content, command = next(starts)
        journal.write_bytes(content)
        return subprocess.Popen(["sh", "-c", command], stderr=subprocess.PIPE, text=True, start_new_session=True)

    def lines(path):
        return {"lines": dict(enumerate(journal.read_text().splitlines()))}

    job = faults.Job("job", (), 1, lines, journal=journal.name)
    outcome = faults.disturb(job, start, tmp_path, [0.1], {"lines": {0: "a", 1: "b", 2: "c"}})
    assert (outcome.kills, outcome.wrong) == (1, wrong)


def test_part_of_what_nobody_kills_must_be_the_same(faults):
    job = faults.Job("halving", (), 1, lambda out: {}, whole=())
    whole = {"epochs": {1: 0.5, 2: 0.25}, "models": {"m": b"1"}}
    assert job.differences({"epochs": {1: 0.5}, "models": {"m": b"1"}}, whole) == ""
    assert job.differences({"epochs": {2: 0.5}, "models": {}}, whole) == "epochs, models"
