"""What a fork server runs ends, prints and finds things as what Python starts itself."""

import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from tests.launching import Finished, completed, interpreter, mpirun, python, run

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the server runs on Linux only")


@pytest.fixture(scope="module")
def forked() -> list[str]:
    """The command that has Python's arguments run by a fork."""
    commands = [interpreter(completed({}), ["-c", ""], fresh=False) for _ in range(4)]
    assert len(commands[-1]) > 1
    return commands[-1]


ENDINGS = {
    "pass": (0, ""),
    "import sys; sys.exit(7)": (7, ""),
    "raise SystemExit('no')": (1, "no\n"),
    "import sys; sys.exit(None)": (0, ""),
    "import sys; sys.exit(259)": (3, ""),
    "import sys, threading; threading.Timer(0.1, sys.stderr.write, ['last']).start()": (0, "last"),
    "import atexit, sys; atexit.register(sys.stderr.write, 'late')": (0, "late"),
    "import os; os._exit(3)": (3, ""),
    "import os, signal; os.kill(os.getpid(), signal.SIGTERM)": (-signal.SIGTERM, ""),
    "import warnings; warnings.warn('an error here')": (1, "UserWarning: an error here\n"),
    "import numpy as np; np.ones(2) + np.ones(3)": (1, "with shapes (2,) (3,) \n"),
}


@pytest.mark.parametrize("code", ENDINGS)
def test_endings(forked, code):
    done, alone = run([*forked, "-c", code]), run([sys.executable, "-c", code])
    assert (done.code, done.out) == (alone.code, alone.out) == (ENDINGS[code][0], "")
    assert done.err.endswith(ENDINGS[code][1])
    assert alone.err.endswith(ENDINGS[code][1])


FACTS = """
import os, subprocess, sys
names = [name for name in sys.modules if name.startswith(("dptrain", "mpi4py", "pycuda"))]
print(__name__, sys.argv, sys.path[0], os.getcwd(), names, sys.stdin.read(), oct(os.umask(0)))
print(subprocess.run(["sh", "-c", "echo $ONLY_HERE $PYTHONWARNINGS"], capture_output=True, text=True).stdout)
print(sorted(os.listdir("/proc/self/fd"))[:4], sys.modules["__main__"].__dict__ is globals())
print(os.getpgrp() == os.getpid())
import dptrain, dptrain.models
print(dptrain.layers.Dense.__module__, dptrain.__spec__.name, dptrain.models is sys.modules["dptrain.models"])
"""


@pytest.mark.sample(3)
@pytest.mark.parametrize("way", ["-c", "script", "-m"])
def test_arguments_environment_and_files(forked, tmp_path, way):
    (tmp_path / "facts.py").write_text(FACTS)
    arguments = {"-c": ["-c", FACTS], "script": [str(tmp_path / "facts.py")], "-m": ["-m", "facts"]}[way]
    runs = [run([*how, *arguments, "a", "-b"], cwd=tmp_path, ONLY_HERE="x") for how in (forked, [sys.executable])]
    assert runs[0] == runs[1]
    assert (runs[0].code, runs[0].err) == (0, "")
    assert "x error" in runs[0].out


def test_numbers_drawn_without_a_seed_are_others(forked):
    code = "import random, numpy as np; print(np.random.random(), random.random())"
    drawn = {number for _ in range(2) for number in run([*forked, "-c", code]).out.split()}
    assert len(drawn) == 4


RANK = """
import os, sys
hook = sys.excepthook
import dptrain as dp
from dptrain.comm import current
from dptrain.runtime.watch import records
names = current().allgather(records.path_of_job(records.launcher_of_job("PMI_RANK")))
if dp.rank() == 0:
    print(hook is sys.excepthook, len(set(names)), records.look_up(os.getppid()) is not None, os.getppid() in [
        records.look_up(os.getpid()).parent])
if dp.rank() == 1 and len(sys.argv) > 1:
    raise KeyError(sys.argv[1])
current().barrier()
"""


def test_ranks_belong_to_their_job(forked):
    assert mpirun(2, "-c", RANK) == Finished(0, "False 1 True True\n", "")
    failed, alone = (mpirun(2, "-c", RANK, "no disk", fresh=fresh) for fresh in (False, True))
    assert failed.code == alone.code == 1
    assert "start-up: KeyError: 'no disk' (<string>:12)" in failed.err.splitlines()[-1]


def test_a_fork_ends_with_who_has_asked_for_it(forked, tmp_path):
    code = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(f'{{os.getpid()}} '); time.sleep(60)"
    client = subprocess.Popen([*forked, "-c", code])
    path, deadline = tmp_path / "pid", time.monotonic() + 20
    while not path.exists() or not path.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    client.kill()
    client.wait()
    while os.path.exists(f"/proc/{path.read_text().strip()}"):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_who_ends_while_it_asks_does_not_end_the_server(forked):
    """As a rank of a job that another rank ends at its start."""
    for sent in (b"", b"\5", (100).to_bytes(8, "little") + b"half"):
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(forked[-1])
            client.sendall(sent)
    assert run([*forked, "-c", "print(7)"]) == Finished(0, "7\n", "")


def test_what_is_fresh_or_in_an_environment_of_its_own_starts_python():
    code = "import sys; print('numpy' in sys.modules)"
    assert python(0, "-c", code, fresh=True).out == "False\n"
    assert python(0, "-c", code, PYTHONPATH="nowhere").out == "False\n"
    assert interpreter(completed({}), ["-I", "-c", ""], fresh=False) == [sys.executable]
