"""Whether the ranks of a job go on: from what a judge sees to what it finds."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dptrain.runtime.watch.hang_detection import LONGER, QUIET, Finding, Limits, Observation, ProcessState, judge
from dptrain.runtime.watch.records import State

LIMITS = Limits(warning=60, timeout=300)
AT_WORK = Observation(1, "b", 11, position=4, phase=("training", 1, 3))
WAITING = replace(AT_WORK, rank=0, host="a", pid=10, position=5, call="an all-reduce of 8 float32", since=2.0)


def finding_of(*observations: Observation, sees_all: bool = True) -> Finding | None:
    return judge(observations, LIMITS, sees_all=sees_all)


def with_time(observation: Observation, since: float) -> Observation:
    return replace(observation, since=since)


def test_ranks_at_work_and_ranks_that_wait_for_a_while_are_left_alone():
    assert finding_of(AT_WORK) is None
    assert finding_of(WAITING, AT_WORK) is None
    assert finding_of(with_time(WAITING, 59), with_time(AT_WORK, 59)) is None
    assert finding_of(WAITING, replace(WAITING, rank=1)) is None


@pytest.mark.parametrize(
    ("observed", "text"),
    [
        (replace(AT_WORK, state=State.LEFT), "left while rank 0 waits in an all-reduce of 8 float32 (training, epoch"),
        (
            replace(AT_WORK, process=ProcessState.GONE),
            "ended without reporting an error (os._exit, or a signal?) while rank 0 waits in an all",
        ),
        (
            replace(AT_WORK, process=ProcessState.GONE, state=State.STARTED),
            "ended without reporting an error (os._exit, or a signal?) while",
        ),
    ],
)
def test_who_has_left_or_is_gone_is_found_at_once(observed, text):
    assert finding_of(WAITING, observed) is None, "it may be seen in passing"
    finding = finding_of(WAITING, with_time(observed, QUIET))
    assert finding is not None
    assert (finding.culprit.rank, finding.fatal, finding.speaker) == (1, True, 0)
    assert finding.text.startswith(text)


def test_who_has_left_is_missed_only_by_those_that_wait_for_it():
    left = replace(AT_WORK, state=State.LEFT, since=9.0)
    assert finding_of(replace(WAITING, position=4), left) is None, "at work"
    assert finding_of(replace(WAITING, position=3), left) is None, "in what the other has been in"
    assert finding_of(replace(WAITING, position=4, state=State.LEFT), left) is None
    assert finding_of(replace(WAITING, state=State.JOINING, position=1), replace(left, position=0)) is not None


def test_who_does_not_come_to_the_end_is_missed_by_those_that_wait_there():
    left = replace(AT_WORK, rank=0, state=State.LEFT, phase=("user code", 0, 0))
    late = replace(AT_WORK, phase=("user code", 0, 0), more="its process is running")
    assert finding_of(with_time(left, 999), with_time(late, 60 * LONGER - 1)) is None
    warned = finding_of(with_time(left, 60.0 * LONGER), with_time(late, 999))
    assert (warned.culprit.rank, warned.fatal, warned.speaker) == (1, False, 0)
    ended = finding_of(with_time(left, 9999), replace(left, rank=2), with_time(late, 300 * LONGER))
    assert (ended.culprit.rank, ended.fatal, ended.speaker) == (1, True, 0)
    assert ended.text == (
        "has not reached the end of its script for 1200 s while ranks 0, 2 wait there; its process is running; the "
        "limit is --stall-timeout or DPTRAIN_STALL_TIMEOUT, 300"
    )
    assert finding_of(with_time(left, 9999), with_time(late, 1)) is None, "it moves on"
    assert judge([with_time(left, 1e9), with_time(late, 1e9)], Limits(0, 0)) is None
    never_met = replace(left, position=0, since=9999)
    assert finding_of(never_met, replace(late, state=State.STARTED, position=0, since=9999)) is None
    assert finding_of(never_met, with_time(late, 9999)) is None


def test_who_stops_going_round_where_ranks_do_not_meet():
    rounds = replace(AT_WORK, rounds=7, more="its process is running")
    others = replace(AT_WORK, rank=0, rounds=9)
    assert finding_of(others, with_time(rounds, 59)) is None
    warned, ended = (finding_of(others, with_time(rounds, seconds)) for seconds in (60, 300))
    assert (warned.fatal, ended.fatal) == (False, True)
    assert (ended.culprit.rank, ended.speaker) == (1, 0)
    assert ended.text == (
        "has made no progress for 300 s; its process is running; the limit is --stall-timeout or "
        "DPTRAIN_STALL_TIMEOUT, 300"
    )
    assert finding_of(others, with_time(replace(rounds, phase=("compilation", 1, 1)), 300)).fatal is False
    assert finding_of(others, with_time(replace(rounds, rounds=0), 9999)) is None, "nobody waits for it"


def test_a_process_that_never_met_the_others_may_end_as_it_likes():
    gone_rank = replace(AT_WORK, process=ProcessState.GONE, state=State.STARTED, position=0, since=9.0)
    assert finding_of(replace(AT_WORK, rank=0, state=State.STARTED, position=0), gone_rank) is None


def test_the_limit_counts_for_training_and_is_longer_elsewhere():
    for phase, factor in [("training", 1), ("saving", LONGER), ("compilation", LONGER), ("user code", LONGER)]:
        slow = replace(AT_WORK, phase=(phase, 1, 3), more="its process is running")
        warning = finding_of(with_time(WAITING, 60.0 * factor), with_time(slow, 999))
        assert warning is not None
        assert not warning.fatal
        fatal = finding_of(with_time(WAITING, 300.0 * factor), with_time(slow, 9999))
        assert fatal is not None
        assert fatal.fatal
        assert fatal.culprit.rank == 1
        assert "has not arrived for" in fatal.text
        assert "its process is running; the limit is --stall-timeout or DPTRAIN_STALL_TIMEOUT, 300" in fatal.text
    assert judge([with_time(WAITING, 1e9), with_time(AT_WORK, 1e9)], Limits(0, 0)) is None


def test_who_moves_on_is_slow_and_not_stuck_but_not_for_ever():
    assert finding_of(with_time(WAITING, 299.0 * LONGER), with_time(AT_WORK, 1)).fatal is False  # type: ignore[union-attr]
    assert finding_of(with_time(WAITING, 300.0 * LONGER), with_time(AT_WORK, 1)).fatal  # type: ignore[union-attr]


def test_a_stopped_process_is_stuck_wherever_it_stands():
    for position in (4, 5, 6):
        stopped = replace(AT_WORK, position=position, phase=("saving", 0, 0), call=WAITING.call)
        stopped = replace(stopped, process=ProcessState.STOPPED)
        assert finding_of(with_time(WAITING, 500), with_time(stopped, 59)) is None
        assert finding_of(WAITING, with_time(stopped, 60)).fatal is False  # type: ignore[union-attr]
        fatal = finding_of(WAITING, with_time(stopped, 300))
        assert fatal is not None
        assert fatal.fatal
        assert "has been stopped for 300 s" in fatal.text
        assert "kill -CONT 11" in fatal.text


def test_different_calls_are_found_at_once_and_all_are_named():
    others = [replace(WAITING, rank=rank) for rank in (1, 2)]
    odd = replace(WAITING, rank=3, call="an all-gather", phase=("evaluate", 0, 0))
    assert finding_of(WAITING, *others, replace(odd, since=0.5)) is None
    finding = finding_of(WAITING, *others, odd)
    assert finding is not None
    assert finding.fatal
    assert finding.culprit.rank == 3
    assert finding.text == (
        "the ranks call different methods: ranks 0-2 in an all-reduce of 8 float32 (training, epoch 1, step 3), rank 3 "
        "in an all-gather (evaluate); all must call the same ones in the same order"
    )


def test_groups_side_by_side_may_meet_over_other_numbers_of_elements():
    beside = replace(WAITING, rank=2, group=3, call="an all-reduce of 6 float32")
    assert finding_of(WAITING, replace(WAITING, rank=1), beside, replace(beside, rank=3)) is None
    for other in (
        replace(beside, rank=3, kind=1, call="an all-gather of 6 float32"),
        replace(WAITING, rank=3, group=3),
    ):
        finding = finding_of(WAITING, beside, other)
        assert finding is not None
        assert "the ranks call different methods" in finding.text


def test_all_in_the_same_call_that_does_not_end():
    waiting = [with_time(WAITING, 300), replace(WAITING, rank=1, since=300.0)]
    finding = finding_of(*waiting)
    assert finding is not None
    assert "has been in an all-reduce of 8 float32 with all ranks for 300 s, and it does not complete" in finding.text
    assert finding_of(*waiting, sees_all=False) is None, "another, who sees more, speaks first"
    assert finding_of(*(with_time(observation, 306) for observation in waiting), sees_all=False) is not None


def test_of_a_silent_node_the_others_phase_says_how_long_to_wait():
    silent = replace(AT_WORK, process=ProcessState.SILENT, phase=("fit", 0, 0), since=999.0)
    silent = replace(silent, more="nothing has been heard from b")
    fatal = finding_of(with_time(WAITING, 300), silent)
    assert fatal is not None
    assert fatal.fatal
    assert "nothing has been heard from b" in fatal.text
    alone = finding_of(replace(WAITING, state=State.LEFT), with_time(silent, 300.0 * LONGER))
    assert alone is not None
    assert "may have died" in alone.text


observations = st.builds(
    Observation,
    rank=st.integers(0, 3),
    pid=st.just(7),
    state=st.sampled_from(State),
    process=st.sampled_from(ProcessState),
    position=st.integers(0, 6),
    call=st.sampled_from(["a", "b"]),
    phase=st.tuples(st.sampled_from(["training", "saving"]), st.integers(0, 2), st.integers(0, 2)),
    since=st.floats(0, 2000),
)
jobs = st.lists(observations, max_size=4, unique_by=lambda observation: observation.rank)


@given(jobs, st.booleans())
def test_a_finding_is_said_by_one_that_can_and_names_one_that_is_there(job, sees_all):
    finding = judge(job, LIMITS, sees_all=sees_all)
    if finding is not None:
        assert finding.culprit in job
        (speaker,) = (observation for observation in job if observation.rank == finding.speaker)
        assert speaker.process == ProcessState.RUNNING
        assert speaker.state != State.ABSENT
        others = [
            observation
            for observation in job
            if observation is not finding.culprit and observation.process == ProcessState.RUNNING
        ]
        assert speaker is not finding.culprit or all(observation.state == State.ABSENT for observation in others)


@given(jobs)
def test_what_is_wrong_stays_wrong_as_time_passes(job):
    before = judge(job, LIMITS)
    after = judge([with_time(observation, observation.since + 10) for observation in job], LIMITS)
    if before is not None and before.fatal:
        assert after is not None
        assert after.fatal


@given(jobs, st.sampled_from([0, 60]), st.booleans())
def test_with_a_limit_of_0_no_wait_ends_a_job_and_none_is_warned_of(job, warning, sees_all):
    """What is fatal then is a fact, which some seconds show, as where the limit is far away."""
    early, late, far = (
        judge([with_time(observation, since) for observation in job], Limits(warning, timeout), sees_all=sees_all)
        for since, timeout in ((50.0, 0), (1e9, 0), (50.0, 1e12))
    )
    assert bool(early and early.fatal) == bool(late and late.fatal) == bool(far and far.fatal)
    assert early is None or early.fatal
    assert late is None or late.fatal or warning


@given(jobs)
def test_nothing_is_wrong_with_ranks_that_all_live_and_move(job):
    moving = [replace(observation, process=ProcessState.RUNNING, state=State.JOINED, since=0.0) for observation in job]
    assert judge(moving, LIMITS) is None


ABSENT = replace(AT_WORK, state=State.ABSENT, position=0, phase=("start-up", 0, 0))
IN_START = replace(WAITING, state=State.JOINING, position=1, call="the start of MPI", phase=("user code", 0, 0))


def test_who_has_not_imported_dptrain_gets_one_stall_timeout_and_who_has_gets_longer():
    started = replace(ABSENT, state=State.STARTED)
    for observed, limit in ((ABSENT, 300), (started, 300 * LONGER)):
        for since, fatal in ((limit - 1, False), (limit, True)):
            finding = finding_of(with_time(IN_START, since), with_time(observed, since))
            assert finding is not None
            assert (finding.culprit.rank, finding.fatal) == (1, fatal)


def test_who_has_not_imported_dptrain_is_named_before_those_that_have():
    started = with_time(replace(ABSENT, state=State.STARTED, rank=2), 300)
    finding = finding_of(with_time(IN_START, 300), started, with_time(replace(ABSENT, rank=3), 300))
    assert finding is not None
    assert (finding.culprit.rank, finding.fatal) == (3, True)


def test_who_has_ended_before_it_imported_dptrain_is_found_once_it_can_no_longer_be_starting():
    gone_rank = replace(ABSENT, process=ProcessState.GONE)
    assert finding_of(IN_START, with_time(gone_rank, 4.9)) is None
    assert finding_of(with_time(gone_rank, 9)) is None, "nobody waits"
    finding = finding_of(IN_START, with_time(gone_rank, 5))
    assert finding is not None
    assert finding.text == "ended before it imported dptrain while rank 0 waits in the start of MPI (user code)"
    stopped = replace(ABSENT, process=ProcessState.STOPPED)
    assert finding_of(with_time(stopped, 400)) is None, "nobody waits"
    finding = finding_of(IN_START, with_time(stopped, 400))
    assert finding is not None
    assert finding.text.startswith("has been stopped for 400 s while rank 0 waits")


def test_ranks_that_have_all_left_are_let_go_in_time():
    left = [replace(observation, state=State.LEFT) for observation in (AT_WORK, WAITING)]
    assert finding_of(*(with_time(observation, 299) for observation in left), sees_all=False) is None
    assert finding_of(*(with_time(observation, 59) for observation in left)) is None
    finding = finding_of(*(with_time(observation, 300) for observation in left))
    assert finding is not None
    assert finding.fatal
    assert finding.text.startswith("has finished, as all ranks have, but MPI has not let them exit for 300 s")
