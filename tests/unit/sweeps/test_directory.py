"""The directory of a sweep: whom it lets in, and what is left after a kill at any moment."""

import errno
import json
import math
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import unittest.mock
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dptrain.cli.run_directory import RunDirectory
from dptrain.errors import ConfigError, DataError, OutputError
from dptrain.runtime.storage import files, locks
from dptrain.sweeps.directory import SweepDirectory
from dptrain.sweeps.records import Ending, Run, Status, Trial
from tests.faulty import each_fault
from tests.sample import examples

PLAN = {"settings": [{"learning_rate": 0.1, "hidden": [128, 64]}], "seeds": [0, 1], "metric": "val_accuracy"}
SEEDS = 2
RUN = Run(0, 0, 0)
OTHER = Run(1, 0, 1)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    monkeypatch.setattr(locks, "_PATIENCE", 0.05)


def ending(run: Run, status: Status, epochs: int, **metrics) -> Ending:
    return Ending(run, status, epochs, 0.5 * epochs, {"loss": 1 / (epochs + 1)}, **metrics)


def train(sweep: SweepDirectory, run: Run, status: Status, begin: int, end: int, state: bytes | None = None) -> Ending:
    for epoch in range(begin + 1, end + 1):
        sweep.add_epoch(run, epoch, {"loss": 1 / epoch})
    last = ending(run, status, end)
    sweep.add_ending(last, state)
    return last


def lines(path: Path) -> list[dict]:
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert all(len(line.pop("digest")) == 16 for line in records)
    return records


def seen(sweep: SweepDirectory) -> list[tuple[int, int]]:
    return [(line["run"], line["epoch"]) for line in sweep.epochs()]


def begin(path: Path) -> SweepDirectory:
    sweep = SweepDirectory(path, PLAN)
    sweep.add_trial(Trial(0, {"learning_rate": 0.1}))
    return sweep


def test_what_is_written_comes_back(tmp_path):
    path = tmp_path / "a" / "b"
    with begin(path) as sweep:
        assert (sweep.trials, sweep.endings, list(sweep.epochs())) == ([Trial(0, {"learning_rate": 0.1})], [], [])
        sweep.add_epoch(RUN, 1, {"loss": np.float32(0.5), "steps": np.int64(7)})
        sweep.add_epoch(OTHER, 1, {"loss": math.nan, "val_loss": math.inf})
        sweep.add_epoch(RUN, 2, {"loss": 0.1 + 0.2})
        paused = Ending(RUN, Status.PAUSED, 2, 1.5, {"loss": 0.1 + 0.2})
        sweep.add_ending(paused, b"two")
        failed = Ending(OTHER, Status.DIVERGED, 1, 0.25, {"loss": -math.inf}, "loss is nan in epoch 1", 76)
        sweep.add_ending(failed, None)
        assert sweep.endings == [paused, failed]
        written = list(sweep.epochs())
    assert written == lines(path / "results.jsonl") == [
        {"trial": 0, "run": 0, "seed": 0, "epoch": 1, "loss": 0.5, "steps": 7},
        {"trial": 0, "run": 1, "seed": 1, "epoch": 1, "loss": None, "val_loss": None},
        {"trial": 0, "run": 0, "seed": 0, "epoch": 2, "loss": 0.1 + 0.2},
    ]  # fmt: skip
    assert lines(path / "journal.jsonl")[0] == {"kind": "trial", "trial": 0, "setting": {"learning_rate": 0.1}}
    assert lines(path / "journal.jsonl")[2] == {
        "kind": "ending", "run": 1, "trial": 0, "seed": 1, "status": "diverged", "epochs": 1, "seconds": 0.25,
        "metrics": {"loss": None}, "reason": "loss is nan in epoch 1", "exit_code": 76,
    }  # fmt: skip
    content = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    with SweepDirectory(path, PLAN) as sweep:
        assert sweep.trials == [Trial(0, {"learning_rate": 0.1})]
        assert sweep.endings[0] == paused
        assert (sweep.endings[1].status, sweep.endings[1].reason) == (Status.DIVERGED, failed.reason)
        assert math.isnan(sweep.endings[1].metrics["loss"])
        assert list(sweep.epochs()) == written
        assert sweep.state(RUN) == b"two"
        with pytest.raises(KeyError):
            sweep.state(OTHER)
    assert {file: file.read_bytes() for file in path.rglob("*") if file.is_file()} == content


