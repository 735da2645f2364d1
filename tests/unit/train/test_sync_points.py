"""Random trainings of several ranks and signals: every rank hears of a signal, and all stop after the same step."""

import itertools
import threading
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dptrain.callbacks.checkpointing import Checkpointing
from dptrain.errors import PreemptedError
from dptrain.runtime import signals
from dptrain.train import sync_points as module
from dptrain.train.sync_points import SyncPoints
from tests.sample import examples
from tests.thread_ranks import on_ranks


class Keeper(Checkpointing):
    """Saves nothing, and notes after how many steps."""

    def __init__(self, rank, due):
        self.rank, self.steps, self.epochs, self.due, self.saved = rank, None, False, due, []

    _is_due = property(lambda self: self.rank == 0 and len(self.saved) in self.due)
    _is_written = property(lambda self: False)

    def _resume(self, hooks):
        return None

    def _save(self, hooks, position):
        self.saved.append(position.made)

    def _wait(self):
        return "somewhere"


@dataclass(frozen=True)
class Rank:
    """What happens on a rank: its signal after so many steps, and how many steps it queues at once, in turn."""

    number: int | None
    after: int
    chunks: list[int]


def train(comm, rank: Rank, due: set[int], steps: int, done_by: dict[int, int]):
    """Train for so many steps; return how it ended, after how many, and after which steps it saved."""
    keeper = Keeper(comm.rank, due)
    points = SyncPoints(comm, SimpleNamespace(callbacks=[keeper], model=None), lambda: None, list)
    thread = threading.get_ident()
    done_by[thread] = done = 0
    noted[thread] = rank
    try:
        points.resume()
        for chunk in itertools.cycle(rank.chunks):
            if done == steps:
                return "", done, keeper.saved
            queued = min(points.most(chunk), steps - done)
            done += queued
            done_by[thread] = done
            points.count(queued)
            points.after_steps(0, done, ahead=chunk)
    except PreemptedError as error:
        return str(error), done, keeper.saved


noted: dict[int, Rank] = {}
CHUNKS = st.lists(st.integers(1, 7), min_size=1, max_size=4)
RANKS = st.builds(Rank, st.none() | st.sampled_from(signals.SIGNALS), st.integers(0, 40), CHUNKS)


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(RANKS, min_size=2, max_size=4), st.sets(st.integers(0, 5)))
def test_every_rank_hears_of_a_signal_and_all_stop_after_the_same_step(ranks, due):
    done_by: dict[int, int] = {}

    def caught():
        thread = threading.get_ident()
        rank = noted[thread]
        return rank.number if done_by[thread] >= rank.after else None

    steps = 60
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module.signals, "caught", caught)
        outcomes = on_ranks(len(ranks), lambda comm: train(comm, ranks[comm.rank], due, steps, done_by))
    assert outcomes[1:] == outcomes[:-1]
    text, done, saved = outcomes[0]
    signalled = [rank for rank in ranks if rank.number is not None]
    if not signalled:
        assert (text, done) == ("", steps)
        return
    first = min(rank.after for rank in signalled)
    assert text, "some rank had a signal"
    # Rank 0 says when the ranks meet again, by the steps that it queues at once.
    assert first <= done <= first + 2 * max(ranks[0].chunks)
    if done:
        assert saved[-1] == done
        assert f"after {done} step" in text
