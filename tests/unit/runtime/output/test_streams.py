"""Streams that are closed when a process begins."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import os, sys
{first}
import dptrain
from dptrain.runtime import failure
from dptrain.runtime.output import streams
opened = os.open({path!r}, os.O_WRONLY | os.O_CREAT)
streams.write_error("lost")
streams.flush()
failure.report(ValueError("lost"))
os.write(opened, str(opened).encode())
"""


def closed(folder, first=""):
    """Return what the program writes into the first file that it opens, started without any stream."""
    path = folder / "opened"
    command = [sys.executable, "-c", PROGRAM.format(first=first, path=str(path))]
    process = subprocess.run(["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *command], check=False)
    return process.returncode, path.read_text()


def test_no_file_gets_the_number_of_a_stream_that_is_closed(tmp_path):
    code, number = closed(tmp_path)
    assert code == 0
    assert int(number) > 2


def test_a_file_that_has_it_already_is_not_written_to(tmp_path):
    existing = tmp_path / "taken"
    code, _ = closed(tmp_path, f"[os.open({str(existing)!r}, os.O_WRONLY | os.O_CREAT) for _ in range(3)]")
    assert code == 0
    assert existing.read_bytes() == b""


def test_streams_that_are_there_are_left_alone():
    program = "import sys, os; before = os.fstat(1); import dptrain; print(os.fstat(1) == before)"
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=os.environ)
    assert (process.stdout, process.stderr) == ("True\n", "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
@pytest.mark.parametrize("option", ["--version", "--help", "--print-config"])
def test_a_full_disk_under_standard_output(option):
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "dptrain", option]
        process = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    expected = "dptrain: standard output: No space left on device; the output is lost\n"
    assert (process.returncode, process.stderr) == (74, expected)


@pytest.mark.parametrize(
    "code",
    [
        "sys.stderr = None; from dptrain.runtime import failure; failure.report(ValueError('bad'))",
        "sys.stderr = None; from dptrain.cli.main import main; main(['--epochs', 'bad'])",
    ],
)
def test_an_error_is_told_where_sys_stderr_is_none(code):
    command = [sys.executable, "-c", f"import sys; {code}"]
    process = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert process.stderr.startswith("dptrain: ")
    assert "bad" in process.stderr
    assert process.stderr.count("\n") == 1