def test_a_state_goes_once_the_run_went_on(tmp_path):
    with begin(tmp_path) as sweep:
        train(sweep, RUN, Status.PAUSED, 0, 1, b"one")
        train(sweep, RUN, Status.PAUSED, 1, 3, b"three")
        assert [file.name for file in (tmp_path / "states").iterdir()] == ["0-3.safetensors"]
        assert sweep.state(RUN) == b"three"
        train(sweep, RUN, Status.DONE, 3, 4)
        assert list((tmp_path / "states").iterdir()) == []


def test_what_contradicts_what_is_there_is_not_written(tmp_path):
    with begin(tmp_path) as sweep:
        sweep.add_epoch(RUN, 1, {})
        before = (tmp_path / "results.jsonl").read_bytes(), (tmp_path / "journal.jsonl").read_bytes()
        for call in (
            lambda: sweep.add_trial(Trial(2, {})),
            lambda: sweep.add_epoch(RUN, 1, {}),
            lambda: sweep.add_epoch(RUN, 3, {}),
            lambda: sweep.add_ending(ending(RUN, Status.DONE, 2), None),
            lambda: sweep.add_ending(ending(RUN, Status.PAUSED, 1), None),
            lambda: sweep.add_ending(ending(RUN, Status.PRUNED, 1), b"state"),
            lambda: sweep.add_ending(ending(Run(2, 1, 0), Status.FAILED, 0), None),
        ):
            with pytest.raises(ValueError, match=r"run|trial"):
                call()
        with pytest.raises(ConfigError, match=r"trial 1: JSON cannot carry its setting {'x': inf}"):
            sweep.add_trial(Trial(1, {"x": math.inf}))
        assert before == ((tmp_path / "results.jsonl").read_bytes(), (tmp_path / "journal.jsonl").read_bytes())


def test_another_plan_is_refused_with_all_differences(tmp_path):
    SweepDirectory(tmp_path, {**PLAN, "rate": 1e-5, "end": math.inf}).close()
    SweepDirectory(tmp_path, {**PLAN, "rate": 0.00001, "end": math.inf, "seeds": (0, 1)}).close()
    other = {
        "settings": [{"learning_rate": 0.2, "hidden": [128, 64]}],
        "seeds": [0, 2, 3],
        "metric": "x" * 100,
        "rate": 1e-5,
        "min": 1,
    }
    with pytest.raises(ConfigError) as caught:
        SweepDirectory(tmp_path, other)
    assert str(caught.value) == (
        f"{tmp_path} holds another sweep: settings[0].learning_rate: 0.1 there, 0.2 here; "
        "seeds: [0, 1] there, [0, 2, 3] here; "
        f'metric: "val_accuracy" there, "{"x" * 39} ... {"x" * 14}" here; '
        "end: Infinity there, nothing here; min: nothing there, 1 here; choose another --out"
    )
    assert not (tmp_path / "holder").exists()


def test_something_else_is_refused_and_left_alone(tmp_path):
    run = tmp_path / "run"
    with RunDirectory(run, "seed: 1\n"):
        before = sorted(run.iterdir())
        with pytest.raises(
            OutputError, match=r"run is not empty and contains no sweep \(config.yaml\); choose another"
        ):
            SweepDirectory(run, PLAN)
        assert sorted(run.iterdir()) == before
    with pytest.raises(OutputError, match=r"config.yaml is not a directory; choose another --out"):
        SweepDirectory(run / "config.yaml", PLAN)
    with pytest.raises(OutputError, match=r"config.yaml/a: Not a directory; choose another --out"):
        SweepDirectory(run / "config.yaml" / "a", PLAN)
    (tmp_path / "sweep.yaml").write_text("a: [")
    with pytest.raises(DataError, match=r"sweep.yaml: not YAML"):
        SweepDirectory(tmp_path, PLAN)


