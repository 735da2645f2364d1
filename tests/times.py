"""What tests take: `pytest --times` prints it by folder, and the tests that take longest.

CPU seconds are those of the process, of what it started, and of what that started and has waited for: the servers that
run what tests start are asked (tests/launching.py). They hardly depend on what else runs on the machine; seconds do.
"""

import os
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

# How many tests the second table names.
LONGEST = 20
# Files that take as many CPU seconds have a row of their own.
_ROW = 5


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of its children, whether they have ended or not."""
    process_times = os.times()
    total = process_times.user + process_times.system + process_times.children_user + process_times.children_system
    for path in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):  # the thread has just ended
            total += sum(map(_cpu_seconds_of, path.read_text().split()))
    return total


def _cpu_seconds_of(pid: str) -> float:
    try:
        fields = Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has just ended
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


class Times:
    """A plugin that measures tests, and prints the tables where reports arrive."""

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Begin with what all tests of a process share before their first."""
        self._start = time.monotonic(), cpu_seconds()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
        """Add a test's times to its last report."""
        if call.when == "teardown":
            wall, cpu = time.monotonic() - self._start[0], cpu_seconds() - self._start[1]
            item.user_properties.append(("times", (cpu, wall, item.get_closest_marker("long") is not None)))
        return (yield)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the tables."""
        taken = {
            report.nodeid: value
            for reports in terminalreporter.stats.values()
            for report in reports
            for name, value in getattr(report, "user_properties", ())
            if name == "times"
        }
        terminalreporter.section("times")
        for line in tables(taken):
            terminalreporter.write_line(line)


def tables(taken: dict[str, tuple[float, float, bool]]) -> list[str]:
    """Return the lines of both tables.

    Args:
        taken: CPU seconds, seconds, and whether it is long, by test.
    """
    rows: defaultdict[str, list[float]] = defaultdict(lambda: [0] * 6)
    for test, (cpu, wall, is_long) in taken.items():
        file = test.partition("::")[0]
        for name in ("all", *(f"{parent}/" for parent in list(Path(file).parents)[-3::-1]), file):
            row = rows[name]
            for column, value in enumerate((1, cpu, wall)):
                row[column + 3 * is_long] += value
    head = f"{'short: tests':>14} {'CPU s':>7} {'s':>7} {'long: tests':>14} {'CPU s':>7} {'s':>7}"
    lines = [head]
    for name, (tests, cpu, wall, long_tests, long_cpu, long_wall) in sorted(rows.items()):
        if name == "all" or name.endswith("/") or cpu + long_cpu >= _ROW:
            short, more = f"{tests:14} {cpu:7.1f} {wall:7.1f}", f"{long_tests:14} {long_cpu:7.1f} {long_wall:7.1f}"
            lines.append(f"{short} {more}  {name}")
    lines += ["", f"{'CPU s':>7} {'s':>7}"]
    for test, (cpu, wall, is_long) in sorted(taken.items(), key=lambda item: -item[1][0])[:LONGEST]:
        lines.append(f"{cpu:7.1f} {wall:7.1f}  {test}{' (long)' if is_long else ''}")
    return lines
