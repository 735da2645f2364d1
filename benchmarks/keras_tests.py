"""Keras' own unit tests against dptrain: how many pass, by room, and which.

    pip install keras jax
    python benchmarks/keras_tests.py --output keras_tests.json --page benchmarks/results/keras-tests_HARDWARE_DATE.md
    python benchmarks/keras_tests.py layers/rnn ops/nn    # these files alone; prints failures, the most frequent first
    python benchmarks/keras_tests.py ops/numpy --select "not NumpyDtypeTest"    # without 4,500 tests by types
    python benchmarks/keras_tests.py --compare before.json after.json    # lost and gained tests by name

Runs the `*_test.py` files of the installed wheel, none of which is copied; `keras_shim.py` answers their imports of
Keras with dptrain's names. Each file runs in a process of its own with a time limit, each test with another. A test is
`passed`, `failed`, `refused` (dptrain says that it lacks the name or the argument), or `skipped` (by itself: another
backend, a GPU, TensorFlow); a file that cannot be imported counts as one `uncollectable`.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import keras_shim
from common import Report, command_line, machine_line, versions

STATES = ("passed", "failed", "refused", "skipped", "uncollectable")
# Rooms that dptrain does not mean to have, or that test what users of Keras do not see; only `--internals` runs them.
INTERNALS = ("backend", "quantizers", "distillation", "testing", "legacy", "export", "visualization")
# Seconds of one test and of one file.
TEST_LIMIT, FILE_LIMIT = 60, 900
# What dptrain does not mean to have, in the names of tests.
_NOT_MEANT = re.compile(r"quantiz|lora|int4|int8|gptq|awq|float8|distill|sparse_tensor|ragged|tf_sparse", re.IGNORECASE)

Result = dict[str, str]  # state, error, message


# In the process of one file


class Recorder:
    """A plugin of pytest that writes a line of JSON for each test when it ends."""

    def __init__(self, path: str, limit: int) -> None:
        self.file = open(path, "w", buffering=1)  # noqa: SIM115
        self.limit = limit
        self.errors: dict[str, tuple[str, str]] = {}

    def write(self, test: str, state: str, error: str = "", message: str = "") -> None:
        """Write one result."""
        line = {"test": _short(test), "state": state, "error": error, "message": message[:400]}
        self.file.write(json.dumps(line) + "\n")

    def pytest_collectreport(self, report: Any) -> None:
        """Note a file that cannot be imported."""
        if report.failed:
            self.write(report.nodeid, "uncollectable", "", str(report.longrepr).strip().splitlines()[-1])
        elif report.skipped:
            self.write(report.nodeid, "skipped", "", str(report.longrepr))

    def pytest_collection_finish(self, session: Any) -> None:
        """Note what will run, for a file that does not end."""
        for item in session.items:
            self.write(item.nodeid, "begun")

    def pytest_runtest_setup(self, item: Any) -> None:
        """Start a test's time limit."""
        signal.alarm(self.limit)

    def pytest_runtest_makereport(self, item: Any, call: Any) -> None:
        """Keep the error, of which the report has only a text."""
        if call.excinfo is not None:
            self.errors[item.nodeid] = (call.excinfo.typename, _first_line(call.excinfo.value))

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Write a result."""
        error, message = self.errors.get(report.nodeid, ("", ""))
        if report.failed:
            refused = _is_refusal(error, message) or _NOT_MEANT.search(report.nodeid.rpartition("::")[2])
            self.write(report.nodeid, "refused" if refused else "failed", error, message)
        elif report.skipped and not hasattr(report, "wasxfail"):
            self.write(report.nodeid, "skipped", error, message)
        elif report.when == "call" and report.passed:
            self.write(report.nodeid, "passed")
        if report.when == "teardown":
            signal.alarm(0)


def _short(test: str) -> str:
    return test.rpartition("keras/src/")[2]


def _first_line(error: BaseException) -> str:
    """Return an error's text on one line, without addresses."""
    text = " ".join(str(error).split())
    return re.sub(r"0x[0-9a-f]+", "0x", text)