def test_a_claim_that_was_killed_is_taken_over(tmp_path):
    for name in ("lock", "holder", ".sweep.yaml.77.tmp"):
        (tmp_path / name).write_text("host gone, pid 77")
    SweepDirectory(tmp_path, PLAN).close()
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "journal.jsonl", "lock", "results.jsonl", "states", "sweep.yaml",
    ]  # fmt: skip


def test_two_sweeps_at_once_are_refused(tmp_path):
    lock_error = (
        rf"another sweep is using it \(host {socket.gethostname()}, pid {os.getpid()}, since .*\); stop it, or choose"
    )
    with SweepDirectory(tmp_path, PLAN):
        for _ in range(2):
            with pytest.raises(OutputError, match=lock_error):
                SweepDirectory(tmp_path, PLAN)
        code = (
            "import sys\nfrom pathlib import Path\nfrom dptrain.sweeps.directory import SweepDirectory\n"
            f"SweepDirectory(Path({str(tmp_path)!r}), {PLAN!r})"
        )
        process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
        assert process.returncode != 0
        assert f"OutputError: {tmp_path}: another sweep is using it (host" in process.stderr
        assert f"pid {os.getpid()}" in process.stderr
        (tmp_path / "holder").write_bytes(b"\xff")
        with pytest.raises(OutputError, match=r"another sweep is using it; stop it"):
            SweepDirectory(tmp_path, PLAN)
    SweepDirectory(tmp_path, PLAN).close()


def test_close_from_another_thread_releases_the_lock(tmp_path):
    sweep = SweepDirectory(tmp_path, PLAN)
    thread = threading.Thread(target=sweep.close)
    thread.start()
    thread.join()
    sweep.close()
    SweepDirectory(tmp_path, PLAN).close()


def test_a_failed_opening_releases_the_lock(tmp_path):
    begin(tmp_path).close()
    (tmp_path / "journal.jsonl").write_text("no\n{}\n")
    for _ in range(2):
        with pytest.raises(DataError, match=r"journal.jsonl, line 1: cannot be read"):
            SweepDirectory(tmp_path, PLAN)


@pytest.mark.parametrize("torn", [b'{"kind": "en', b"{}", b"\xff\xff\n", b"{}\n", b"\0" * 9, b"[1]\n", b"\n"])
@pytest.mark.parametrize("name", ["results.jsonl", "journal.jsonl"])
def test_a_torn_last_line_never_happened(tmp_path, name, torn):
    with begin(tmp_path) as sweep:
        train(sweep, RUN, Status.DONE, 0, 2)
    content = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(content + torn)
    with SweepDirectory(tmp_path, PLAN) as sweep:
        assert (tmp_path / name).read_bytes() == content
        train(sweep, OTHER, Status.DONE, 0, 1)
    with SweepDirectory(tmp_path, PLAN) as sweep:
        assert seen(sweep) == [(0, 1), (0, 2), (1, 1)]
        assert [ending.run for ending in sweep.endings] == [RUN, OTHER]


def test_a_line_that_only_lacks_its_newline_does_not_glue(tmp_path):
    with begin(tmp_path) as sweep:
        train(sweep, RUN, Status.DONE, 0, 1)
        train(sweep, OTHER, Status.DONE, 0, 1)
    journal = tmp_path / "journal.jsonl"
    journal.write_bytes(journal.read_bytes()[:-1])
    with SweepDirectory(tmp_path, PLAN) as sweep:
        assert [ending.run for ending in sweep.endings] == [RUN]
        assert seen(sweep) == [(0, 1)]
        train(sweep, OTHER, Status.DONE, 0, 1)
    assert len(lines(journal)) == 3


@pytest.mark.parametrize(
    ("name", "line", "message"),
    [
        ("results.jsonl", "no", "line 2: cannot be read"),
        ("results.jsonl", '{"run": 0}', "line 2: cannot be read .KeyError: 'epoch'"),
        ("results.jsonl", '{"run": 0, "epoch": 1}', "line 2: epoch 1 of run 0 comes after 1 epochs"),
        ("journal.jsonl", '{"kind": "other"}', "line 2: cannot be read .ValueError: unknown kind 'other'"),
        ("journal.jsonl", "[]", "line 2: cannot be read"),
        ("journal.jsonl", '{"kind": "trial", "trial": 4, "setting": {}}', "line 2: trial 4 comes after 1 trials"),
    ],
)
def test_any_other_line_that_is_wrong_is_an_error(tmp_path, name, line, message):
    with begin(tmp_path) as sweep:
        train(sweep, RUN, Status.DONE, 0, 2)
    first, *rest = (tmp_path / name).read_text().splitlines()
    (tmp_path / name).write_text("\n".join([first, line, *rest, ""]))
    with pytest.raises(DataError, match=f"{name}, {message}"):
        SweepDirectory(tmp_path, PLAN)


