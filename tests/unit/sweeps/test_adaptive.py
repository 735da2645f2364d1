"""Settings from Optuna: of the right kind, better as the sweep goes, and the same after a kill."""

import json
import math
import subprocess
import sys

import pytest

pytest.importorskip("optuna")

import optuna

from dptrain.errors import ConfigError
from dptrain.sweeps.adaptive import OptunaSource, to_optuna
from dptrain.sweeps.records import Ending, Status, Trial
from dptrain.sweeps.scheduling.scheduler import Scheduler
from dptrain.sweeps.space import Choice, FieldDistribution, Floats, Integers

FIELDS = {
    "learning_rate": Floats(1e-5, 1e-1, log=True),
    "dropout": Floats(0.0, 0.5),
    "batch_size": Integers(16, 512, log=True),
    "layers": Integers(0, 3),
    "hidden": Choice([[128], [256, 128], 64, "none", True]),
}


def badness(setting) -> float:
    """Return how far a setting is from the best one, which is at 0.4 and "b"."""
    return abs(setting["x"] - 0.4) + (setting["y"] != "b")


def walk(source: OptunaSource, mode: str, trials: range) -> list[dict]:
    """Train one trial after the other."""
    settings = []
    for number in trials:
        settings.append(source.next(number))
        value = badness(settings[-1])
        source.tell(Trial(number, settings[-1]), None if number % 7 == 3 else value if mode == "min" else -value)
    return settings


def test_values_are_of_their_kind_and_in_their_range():
    source = OptunaSource(FIELDS, 40, "max", seed=1)
    assert source.total == 40
    settings = [source.next(number) for number in range(40)]
    assert source.next(40) is None
    for setting in settings:
        assert list(setting) == list(FIELDS)
        assert json.loads(json.dumps(setting)) == setting
        assert type(setting["learning_rate"]) is type(setting["dropout"]) is float
        assert type(setting["batch_size"]) is type(setting["layers"]) is int
        assert 1e-5 <= setting["learning_rate"] <= 1e-1
        assert 0 <= setting["dropout"] <= 0.5
        assert 16 <= setting["batch_size"] <= 512
        assert 0 <= setting["layers"] <= 3
    assert {json.dumps(setting["hidden"]) for setting in settings} == {
        "[128]", "[256, 128]", "64", '"none"', "true",
    }  # fmt: skip
    # In the logarithm: about half of them below the middle, which is 1e-3.
    assert 10 <= sum(setting["learning_rate"] < 1e-3 for setting in settings) <= 30


def test_a_distribution_that_is_none_of_ours():
    class Other(FieldDistribution):
        def sample(self, rng):
            return 0

        def describe(self):
            return ""

    with pytest.raises(TypeError, match="is not a distribution that Optuna supports"):
        to_optuna(Other())


FEW = {"x": Floats(-10.0, 10.0), "y": Choice(["a", "b", "c"])}


@pytest.mark.parametrize("mode", ["min", "max"])
def test_later_settings_are_better(mode):
    settings = walk(OptunaSource(FEW, 60, mode, seed=0), mode, range(60))
    first, last = ([badness(setting) for setting in part] for part in (settings[:15], settings[-15:]))
    assert sum(last) < 0.5 * sum(first)


def test_the_seed_decides():
    first, repeated, other = (walk(OptunaSource(FEW, 5, "min", seed), "min", range(5)) for seed in (3, 3, 4))
    assert first == repeated != other
    assert len({setting["x"] for setting in first}) == 5


def test_settings_that_diverge_are_avoided_and_those_that_fail_otherwise_are_not():
    """Half of the range gives no value at all."""

    def settings(value: float | None) -> list[float]:
        source = OptunaSource({"x": Floats(0.0, 1.0)}, 40, "min", seed=1)
        results = []
        for number in range(40):
            results.append(source.next(number)["x"])
            source.tell(Trial(number, {"x": results[-1]}), value if results[-1] > 0.5 else 1.0)
        return results

    avoided, ignored = (sum(x > 0.5 for x in settings(value)[20:]) for value in (math.nan, None))
    assert avoided < ignored


