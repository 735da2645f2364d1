"""Of two threads that meet the other ranks at once, the second ends the job."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from dptrain import comm
from dptrain.errors import ThreadOrderError
from dptrain.runtime import failure
from dptrain.runtime.watch import thread_order
from dptrain.runtime.watch.records import Collective, Record


@pytest.fixture(autouse=True)
def ended(monkeypatch):
    """The errors by which the job would have been ended."""
    errors: list[BaseException] = []
    monkeypatch.setattr(failure, "end_job", errors.append)
    monkeypatch.setattr(thread_order, "_names", set())
    return errors


def elsewhere(action, name="loader"):
    """Call a function in another thread, and return what it returns."""
    with ThreadPoolExecutor(1, name) as pool:
        return pool.submit(action).result(60)


def meet(call):
    with thread_order.meeting(call):
        return thread_order.name_among_several()


def test_a_second_thread_ends_the_job_whether_it_trains_or_is_in_a_collective(ended):
    record = Record()
    with thread_order.meeting("fit"):
        meet("evaluate")  # a callback's
        record.collective(Collective.ALL_GATHER)
        for action, call in (
            (lambda: meet("predict"), "predict"),
            (lambda: record.collective(Collective.ALL_REDUCE, 3, "f"), "an all-reduce"),
        ):
            with pytest.raises(ThreadOrderError, match=f"'loader_0' calls {call} while thread 'MainThread' is in fit"):
                elsewhere(action)
    assert len(ended) == 2
    elsewhere(lambda: meet("predict"))
    with pytest.raises(KeyError), thread_order.meeting("fit"):
        raise KeyError
    elsewhere(lambda: meet("predict"))


def test_threads_one_after_the_other_are_compared_by_their_names_without_numbers():
    assert [meet("fit"), elsewhere(lambda: meet("fit"), "a 1"), meet("fit")] == [None, "a _", "MainThread"]


def test_threads_of_a_process_alone_train_at_the_same_time(ended):
    both = threading.Barrier(2)

    def train():
        with comm.meeting("fit"):
            both.wait(60)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda _: train(), range(2))) == [None, None]
    assert not ended
