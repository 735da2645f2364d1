"""Sweeps on several ranks: the same runs as on one, shared out as places become free; faults on one rank alone."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launching import dptrain, mpirun
from tests.sample import sample

SWEEP = ("sweep", "--seeds", "0-2", "--grid", "hidden=4,8", "--grid", "learning_rate=1e-2,1e-3", "--epochs", "2")


def lines(path: Path) -> list[str]:
    return sorted((path / "results.jsonl").read_text().splitlines())


def journal(path: Path) -> list[dict]:
    return [json.loads(line) for line in (path / "journal.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def on_one_rank(small_npz, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("one") / "s"
    done = dptrain(0, *SWEEP, "--data", str(small_npz), "--out", str(out), "--verbose", "0")
    assert (done.code, done.out, done.err) == (0, "", "")
    return out


@pytest.mark.long
@pytest.mark.parametrize(("ranks", "places"), sample([(2, 3), (3, 1)], 2))
def test_any_number_of_ranks_trains_the_same_runs(small_npz, on_one_rank, tmp_path, ranks, places):
    out = tmp_path / "s"
    done = dptrain(
        ranks, *SWEEP, "--data", str(small_npz), "--out", str(out), "--verbose", "2", "--runs-per-device", str(places)
    )
    assert (done.code, done.err) == (0, "")
    assert lines(out) == lines(on_one_rank)
    columns = [row.split(",") for row in (out / "trials.csv").read_text().splitlines()]
    expected = [row.split(",") for row in (on_one_rank / "trials.csv").read_text().splitlines()]
    seconds = columns[0].index("seconds")
    assert [row[:seconds] for row in columns] == [row[:seconds] for row in expected]
    assert f"rank {ranks - 1}: {places} run" in done.out
    assert done.out.count("\nrun ") == 12


@pytest.mark.long
def test_halving_and_optuna_on_two_ranks(small_npz, tmp_path):
    out = tmp_path / "s"
    arguments = ("--seeds", "0,1", "--halving", "2", "--epochs", "3", "--hidden", "4", "--data", str(small_npz))
    adaptive = ("--adaptive", "4", "--random", "learning_rate=log:1e-4..1e-1", "dropout=0..0.3")
    done = dptrain(2, "sweep", *arguments, *adaptive, "--out", str(out), "--runs-per-device", "1")
    assert (done.code, done.err) == (0, "")
    endings = [event for event in journal(out) if event["kind"] == "ending"]
    last = {event["run"]: event for event in endings}
    assert len(last) == 8
    assert {event["status"] for event in last.values()} == {"done", "pruned"}
    # Each trial goes on or stops as a whole.
    for trial in range(4):
        assert len({(last[run]["status"], last[run]["epochs"]) for run in (2 * trial, 2 * trial + 1)}) == 1
    again = dptrain(2, "sweep", *arguments, *adaptive, "--out", str(out), "--runs-per-device", "1")
    assert again.code == 0
    assert "8 runs have ended already" in again.out
    assert [event for event in journal(out) if event["kind"] == "ending"] == endings


def test_the_dry_run_times_runs_on_the_first_rank_alone(small_npz, tmp_path):
    done = dptrain(2, *SWEEP, "--data", str(small_npz), "--dry-run", cwd=tmp_path)
    assert (done.code, done.err) == (0, "")
    assert " in all on 2 ranks, without evaluation: " in done.out


@pytest.mark.long
@pytest.mark.parametrize("rank", sample([0, 1], 2, first=1))
def test_a_rank_that_dies_ends_the_sweep_which_then_goes_on(small_npz, on_one_rank, tmp_path, rank):
    """The rank is killed when a run has ended; nothing that the journal says is lost."""
    out = tmp_path / "s"
    kill = (
        "import os, signal, sys\n"
        "from dptrain.cli.main import main\n"
        "from dptrain.sweeps.scheduling import worker\n"
        "tell, told = worker.Worker._tell, []\n"
        "def die(self, *arguments):\n"
        "    told.append(arguments)\n"
        f"    if self._ranks.rank == {rank} and len(told) == 3: os.kill(os.getpid(), signal.SIGKILL)\n"
        "    tell(self, *arguments)\n"
        "worker.Worker._tell = die\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    arguments = (*SWEEP, "--data", str(small_npz), "--out", str(out), "--verbose", "0")
    died = mpirun(2, "-c", kill, *arguments, timeout=60)
    assert died.code != 0
    ended = [event["run"] for event in journal(out) if event["kind"] == "ending"]
    assert 0 < len(ended) < 12
    done = dptrain(2, *arguments, timeout=60)
    assert (done.code, done.err) == (0, "")
    assert lines(out) == lines(on_one_rank)
    after = [event["run"] for event in journal(out) if event["kind"] == "ending"]
    assert after[: len(ended)] == ended
    assert sorted(after) == list(range(12))


def test_a_run_that_fails_on_one_rank_alone_is_recorded(small_npz, tmp_path):
    """The run's error stays the run's, whatever rank trains it; a second one is about the rank itself and ends all."""
    out = tmp_path / "s"
    script = (
        "import sys\n"
        "from dptrain.cli.main import main\n"
        "from dptrain.sweeps.scheduling import worker\n"
        "start = worker.Worker.start\n"
        "def fail(self, segment, *rest):\n"
        "    if self._ranks.rank == 1: self._recipe = None\n"
        "    start(self, segment, *rest)\n"
        "worker.Worker.start = fail\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    arguments = (*SWEEP, "--data", str(small_npz), "--out", str(out), "--verbose", "0")
    done = mpirun(2, "-c", script, *arguments)
    assert (done.code, done.err) == (70, "")
    last = [event for event in journal(out) if event["kind"] == "ending"]
    failed = [event for event in last if event["status"] == "failed"]
    assert len(last) == 12
    assert 0 < len(failed) < 12
    assert all("AttributeError: 'NoneType' object has no attribute 'build'" in event["reason"] for event in failed)


def test_an_error_of_rank_1_itself_ends_all_with_one_line(small_npz, tmp_path):
    script = (
        "import sys\n"
        "from dptrain.cli.main import main\n"
        "from dptrain.sweeps.scheduling import worker\n"
        "def fail(self): raise RuntimeError('the device is lost')\n"
        "from dptrain.comm import current\n"
        "if current().rank == 1: worker.Worker.advance = fail\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    done = mpirun(2, "-c", script, *SWEEP, "--data", str(small_npz), "--out", str(tmp_path / "s"), "--verbose", "0")
    assert done.code == 70
    [line] = done.messages
    assert line.startswith("dptrain: rank 1/2 host ")
    assert "sweep: RuntimeError: the device is lost" in line


@pytest.mark.long
@pytest.mark.parametrize("how", sample(["error", "SIGTERM"], 2))
def test_what_there_is_is_reported_when_rank_1_fails_or_is_told_to_stop(small_npz, tmp_path, how):
    """Rank 1 meets an error of its own, or a signal alone, when rank 0 has ended a run."""
    out = tmp_path / "s"
    script = (
        "import os, signal, sys\n"
        "from dptrain.cli.main import main\n"
        "from dptrain.comm import current\n"
        "from dptrain.sweeps.scheduling import coordinator, worker\n"
        f"done, how = {str(tmp_path / 'done')!r}, {how!r}\n"
        "write, advance = coordinator.Coordinator._write, worker.Worker.advance\n"
        "def written(self, ending, state):\n"
        "    write(self, ending, state)\n"
        "    open(done, 'w').close()\n"
        "def fail(self):\n"
        "    if os.path.exists(done):\n"
        "        if how == 'error': raise RuntimeError('the device is lost')\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "    return advance(self)\n"
        "coordinator.Coordinator._write = written\n"
        "if current().rank == 1: worker.Worker.advance = fail\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    arguments = (*SWEEP, "--seeds", "0-5", "--data", str(small_npz), "--out", str(out), "--verbose", "0")
    stopped = mpirun(2, "-c", script, *arguments, timeout=60)
    assert stopped.code == (70 if how == "error" else 75)
    rows = [row.split(",") for row in (out / "trials.csv").read_text().splitlines()]
    values = rows[0].index("n")
    assert 1 <= sum(int(row[values]) for row in rows[1:]) < 24
    assert ("The sweep is incomplete (SIGTERM)" in (out / "report.html").read_text()) == (how == "SIGTERM")
    done = dptrain(2, *arguments, timeout=60)
    assert (done.code, done.err) == (0, "")
    assert len(lines(out)) == 2 * 24


def test_ranks_with_different_plans_are_refused(small_npz, tmp_path):
    script = (
        "import sys\n"
        "from dptrain.cli.main import main\n"
        "from dptrain.comm import current\n"
        "more = ['--seeds', '0-3'] if current().rank == 1 else []\n"
        "sys.exit(main(sys.argv[1:] + more))\n"
    )
    done = mpirun(2, "-c", script, *SWEEP, "--data", str(small_npz), "--out", str(tmp_path / "s"))
    assert done.code == 2
    assert [line for line in done.messages if "the ranks sweep differently" in line] == done.messages
    assert len(done.messages) == 1


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="sends signals to the launcher")
def test_two_sweeps_in_one_directory(small_npz, tmp_path):
    out = tmp_path / "s"
    command = [sys.executable, "-m", "dptrain", *SWEEP, "--epochs", "500", "--data", str(small_npz), "--out", str(out)]
    first = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        deadline = time.monotonic() + 60
        while not (out / "results.jsonl").exists() or not (out / "results.jsonl").stat().st_size:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        second = dptrain(2, *SWEEP, "--epochs", "500", "--data", str(small_npz), "--out", str(out))
        assert second.code == 74
        [line] = second.messages
        assert f"pid {first.pid}" in line
    finally:
        os.killpg(first.pid, signal.SIGKILL)
        first.wait()


@pytest.mark.long
def test_a_sweep_from_a_script_between_trainings_of_all_ranks(tmp_path):
    """Every rank gets the same result, that of one rank; what the ranks train together is not touched by it."""
    script = str(Path(__file__).parent / "scripts" / "sweep.py")
    results = []
    for ranks in (1, 3):
        done = mpirun(ranks, script, str(tmp_path / "out.json"))
        assert (done.code, done.out, done.err) == (0, "", "")
        results.append(json.loads((tmp_path / "out.json").read_text()))
    alone, three = results
    assert three.pop("together") == pytest.approx(alone.pop("together"), rel=1e-5)
    assert three == alone