def test_all_metrics_are_optimized_and_a_sweep_of_several_goes_on():
    """Nearness to 0 and to 1: trials between them are all on the front, and those outside are not."""

    def go(source, numbers):
        results = []
        for number in numbers:
            x = source.next(number)["x"]
            results.append(x)
            tell(source, number, x)
        return results

    def tell(source, number, x):
        source.tell(Trial(number, {"x": x}), abs(x), math.nan if number % 7 == 3 else -abs(x - 1))

    def source():
        return OptunaSource({"x": Floats(-10.0, 10.0)}, 60, ["min", "max"], seed=0)

    complete = go(source(), range(60))
    assert sum(-1 <= x <= 2 for x in complete[-20:]) >= 6  # twice as many as of random ones
    continued = source()
    continued.restore([Trial(number, {"x": x}) for number, x in enumerate(complete[:25])])
    for number, x in enumerate(complete[:25]):
        tell(continued, number, x)
    assert go(continued, range(25, 60)) == complete[25:]


@pytest.mark.parametrize("kill", [1, 12, 25])
def test_a_continued_sweep_chooses_as_it_would_have_chosen(kill):
    complete = walk(OptunaSource(FEW, 30, "min", 5), "min", range(30))
    source = OptunaSource(FEW, 30, "min", 5)
    trials = [Trial(number, json.loads(json.dumps(setting))) for number, setting in enumerate(complete[:kill])]
    source.restore(trials)
    for trial in trials:
        source.tell(trial, None if trial.number % 7 == 3 else badness(trial.setting))
    assert walk(source, "min", range(kill, 30)) == complete[kill:]


def test_trials_at_a_time_are_told_in_any_order():
    source = OptunaSource(FEW, 60, "min", 0)
    waiting = [Trial(number, source.next(number)) for number in range(4)]
    told_trials = []
    for number in range(4, 60):
        trial = waiting.pop(number % 3)
        told_trials.append(badness(trial.setting))
        source.tell(trial, told_trials[-1])
        waiting.append(Trial(number, source.next(number)))
    assert sum(told_trials[-15:]) < 0.5 * sum(told_trials[:15])
    assert len({json.dumps(trial.setting) for trial in waiting}) == 4


@pytest.mark.parametrize("rungs", [(), (1, 3)])
@pytest.mark.parametrize("kill", [0, 7, 23])
def test_a_scheduler_with_optuna_goes_on_from_a_journal(rungs, kill):
    trials: list[Trial] = []
    endings: list[Ending] = []

    def start() -> Scheduler:
        scheduler = Scheduler(OptunaSource(FEW, 12, "min", 0), (0, 1), metric="bad", mode="min", rungs=rungs)
        scheduler.restore(trials, endings)
        return scheduler

    def go(scheduler: Scheduler, steps: int) -> None:
        out = []
        while steps:
            while len(out) < 3 and (segment := scheduler.next()) is not None:
                out.append(segment)
            trials.extend(scheduler.new_trials())
            if not out:
                assert scheduler.finished
                return
            segment = out.pop(steps % len(out))
            status = Status.DONE if segment.end is None else Status.PAUSED
            value = badness(trials[segment.run.trial].setting) + segment.run.seed
            endings.append(Ending(segment.run, status, segment.end or 9, 1.0, {"bad": value}))
            scheduler.ended(endings[-1])
            steps -= 1

    go(start(), kill)
    scheduler = start()
    go(scheduler, -1)
    assert [trial.number for trial in trials] == list(range(12))
    finals = [ending for ending in (*endings, *scheduler.leftover()) if ending.status.is_final]
    assert sorted(ending.run.number for ending in finals) == list(range(24))
    done_trials = {ending.run.trial for ending in finals if ending.status is Status.DONE}
    assert min(trials, key=lambda trial: badness(trial.setting)).number in done_trials
    assert rungs or len(done_trials) == 12


def test_optuna_is_quiet_and_keeps_its_own_level():
    level = optuna.logging.get_verbosity()
    assert level == optuna.logging.INFO
    walk(OptunaSource(FEW, 12, "min", 0), "min", range(12))
    assert optuna.logging.get_verbosity() == level
    # In a process of its own: Optuna writes to the stderr that was there when it was imported.
    code = (
        "from dptrain.sweeps.adaptive import OptunaSource\n"
        "from dptrain.sweeps.records import Trial\n"
        "from dptrain.sweeps.space import Floats\n"
        "source = OptunaSource({'x': Floats(0.0, 1.0)}, 3, 'min', 0)\n"
        "for number, value in enumerate((0.5, None)):\n"
        "    source.tell(Trial(number, source.next(number)), value)\n"
    )
    process = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (process.returncode, process.stdout, process.stderr) == (0, "", "")


def test_without_optuna(monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ConfigError, match=r"Optuna is not installed: pip install 'optuna>="):
        OptunaSource(FEW, 3, "min", 0)


def test_without_fields():
    with pytest.raises(ConfigError, match="needs a field to draw at random"):
        OptunaSource({}, 3, "min", 0)
