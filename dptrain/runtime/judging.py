"""Whether the ranks of a job go on, judged by one of them from what it sees of all: a function without side effects.

A rank that waits for others in MPI cannot look after itself, and one that is stopped or that runs code which holds
Python's lock says nothing at all. So each rank is judged by its peers, from what they see of it and for how long they
have seen it unchanged. Those times are counted by the judge's own clock, and only while the judge is awake: where the
whole machine slept, nobody is late.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from dptrain.runtime.failure import words
from dptrain.runtime.records import State
from dptrain.runtime.text import ranges

# What is wrong at first sight may be seen in passing: it has to last that long.
QUIET = 1.0

# The limit counts for training. What else a rank may be at while others wait has so many times of it: start-up,
# compilation, evaluation, saving, and a user's own code between them.
LONGER = 4

# The position of a rank that has met the others in the start of MPI, and in nothing else.
_MET = 1

# Seconds by which a judge that does not see all ranks speaks later than one that does, and in which a rank that is not
# there may still be started.
_GRACE = 5.0


class ProcessState(StrEnum):
    """What the system says of a process."""

    RUNNING = "running"
    STOPPED = "stopped"
    GONE = "gone"
    SILENT = "silent"  # on another node, from which nothing is heard


@dataclass(frozen=True)
class Limits:
    """For how long ranks may wait for another, in seconds; 0 for ever.

    Attributes:
        warning: until a warning.
        timeout: until the job is ended.
    """

    warning: float = 60.0
    timeout: float = 300.0

    def of(self, seconds: float, phase: str) -> float:
        """Return how long to wait for a rank in a phase, where it is `seconds` in training."""
        return (seconds if phase == "training" else LONGER * seconds) or math.inf


@dataclass(frozen=True)
class Observation:
    """What a judge sees of a rank.

    Attributes:
        rank: it.
        host: its node.
        pid: its process; 0 where it is not known.
        state: where the rank is in its life.
        process: the state of its process.
        position: 2n - 1 in its n-th collective, 2n after it.
        call: what it meets the others in, or did last.
        kind: of that.
        group: which ranks meet there; 0 for all of them.
        phase: name, epoch and step of what it does; 0 for none.
        rounds: how often it has gone round in work in which ranks do not meet; 0 outside such work.
        place: where its Python code is; "" where that is not known.
        since: seconds for which the judge has seen all of this unchanged, but for the place.
        more: what else there is to say of it.
    """

    rank: int
    host: str = ""
    pid: int = 0
    state: State = State.JOINED
    process: ProcessState = ProcessState.RUNNING
    position: int = 0
    call: str = ""
    kind: int = 0
    group: int = 0
    phase: tuple[str, int, int] = ("training", 0, 0)
    rounds: int = 0
    place: str = ""
    since: float = 0.0
    more: str = ""

    @property
    def waits(self) -> bool:
        """Whether it is in a collective."""
        joins = self.state in (State.JOINING, State.JOINED)
        return joins and self.position % 2 == 1 and self.process != ProcessState.GONE


@dataclass(frozen=True)
class Finding:
    """What is wrong.

    Attributes:
        culprit: the rank to name.
        text: what is said of it.
        fatal: whether to end the job; else it is a warning.
        speaker: the rank that is to say so.
    """

    culprit: Observation
    text: str
    fatal: bool
    speaker: int


def judge(observations: Sequence[Observation], limits: Limits, *, sees_all: bool = True) -> Finding | None:
    """Return what is wrong with a job, or None where it goes on.

    Args:
        observations: of the ranks that the judge sees, itself among them.
        limits: for how long ranks may wait.
        sees_all: whether `observations` are of all ranks; who does not see all leaves it to others to speak first.
    """
    waiting = [one for one in observations if one.waits]
    patient = [one for one in waiting if one.since >= QUIET]
    able = [one for one in observations if one.process == ProcessState.RUNNING and one.state != State.ABSENT]
    if not able:
        return None

    def found(culprit: Observation, text: str, fatal: bool = True) -> Finding:
        others = [one for one in able if one is not culprit]
        speakers = [one for one in others if one.waits] or others or [culprit]
        return Finding(culprit, text, fatal, min(one.rank for one in speakers))

    for one in observations:
        if one.since < QUIET:
            continue
        if one.process == ProcessState.GONE and one.state != State.LEFT and (one.state == State.JOINED or patient):
            if one.state != State.ABSENT:
                more = f"; {one.more}" if one.more else ""
                return found(one, f"ended without a word (os._exit, or a signal?){_for(patient)}{more}")
            if one.since >= min(_GRACE, limits.timeout or _GRACE):  # the launcher may take a while to start it
                return found(one, f"ended before it imported dptrain{_for(patient)}")
        late = [other for other in patient if other.position > one.position]
        if one.state == State.LEFT and late:
            return found(one, f"left{_for(late)}")
    for one in patient:
        together = [other for other in patient if _should_meet(one, other)]
        calls = [other.call for other in together]
        if len(set(calls)) > 1:
            odd = min(together, key=lambda other: (calls.count(other.call), -other.rank))
            return found(odd, mismatch(together))
    for one in observations:
        if (
            one.process == ProcessState.STOPPED
            and one.state != State.LEFT
            and (one.state not in (State.ABSENT, State.STARTED) or patient)
        ):
            text = f"has been stopped for {one.since:.0f} s{_for(patient)}; kill -CONT {one.pid} lets it go on"
            if one.since >= min(limits.timeout or math.inf, limits.warning or math.inf):
                return found(one, text, one.since >= (limits.timeout or math.inf))
        if one.process == ProcessState.SILENT and one.since >= limits.of(limits.timeout, ""):
            return found(one, f"may have died{_for(patient)}; {one.more}")
    stall = _stall(observations, waiting, sees_all) or _lonely(observations)
    if stall is None:
        return None
    culprit, waited, text = stall
    # What a silent rank was last heard to do may be long past: the others' phase tells more.
    phase = (patient[0] if culprit.process == ProcessState.SILENT and patient else culprit).phase[0]
    if culprit.state == State.ABSENT:  # it has nothing to compile or to save
        phase = "training"
    if waited >= limits.of(limits.timeout, phase) + (0 if sees_all else _GRACE):
        return found(culprit, f"{text}; the limit is --stall-timeout or DPTRAIN_STALL_TIMEOUT, {limits.timeout:g}")
    if waited >= limits.of(limits.warning, phase) and sees_all:
        return found(culprit, text, False)
    return None


def _should_meet(one: Observation, other: Observation) -> bool:
    """Whether two ranks are to be in the same call; groups side by side may have other numbers of elements."""
    return one.position == other.position and (one.group == other.group or one.kind != other.kind)


def _stall(
    observations: Sequence[Observation], waiting: Sequence[Observation], sees_all: bool
) -> tuple[Observation, float, str] | None:
    """Return who keeps the others waiting, for how many seconds, and that in words."""
    live = [one for one in observations if one.state != State.LEFT]
    if not live and sees_all:
        culprit = min(observations, key=lambda one: one.rank)
        waited = min(one.since for one in observations)
        return culprit, waited, f"has left with all ranks, and MPI does not let them go for {waited:.0f} s"
    ended = (ProcessState.STOPPED, ProcessState.GONE)  # which is reason enough
    if any(one.process in ended for one in live):
        return None
    if not waiting:
        return _straggler(observations)
    culprit = min(live, key=lambda one: (one.position, one.state != State.ABSENT, one.rank))
    behind = [one for one in waiting if one.position > culprit.position]
    more = f"; {culprit.more}" if culprit.more else ""
    if behind:
        longest = max(one.since for one in behind)
        # Who moves on is slow rather than stuck, but not for ever.
        waited = max(min(culprit.since, longest), longest / LONGER)
        return culprit, waited, f"has not come for {waited:.0f} s{_for(behind)}{more}"
    if len(waiting) < len(live):
        return None
    waited = min(one.since for one in waiting)
    whom = "all ranks" if sees_all else "all ranks that are seen from here"
    return culprit, waited, f"has been with {whom} in {culprit.call} for {waited:.0f} s, and it does not end{more}"


def _straggler(observations: Sequence[Observation]) -> tuple[Observation, float, str] | None:
    """Return who does not come to the end of its script, where others have and wait for it there, as `_stall`.

    Nobody waits in a call then. Who moves on has something to do, such as an evaluation of its own.
    """
    left = [one for one in observations if one.state == State.LEFT and one.position > _MET]
    joined = [one for one in observations if one.state == State.JOINED]
    if not left or not joined:
        return None
    culprit = max(joined, key=lambda one: (one.since, -one.rank))
    waited = min(culprit.since, max(one.since for one in left))
    several = len(left) > 1
    ranks = f"rank{'s' * several} {ranges([one.rank for one in left])} wait{'s' * (not several)}"
    more = f"; {culprit.more}" if culprit.more else ""
    return culprit, waited, f"has not come to the end of its script for {waited:.0f} s while {ranks} there{more}"


def _lonely(observations: Sequence[Observation]) -> tuple[Observation, float, str] | None:
    """Return who has stopped going round in work in which nobody waits for it, as `_stall`."""
    still = [one for one in observations if one.rounds and one.process == ProcessState.RUNNING and not one.waits]
    if not still:
        return None
    culprit = max(still, key=lambda one: one.since)
    more = f"; {culprit.more}" if culprit.more else ""
    return culprit, culprit.since, f"has not come to an end of what it is doing for {culprit.since:.0f} s{more}"


def _for(waiting: Sequence[Observation]) -> str:
    """Return who waits in what, as the end of a sentence."""
    if not waiting:
        return ""
    several = len(waiting) > 1
    ranks = ranges([one.rank for one in waiting])
    first = waiting[0]
    return f" while rank{'s' * several} {ranks} wait{'s' * (not several)} in {first.call} ({words(*first.phase)})"


def mismatch(waiting: Sequence[Observation]) -> str:
    """Say who is in what, or has been last."""
    calls: dict[str, list[Observation]] = {}
    for one in waiting:
        calls.setdefault(one.call, []).append(one)
    found = [
        f"rank{'s' * (len(them) > 1)} {ranges([one.rank for one in them])} in {call} ({words(*them[0].phase)})"
        for call, them in calls.items()
    ]
    return f"the ranks call different methods: {', '.join(found)}; all must call the same ones in the same order"