def _is_refusal(error: str, message: str) -> bool:
    """Whether a test failed since dptrain says that it lacks something of Keras."""
    return error == "NotThere" or (error in ("ConfigError", "AttributeError") and "not supported" in message)


def run_file(file: str, output: str, limit: int, select: str) -> int:
    """Run the tests of one file of Keras that pytest's `-k` selects; return pytest's exit code."""

    def late(*_: Any) -> None:
        raise TimeoutError(f"takes over {limit} s")

    signal.signal(signal.SIGALRM, late)
    keras_shim.install()
    import pytest

    root = str(keras_shim.root().parent)
    path = keras_shim.root() / "src" / file
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:randomly", "-c", os.devnull, "--rootdir", root, "--tb=short"]
    # By default pytest would take keras/src/testing/test_case.py for tests, and load it past the shim.
    options += ["-o", "python_files=*_test.py", "-W", "ignore", *(["-k", select] if select else [])]
    return int(pytest.main([str(path), *options], plugins=[Recorder(output, limit)]))


# In the process that started it


def test_files(words: Sequence[str], internals: bool) -> list[str]:
    """Return Keras' test files below `keras/src`, those alone that begin with one of the words where there are any."""
    folder = keras_shim.root() / "src"
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*_test.py"))
    if words:
        return [file for file in files if any(file.startswith(word) for word in words)]
    return [file for file in files if internals or file.split("/")[0] not in INTERNALS]


def run_one(file: str, options: argparse.Namespace) -> dict[str, Result]:
    """Run one file in a process of its own; return its tests' results by name."""
    with tempfile.TemporaryDirectory() as folder:
        output = f"{folder}/results"
        command = [
            sys.executable,
            __file__,
            "--file",
            file,
            "--output",
            output,
            "--select",
            options.select,
            "--test-limit",
            f"{options.test_limit}",
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu", "PYTHONPATH": _repository()}
        with open(f"{folder}/log", "w") as log:
            process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, cwd=folder, env=environment, start_new_session=True
            )
            try:
                process.wait(options.file_limit)
                end = f"ended with exit code {process.returncode}"
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                end = f"takes over {options.file_limit} s"
        results = _read(output) if Path(output).exists() else {}
        if not results and process.returncode not in (0, 5):
            tail = Path(f"{folder}/log").read_text().strip().splitlines()[-1:]
            results = {file: {"state": "uncollectable", "error": "", "message": " ".join(tail)}}
    for result in results.values():
        if result["state"] == "begun":
            result.update(state="failed", error="Unfinished", message=f"the process {end}")
    return results


def _repository() -> str:
    return str(Path(__file__).resolve().parents[1])


def _read(path: str) -> dict[str, Result]:
    """Return results by test; the worst of a test's stages counts."""
    results: dict[str, Result] = {}
    for line in Path(path).read_text().splitlines():
        result = json.loads(line)
        name = result.pop("test")
        if results.get(name, {}).get("state") not in ("failed", "refused"):
            results[name] = result
    return results


def room_of(test: str) -> str:
    """Return a test's room: folders, and for ops the file."""
    file = test.partition("::")[0]
    folder = file.rpartition("/")[0] or "top"
    return file.removesuffix("_test.py") if folder == "ops" else "/".join(folder.split("/")[:2])


def count(results: Mapping[str, Result]) -> dict[str, Counter[str]]:
    """Return the number of tests of each state by room."""
    rooms: dict[str, Counter[str]] = defaultdict(Counter)
    for test, result in results.items():
        rooms[room_of(test)][result["state"]] += 1
    return dict(sorted(rooms.items()))


