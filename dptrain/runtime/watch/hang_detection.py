"""Judges whether the ranks of a job go on, from what one of them observes; without side effects.

A rank that waits in MPI, is stopped or holds Python's lock cannot report anything, so its peers judge it by what they
see and how long it has not changed. The judge's clock counts only while the judge runs: if
the whole machine slept, no rank is late.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from dptrain.runtime.failure import words
from dptrain.runtime.text import ranges
from dptrain.runtime.watch.records import State

# Seconds that a problem must last: it may be a passing state.
QUIET = 1.0

# Factor on the limit for other phases than training, while others wait: start-up,
# compilation, evaluation, saving, and a user's own code between them.
LONGER = 4

# The position of a rank that has met the others only in MPI's start.
_MET = 1

# Delay in seconds of a judge that does not see all ranks, and time for a missing rank to be started.
_GRACE = 5.0


class ProcessState(StrEnum):
    """The system's state of a process."""

    RUNNING = "running"
    STOPPED = "stopped"
    GONE = "gone"
    SILENT = "silent"  # on another node that sends nothing


@dataclass(frozen=True)
class Limits:
    """How long ranks may wait for another, in seconds; 0 for ever."""

    warning: float = 60.0  # until a warning
    timeout: float = 300.0  # until the job is ended

    def of(self, seconds: float, phase: str) -> float:
        """Return how long to wait in a phase, given `seconds` for training."""
        return (seconds if phase == "training" else LONGER * seconds) or math.inf


@dataclass(frozen=True)
class Observation:
    """What a judge sees of a rank."""

    rank: int
    host: str = ""
    pid: int = 0  # 0 if unknown
    state: State = State.JOINED
    process: ProcessState = ProcessState.RUNNING
    position: int = 0  # 2n - 1 in the n-th collective, 2n after it
    call: str = ""  # current or last collective, in words
    kind: int = 0  # its `Collective`
    group: int = 0  # which ranks meet there; 0 for all
    phase: tuple[str, int, int] = ("training", 0, 0)  # name, epoch, step; 0 for none
    rounds: int = 0  # iterations of work in which ranks do not meet; 0 outside
    place: str = ""  # of its Python code; "" if unknown
    since: float = 0.0  # seconds for which all but the place has not changed
    more: str = ""  # further detail for the message

    @property
    def waits(self) -> bool:
        """Whether it is in a collective."""
        joins = self.state in (State.JOINING, State.JOINED)
        return joins and self.position % 2 == 1 and self.process != ProcessState.GONE


@dataclass(frozen=True)
class Finding:
    """A diagnosis: the rank to name, and the rank that reports it."""

    culprit: Observation
    text: str
    fatal: bool  # end the job; else a warning
    speaker: int


def judge(observations: Sequence[Observation], limits: Limits, *, sees_all: bool = True) -> Finding | None:
    """Return what is wrong with a job, or None while it goes on.

    A judge whose `observations` do not cover all ranks (`sees_all`) leaves it to others to speak first.
    """
    waiting = [observation for observation in observations if observation.waits]
    patient = [observation for observation in waiting if observation.since >= QUIET]
    able = [
        observation
        for observation in observations
        if observation.process == ProcessState.RUNNING and observation.state != State.ABSENT
    ]
    if not able:
        return None

    def finding(culprit: Observation, text: str, fatal: bool = True) -> Finding:
        others = [peer for peer in able if peer is not culprit]
        speakers = [peer for peer in others if peer.waits] or others or [culprit]
        return Finding(culprit, text, fatal, min(peer.rank for peer in speakers))

    for observation in observations:
        if observation.since < QUIET:
            continue
        if (
            observation.process == ProcessState.GONE
            and observation.state != State.LEFT
            and (observation.state == State.JOINED or patient)
        ):
            if observation.state != State.ABSENT:
                more = f"; {observation.more}" if observation.more else ""
                return finding(
                    observation, f"ended without reporting an error (os._exit, or a signal?){_for(patient)}{more}"
                )
            if observation.since >= min(_GRACE, limits.timeout or _GRACE):  # the launcher may take a while to start it
                return finding(observation, f"ended before it imported dptrain{_for(patient)}")
        late = [other for other in patient if other.position > observation.position]
        if observation.state == State.LEFT and late:
            return finding(observation, f"left{_for(late)}")
    if mistaken := _in_another_call(patient):
        return finding(*mistaken)
    for observation in observations:
        if (
            observation.process == ProcessState.STOPPED
            and observation.state != State.LEFT
            and (observation.state not in (State.ABSENT, State.STARTED) or patient)
        ):
            pid, since = observation.pid, observation.since
            text = f"has been stopped for {since:.0f} s{_for(patient)}; kill -CONT {pid} resumes it"
            if since >= min(limits.timeout or math.inf, limits.warning or math.inf):
                return finding(observation, text, since >= (limits.timeout or math.inf))
        if observation.process == ProcessState.SILENT and observation.since >= limits.of(limits.timeout, ""):
            return finding(observation, f"may have died{_for(patient)}; {observation.more}")
    stall = _stall(observations, waiting, sees_all) or _lonely(observations)
    if stall is None:
        return None
    culprit, waited, text = stall
    # A silent rank's last known phase may be long past: the others' phase tells more.
    phase = (patient[0] if culprit.process == ProcessState.SILENT and patient else culprit).phase[0]
    if culprit.state == State.ABSENT:  # it has nothing to compile or to save
        phase = "training"
    if waited >= limits.of(limits.timeout, phase) + (0 if sees_all else _GRACE):
        return finding(culprit, f"{text}; the limit is --stall-timeout or DPTRAIN_STALL_TIMEOUT, {limits.timeout:g}")
    if waited >= limits.of(limits.warning, phase) and sees_all:
        return finding(culprit, text, False)
    return None


