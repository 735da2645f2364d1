"""Random histories of healthy jobs in simulated time: nothing is found while any rank waits less than the limit.

Ranks start late, join, work for random times in random phases, as long as they like while none waits, meet in
collectives of all or of groups, and leave. A judge looks at them as the watchdog does, at random moments. If a rank
never comes, it is found at the limit and not before: so the judge looks indeed.
"""

import math
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from dptrain.runtime.watch.hang_detection import QUIET, Finding, Limits, Observation, judge
from dptrain.runtime.watch.records import Collective, State
from tests.sample import examples

LIMITS = Limits(warning=60.0, timeout=300.0)
PHASES = ("training", "evaluation", "saving", "compilation", "user code")
CALLS = {Collective.ALL_REDUCE: "an all-reduce of 8 float32", Collective.ALL_GATHER: "an all-gather"}
# Seconds for which all ranks work before the first waits for another: any number of limits.
TOGETHER = st.sampled_from([0.0, 10 * LIMITS.timeout])


@dataclass
class Change:
    """From a moment on a rank is in this state."""

    at: float
    state: State
    position: int = 0
    kind: int = Collective.START
    phase: str = "start-up"
    step: int = 0


@dataclass
class History:
    """What each rank of a job does, in the order of time.

    `late` is a rank that never comes, when that may show at the earliest, and when it must: all others have come.
    """

    ranks: list[list[Change]]
    late: tuple[int, float, float] | None = None

    @property
    def end(self) -> float:
        return max(changes[-1].at for changes in self.ranks)

    def seen(self, now: float) -> list[Observation]:
        """Return what a judge sees at a moment."""
        observations = []
        for rank, changes in enumerate(self.ranks):
            current = [change for change in changes if change.at <= now][-1]
            observations.append(
                Observation(
                    rank,
                    "a",
                    100 + rank,
                    current.state,
                    position=current.position,
                    call=CALLS.get(current.kind, "the start of MPI"),
                    kind=current.kind,
                    phase=(current.phase, 1, current.step),
                    since=now - current.at,
                )
            )
        return observations


@st.composite
def histories(draw, longest: float, has_late: bool = False) -> History:
    """Draw a job in which ranks wait for less than a part `longest` of the limit of the late one's phase.

    With `has_late` it is healthy until a rank never comes to a collective.
    """
    size, steps = draw(st.integers(2, 5)), draw(st.integers(1, 6))
    part = st.floats(0, longest, exclude_max=True)

    def allowed(phase: str) -> float:
        return LIMITS.timeout * (1 if phase == "training" else 4)

    # A rank that has not been imported is in training's limit; one that has, in start-up's.
    history = History([[Change(0.0, State.ABSENT)] for _ in range(size)])
    imported = [draw(part) * LIMITS.timeout for _ in range(size)]
    joins = [max(imported) if draw(st.booleans()) else moment for moment in imported]
    for rank, changes in enumerate(history.ranks):
        changes.append(Change(imported[rank], State.STARTED))
        changes.append(Change(joins[rank], State.JOINING, 1))
    now, position = max(joins), 2
    for changes in history.ranks:
        changes.append(Change(now, State.JOINED, position))
    for step in range(steps):
        phase, kind = draw(st.sampled_from(PHASES)), draw(st.sampled_from(list(CALLS)))
        # A rank that moves on, from step to step, is not late after each of these times.
        works = [[draw(part) * allowed(phase) for _ in range(draw(st.integers(1, 3)))] for _ in range(size)]
        while_nobody_waits = draw(TOGETHER)
        for pieces in works:
            pieces[0] += while_nobody_waits
        arrivals = [now + sum(pieces) for pieces in works]
        is_last = has_late and step == steps - 1
        bad = draw(st.integers(0, size - 1)) if is_last else None
        for arrival, pieces, changes in zip(arrivals, works, history.ranks, strict=True):
            for piece in range(len(pieces)):
                at = now + sum(pieces[:piece])
                changes.append(Change(at, State.JOINED, position, kind, phase, 10 * step + piece))
            if bad is None or changes is not history.ranks[bad]:
                changes.append(Change(arrival, State.JOINED, position + 1, kind, phase, 10 * step))
        if bad is not None:
            others = [arrival for rank, arrival in enumerate(arrivals) if rank != bad]
            last = now + sum(works[bad][:-1])  # it has moved on then
            history.late = bad, *(max(first, last) + allowed(phase) for first in (min(others), max(others)))
            return history
        # The message itself takes a while as well.
        now, position = max(arrivals) + draw(part) * LIMITS.timeout / 2, position + 2
        for changes in history.ranks:
            changes.append(Change(now, State.JOINED, position, kind, phase, 10 * step))
    while_nobody_waits = draw(TOGETHER)
    for changes in history.ranks:
        changes.append(Change(now, State.JOINED, position, phase="user code"))
        at = now + while_nobody_waits + draw(part) * allowed("user code")
        changes.append(Change(at, State.LEFT, position, phase="user code"))
    return history


def findings(history: History, moments: list[float], until: float = math.inf) -> list[Finding]:
    """Return what is found before a time: at some moments, parts of the whole time, and around all changes."""
    times = [moment * history.end for moment in moments]
    times += [change.at + later for changes in history.ranks for change in changes for later in (0.0, QUIET, 2 * QUIET)]
    found = (judge(history.seen(now), LIMITS) for now in sorted(times) if now <= history.end and now < until)
    return [finding for finding in found if finding is not None]


MOMENTS = st.lists(st.floats(0, 1), min_size=5, max_size=15)


@settings(max_examples=examples(40), deadline=None)
@given(histories(longest=1.0), MOMENTS)
def test_no_rank_is_blamed_that_keeps_others_waiting_less_than_the_limit(history, moments):
    assert [finding for finding in findings(history, moments) if finding.fatal] == []


@settings(max_examples=examples(40), deadline=None)
@given(histories(longest=LIMITS.warning / LIMITS.timeout / 2), MOMENTS)
def test_nor_is_anybody_warned_of_shorter_waits(history, moments):
    assert findings(history, moments) == []


@settings(max_examples=examples(40), deadline=None)
@given(histories(longest=1.0, has_late=True), MOMENTS)
def test_of_such_histories_a_rank_beyond_the_limit_is_found_and_nobody_before(history, moments):
    assert history.late is not None
    bad, may_show, must_show = history.late
    assert [finding for finding in findings(history, moments, until=may_show) if finding.fatal] == []
    finding = judge(history.seen(must_show + 1.0), LIMITS)
    assert finding is not None
    assert (finding.fatal, finding.culprit.rank) == (True, bad)
    assert finding.speaker != bad