def table(rooms: Mapping[str, Counter[str]]) -> Iterator[str]:
    """Yield the lines of a table of rooms, with sums."""
    yield "| room | " + " | ".join(STATES) + " |"
    yield "|---|" + "--:|" * len(STATES)
    for name, states in rooms.items():
        yield f"| {name} | " + " | ".join(str(states[state]) for state in STATES) + " |"
    total = sum(rooms.values(), Counter())
    yield "| **all** | " + " | ".join(f"**{total[state]:,}**" for state in STATES) + " |"


def causes(results: Mapping[str, Result]) -> Iterator[str]:
    """Yield failures by error, the most frequent first, each with a test that shows it."""
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    for test, result in results.items():
        if result["state"] in ("failed", "refused", "uncollectable"):
            words = re.sub(r"[-\d.e+]*\d", "N", result["message"])[:110]
            groups[result["error"], words].append(test)
    for (error, words), tests in sorted(groups.items(), key=lambda item: -len(item[1])):
        yield f"{len(tests):5} {error}: {words}\n      {tests[0]}"


def compare(before: Mapping[str, Result], after: Mapping[str, Result]) -> list[str]:
    """Return lines on the tests that pass in one of two runs only, with the losses first."""
    passing = [{name for name, result in run.items() if result["state"] == "passed"} for run in (before, after)]
    lost, gained = sorted(passing[0] - passing[1]), sorted(passing[1] - passing[0])
    return [
        f"{len(lost)} lost, {len(gained)} gained, {len(passing[0])} -> {len(passing[1])} passed",
        *(f"lost    {name}  {after.get(name, {}).get('message', 'not run')[:120]}" for name in lost),
        *(f"gained  {name}" for name in gained),
    ]


def page(results: Mapping[str, Result], options: argparse.Namespace) -> None:
    """Write a page of results."""
    report = Report()
    report.add("# Keras' own unit tests, run against dptrain\n")
    report.add(command_line(), machine_line())
    report.add(f"- Versions: {versions(('dptrain', 'keras', 'jax', 'numpy'))}")
    report.add(f"- Limits: {options.test_limit} s a test, {options.file_limit} s a file\n")
    report.add(*table(count(results)))
    report.save(Path(options.page))


def run(options: argparse.Namespace) -> dict[str, Result]:
    """Run the files that the options name; return results by test."""
    os.nice(10)
    results: dict[str, Result] = {}
    with ThreadPoolExecutor(options.processes) as pool:
        files = test_files(options.files, options.internals)
        for future in as_completed([pool.submit(run_one, file, options) for file in files]):
            results |= future.result()
            if options.output:
                Path(options.output).write_text(json.dumps(results, indent=0, sort_keys=True))
    return results


def main() -> None:
    """Run what the options say."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", help="beginnings of paths below keras/src")
    parser.add_argument("--output", help="JSON file of all results by test")
    parser.add_argument("--page", help="Markdown page of the table")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--test-limit", type=int, default=TEST_LIMIT, metavar="SECONDS")
    parser.add_argument("--file-limit", type=int, default=FILE_LIMIT, metavar="SECONDS")
    parser.add_argument("--select", default="", metavar="EXPRESSION", help="tests, as pytest's -k takes them")
    parser.add_argument("--causes", type=int, default=40, metavar="N", help="print the N most frequent failures")
    parser.add_argument("--internals", action="store_true", help=f"also {', '.join(INTERNALS)}")
    parser.add_argument("--results", nargs="+", metavar="JSON", help="show these instead of running; later ones count")
    parser.add_argument("--compare", nargs=2, metavar=("BEFORE", "AFTER"))
    parser.add_argument("--file", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.file:
        raise SystemExit(run_file(options.file, options.output, options.test_limit, options.select))
    if options.compare:
        print(*compare(*(json.loads(Path(path).read_text()) for path in options.compare)), sep="\n")
        return
    results: dict[str, Result] = {}
    if options.results:
        for path in options.results:
            results |= json.loads(Path(path).read_text())
    else:
        results = run(options)
    print(*table(count(results)), "", *list(causes(results))[: options.causes], sep="\n")
    if options.page:
        page(results, options)


if __name__ == "__main__":
    main()
