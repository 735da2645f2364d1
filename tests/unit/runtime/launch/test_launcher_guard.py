"""Open MPI's mpirun that waits for itself is ended; one that works is left alone."""

import os
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace

import pytest

from dptrain.runtime.launch import launcher_guard
from dptrain.runtime.launch.launcher import LaunchInfo

STUCK = "import threading; lock = threading.Lock(); lock.acquire(); threading.Thread(target=lock.acquire).start()"
WAYS = {
    "stuck": f"{STUCK}; print(1, flush=True); lock.acquire()",
    "one thread waits for a rank": f"import select; {STUCK}; print(1, flush=True); select.select([], [], [])",
}
pytestmark = pytest.mark.skipif(not os.access("/proc/self/wchan", os.R_OK), reason="the system has no /proc/PID/wchan")


@contextmanager
def launcher(way):
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", WAYS[way]], stdout=pipe, stderr=pipe, text=True) as process:
        process.stdout.readline()
        try:
            yield process
        finally:
            process.kill()


def ends(process, seconds):
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None


def test_a_launcher_whose_threads_all_wait_for_locks_ends_after_its_rank_not_before():
    with launcher("stuck") as process:
        rank = launcher_guard.guard(process.pid, 3, 0.1)
        assert ends(process, 1) is None
        os.close(rank)
        assert ends(process, 30) == -9
        errors = process.stderr.read()
    assert errors == (f"dptrain: warning: mpirun (PID {process.pid}) did not exit after its ranks had ended: killed\n")


def test_a_launcher_that_works_is_left_alone():
    with launcher("one thread waits for a rank") as process:
        os.close(launcher_guard.guard(process.pid, 3, 0.1))
        assert ends(process, 2) is None


def test_another_process_with_the_pid_of_a_launcher_that_has_ended_is_left_alone(monkeypatch):
    with launcher("stuck") as process:
        record = launcher_guard.records.look_up(process.pid)
        monkeypatch.setattr(launcher_guard.records, "look_up", lambda _: replace(record, started=record.started - 1))
        os.close(launcher_guard.guard(process.pid, 3, 0.1))
        assert ends(process, 2) is None
    monkeypatch.undo()
    assert launcher_guard.guard(process.pid) is None, "has ended"


@pytest.mark.parametrize(
    ("family", "local", "guards"),
    [("Open MPI", "0", 1), ("Open MPI", "1", 1), ("Open MPI", "2", 0), ("Open MPI", "", 0), ("MPICH", "0", 0)],
)
def test_the_first_two_ranks_of_a_node_under_open_mpi_have_a_guard(monkeypatch, family, local, guards):
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", local)
    monkeypatch.setattr(
        launcher_guard.children, "ancestors", lambda: iter([(5, "bash"), (4, "prterun"), (3, "mpirun")])
    )
    started = []
    monkeypatch.setattr(launcher_guard, "guard", lambda pid: started.append(pid) or 7)
    assert launcher_guard.start(LaunchInfo(family, 4, 1, 4)) == (7 if guards else None)
    assert started == [4] * guards


def test_no_guard_without_a_launcher_among_the_ancestors(monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", "0")
    monkeypatch.setattr(launcher_guard.children, "ancestors", lambda: iter([(5, "bash"), (1, "init")]))
    assert launcher_guard.start(LaunchInfo("Open MPI", 4, 1, 4)) is None
