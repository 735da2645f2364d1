"""What mpirun would take for success although a rank, or all of them, ended before the job did."""

import re
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.launching import find_mpirun, run

CASES = {
    "sys.exit(256)": (1, "exit code 256 would be read as 0; exiting with 1 instead"),
    "os._exit(512)": (2, r"ended with os._exit\(512\)"),
    "MPI.COMM_WORLD.Dup().Abort()": (1, r"MPI_Abort\(0\) would be read as success; exiting with 1 instead"),
    "ctypes.CDLL(None)._exit(0)": (77, r"exited with code 0 in the middle of the job \(C's _exit\?\)"),
    "launch": (77, "launch: exited with code 0 in the middle of the job"),
}


@pytest.fixture(scope="module")
def done(once):
    """How the jobs ended in which every rank does so, once all have met."""
    mpirun = find_mpirun()

    def start(folder, number, deed):
        script = folder / f"{number}.py"
        deed = "ctypes.CDLL(None)._exit(0)" if deed == "launch" else deed
        script.write_text(
            "import ctypes, os, sys, dptrain\nfrom dptrain.comm import current\ncurrent().barrier()\n"
            f"from mpi4py import MPI\n{deed}\n"
        )
        return [sys.executable, str(script)]

    def launch(folder, case):
        number, deed = case
        launcher = (
            [sys.executable, "-m", "dptrain", "launch", "-n", "2", "--"] if deed == "launch" else [mpirun, "-n", "2"]
        )
        return run([*launcher, *start(folder, number, deed)], timeout=90)

    def launch_all(folder):
        with ThreadPoolExecutor(3) as pool:
            return dict(zip(CASES, pool.map(lambda case: launch(folder, case), enumerate(CASES)), strict=True))

    return once("exit codes", launch_all)


@pytest.mark.sample(2)
@pytest.mark.parametrize("deed", CASES)
def test_no_exit_looks_like_success(done, deed):
    code, text = CASES[deed]
    assert done[deed].code == code, done[deed].err
    assert re.search(rf"^dptrain: rank \d/2 host \S+ pid \d+ .*{text}|: {text}", done[deed].err, re.MULTILINE)
