"""The speed of runs, which says how long a sweep takes: that of steps, without what is compiled for the first."""

from types import SimpleNamespace

import pytest

from dptrain.runtime.storage.cache import compilations, compiled
from dptrain.sweeps.scheduling import capacity
from dptrain.sweeps.scheduling.round_robin import AdvanceResult

STEP, COMPILING = 0.125, 60.0


class Clock:
    """A clock that steps and compilers move."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


class Steps:
    """A schedule whose turn takes a step; the turns in `compiling` compile a file before it."""

    def __init__(self, clock, folder, compiling, ends_after=10**6):
        self.clock, self.folder, self.compiling, self.ends_after = clock, folder, compiling, ends_after
        self.trainer = SimpleNamespace(steps_done=0, wait=lambda: None)

    def advance(self, trainings):
        self.trainer.steps_done += 1
        if self.trainer.steps_done in self.compiling:
            with compiled(self.folder, f"{self.trainer.steps_done}.so", self.compile):
                pass
        self.clock.now += STEP
        ended = "ended" if self.trainer.steps_done == self.ends_after else None
        return [AdvanceResult(training, ended) for training in trainings]

    def compile(self):
        self.clock.now += COMPILING
        return b"program"


def speed(monkeypatch, folder, compiling, **options):
    clock = Clock()
    steps = Steps(clock, folder, compiling, **options)
    monkeypatch.setattr(capacity, "time", clock)
    return capacity._steps_per_second(steps, [SimpleNamespace(trainer=steps.trainer)])


@pytest.mark.parametrize("compiling", [(), (1,), (2,), (1, 2), (1, 4)])
def test_compiling_is_no_part_of_a_steps_time(monkeypatch, tmp_path, compiling):
    (tmp_path / "native").mkdir(mode=0o700)
    assert speed(monkeypatch, tmp_path / "native", compiling) == 1 / STEP
    assert compilations()[1] is False


def test_a_run_that_ends_meanwhile_is_measured_as_it_is(monkeypatch, tmp_path):
    (tmp_path / "native").mkdir(mode=0o700)
    assert speed(monkeypatch, tmp_path / "native", (1,), ends_after=1) == 1 / (STEP + COMPILING)


def test_whatever_compiles_on_and_on_is_measured(monkeypatch, tmp_path):
    (tmp_path / "native").mkdir(mode=0o700)
    assert 0 < speed(monkeypatch, tmp_path / "native", range(10**6)) < 1 / STEP
