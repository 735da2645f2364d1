"""`python -m dptrain launch`, with faults planted: no orphan, no hang, and a line that says who."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.launching import find_mpirun, run
from tests.sample import sample

STANDINS = Path(__file__).resolve().parents[1] / "standins" / "commands"
# What begins the lines of a log, and whose lines they are.
STAMP, STREAMS = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", ("stdout", "stderr")
LAUNCH = [sys.executable, "-m", "dptrain", "launch"]
# Its rank, by either MPI and Slurm.
RANK = """
import glob, os, signal, subprocess, sys, time
rank = int(next(os.environ[n] for n in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID") if n in os.environ))
again = int(os.environ["DPTRAIN_RESTART"])

def say(*words):  # in one write, which those of other ranks do not cut
    os.write(1, f"{' '.join(map(str, words))}\\n".encode())

def meet(others):  # waits until so many are here as well
    open(f"{__file__}.{rank}.{again}", "w").close()
    while len(glob.glob(f"{glob.escape(__file__)}.*.{again}")) <= others: time.sleep(0.01)
"""


@pytest.fixture(autouse=True)
def _launcher() -> None:
    find_mpirun()


def script(folder: Path, text: str) -> list[str]:
    path = folder / "script.py"
    path.write_text(RANK + text)
    return [sys.executable, str(path)]


@contextmanager
def started(arguments: list[str], **environment: str) -> Iterator[tuple["subprocess.Popen[str]", list[str]]]:
    """Yield `launch`, and the lines that it and its ranks have printed so far."""
    process = subprocess.Popen(
        [*LAUNCH, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **environment},
    )
    lines: list[str] = []
    assert process.stdout is not None
    reader = threading.Thread(target=lines.extend, args=(process.stdout,), daemon=True)
    reader.start()
    try:
        yield process, lines
    finally:
        process.kill()
        process.wait()
        reader.join(30)
        process.stdout.close()


def wait_for(lines: list[str], pattern: str, count: int) -> list[str]:
    """Return what a pattern's group found in `count` lines, once there are so many."""
    return until(lambda: (matches := re.findall(pattern, "".join(lines))) and len(matches) >= count and matches, lines)


def until(condition, lines):
    end = time.monotonic() + 60
    while time.monotonic() < end:
        if result := condition():
            return result
        time.sleep(0.05)
    raise AssertionError(lines)


def gone(pid: int) -> bool:
    """Whether a process has ended; one that nobody has asked about yet is a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


# Ends while others wait for it, before MPI and so before dptrain can do anything about it.
@pytest.mark.parametrize(
    ("fault", "code", "how"),
    [
        ("sys.exit(0)", 77, "exited with code 0 without MPI, so that rank"),
        ("raise ValueError", 1, "exited with code 1"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", 139, "was killed by SIGSEGV"),
    ],
)
def test_a_rank_that_does_not_come_to_mpi_ends_all(tmp_path, fault, code, how):
    command = script(tmp_path, f"if rank == 1: {fault}\nfrom mpi4py import MPI\nMPI.COMM_WORLD.Barrier()")
    done = run([*LAUNCH, "-n", "2", "--", *command])
    assert done.code == code
    (line,) = done.messages
    assert re.match(rf"dptrain: rank 1/2 host \S+ pid \d+ launch: {how}", line)


def test_a_job_that_is_aborted_has_the_exit_code_of_the_abort(tmp_path):
    command = script(tmp_path, "from mpi4py import MPI\nMPI.COMM_WORLD.Barrier()\nMPI.COMM_WORLD.Abort(7 + rank)")
    done = run([*LAUNCH, "-n", "1", "--", *command])
    assert done.code == 7
    assert re.search(r"dptrain: .*launch: .*exit.* code 7$", done.err, re.MULTILINE)


# Each rank waits for a process of its own, as a shell script does for Python.
WAITING = """
child = subprocess.Popen(["sleep", "1000"])
say("ready", rank, os.getpid(), child.pid)
child.wait()
"""


@pytest.mark.parametrize("victim", sample(["launch", "mpirun", "daemon", "supervisor", "rank"], 5, first=3))
def test_nothing_is_left_behind_by_kill_9(tmp_path, victim):
    with started(["-n", "2", "--", *script(tmp_path, WAITING)]) as (process, lines):
        wait_for(lines, r"(ready) \d \d+ \d+\n", 2)
        ranks = {
            number: (int(pid), int(child))
            for number, pid, child in re.findall(r"ready (\d) (\d+) (\d+)", "".join(lines))
        }
        supervisors = [parent(pid) for pid, _ in ranks.values()]
        of_mpirun = next(Path(f"/proc/{process.pid}/task/{process.pid}").glob("children")).read_text().split()
        target = {
            "launch": process.pid,
            "mpirun": int(of_mpirun[0]),
            "daemon": parent(supervisors[1]),  # of MPICH; Open MPI's mpirun starts the ranks of its host itself
            "supervisor": supervisors[1],
            "rank": ranks["1"][0],
        }[victim]
        os.kill(target, signal.SIGKILL)
        code = process.wait(60)
        everybody = [*supervisors, *map(int, of_mpirun), *(pid for pair in ranks.values() for pid in pair)]
        until(lambda: all(map(gone, everybody)), everybody)
    said = "".join(lines)
    if victim == "launch":
        assert code == -signal.SIGKILL
    elif victim == "rank":
        assert code == 128 + signal.SIGKILL
        assert re.search(rf"^dptrain: rank 1/2 host \S+ pid {target} launch: was killed by SIGKILL", said, re.MULTILINE)
    else:
        assert code != 0
        assert "dptrain: " in said


def test_what_a_command_leaves_in_a_session_of_its_own_ends_with_it(tmp_path):
    command = script(tmp_path, "say('daemon', subprocess.Popen(['sleep', '1000'], start_new_session=True).pid)")
    done = run([*LAUNCH, "-n", "2", "--prefix", "--", *command])
    assert done.code == 0, done.err
    pids = re.findall(r"daemon (\d+)", done.out)
    assert len(pids) == 2
    until(lambda: all(gone(int(pid)) for pid in pids), pids)


# Saves for a while when it is told to, and counts how often it is.
SAVING = """
told = []
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
    signal.signal(number, lambda got, _: told.append(signal.Signals(got).name))
say("ready", rank, os.getpid())
while not told: time.sleep(0.01)
time.sleep(1)
say("saved", rank, told)
while len(sys.argv) > 1: time.sleep(1)
sys.exit(75)
"""


@pytest.mark.parametrize("number", sample([signal.SIGTERM, signal.SIGINT, signal.SIGUSR1], 3))
def test_ranks_that_are_told_to_stop_can_save(tmp_path, number):
    """In a shell, which is told as well and ends at once."""
    command = " ".join(script(tmp_path, SAVING))
    arguments = ["-n", "2", "--restarts", "3", "--", "sh", "-c", f"{command}; exit $?"]
    with started(arguments) as (process, lines):
        supervisors = [parent(parent(int(pid))) for pid in wait_for(lines, r"ready \d (\d+)\n", 2)]
        process.send_signal(number)
        if number == signal.SIGTERM:  # as Slurm tells every process of a job; each rank hears it once
            for supervisor in supervisors:
                with suppress(ProcessLookupError):  # its rank has saved, and it has left
                    os.kill(supervisor, number)
        code = process.wait(60)
    said = "".join(lines)
    for rank in (0, 1):
        assert f"saved {rank} ['{number.name}']" in said
    assert code in (75, 128 + number)
    assert f"dptrain: launch: {number.name}: asking the ranks to save and stop" in said
    assert "restart" not in said


def test_a_second_signal_ends_at_once(tmp_path):
    with started(["-n", "2", "--", *script(tmp_path, SAVING), "stay"]) as (process, lines):
        pids = wait_for(lines, r"ready \d (\d+)\n", 2)
        process.send_signal(signal.SIGTERM)
        wait_for(lines, r"(saved) \d", 2)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 128 + signal.SIGTERM
        until(lambda: all(gone(int(pid)) for pid in pids), pids)
    assert "dptrain: launch: SIGINT: stopped at once" in "".join(lines)


@pytest.mark.parametrize(
    ("number", "code"), sample([(signal.SIGUSR1, 75), (signal.SIGTERM, 75), (signal.SIGINT, 130)], 3)
)
def test_a_signal_before_the_ranks_are_there_says_that_nothing_was_begun(tmp_path, number, code):
    with started(["-n", "2", "--launcher", str(waiting_mpirun(tmp_path)), "--", "true"]) as (process, lines):
        until((tmp_path / "started").exists, lines)
        process.send_signal(number)
        assert process.wait(60) == code
    assert f"{signal.Signals(number).name}: received before the ranks had started" in "".join(lines)


# Sends a signal as the first module of dptrain is imported that is none of its handlers'.
HOOK = """
import builtins, signal
real = builtins.__import__
def hooked(name, *rest):
    if name == "dptrain.registry.names":
        builtins.__import__ = real
        signal.raise_signal(signal.SIGUSR1)
    return real(name, *rest)
builtins.__import__ = hooked
"""


def test_a_signal_while_dptrain_is_imported_says_that_nothing_was_begun(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(HOOK)
    done = run([*LAUNCH, "-n", "2", "--", "touch", str(tmp_path / "begun")], PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert (done.code, (tmp_path / "begun").exists()) == (75, False)
    assert done.messages == ["dptrain: launch: SIGUSR1: received before the ranks had started; nothing was trained"]


@pytest.mark.parametrize("number", sample([signal.SIGTERM, signal.SIGUSR1], 2))
def test_a_signal_that_is_held_back_until_it_can_be_heard_is_not_lost(tmp_path, number):
    """As `env --block-signal` and `launch/local.sh` do: the signal comes before Python's first instruction."""

    def hold() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, [number])
        os.kill(os.getpid(), number)

    command = [*LAUNCH, "-n", "2", "--", "touch", str(tmp_path / "begun")]
    done = subprocess.run(command, preexec_fn=hold, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, (tmp_path / "begun").exists()) == (75, False), done.stderr
    assert f"{number.name}: received before the ranks had started" in done.stderr


@pytest.mark.long
def test_an_mpirun_that_waits_for_nothing_does_not_make_the_job_wait(tmp_path):
    began = time.monotonic()
    with started(["-n", "2", "--launcher", str(waiting_mpirun(tmp_path)), "--", "true"]) as (process, lines):
        assert process.wait(40) == 77
    assert 10 <= time.monotonic() - began < 30
    assert re.search(
        r"waiting_mpirun \(pid \d+\) is waiting, but its process that starts the ranks is gone", "".join(lines)
    )


def waiting_mpirun(folder: Path) -> Path:
    """Return an mpirun whose process that starts ranks dies at once, and which waits for it for ever, as MPICH's."""
    path = folder / "waiting_mpirun"
    path.write_text(
        f"#!{sys.executable}\nimport pathlib, subprocess, sys, time\n"
        "if '--version' in sys.argv: sys.exit(print('HYDRA build details: MPICH'))\n"
        f"subprocess.Popen(['true'])\npathlib.Path({str(folder / 'started')!r}).touch()\ntime.sleep(100)\n"
    )
    path.chmod(0o755)
    return path


def test_it_starts_again_and_keeps_logs_by_rank(tmp_path):
    command = script(
        tmp_path,
        "say('begins', again)\n"
        "print('warns', file=sys.stderr)\n"
        "meet(1)\n"
        "if again == 0: sys.exit(3 * rank)\n"
        "sys.stdout.write('no end of line')",
    )
    logs = tmp_path / "logs"
    done = run([*LAUNCH, "-n", "2", "--restarts", "2", "--log-dir", str(logs), "--prefix", "--", *command])
    assert done.code == 0
    shown = [f"[{rank}] {words}" for rank in "01" for words in ("begins 0", "begins 1", "no end of line")]
    assert sorted(done.out.splitlines()) == shown
    assert [line for line in done.err.splitlines() if line.startswith("[1]")] == ["[1] warns"] * 2
    assert done.messages[0].endswith("launch: exited with code 3")
    assert done.messages[1:] == ["dptrain: launch: restart 1 of 2 in 1 s"]
    kept = [re.fullmatch(rf"{STAMP} \[1\] (.*)", line) for line in (logs / "rank-1.log").read_text().splitlines()]
    assert sorted(line[1] for line in kept if line is not None) == sorted(
        ["warns", "begins 0", "warns", "begins 1", "no end of line"]
    )
    assert len(kept) == 5


@pytest.mark.parametrize("log_format", ["text", "json", "plain"])
def test_lines_of_logs_have_time_and_rank_or_are_as_they_were(tmp_path, log_format):
    command = script(tmp_path, "print('out')\nsys.stderr.buffer.write(b'b\\xff' + b'x' * 70_000 + b'\\n')")
    launch = [*LAUNCH, "-n", "1", "--log-dir", str(tmp_path), "--log-format", log_format, "--", *command]
    subprocess.run(launch, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=120, check=True)
    lines = (tmp_path / "rank-0.log").read_bytes().decode(errors="surrogateescape").splitlines()
    if log_format == "json":  # an object of each part of a line that is too long
        records = [json.loads(line) for line in lines]
        assert all(re.fullmatch(STAMP, record["time"]) and record["rank"] == 0 for record in records)
        messages = {
            stream: "".join(each["message"] for each in records if each["stream"] == stream) for stream in STREAMS
        }
        assert messages == {"stdout": "out", "stderr": r"b\xff" + "x" * 70_000}
    else:
        before = rf"{STAMP} \[0\] " if log_format == "text" else ""
        parts = [re.fullmatch(f"{before}(out|b\udcffx+|x+)", line) for line in lines]
        messages = [part[1] for part in parts if part is not None]
        assert len(messages) == len(lines) <= 3  # the shorter line may lie between the parts of the other
        assert messages.count("out") == 1
        assert "".join(message for message in messages if message != "out") == "b\udcff" + "x" * 70_000


@pytest.mark.parametrize("kind", ["file", "folder in its place", "missing disk"])
def test_logs_that_cannot_be_written_are_an_output_error_of_one_line(tmp_path, kind):
    logs = tmp_path / "logs"
    if kind == "file":
        logs.touch()
        expected = f"{logs}/rank-0.log: File exists"
    elif kind == "folder in its place":
        (logs / "rank-1.log").mkdir(parents=True)
        expected = f"{logs}/rank-1.log: Is a directory"
    else:
        logs = Path("/proc/self/logs")
        expected = f"{logs}/rank-0.log: No such file or directory"
    done = run([*LAUNCH, "-n", "2", "--restarts", "2", "--log-dir", str(logs), "--", *script(tmp_path, "meet(1)")])
    assert (done.code, done.out) == (74, "")
    assert done.err == f"dptrain: {expected}; choose another --log-dir\n"


def test_a_log_that_another_host_cannot_write_ends_the_job_with_one_line(tmp_path):
    """Two addresses of this machine; a stand-in of ssh reaches the second."""
    (tmp_path / "logs" / "rank-1.log").mkdir(parents=True)
    path = f"{STANDINS}:{os.environ['PATH']}"
    command = ["-n", "2", "--hosts", "127.0.0.1:1,127.0.0.2:1", "--address", "localhost", "--log-dir", "logs", "--"]
    done = run([*LAUNCH, *command, *script(tmp_path, "meet(1)")], cwd=tmp_path, PATH=path)
    assert done.code == 74, done.err
    (line,) = done.messages
    trouble = rf"{tmp_path}/logs/rank-1.log: Is a directory; choose another --log-dir"
    assert re.fullmatch(rf"dptrain: rank 1/2 host \S+ pid \d+ launch: {trouble}", line)


def test_what_would_fail_again_is_not_started_again(tmp_path):
    training = [sys.executable, "-m", "dptrain", "--data", "nowhere.npz", "--out", str(tmp_path / "run")]
    done = run([*LAUNCH, "-n", "2", "--restarts", "3", "--", *training])
    assert done.code == 65
    assert "restart" not in done.err
    missing = run([*LAUNCH, "-n", "1", "--restarts", "3", "--", "no-such-command"])
    assert missing.code == 127
    assert missing.err == "dptrain: launch: cannot run no-such-command: not found on PATH\n"
    (tmp_path / "no-interpreter").write_text("#!/no/such/interpreter\n")
    (tmp_path / "no-interpreter").chmod(0o755)
    missing = run([*LAUNCH, "-n", "1", "--restarts", "3", "--", str(tmp_path / "no-interpreter")])
    assert missing.code == 127
    assert f"dptrain: cannot run {tmp_path}/no-interpreter: No such file or directory" in missing.err
    assert "restart" not in missing.err


@pytest.mark.long
def test_it_goes_on_without_a_host_that_is_lost(tmp_path):
    """On two addresses of this machine, which a stand-in of ssh reaches."""
    down = tmp_path / "down"
    down.mkdir()
    command = script(
        tmp_path,
        "if again == 0 and rank == 1:\n"
        f"    open({str(down / '127.0.0.3')!r}, 'w').close()\n"
        "    os.kill(os.getppid(), signal.SIGKILL)\n"
        "if again == 0: time.sleep(1000)\n"
        "say('goes on', rank)",
    )
    hosts = ["--hosts", "127.0.0.2:1,127.0.0.3:1", "--restarts", "1", "--min-ranks", "1"]
    ssh = str(STANDINS / "ssh")
    done = run(
        [*LAUNCH, *hosts, "--", *command], HYDRA_LAUNCHER_EXEC=ssh, PRTE_MCA_plm_ssh_agent=ssh, STANDIN_DOWN=str(down)
    )
    assert done.code == 0, done.err
    assert "127.0.0.3 does not answer; slots left: 1" in done.err
    assert done.out.splitlines()[-1] == "goes on 0"


def test_tasks_of_slurm(tmp_path):
    """With a stand-in of srun: what a rank's end means does not depend on what starts it."""
    command = script(tmp_path, "say(rank, os.environ['SLURM_LOCALID'])\nmeet(3)\nsys.exit(4 * (rank == 2))")
    start = [*LAUNCH, "-n", "4", "--hosts", "n1:2,n2:2", "--launcher", str(STANDINS / "srun"), "--", *command]
    done = run(start, SLURM_JOB_ID="1", SLURM_NTASKS="4")
    assert done.code == 4
    assert sorted(done.out.splitlines()) == ["0 0", "1 1", "2 0", "3 1"]
    assert re.search(r"^dptrain: rank 2/4 host n2 pid \d+ launch: exited with code 4$", done.err, re.MULTILINE)


def test_ranks_of_a_launcher_do_not_launch(tmp_path):
    done = run([*LAUNCH, "-n", "2", "--", *LAUNCH, "-n", "2", "--", "true"])
    assert done.code == 2
    assert any("launch starts the ranks itself" in line for line in done.messages)
