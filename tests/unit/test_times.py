"""What `pytest --times` prints."""

import subprocess
import sys

from tests.times import LONGEST, cpu_seconds, tables

BUSY = "import time\nwhile time.process_time() < 0.3: pass\n"


def test_short_and_long_tests_are_added_up_by_folder_and_by_file():
    durations = {
        "tests/mpi/test_a.py::test_x": (4.0, 9.0, False),
        "tests/mpi/test_a.py::test_y": (2.0, 1.0, True),
        "tests/unit/ops/test_b.py::test_z[1]": (0.5, 0.25, False),
    }
    lines = [line.split() for line in tables(durations)]
    assert ["2", "4.5", "9.2", "1", "2.0", "1.0", "all"] in lines
    assert ["1", "4.0", "9.0", "1", "2.0", "1.0", "tests/mpi/test_a.py"] in lines
    assert ["1", "0.5", "0.2", "0", "0.0", "0.0", "tests/unit/ops/"] in lines
    assert "tests/unit/ops/test_b.py" not in [line[-1] for line in lines if line], "it takes little"
    assert lines[-3] == ["4.0", "9.0", "tests/mpi/test_a.py::test_x"]
    assert lines[-2] == ["2.0", "1.0", "tests/mpi/test_a.py::test_y", "(long)"]


def test_the_longest_are_the_last_lines():
    durations = {f"tests/test_a.py::test_{number}": (float(number), 0.0, False) for number in range(2 * LONGEST)}
    assert [line.split()[0] for line in tables(durations)[-LONGEST:]] == [
        f"{number}.0" for number in reversed(range(LONGEST, 2 * LONGEST))
    ]


def test_processes_count_before_and_after_their_end():
    before = cpu_seconds()
    command = [sys.executable, "-c", BUSY + "print(flush=True)\ninput()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        running = cpu_seconds()
        process.communicate(b"\n")
    assert running - before >= 0.25
    assert cpu_seconds() >= running - 0.05
