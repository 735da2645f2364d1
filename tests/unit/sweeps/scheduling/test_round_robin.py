"""Runs beside each other on a CPU's cores."""

import threading

import pytest

from dptrain.backend.cpu.compile import compiler
from dptrain.backend.cpu.compiled import CompiledExecutable
from dptrain.sweeps.api import _Recipe
from dptrain.sweeps.records import Run
from dptrain.sweeps.scheduling.capacity import measure
from dptrain.sweeps.scheduling.round_robin import RoundRobin
from dptrain.sweeps.scheduling.training import Training
from dptrain.sweeps.scheduling.worker import Worker
from dptrain.sweeps.space import Space
from dptrain.train import devices
from tests.unit.sweeps.test_sweeping import FIT, X, Y, alone, build, epochs_of, sweep

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")


@pytest.fixture(autouse=True)
def _three_cores(monkeypatch):
    monkeypatch.setenv("DPTRAIN_JIT_COMPILE", "1")
    monkeypatch.setattr(devices, "limit_threads", lambda local_size: 3)


def test_runs_have_their_bits_alone(tmp_path, monkeypatch):
    """Three at a time, each in a thread of its own; one fails, and its place is taken."""
    threads, slots = set(), []

    def build_or_fail(units, learning_rate):
        if learning_rate == 0.5:
            raise ZeroDivisionError("no such model")
        return build(units, learning_rate)

    execute, initialize = CompiledExecutable.run, CompiledExecutable.__init__

    def watched(self, starts=(0,)):
        threads.add(threading.current_thread().name.partition("_")[0])
        execute(self, starts)

    def noted(self, *arguments, **keywords):
        slots.append(keywords["threads"])
        initialize(self, *arguments, **keywords)

    monkeypatch.setattr(CompiledExecutable, "run", watched)
    monkeypatch.setattr(CompiledExecutable, "__init__", noted)
    result = sweep({"units": [4, 5], "learning_rate": [0.01, 0.5]}, build_or_fail, out=tmp_path / "s")
    assert (threads, set(slots[1:])) == ({"MainThread", "training"}, {1})  # the main thread's were the first look
    assert [run["status"] for run in result.runs] == (["done"] * 3 + ["failed"] * 3) * 2
    for run in result.runs:
        if run["status"] == "done":
            expected = alone(run["seed"], units=run["units"], learning_rate=run["learning_rate"])
            assert epochs_of(tmp_path / "s", run["run"]) == expected


class Noted:
    """A training that notes when it advances, and when the device is to begin with it."""

    def __init__(self, place, log):
        self.place, self._log = place, log

    def advance(self):
        self._log.append(("advance", self.place))

    def launch_waiting(self):
        self._log.append(("begin", self.place))


def test_a_pack_begins_when_its_trainings_have_advanced():
    log = []
    trainings = [Noted(place, log) for place in (3, 0, 2)]
    assert [outcome.training.place for outcome in RoundRobin(packs=2).advance(trainings)] == [0, 2, 3]
    assert log == [("advance", 0), ("advance", 2), ("begin", 0), ("begin", 2), ("advance", 3), ("begin", 3)]


def test_two_runs_for_each_core():
    """One is ready where another waits for Python; no more than there are, and as many as somebody says."""
    recipe = _Recipe(build, Space(), X, Y, None, FIT)
    measurements = [measure(recipe, [{}], Run(0, 0, 0), ["loss"], *limits) for limits in ((None, 9), (None, 2), (1, 9))]
    assert [(measurement.places, measurement.at_once) for measurement in measurements] == [(6, 3), (2, 2), (1, 1)]


def test_an_interrupted_sweep_waits_for_its_threads(tmp_path, monkeypatch):
    advance, results = Worker.advance, []

    def interrupt(self):
        results.append(advance(self))
        if len(results) == 5:
            raise KeyboardInterrupt
        return results[-1]

    closed = []
    close = Training.close
    monkeypatch.setattr(Worker, "advance", interrupt)
    monkeypatch.setattr(Training, "close", lambda self: (closed.append(self), close(self)))
    with pytest.raises(KeyboardInterrupt):
        sweep({"units": [4]}, out=tmp_path / "s", seeds="0-5")
    assert len(closed) >= 7  # the four of the measurement, and three at work
    assert not any(thread.name.startswith("training") for thread in threading.enumerate())
    monkeypatch.undo()
    assert [run["status"] for run in sweep({"units": [4]}, out=tmp_path / "s", seeds="0-5").runs] == ["done"] * 6
