"""What is trained next: by hand, and in simulated sweeps whose runs end in any order, fail, and are killed."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dptrain.errors import ConfigError
from dptrain.sweeps.records import Ending, Run, Segment, Setting, Status, Trial
from dptrain.sweeps.scheduling.scheduler import ListSource, Scheduler, SettingSource, rung_epochs
from tests.sample import examples

EPOCHS = 30
SETTINGS = [{"x": number} for number in range(9)]


def plan(trials: int, seeds: int = 1, **options) -> Scheduler:
    return Scheduler(ListSource(SETTINGS[:trials]), range(seeds), metric="acc", **{"mode": "max"} | options)


def end(segment: Segment, value: float | None, status: Status | None = None, epochs: int | None = None) -> Ending:
    epochs = (EPOCHS if segment.end is None else segment.end) if epochs is None else epochs
    status = status or (Status.DONE if segment.end is None else Status.PAUSED)
    return Ending(segment.run, status, epochs, 1.0, {} if value is None else {"acc": value})


def alone(scheduler: Scheduler, value) -> list[tuple[int, int, int | None]]:
    """Train one segment after the other; return (run, begin, end) of each."""
    order = []
    while (segment := scheduler.next()) is not None:
        order.append((segment.run.number, segment.begin, segment.end))
        scheduler.ended(end(segment, value(segment.run.trial)))
    assert scheduler.finished
    return order


def test_rungs():
    assert rung_epochs(1, 30) == (1, 3, 9, 27)
    assert rung_epochs(2, 16, 2) == (2, 4, 8)
    assert rung_epochs(5, 5) == rung_epochs(6, 5) == ()
    with pytest.raises(ConfigError, match="min_epochs = 0"):
        rung_epochs(0, 5)
    with pytest.raises(ConfigError, match="eta = 1"):
        rung_epochs(1, 5, 1)


@pytest.mark.parametrize(
    "wrong",
    [{"seeds": []}, {"seeds": [1, 1]}, {"rungs": (0, 3)}, {"rungs": (3, 3)}, {"rungs": (3, 1)}, {"eta": 1}],
)
def test_what_cannot_be_is_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Scheduler(ListSource(SETTINGS), **{"seeds": [0], "metric": "acc", "mode": "max"} | wrong)


def test_without_rungs_all_seeds_of_a_trial_then_the_next_trial():
    scheduler = Scheduler(ListSource(SETTINGS[:2]), [7, 3], metric="acc", mode="max")
    assert scheduler.total_runs == 4
    runs = [Run(0, 0, 7), Run(1, 0, 3), Run(2, 1, 7), Run(3, 1, 3)]
    assert [scheduler.next() for _ in range(5)] == [*map(Segment, runs), None]
    assert scheduler.new_trials() == scheduler.trials == [Trial(0, {"x": 0}), Trial(1, {"x": 1})]
    assert scheduler.new_trials() == []
    for run in runs:
        assert not scheduler.finished
        scheduler.ended(end(Segment(run), 0.5))
    assert scheduler.finished
    assert scheduler.next() is None
    assert scheduler.leftover() == []


def test_a_trial_is_known_before_its_first_segment_is_out():
    scheduler = plan(2, 2)
    known_trials = []
    for _ in range(4):
        segment = scheduler.next()
        known_trials += [trial.number for trial in scheduler.new_trials()]
        assert known_trials == list(range(segment.run.trial + 1))


def test_nothing_to_train_is_finished():
    assert plan(0).finished
    assert plan(0).next() is None


def test_what_is_not_out_cannot_end():
    scheduler = plan(1, rungs=(2,))
    with pytest.raises(ValueError, match="run 0 is not being trained"):
        scheduler.ended(end(Segment(Run(0, 0, 0)), 1.0))
    segment = scheduler.next()
    for wrong in (end(segment, 1.0, epochs=1), end(segment, 1.0, Status.PRUNED)):
        with pytest.raises(ValueError, match="run 0 is"):
            scheduler.ended(wrong)
    scheduler.ended(end(segment, 1.0))
    with pytest.raises(ValueError, match="is not being trained"):
        scheduler.returned(segment)


def test_a_returned_segment_is_next_again():
    scheduler = plan(2, 2)
    first, second = scheduler.next(), scheduler.next()
    scheduler.returned(second)
    scheduler.returned(first)
    assert not scheduler.finished
    assert [scheduler.next().run.number for _ in range(4)] == [0, 1, 2, 3]


def test_asha_by_hand():
    # The earlier the better: every third judgement lets one go on, and three that went on let one go to the end.
    value = {trial: -float(trial) for trial in range(9)}
    first = lambda *runs: [(run, 0, 1) for run in runs]  # noqa: E731
    expected = [
        *first(0, 1, 2), (0, 1, 3), *first(3, 4, 5), (1, 1, 3), *first(6, 7, 8), (2, 1, 3), (0, 3, None),
    ]  # fmt: skip
    scheduler = plan(9, rungs=(1, 3))
    assert alone(scheduler, value.get) == expected
    left = {(ending.run.number, ending.epochs) for ending in scheduler.leftover()}
    assert left == {(1, 3), (2, 3), *((run, 1) for run in range(3, 9))}
    assert {ending.status for ending in scheduler.leftover()} == {Status.PRUNED}
    # The same where a low value is good.
    assert alone(plan(9, rungs=(1, 3), mode="min"), lambda trial: float(trial)) == expected
    # The later the better: each is the best so far, and goes on at once.
    order = alone(plan(5, rungs=(1, 3)), float)
    assert order == [*first(0, 1, 2), (2, 1, 3), *first(3), (3, 1, 3), *first(4), (4, 1, 3), (4, 3, None)]


def restored(endings: list[tuple[int, Status, int, float]], trials: int, seeds: int = 1) -> Scheduler:
    """Return a scheduler that goes on from endings: (run, status, epochs, value)."""
    scheduler = plan(trials, seeds, rungs=(1, 3))
    scheduler.restore(
        [Trial(number, SETTINGS[number % 9]) for number in range(trials)],
        [
            Ending(Run(number, number // seeds, number % seeds), status, epochs, 1.0, {"acc": value})
            for number, status, epochs, value in endings
        ],
    )
    return scheduler


def test_the_highest_rung_comes_first():
    paused = [(trial, Status.PAUSED, 1, -trial) for trial in range(9)]
    scheduler = restored([*paused[:6], *((trial, Status.PAUSED, 3, -trial) for trial in (0, 1, 2)), *paused[6:]], 9)
    assert scheduler.next() == Segment(Run(0, 0, 0), 3)
    # At the rung below there is one to promote as well.
    scheduler = restored(
        [
            *paused[:8],
            (0, Status.PAUSED, 3, 0),
            (1, Status.PAUSED, 3, -1),
            (8, Status.PAUSED, 1, 1),
            (5, Status.PAUSED, 3, -5),
        ],
        9,
    )
    assert [scheduler.next() for _ in range(2)] == [Segment(Run(0, 0, 0), 3), Segment(Run(8, 8, 0), 1, 3)]


def test_a_trial_that_went_on_goes_on_though_others_are_better_now():
    paused = [(run, Status.PAUSED, 1, [5, 4, 3, 9][run // 2]) for run in range(8)]
    scheduler = restored([*paused, (0, Status.PAUSED, 3, 5)], 4, 2)
    assert [scheduler.next() for _ in range(3)] == [
        Segment(Run(1, 0, 1), 1, 3), Segment(Run(6, 3, 0), 1, 3), Segment(Run(7, 3, 1), 1, 3),
    ]  # fmt: skip


def test_a_trial_that_was_pruned_stays_so():
    scheduler = restored([(run, Status.PAUSED, 1, 1) for run in range(2)] + [(0, Status.PRUNED, 1, 1)], 1, 2)
    assert scheduler.finished
    assert [ending.run.number for ending in scheduler.leftover()] == [1]


def test_the_place_of_a_trial_that_fails_later_is_anothers():
    scheduler = plan(2, rungs=(1,))
    for value in (0.9, 0.1):
        scheduler.ended(end(scheduler.next(), value))
    scheduler.ended(end(scheduler.next(), 0.9, Status.DIVERGED, 4))
    assert scheduler.next() == Segment(Run(1, 1, 0), 1)


def test_the_best_of_few_goes_to_the_end():
    assert alone(plan(2, rungs=(1, 3)), float) == [(0, 0, 1), (1, 0, 1), (1, 1, 3), (1, 3, None)]
    assert alone(plan(1, rungs=(1, 3)), float) == [(0, 0, 1), (0, 1, 3), (0, 3, None)]


def test_equal_values_prefer_the_earlier_trial():
    assert alone(plan(3, rungs=(1,)), lambda trial: 0.5)[3:] == [(0, 1, None)]


def test_the_mean_over_seeds_decides_and_all_seeds_go_on():
    # Trial 1 has the best seed, trial 0 the best mean.
    values = {0: 0.6, 1: 0.6, 2: 0.9, 3: 0.1, 4: 0.2, 5: 0.2}
    scheduler = plan(3, 2, rungs=(1,))
    out = [scheduler.next() for _ in range(6)]
    for segment in out[:5]:
        scheduler.ended(end(segment, values[segment.run.number]))
        assert scheduler.next() is None, "a trial of which a seed is missing is not judged"
    scheduler.ended(end(out[5], values[5]))
    assert [scheduler.next() for _ in range(3)] == [
        Segment(Run(0, 0, 0), 1), Segment(Run(1, 0, 1), 1), None,
    ]  # fmt: skip


@pytest.mark.parametrize("bad", [None, math.nan, math.inf, Status.DIVERGED, Status.FAILED])
def test_a_trial_without_a_value_is_last_and_never_goes_on(bad):
    scheduler = plan(1, 2, rungs=(1,))
    for value in (0.9, bad):
        segment = scheduler.next()
        if isinstance(value, Status):
            scheduler.ended(end(segment, 0.9, value, epochs=0))
        else:
            scheduler.ended(end(segment, value))
    assert scheduler.next() is None
    assert scheduler.finished
    assert [ending.run.number for ending in scheduler.leftover()] == ([0] if isinstance(bad, Status) else [0, 1])


def test_a_run_that_ends_early_counts_and_is_not_trained_again():
    scheduler = plan(3, 2, rungs=(2, 6))
    for value in (0.1, 0.1, 0.9, 0.8, 0.2, 0.2):
        segment = scheduler.next()
        scheduler.ended(end(segment, value, Status.DONE, 1) if value == 0.9 else end(segment, value))
    # The other seed of the best trial goes on alone, to the end.
    for begin, stop in ((2, 6), (6, None)):
        segment = scheduler.next()
        assert segment == Segment(Run(3, 1, 1), begin, stop)
        assert scheduler.next() is None
        scheduler.ended(end(segment, 0.8))
    assert scheduler.finished
    # A trial of which nothing is left to train goes on without a segment.
    source = Told(SETTINGS[:1])
    scheduler = Scheduler(source, [0], metric="acc", mode="max", rungs=(2, 6))
    scheduler.ended(end(scheduler.next(), 0.5, Status.DONE, 1))
    assert scheduler.finished
    assert scheduler.leftover() == []
    assert source.values == {0: 0.5}


class Told(ListSource):
    """Writes down what it is told."""

    def __init__(self, settings: Sequence[Setting]) -> None:
        super().__init__(settings)
        self.values: dict[int, float | None] = {}
        self.restored: list[int] = []

    def tell(self, trial: Trial, value: float | None) -> None:
        assert trial.number not in self.values
        self.values[trial.number] = value

    def restore(self, trials: Sequence[Trial]) -> None:
        self.restored += [trial.number for trial in trials]


@pytest.mark.parametrize(("mode", "wrong"), [("max", Status.DIVERGED), ("min", Status.FAILED)])
def test_the_source_learns_the_mean_of_trials_that_are_through(mode, wrong):
    source = Told(SETTINGS[:2])
    scheduler = Scheduler(source, (0, 1), metric="acc", mode=mode)
    out = [scheduler.next() for _ in range(4)]
    scheduler.ended(end(out[0], 0.25))
    assert source.values == {}
    scheduler.ended(end(out[1], 0.75))
    assert source.values == {0: 0.5}
    scheduler.ended(end(out[2], 0.25, wrong, 3))
    ended = [end(out[0], 0.25), end(out[1], 0.75), end(out[2], 0.25, wrong, 3)]
    scheduler.ended(end(out[3], 0.75))
    assert repr(source.values) == repr({0: 0.5, 1: math.nan if wrong is Status.DIVERGED else None})
    second_source = Told(SETTINGS[:2])
    Scheduler(second_source, (0, 1), metric="acc", mode=mode).restore(scheduler.trials, ended)
    assert (second_source.restored, second_source.values) == ([0, 1], {0: 0.5})


def test_the_source_learns_the_means_of_further_metrics():
    class ToldAll(Told):
        def tell(self, trial, value, *further_values):
            self.values[trial.number] = (value, *further_values)

    source = ToldAll(SETTINGS[:2])
    scheduler = Scheduler(source, (0, 1), metric="acc", mode="max", further=("size", "cost"))
    for segment, size in zip([scheduler.next() for _ in range(4)], (10.0, 20.0, 30.0, math.inf), strict=True):
        ending = end(segment, 0.5)
        scheduler.ended(replace(ending, metrics={**ending.metrics, "size": size, "cost": None}))
    assert repr(source.values) == repr({0: (0.5, 15.0, math.nan), 1: (0.5, math.nan, math.nan)})


class Endless(SettingSource):
    """Nobody knows how many there are."""

    total = None

    def __init__(self, trials: int) -> None:
        self.left = trials

    def next(self, number: int) -> Setting | None:
        self.left -= 1
        assert self.left >= -1, "it said that there are no more"
        return {} if self.left >= 0 else None

    def tell(self, trial: Trial, value: float | None) -> None:
        pass

    def restore(self, trials: Sequence[Trial]) -> None:
        pass


def test_an_unknown_number_of_settings():
    scheduler = Scheduler(Endless(3), [0, 1], metric="acc", mode="max")
    assert scheduler.total_runs is None
    assert [run for run, _, _ in alone(scheduler, float)] == [0, 1, 2, 3, 4, 5]


@dataclass
class World:
    """A simulated sweep.

    Attributes:
        quality: of each trial; all differ.
        seeds: how many.
        places: segments trained at a time.
        rungs: in epochs.
        eta: one in so many goes on.
        mode: "max" or "min".
        fates: run -> (how it ends, after how many epochs), where it does not end well.
        rng: who ends when.
    """

    quality: list[int]
    seeds: int
    places: int
    rungs: tuple[int, ...]
    eta: int
    mode: str
    fates: dict[int, tuple[Status, int]]
    rng: random.Random

    def __post_init__(self) -> None:
        self.endings: list[Ending] = []
        self.trials: list[Trial] = []
        self.start()

    def start(self) -> None:
        self.out: list[Segment] = []
        self.scheduler = Scheduler(
            ListSource([{"x": q} for q in self.quality]), range(self.seeds), metric="acc", mode=self.mode,
            rungs=self.rungs, eta=self.eta,
        )  # fmt: skip
        self.scheduler.restore(self.trials, self.endings)
        self.promoted = {(ending.run.trial, rung) for ending in self.endings for rung in range(self.stage_of(ending))}

    def stage_of(self, ending: Ending) -> int:
        """Return how many rungs lie behind the segment that ended so."""
        earlier = [
            earlier_ending
            for earlier_ending in self.endings[: self.endings.index(ending)]
            if earlier_ending.run == ending.run
        ]
        return sum(ending.status is Status.PAUSED for ending in earlier) - (ending.status is Status.PRUNED)

    def value(self, run: Run, epochs: int) -> float:
        value = self.quality[run.trial] + 0.3 * (run.seed % 2) + 0.001 * epochs
        return value if self.mode == "max" else -value

    def end(self, segment: Segment) -> Ending:
        run = segment.run
        status, epochs = self.fates.get(run.number, (Status.DONE, EPOCHS))
        if segment.end is not None and epochs > segment.end:
            status, epochs = Status.PAUSED, segment.end
        return Ending(run, status, epochs, 1.0, {"acc": self.value(run, epochs)})

    def done(self, run: Run) -> int:
        return max((ending.epochs for ending in self.endings if ending.run == run), default=0)

    def judged(self, rung: int) -> dict[int, float | None]:
        """Return the trials that have completed a rung, from the endings alone (no run ends early and well)."""
        values = {}
        for trial in range(len(self.trials)):
            runs = {ending.run.number: ending for ending in self.endings if ending.run.trial == trial}
            at = [
                ending
                for ending in self.endings
                if ending.run.trial == trial and (ending.epochs == self.rungs[rung] and ending.status is Status.PAUSED)
            ]
            failed = [ending for ending in runs.values() if not ending.status.is_success]
            early = [ending for ending in failed if ending.epochs <= self.rungs[rung]]
            if len(at) + len(early) == self.seeds and (rung == 0 or (trial, rung - 1) in self.promoted):
                values[trial] = None if failed else sum(ending.metrics["acc"] for ending in at) / self.seeds
        return values

    def place_of(self, trial: int, judged: dict[int, float | None]) -> int:
        """Return how many are better."""
        sign = 1 if self.mode == "max" else -1
        value_of_trial = sign * judged[trial]
        return sum(value is not None and sign * value > value_of_trial for value in judged.values())

    def check(self, segment: Segment, exact: bool) -> None:
        run = segment.run
        assert all(segment.run != run for segment in self.out), "it is trained already"
        last = [ending for ending in self.endings if ending.run == run]
        assert not last or last[-1].status is Status.PAUSED
        assert segment.begin == self.done(run)
        assert segment.end is None or segment.end > segment.begin
        assert segment.end == next((rung for rung in self.rungs if rung > segment.begin), None)
        if segment.begin and (run.trial, self.rungs.index(segment.begin)) not in self.promoted:
            rung = self.rungs.index(segment.begin)
            if exact:
                judged = self.judged(rung)
                assert judged[run.trial] is not None
                place = self.place_of(run.trial, judged)
                if place >= len(judged) // self.eta:
                    assert place == 0, "only the best may exceed the quota"
                    assert len(self.trials) == len(self.quality), "others will come"
                    assert all(
                        other_segment.end is None or other_segment.end > segment.begin for other_segment in self.out
                    ), "others are on their way"
            self.promoted.add((run.trial, rung))

    def go(self, steps: int, exact: bool = True) -> None:
        """Train until the sweep has finished, or for so many endings."""
        while steps:
            while len(self.out) < self.places and (segment := self.scheduler.next()) is not None:
                self.trials += self.scheduler.new_trials()
                assert segment.run.trial < len(self.trials)
                if self.rng.random() < 0.1:
                    self.scheduler.returned(segment)
                    assert self.scheduler.next() == segment
                self.check(segment, exact)
                self.out.append(segment)
            if not self.out:
                assert self.scheduler.finished
                return
            assert self.rng.random() < 0.5 or not self.scheduler.finished
            ending = self.end(self.out.pop(self.rng.randrange(len(self.out))))
            self.endings.append(ending)
            self.scheduler.ended(ending)
            steps -= 1

    def finals(self) -> dict[int, Ending]:
        """Return each run's only final ending, the leftover ones included."""
        finals = [ending for ending in (*self.endings, *self.scheduler.leftover()) if ending.status.is_final]
        assert len({ending.run.number for ending in finals}) == len(finals)
        return {ending.run.number: ending for ending in finals}

    def check_end(self, exact: bool) -> None:
        finals = self.finals()
        assert set(finals) == set(range(len(self.quality) * self.seeds))
        if not self.rungs:
            assert not any(final.status is Status.PRUNED for final in finals.values())
        failed = {run // self.seeds for run, (status, _) in self.fates.items() if not status.is_success}
        complete_trials = [trial for trial in range(len(self.quality)) if trial not in failed]
        if exact and complete_trials:
            best = max(complete_trials, key=lambda trial: self.quality[trial])
            runs = range(best * self.seeds, (best + 1) * self.seeds)
            assert [(finals[run].status, finals[run].epochs) for run in runs] == [(Status.DONE, EPOCHS)] * self.seeds
        if exact:
            for ending in finals.values():
                if ending.status is Status.PRUNED:
                    judged = self.judged(self.rungs.index(ending.epochs))
                    enough = max(1, len(judged) // self.eta)
                    assert judged[ending.run.trial] is None or self.place_of(ending.run.trial, judged) >= enough


@st.composite
def worlds(draw, bad=(Status.DIVERGED, Status.FAILED)) -> World:
    trials, seeds = draw(st.integers(0, 9)), draw(st.integers(1, 4))
    runs = st.integers(0, max(0, trials * seeds - 1))
    fate = st.tuples(st.sampled_from(bad), st.integers(0, EPOCHS - 1))
    return World(
        draw(st.permutations(range(trials))),
        seeds,
        draw(st.integers(1, 6)),
        tuple(sorted(draw(st.sets(st.integers(1, EPOCHS - 1), max_size=3)))),
        draw(st.integers(2, 4)),
        draw(st.sampled_from(["max", "min"])),
        draw(st.dictionaries(runs, fate, max_size=3)),
        random.Random(draw(st.integers(0, 2**32))),
    )


@settings(max_examples=examples(300), deadline=None)
@given(worlds())
def test_every_run_ends_once_and_the_best_trial_is_trained_to_the_end(world):
    world.go(-1)
    world.check_end(exact=True)


@settings(max_examples=examples(150), deadline=None)
@given(worlds((Status.DIVERGED, Status.DONE)))
def test_runs_that_end_early_hold_nothing_up(world):
    world.go(-1, exact=False)
    world.check_end(exact=False)


@settings(max_examples=examples(300), deadline=None)
@given(worlds(), st.lists(st.integers(0, 12), max_size=4), st.booleans(), st.booleans())
def test_a_killed_sweep_goes_on_from_its_journal(world, kills, loses_states, told_twice):
    before: set[int] = set()
    for steps in kills:
        world.go(steps, exact=not loses_states)
        before |= {ending.run.number for ending in world.endings if ending.status.is_final}
        if loses_states:
            paused = {ending.run.number for ending in world.endings} - before
            lost = {run for run in paused if world.rng.random() < 0.4}
            world.endings = [ending for ending in world.endings if ending.run.number not in lost]
        world.start()
    world.go(-1, exact=not loses_states)
    world.check_end(exact=not loses_states)
    # Finished as it is, or while its leftover endings were written down, it has nothing to train any more.
    left = world.scheduler.leftover()
    world.endings += left if told_twice else left[: len(left) // 2]
    ended = list(world.endings)
    world.start()
    world.go(-1, exact=False)
    assert world.endings == ended
    assert len(world.finals()) == len(world.quality) * world.seeds


def test_a_lost_state_is_made_again_where_its_trial_went_on():
    scheduler = plan(3, 2, rungs=(1, 3), eta=3)
    trials = [Trial(number, SETTINGS[number]) for number in range(3)]
    paused = [end(Segment(Run(n, n // 2, n % 2), 0, 1), float(n)) for n in range(6)]
    beyond = end(Segment(Run(5, 2, 1), 1, 3), 5.0)
    kept_endings = [ending for ending in (*paused, beyond) if ending.run.number != 4]
    scheduler.restore(trials, kept_endings)
    for begin, stop in ((0, 1), (1, 3)):
        segment = scheduler.next()
        assert segment == Segment(Run(4, 2, 0), begin, stop)
        assert scheduler.next() is None
        scheduler.ended(end(segment, 4.0))
    assert [scheduler.next() for _ in range(3)] == [Segment(Run(4, 2, 0), 3), Segment(Run(5, 2, 1), 3), None]


def test_endings_keep_what_the_leftover_ones_need():
    scheduler = plan(2, rungs=(1,))
    alone(scheduler, float)
    (left,) = scheduler.leftover()
    assert left == replace(end(Segment(Run(0, 0, 0), 0, 1), 0.0), status=Status.PRUNED)
