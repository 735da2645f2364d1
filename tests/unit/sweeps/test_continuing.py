"""Scheduler and directory together: a sweep that is stopped again and again ends as one that never was."""

import math
import random
import tempfile
import unittest.mock
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dptrain.sweeps.directory import SweepDirectory
from dptrain.sweeps.records import Ending, Segment, Status, Trial
from dptrain.sweeps.scheduling.scheduler import ListSource, Scheduler
from tests.sample import examples

TRIALS, SEEDS, EPOCHS = 5, (7, 2), 6
DIVERGES = 3


def value(run: int, epoch: int) -> float:
    return math.nan if run == DIVERGES and epoch == EPOCHS else run * 1.25 + epoch / 8


class StoppedError(Exception):
    """The sweep is cut off."""


def go(path: Path, rungs: tuple[int, ...], rng: random.Random, patience: float) -> tuple[list[Trial], list[Ending]]:
    """Train until all is done, or until patience (epochs, on the average) is at its end."""
    source = ListSource([{"x": number} for number in range(TRIALS)])
    scheduler = Scheduler(source, SEEDS, metric="acc", mode="max", rungs=rungs, eta=2)
    with SweepDirectory(path, {"rungs": list(rungs)}) as sweep:
        scheduler.restore(sweep.trials, sweep.endings)
        # Segment -> the epoch that it has done.
        out: dict[Segment, int] = {}
        while True:
            while len(out) < 3 and (segment := scheduler.next()) is not None:
                for trial in scheduler.new_trials():
                    sweep.add_trial(trial)
                if segment.begin:
                    assert sweep.state(segment.run) == f"{segment.run} at {segment.begin}".encode()
                out[segment] = segment.begin
            if not out:
                assert scheduler.finished
                for ending in scheduler.leftover():
                    if rng.random() < 1 / patience:
                        raise StoppedError
                    sweep.add_ending(ending, None)
                return sweep.trials, sweep.endings
            if rng.random() < 1 / patience:
                raise StoppedError
            segment = rng.choice(sorted(out, key=lambda candidate: candidate.run.number))
            run, out[segment] = segment.run, out[segment] + 1
            logs = {"acc": value(run.number, out[segment])}
            sweep.add_epoch(run, out[segment], logs)
            if out[segment] == (segment.end or EPOCHS):
                epochs = out.pop(segment)
                status = Status.DONE if segment.end is None else Status.PAUSED
                state = f"{run} at {epochs}".encode() if status is Status.PAUSED else None
                if math.isnan(logs["acc"]):
                    status = Status.DIVERGED
                sweep.add_ending(Ending(run, status, epochs, 1.0, logs), state)
                scheduler.ended(sweep.endings[-1])


@settings(max_examples=examples(40), deadline=None)
@given(st.sampled_from([(), (2,), (1, 3)]), st.integers(0, 2**32), st.floats(5, 60), st.booleans())
def test_a_sweep_that_is_stopped_again_and_again(rungs, seed, patience, loses_states):
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder, unittest.mock.patch("os.fsync"):
        path = Path(folder)
        for stops in range(1000):
            try:
                trials, endings = go(path, rungs, rng, patience + stops)
                break
            except StoppedError:
                # What was there before a kill may be torn at its end.
                with open(path / "results.jsonl", "ab") as file:
                    file.write(b'{"trial": 0, "ru'[: rng.randrange(17)])
                states = sorted((path / "states").iterdir())
                if loses_states and states:
                    rng.choice(states).unlink()
        assert [trial.setting["x"] for trial in trials] == list(range(TRIALS))
        finals = {ending.run.number: ending for ending in endings if ending.status.is_final}
        assert len(finals) == sum(ending.status.is_final for ending in endings) == TRIALS * len(SEEDS)
        assert {(ending.run.trial, ending.run.seed) for ending in finals.values()} == {
            (t, s) for t in range(TRIALS) for s in SEEDS
        }
        # The last trial is the best, and the one with the run that diverges at its end may have been pruned before.
        assert {finals[run].status for run in (8, 9)} == {Status.DONE}
        if not rungs:
            assert {run for run, ending in finals.items() if ending.status is Status.DONE} == set(range(10)) - {
                DIVERGES
            }
        with SweepDirectory(path, {"rungs": list(rungs)}) as sweep:
            assert list((path / "states").iterdir()) == []
            assert repr(sweep.endings) == repr(endings)  # NaN is not equal to itself
            actual = {(line["run"], line["epoch"]): line["acc"] for line in sweep.epochs()}
            assert len(actual) == len(list(sweep.epochs()))
        expected = {
            (run, epoch): value(run, epoch) for run, ending in finals.items() for epoch in range(1, ending.epochs + 1)
        }
        assert actual == {place: None if math.isnan(acc) else acc for place, acc in expected.items()}


def test_another_plan_does_not_go_on(tmp_path):
    with pytest.raises(StoppedError):
        go(tmp_path, (), random.Random(0), 2)
    with pytest.raises(ValueError, match=r"rungs: \[\] there, \[1, 3\] here"):
        go(tmp_path, (1, 3), random.Random(0), 2)