def test_endings_that_contradict_are_an_error(tmp_path):
    with begin(tmp_path) as sweep:
        train(sweep, RUN, Status.DONE, 0, 2)
    journal = tmp_path / "journal.jsonl"
    trial, end = journal.read_text().splitlines()
    journal.write_text(f"{trial}\n{end}\n{end}\n")
    with pytest.raises(DataError, match="line 3: run 0 had already ended"):
        SweepDirectory(tmp_path, PLAN)
    journal.write_text(f"{end}\n{trial}\n")
    with pytest.raises(DataError, match="line 1: run of trial 0, which does not exist yet"):
        SweepDirectory(tmp_path, PLAN)
    journal.write_text(f"{trial}\n{end}\n")
    (tmp_path / "results.jsonl").unlink()
    with pytest.raises(
        DataError, match=r"results.jsonl: has 0 epochs of run 0, but journal.jsonl has 2; restore the file"
    ):
        SweepDirectory(tmp_path, PLAN)


@pytest.mark.parametrize("damage", ["missing", "short", "changed"])
def test_a_paused_run_without_its_state_is_trained_again(tmp_path, damage):
    with begin(tmp_path) as sweep:
        train(sweep, RUN, Status.PAUSED, 0, 1, b"one")
        kept_ending = train(sweep, OTHER, Status.PAUSED, 0, 2, b"kept")
        train(sweep, RUN, Status.PAUSED, 1, 3, b"three")
        state = tmp_path / "states" / "0-3.safetensors"
        if damage == "missing":
            state.unlink()
            with pytest.raises(OutputError, match=r"0-3.safetensors: No such file"):
                sweep.state(RUN)
        else:
            state.write_bytes(b"thre" if damage == "short" else b"threE")
            with pytest.raises(DataError, match=r"0-3.safetensors: does not match its checksum"):
                sweep.state(RUN)
    for _ in range(2):
        with SweepDirectory(tmp_path, PLAN) as sweep:
            assert sweep.endings == [kept_ending]
            assert seen(sweep) == [(1, 1), (1, 2)]
            assert sweep.state(OTHER) == b"kept"
            assert [file.name for file in (tmp_path / "states").iterdir()] == ["1-2.safetensors"]
    with SweepDirectory(tmp_path, PLAN) as sweep:
        train(sweep, RUN, Status.DONE, 0, 4)
        assert seen(sweep) == [(1, 1), (1, 2), (0, 1), (0, 2), (0, 3), (0, 4)]


