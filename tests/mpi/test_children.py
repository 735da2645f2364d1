"""What a rank starts is no rank: it runs alone, and its end is its own."""

import re

import pytest

from tests.launching import find_mpirun, mpirun
from tests.sample import sample

SCRIPT = """
import os, subprocess, sys, numpy as np, dptrain as dp
from dptrain.comm import current
comm = current()

class Forks(dp.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if comm.rank == 1:
            for deed in (sys.exit, lambda: os._exit(0), lambda: 1 / 0, comm.barrier, lambda: comm.allgather(1)):
                if not (child := os.fork()):
                    deed()
                print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), end=" ")

model = dp.Sequential([dp.layers.Dense(2, input_shape=(3,))])
model.compile("sgd", "mse")
model.fit(np.ones((4, 3)), np.ones((4, 2)), batch_size=4, verbose=0, callbacks=[Forks()])
if comm.rank == 1:
    alone = "import dptrain; from dptrain.comm import current; print(current().size, dptrain.world_size())"
    done = subprocess.run([sys.executable, "-c", alone], capture_output=True, text=True)
    print(done.returncode, done.stdout, done.stderr)
comm.barrier()
"""


@pytest.mark.long
def test_a_rank_may_fork_and_start_programs(tmp_path):
    (tmp_path / "parent.py").write_text(SCRIPT)
    done = mpirun(2, str(tmp_path / "parent.py"), timeout=90, fresh=True, PYTHONWARNINGS="default")
    assert done.code == 0, done.err
    refusals = [
        line for line in done.messages if "forked by a rank: it cannot communicate with the other ranks" in line
    ]
    assert len(refusals) == 2, done.err
    said = r"0 0 1 1 1 0 1 1\n dptrain: pid \d+ was started by a rank, pid \d+: it runs alone, without MPI\n"
    assert re.search(said, done.out), done.out


@pytest.mark.long
def test_a_fork_does_not_end_mpi_which_mpi4py_has_started(tmp_path):
    (tmp_path / "parent.py").write_text(
        "import os, sys\nfrom mpi4py import MPI\nfrom dptrain.comm import current\n"
        "current().barrier()\n"
        "if not (child := os.fork()):\n    sys.exit(5)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\ncurrent().barrier()\n"
    )
    done = mpirun(2, str(tmp_path / "parent.py"), timeout=90, fresh=True, PYTHONWARNINGS="default")
    assert (done.code, done.out.replace("\n", "")) == (0, "55"), done.err  # line ends may come later


@pytest.mark.long
def test_a_rank_may_start_ranks(tmp_path):
    (tmp_path / "parent.py").write_text(
        "import subprocess, sys, dptrain\n"
        "inner = 'import dptrain; from dptrain.comm import current; print(current().size)'\n"
        "subprocess.run([sys.argv[1], '-n', '2', sys.executable, '-c', inner], check=True)\n"
    )
    done = mpirun(1, str(tmp_path / "parent.py"), find_mpirun(), timeout=90, fresh=True)
    assert (done.code, done.out.replace("\n", "")) == (0, "22"), done.err


FORKING = """
import os, sys, numpy as np, dptrain as dp
from dptrain.comm import current
comm, way = current(), sys.argv[1]
children = []

def forked():  # and goes on in both
    if comm.rank == 1 and (child := os.fork()):
        children.append(child)
    elif comm.rank == 1 and way == "raises":
        raise ValueError("in the fork")
    elif comm.rank == 1 and way == "exits":
        sys.exit(5)

def batches():
    for number in range(6):
        if number == 4:
            forked()
        yield np.ones((4, 3)), np.ones((4, 2))

model = dp.Sequential([dp.layers.Dense(2, input_shape=(3,))])
model.compile("sgd", "mse")
model.fit(batches(), verbose=0, shuffle=False, steps_per_epoch=6)
for child in children:
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
comm.barrier()
"""


@pytest.mark.parametrize(("way", "code"), sample([("goes on", 0), ("raises", 1), ("exits", 5)], 3))
def test_a_fork_of_a_loader_thread_ends_when_it_comes_back(tmp_path, way, code):
    """Else it would wait for ever for the next batch that is asked of it, and mpirun for the orphan."""
    (tmp_path / "parent.py").write_text(FORKING)
    done = mpirun(2, str(tmp_path / "parent.py"), way, timeout=90, fresh=True, PYTHONWARNINGS="ignore")
    assert (done.code, done.out) == (0, f"{code}\n"), done.err
    assert ("ValueError: in the fork" in done.err) == (way == "raises")
