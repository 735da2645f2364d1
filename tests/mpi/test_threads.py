"""Two threads of a rank that train: on several ranks the job ends with a line, alone both go on."""

import re

import pytest

from tests.launching import mpirun, python

SCRIPT = """
import os, sys, threading
import numpy as np
import dptrain as dp
rank = int(os.environ.get("PMI_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK") or 0)
x, y = np.random.default_rng(0).normal(size=(64, 4)).astype("f4"), np.zeros((64, 1), "f4")
way = sys.argv[1]

def train(units):
    model = dp.Sequential([dp.layers.Dense(units, input_shape=(4,)), dp.layers.Dense(1)], seed=1)
    model.compile("sgd", "mse")
    for _ in range(3):
        with lock:
            model.fit(x, y, epochs=2, verbose=0)

class Nothing:
    __enter__ = __exit__ = lambda *_: None

lock = Nothing()
if way == "warm":
    train(2)
if way == "turns":
    lock = threading.Lock()
# Of equal models, so that only their order tells them apart.
threads = [threading.Thread(target=train, args=(3,), name=name) for name in ("first", "second")]
if way == "turns":  # one after the other, on rank 1 in another order
    for thread in threads[:: 1 if rank == 0 else -1]:
        thread.start()
        thread.join()
else:
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
print("end", flush=True)
"""
AT_ONCE = r"thread '(first|second)' calls [a-z- ]+ while thread '(first|second)' is in fit: of each rank only one"


@pytest.mark.parametrize("way", ["cold", "warm"])
def test_threads_at_once_end_the_job_with_a_line(way):
    done = mpirun(2, "-c", SCRIPT, way, fresh=True, timeout=90)
    assert done.code == 2, done.err
    assert 1 <= len(done.messages) <= 2, done.err  # where both ranks meet it in the same moment
    # Where another thread is the first on each rank, they may find that out before.
    differ = r"dptrain: the ranks call fit differently: thread: rank 0 has '\w+', rank 1 has '\w+'"
    for line in done.messages:
        assert re.match(rf"dptrain: rank \d/2 host \S+ pid \d+ \S.*: {AT_ONCE}|{differ}", line), line
    assert "end" not in done.out


def test_threads_that_train_in_another_order_are_refused():
    done = mpirun(2, "-c", SCRIPT, "turns", fresh=True, timeout=90, DPTRAIN_STALL_TIMEOUT="10")
    assert done.code == 2, done.err
    assert "the ranks call fit differently: thread: rank 0 has 'second', rank 1 has 'first'" in done.err


ALONE = """
import os, threading
from dptrain.comm import current, meeting
comm = current()

def meet():
    with meeting("a test"):
        if comm.rank == 1:
            raise KeyError("of a thread")
        comm.barrier()

thread = threading.Thread(target=meet)
thread.start()
thread.join()
comm.barrier()
"""


def test_an_error_in_a_thread_that_meets_the_others_ends_the_job():
    done = mpirun(2, "-c", ALONE, fresh=True, timeout=90)
    assert done.code == 1, done.err
    (line,) = done.messages
    assert re.match(r"dptrain: rank 1/2 host \S+ pid \d+ start-up: KeyError: 'of a thread'", line)


def test_threads_of_a_process_alone_train_at_once():
    done = python(0, "-c", SCRIPT, "cold", timeout=90)
    assert (done.code, done.out, done.err) == (0, "end\n", "")