def test_a_full_disk_leaves_no_half_line(tmp_path, monkeypatch):
    with begin(tmp_path) as sweep:
        train(sweep, RUN, Status.DONE, 0, 1)
        results = sweep._results._file

        class Full:
            """The file on a disk that takes 5 bytes more."""

            left = 5

            def write(self, content: bytes) -> int:
                if not self.left:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                written, self.left = self.left, 0
                return results.write(content[:written])

            def __getattr__(self, name: str):
                return getattr(results, name)

        monkeypatch.setattr(sweep._results, "_file", Full())
        with pytest.raises(
            OutputError,
            match=r"results.jsonl: No space left.*needs \d+ bytes, \d+ free\); once it can be written, start",
        ):
            sweep.add_epoch(OTHER, 1, {"loss": 1.0})
        monkeypatch.setattr(sweep._results, "_file", results)
        train(sweep, OTHER, Status.DONE, 0, 1)
        assert seen(sweep) == [(0, 1), (1, 1)]

        def full(handle: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        sweep.add_trial(Trial(1, {}))
        monkeypatch.setattr(files.os, "fsync", full)
        with pytest.raises(OutputError, match=r"2-0.safetensors: No space left .*needs 5 bytes.*it continues"):
            sweep.add_ending(ending(Run(2, 1, 0), Status.PAUSED, 0), b"state")
        with pytest.raises(OutputError, match=r"results.jsonl: No space left"):
            sweep.add_ending(ending(Run(2, 1, 0), Status.DONE, 0), None)
    monkeypatch.undo()
    with SweepDirectory(tmp_path, PLAN) as sweep:
        assert [ending.run.number for ending in sweep.endings] == [0, 1]


def test_whichever_call_fails_what_was_reported_is_there(tmp_path):
    def work(number):
        reported.clear()
        with SweepDirectory(tmp_path / str(number), PLAN) as sweep:
            sweep.add_trial(Trial(0, {"learning_rate": 0.1}))
            train(sweep, RUN, Status.PAUSED, 0, 1, b"one")
            reported.append((RUN, b"one"))
            train(sweep, RUN, Status.PAUSED, 1, 2, b"two")
            reported[:] = [(RUN, b"two")]
            train(sweep, OTHER, Status.DONE, 0, 1)
            reported.append((OTHER, None))
            sweep.add_model(OTHER, b"PK")
            sweep.keep_models([])

    reported: list[tuple[Run, bytes | None]] = []
    for number, raised in each_fault(work):
        assert raised is None or (isinstance(raised, OutputError) and "Read-only file system" in str(raised))
        with SweepDirectory(tmp_path / str(number), PLAN) as sweep:
            last = {ending.run: ending for ending in sweep.endings}
            assert {run for run, _ in reported} <= last.keys()
            for run, state in reported:
                assert state is None or (last[run].epochs == 2) == (sweep.state(run) == b"two")
            assert sum(ending.epochs for ending in last.values()) == len(seen(sweep))
    assert number > 25, "calls were counted"


def test_what_decides_reaches_the_disk_in_order(tmp_path, monkeypatch):
    with begin(tmp_path) as sweep:
        synced: list[str] = []
        real = os.fsync

        def note(handle: int) -> None:
            synced.append(Path(os.readlink(f"/proc/self/fd/{handle}")).name)
            real(handle)

        monkeypatch.setattr(os, "fsync", note)
        sweep.add_epoch(RUN, 1, {"loss": 1.0})
        assert synced == []
        sweep.add_ending(ending(RUN, Status.PAUSED, 1), b"state")
        assert synced[0].startswith(f".0-1.safetensors.{os.getpid()}-")
        assert synced[1:] == ["states", "results.jsonl", "journal.jsonl"]


# What a random sweep does: of which run, and what: an epoch, an ending at a rung, an ending.
steps = st.lists(st.tuples(st.integers(0, 5), st.sampled_from("eeepd")), max_size=25)


@settings(max_examples=examples(60), deadline=None)
@given(steps, st.data())
def test_a_kill_at_any_byte_leaves_a_consistent_sweep(actions, data):
    # Nothing here cuts the power.
    with tempfile.TemporaryDirectory() as folder, unittest.mock.patch("os.fsync"):
        path = Path(folder) / "sweep"
        results, journal = path / "results.jsonl", path / "journal.jsonl"
        # By end of a journal line: the size of results.jsonl that it needs; all states ever written.
        needs: list[tuple[int, int]] = [(0, 0)]
        states: dict[str, bytes] = {}
        epochs: dict[int, int] = {}
        ended: list[Ending] = []
        with SweepDirectory(path, PLAN) as sweep:
            for number, action in actions:
                run = Run(number, number // SEEDS, number % SEEDS)
                while len(sweep.trials) <= run.trial:
                    sweep.add_trial(Trial(len(sweep.trials), {"x": number}))
                    needs.append((journal.stat().st_size, needs[-1][1]))
                if any(ending.run == run and ending.status.is_final for ending in ended):
                    continue
                if action == "e":
                    epochs[number] = epochs.get(number, 0) + 1
                    sweep.add_epoch(run, epochs[number], {"loss": float(number)})
                    continue
                ended.append(ending(run, Status.PAUSED if action == "p" else Status.DONE, epochs.get(number, 0)))
                state = f"{number} at {epochs.get(number, 0)}".encode() if action == "p" else None
                sweep.add_ending(ended[-1], state)
                if state is not None:
                    states[f"{number}-{epochs.get(number, 0)}.safetensors"] = state
                needs.append((journal.stat().st_size, results.stat().st_size))
        cut = data.draw(st.integers(0, journal.stat().st_size), "journal")
        need = max(size for end, size in needs if end <= cut)
        os.truncate(journal, cut)
        os.truncate(results, data.draw(st.integers(need, results.stat().st_size), "results"))
        content = journal.read_bytes()
        kept_endings = ended[: content[: content.rfind(b"\n") + 1].count(b'"ending"')]
        last = {ending.run.number: ending for ending in kept_endings}
        state_files = {
            f"{n}-{ending.epochs}.safetensors" for n, ending in last.items() if ending.status is Status.PAUSED
        }
        for name, state in states.items():
            if name in state_files or data.draw(st.booleans(), name):
                (path / "states" / name).write_bytes(state)

        for _ in range(2):
            with SweepDirectory(path, PLAN) as sweep:
                assert sweep.endings == kept_endings
                expected = {(n, epoch) for n, ending in last.items() for epoch in range(1, ending.epochs + 1)}
                assert len(seen(sweep)) == len(expected)
                assert set(seen(sweep)) == expected
                assert {file.name for file in (path / "states").iterdir()} == state_files
                for last_ending in last.values():
                    if last_ending.status is Status.PAUSED:
                        assert (
                            sweep.state(last_ending.run)
                            == states[f"{last_ending.run.number}-{last_ending.epochs}.safetensors"]
                        )
                trials = len(sweep.trials)
                sweep.add_trial(Trial(trials, {}))
                run = Run(trials * SEEDS, trials, 0)
                kept_endings = [*kept_endings, train(sweep, run, Status.DONE, 0, 1)]
                last[run.number] = kept_endings[-1]


ENDLESS = """
import itertools, sys
from pathlib import Path
from dptrain.sweeps.directory import SweepDirectory
from dptrain.sweeps.records import Ending, Run, Status, Trial

def reach(run, status, end, state):
    for epoch in range(last[run.number].epochs + 1 if run.number in last else 1, end + 1):
        sweep.add_epoch(run, epoch, {"loss": run.number + epoch / 8, "padding": 0.123456789})
    last[run.number] = Ending(run, status, end, 1.0, {"loss": run.number + end / 8})
    sweep.add_ending(last[run.number], state)

sweep = SweepDirectory(Path(sys.argv[1]), {"endless": True})
last = {ending.run.number: ending for ending in sweep.endings}
for ending in last.values():
    if ending.status is Status.PAUSED:
        assert sweep.state(ending.run) == str(ending.run.number).encode() * 20000
print("open", flush=True)
for trial in itertools.count():
    if trial == len(sweep.trials):
        sweep.add_trial(Trial(trial, {"x": trial}))
    runs = [Run(trial * 2 + place, trial, place) for place in (0, 1)]
    for run in runs:
        if run.number not in last:
            reach(run, Status.PAUSED, 2, str(run.number).encode() * 20000)
    for run in runs:
        if not last[run.number].status.is_final:
            reach(run, Status.DONE, 5, None)
"""


@pytest.mark.long
@pytest.mark.slow
def test_kill_9_at_random_moments_loses_nothing(tmp_path):
    rng = random.Random(0)
    path = tmp_path / "sweep"
    before: list[Ending] = []
    for _ in range(12):
        with subprocess.Popen([sys.executable, "-c", ENDLESS, str(path)], stdout=subprocess.PIPE) as process:
            assert process.stdout.readline() == b"open\n"
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(rng.uniform(0.001, 0.1))
            process.send_signal(signal.SIGKILL)
        with SweepDirectory(path, {"endless": True}) as sweep:
            assert sweep.endings[: len(before)] == before
            before = list(sweep.endings)
            last = {ending.run.number: ending for ending in before}
            expected = {
                (n, epoch): n + epoch / 8 for n, ending in last.items() for epoch in range(1, ending.epochs + 1)
            }
            actual = [((line["run"], line["epoch"]), line["loss"]) for line in sweep.epochs()]
            assert len(actual) == len(expected)
            assert dict(actual) == expected
            paused = [ending.run for ending in last.values() if ending.status is Status.PAUSED]
            assert [sweep.state(run) for run in paused] == [str(run.number).encode() * 20000 for run in paused]
    assert len(before) > 12


GROWING = {"seeds": [0, 1], "space": {"grid": {"units": [4]}, "samples": 2, "seed": 0}, "epochs": 3, "halving": None}


def grown(**changes) -> dict:
    return {**GROWING, **changes}


@pytest.mark.parametrize(
    ("plan", "refused"),
    [
        (grown(seeds=[2, 1, 0]), None),
        (grown(space={"grid": {"units": [8, 4]}, "samples": 3, "seed": 0}), None),
        (grown(epochs=5), None),
        (grown(seeds=[0, 2]), "seeds[1]: 1 there, 2 here"),
        (grown(seeds=[0]), "seeds: [0, 1] there, [0] here"),
        (grown(epochs=2), "epochs: 3 there, 2 here"),
        (grown(space={"grid": {"units": [4, 8]}, "samples": 2, "seed": 1}), "space.seed: 0 there, 1 here"),
        (grown(space={"grid": {"units": [8]}, "samples": 2, "seed": 0}), "space.grid.units[0]: 4 there, 8 here"),
        (
            grown(space={"grid": {"units": [4], "rate": [1]}, "samples": 2, "seed": 0}),
            "space.grid.rate: nothing there, [1] here",
        ),
        (
            grown(halving=3, epochs=5),
            "epochs: 3 there, 5 here (with halving, the number of epochs cannot grow); halving: null there, 3 here",
        ),
    ],
)
def test_a_plan_may_grow(tmp_path, plan, refused):
    SweepDirectory(tmp_path, GROWING).close()
    if refused is None:
        SweepDirectory(tmp_path, plan).close()
        with pytest.raises(ConfigError, match="holds another sweep"):  # it has grown, and does not shrink
            SweepDirectory(tmp_path, GROWING)
        return
    with pytest.raises(ConfigError) as caught:
        SweepDirectory(tmp_path, plan)
    assert str(caught.value) == f"{tmp_path} holds another sweep: {refused}; choose another --out"


def test_more_epochs_go_on_from_states_that_were_kept(tmp_path):
    """Runs that had come to their end wait there, are there no more without a state, or had ended by themselves."""
    early, failed = Run(2, 0, 2), Run(3, 0, 3)
    with SweepDirectory(tmp_path, GROWING) as sweep:
        sweep.add_trial(Trial(0, {}))
        sweep.add_runs([RUN, OTHER, early, failed])
        train(sweep, RUN, Status.DONE, 0, 3, b"three")
        train(sweep, OTHER, Status.DONE, 0, 3)
        train(sweep, early, Status.DONE, 0, 2)
        train(sweep, failed, Status.FAILED, 0, 1)
        for run in (RUN, OTHER, early):
            sweep.add_test(run, {"accuracy": 0.5})
        assert [sweep.has_state(run) for run in (RUN, OTHER)] == [True, False]
    for _ in range(2):  # a second start finds the same
        with SweepDirectory(tmp_path, grown(epochs=5)) as sweep:
            assert [(ending.run, ending.status) for ending in sweep.endings] == [
                (RUN, Status.PAUSED), (early, Status.DONE), (failed, Status.FAILED)
            ]  # fmt: skip
            assert sweep.runs == [RUN, OTHER, early, failed]
            assert seen(sweep) == [(0, 1), (0, 2), (0, 3), (2, 1), (2, 2), (3, 1)]
            assert sweep.tested == {2: {"accuracy": 0.5}}
            assert sweep.state(RUN) == b"three"
    with SweepDirectory(tmp_path, grown(epochs=5)) as sweep:
        train(sweep, RUN, Status.DONE, 3, 5, b"five")
        sweep.release(RUN)
        assert not sweep.has_state(RUN)
    with SweepDirectory(tmp_path, grown(epochs=5)) as sweep:
        assert [ending.status for ending in sweep.endings if ending.run == RUN] == [Status.PAUSED, Status.DONE]
