"""Programs that are started have their time, and are killed with all that they have started."""

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import dptrain
from dptrain.cli.commands import doctor
from dptrain.errors import ConfigError
from dptrain.runtime import programs, signals
from dptrain.runtime.launch import mpirun
from dptrain.runtime.programs import run_program
from tests.launching import is_gone, sleep_of

# A wrapper that waits for what it starts, which holds its standard output open.
SLEEPS = ["sh", "-c", "sleep 60; true"]


def test_what_a_program_reads_and_says():
    process = run_program(["sh", "-c", "cat; echo bad >&2; exit 3"], 60, b"good")
    assert (process.returncode, process.stdout, process.stderr) == (3, b"good", b"bad\n")
    code = "import sys, time; time.sleep(0.3); sys.stdout.write(sys.stdin.read())"
    megabytes = run_program([sys.executable, "-c", code], 60, b"x" * 3_000_000)
    assert len(megabytes.stdout) == 3_000_000
    with pytest.raises(FileNotFoundError):
        run_program(["/not/there"], 60)


def test_a_program_that_hangs_is_killed_with_what_it_started(tmp_path):
    sleep, start = sleep_of(tmp_path), time.monotonic()
    with pytest.raises(subprocess.TimeoutExpired):
        run_program(["sh", "-c", f"{sleep} 600; true"], 0.3)
    assert time.monotonic() - start < 60
    assert is_gone(sleep)


@pytest.mark.parametrize(
    ("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, signals.SignalledError)]
)
def test_a_signal_that_was_noted_does_not_wait_for_it(monkeypatch, number, error):
    with signals.catching():
        signal.raise_signal(number)
        assert run_program(["true"], 60).returncode == 0
        monkeypatch.setattr(programs, "GRACE", 0.1)
        with pytest.raises(error):
            run_program(SLEEPS, 60)


def test_the_time_that_is_left_counts_from_the_signal(monkeypatch):
    monkeypatch.setattr(programs, "GRACE", 60.0)
    with signals.catching():
        signal.raise_signal(signal.SIGTERM)
        monkeypatch.setattr(signals, "_caught_at", time.monotonic() - 61)
        begun = time.monotonic()
        with pytest.raises(signals.SignalledError):
            run_program(["sleep", "120"], 240)
        assert time.monotonic() - begun < 50


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), 9)", "os._exit(1)"])
def test_a_process_that_is_killed_leaves_none_behind(end, tmp_path):
    sleep = sleep_of(tmp_path)
    code = (
        "import os, sys, threading, time; from dptrain.runtime import programs\n"
        "command = ['sh', '-c', sys.argv[1] + ' 600; true']\n"
        "threading.Thread(target=programs.run_program, args=(command, 60), daemon=True).start()\n"
        f"while not programs._running:\n    time.sleep(0.01)\n{end}"
    )
    subprocess.run([sys.executable, "-c", code, sleep], check=False, timeout=60)
    assert is_gone(sleep)


def test_a_process_that_ends_leaves_none_behind(tmp_path):
    sleep = sleep_of(tmp_path)
    code = (
        "import sys, threading, time; from dptrain.runtime import programs\n"
        "command = [sys.argv[1], '600']\n"
        "threading.Thread(target=programs.run_program, args=(command, 600), daemon=True).start()\n"
        "while not programs._running:\n    time.sleep(0.01)"
    )
    subprocess.run([sys.executable, "-c", code, sleep], check=True, timeout=60)
    assert is_gone(sleep)


def test_all_programs_are_started_in_one_place():
    package = Path(dptrain.__file__).parent
    starting = re.compile(
        r"subprocess\.(run|Popen|call|check_\w+|getoutput)\(|from subprocess import .*\b(run|Popen)\b"
    )
    starters = {
        path.relative_to(package).as_posix() for path in package.rglob("*.py") if starting.search(path.read_text())
    }
    assert starters == {
        "runtime/programs.py",
        "runtime/launch/job.py",
    }  # the latter: ranks, which have no limit of time


def wrapper(folder: Path) -> tuple[str, str]:
    """Return a program that never answers, and what it starts."""
    path, sleep = folder / "wrapper", sleep_of(folder)
    path.write_text(f"#!/bin/sh\n{sleep} 600\ntrue\n")
    path.chmod(0o755)
    return str(path), sleep


def test_a_launcher_that_does_not_answer_is_killed_with_what_it_started(tmp_path, monkeypatch):
    monkeypatch.setattr(mpirun, "_PATIENCE", 0.3)
    program, sleep = wrapper(tmp_path)
    with pytest.raises(ConfigError, match=r"wrapper --version: .* timed out after"):
        mpirun.find_launcher(program)
    assert is_gone(sleep)


def test_a_program_that_does_not_answer_doctor_is_killed_with_what_it_started(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "_PATIENCE", 0.3)
    program, sleep = wrapper(tmp_path)
    assert doctor._ask([program]) == (1, "no answer within 0.3 s")
    assert is_gone(sleep)