def _in_another_call(waiting: Sequence[Observation]) -> tuple[Observation, str] | None:
    """Return the rank whose call differs from that of ranks which should be in the same one, and a description."""
    for observation in waiting:
        together = [other for other in waiting if _should_meet(observation, other)]
        calls = [other.call for other in together]
        if len(set(calls)) > 1:
            return min(together, key=lambda other: (calls.count(other.call), -other.rank)), mismatch(together)
    return None


def _should_meet(observation: Observation, other: Observation) -> bool:
    """Whether two ranks should be in the same call; disjoint groups may have other numbers of elements."""
    return observation.position == other.position and (
        observation.group == other.group or observation.kind != other.kind
    )


def _stall(
    observations: Sequence[Observation], waiting: Sequence[Observation], sees_all: bool
) -> tuple[Observation, float, str] | None:
    """Return who keeps the others waiting, for how many seconds, and a description."""
    live = [observation for observation in observations if observation.state != State.LEFT]
    if not live and sees_all:
        culprit = min(observations, key=lambda observation: observation.rank)
        waited = min(observation.since for observation in observations)
        return culprit, waited, f"has finished, as all ranks have, but MPI has not let them exit for {waited:.0f} s"
    ended = (ProcessState.STOPPED, ProcessState.GONE)  # reason enough
    if any(observation.process in ended for observation in live):
        return None
    if not waiting:
        return _straggler(observations)
    culprit = min(
        live, key=lambda observation: (observation.position, observation.state != State.ABSENT, observation.rank)
    )
    behind = [observation for observation in waiting if observation.position > culprit.position]
    more = f"; {culprit.more}" if culprit.more else ""
    if behind:
        longest = max(observation.since for observation in behind)
        # A moving rank is slow rather than stuck, but not for ever.
        waited = max(min(culprit.since, longest), longest / LONGER)
        return culprit, waited, f"has not arrived for {waited:.0f} s{_for(behind)}{more}"
    if len(waiting) < len(live):
        return None
    waited = min(observation.since for observation in waiting)
    whom = "all ranks" if sees_all else "all ranks visible from here"
    return culprit, waited, f"has been in {culprit.call} with {whom} for {waited:.0f} s, and it does not complete{more}"


def _straggler(observations: Sequence[Observation]) -> tuple[Observation, float, str] | None:
    """Return who does not reach the end of its script while others wait for it there, as `_stall`.

    Nobody waits in a call then. A rank that moves on has something to do, such as an evaluation of its own.
    """
    left = [
        observation for observation in observations if observation.state == State.LEFT and observation.position > _MET
    ]
    joined = [observation for observation in observations if observation.state == State.JOINED]
    if not left or not joined:
        return None
    culprit = max(joined, key=lambda observation: (observation.since, -observation.rank))
    waited = min(culprit.since, max(observation.since for observation in left))
    several = len(left) > 1
    ranks = f"rank{'s' * several} {ranges([observation.rank for observation in left])} wait{'s' * (not several)}"
    more = f"; {culprit.more}" if culprit.more else ""
    return culprit, waited, f"has not reached the end of its script for {waited:.0f} s while {ranks} there{more}"


def _lonely(observations: Sequence[Observation]) -> tuple[Observation, float, str] | None:
    """Return who has stopped iterating in work where nobody waits for it, as `_stall`."""
    still = [
        observation
        for observation in observations
        if observation.rounds and observation.process == ProcessState.RUNNING and not observation.waits
    ]
    if not still:
        return None
    culprit = max(still, key=lambda observation: observation.since)
    more = f"; {culprit.more}" if culprit.more else ""
    return culprit, culprit.since, f"has made no progress for {culprit.since:.0f} s{more}"


def _for(waiting: Sequence[Observation]) -> str:
    if not waiting:
        return ""
    several = len(waiting) > 1
    ranks = ranges([observation.rank for observation in waiting])
    first = waiting[0]
    return f" while rank{'s' * several} {ranks} wait{'s' * (not several)} in {first.call} ({words(*first.phase)})"


def mismatch(waiting: Sequence[Observation]) -> str:
    """Describe which ranks are, or were last, in which calls."""
    calls: dict[str, list[Observation]] = {}
    for peer in waiting:
        calls.setdefault(peer.call, []).append(peer)
    parts = [
        f"rank{'s' * (len(peers) > 1)} {ranges([peer.rank for peer in peers])} in {call} ({words(*peers[0].phase)})"
        for call, peers in calls.items()
    ]
    return f"the ranks call different methods: {', '.join(parts)}; all must call the same ones in the same order"
