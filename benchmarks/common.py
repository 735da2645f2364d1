"""What the benchmark scripts share: reports, what a machine is, workers in processes of their own."""

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import resource
import selectors
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Self, TextIO

# What all frameworks train with.
LEARNING_RATE, BETA_1, BETA_2, EPSILON = 1e-3, 0.9, 0.999, 1e-7
CLASSES = 10


@dataclass(frozen=True)
class Epoch:
    """What an epoch took, and the mean loss over its samples; where several runs are trained, the loss of each too."""

    seconds: float
    loss: float
    by_run: Sequence[float] = ()

    @classmethod
    def of_runs(cls, seconds: float, losses: Sequence[float]) -> Self:
        """Return the epoch of runs that are trained together."""
        return cls(seconds, statistics.fmean(losses), losses)


def glorot(sizes: Sequence[int], seed: int) -> list[Any]:
    """Return [kernel, bias, ...] of dense layers in float32, kernels as (inputs, outputs), the same everywhere."""
    import numpy as np

    rng = np.random.default_rng(seed)
    weights: list[Any] = []
    for inputs, outputs in pairwise(sizes):
        limit = (6 / (inputs + outputs)) ** 0.5
        weights.append(rng.uniform(-limit, limit, (inputs, outputs)).astype(np.float32))
        weights.append(np.zeros(outputs, np.float32))
    return weights


# Options


def words(allowed: Sequence[str]) -> Callable[[str], list[str]]:
    """Return what reads "A,B" as an option's value, in any case."""
    lower = {word.lower(): word for word in allowed}

    def split(text: str) -> list[str]:
        unknown = [part for part in text.split(",") if part.lower() not in lower]
        if unknown:
            raise argparse.ArgumentTypeError(f"unknown {', '.join(unknown)}; choose from {', '.join(allowed)}")
        return [lower[part.lower()] for part in text.split(",")]

    return split


def numbers(text: str) -> list[int]:
    """Read "1,2" as an option's value: numbers from 1."""
    values = [int(part) for part in text.split(",")]
    if min(values) < 1:
        raise ValueError(text)
    return values


def training_options(description: str, works: Sequence[str]) -> argparse.ArgumentParser:
    """Return the options of a benchmark that trains `works` in several frameworks, beside each other."""
    parser = argparse.ArgumentParser(
        description=description.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--works", type=words(works), default=list(works), help="some of what is trained")
    parser.add_argument("--output", type=Path, help="a file for the report")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser


# Reports


def spread(values: Sequence[float], form: str) -> str:
    """Return "median (min to max)"."""
    shown = [format(value, form) for value in (statistics.median(values), min(values), max(values))]
    return f"{shown[0]} ({shown[1]} to {shown[2]})"


def one_line(text: str, most: int = 200) -> str:
    """Return a text without line breaks and bars, which would end a table's cell, cut to a length."""
    flat = " ".join(text.split()).replace("|", "/")
    return flat if len(flat) <= most else flat[: most - 3] + "..."


def cpu_model() -> str:
    """Return the processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def versions(packages: Sequence[str]) -> str:
    """Return Python's version and those of the packages that are installed."""
    parts = [f"Python {platform.python_version()}"]
    for package in packages:
        # A package that is only on the path has no version of its own.
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            parts.append(f"{package} {importlib.metadata.version(package)}")
    return ", ".join(parts)


def peak_bytes() -> int:
    """Return this process's highest resident size; VmHWM, since `ru_maxrss` is inherited from the parent."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def begin_peak() -> int:
    """Let `peak_bytes` count from now on, where the system can; return this process's resident size."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return peak_bytes()


def command_line() -> str:
    """Return how this script was started."""
    return f"- Command: `python {shlex.join(sys.argv)}`"


def machine_line() -> str:
    """Return the machine and its load."""
    load = f", load average at the start {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    return f"- Machine: {cpu_model()}, {os.cpu_count()} cores, {platform.system()} {platform.machine()}{load}"


def nvidia_smi() -> str:
    """Return the GPU's state in words; it is only asked."""
    fields = "name,driver_version,pstate,clocks.sm,clocks.mem,clocks.max.sm,power.draw,power.limit,temperature.gpu"
    program = shutil.which("nvidia-smi")
    if program is None or "EMULATOR_HOME" in os.environ:
        return "nvidia-smi not asked: none here"
    try:
        process = subprocess.run(
            [program, f"--query-gpu={fields}", "--format=csv,noheader"], capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return one_line(f"nvidia-smi: {error}")
    values = (process.stdout or process.stderr).splitlines()[:1] or [""]
    names = [
        name.replace("clocks.max.sm", "SM clock at most").replace("clocks.", "clock ") for name in fields.split(",")
    ]
    parts = values[0].split(",")
    if process.returncode or len(parts) != len(names):
        return one_line(f"nvidia-smi: {values[0]}")
    return ", ".join(f"{name} {value.strip()}" for name, value in zip(names, parts, strict=True))


class Report:
    """Lines that appear at once on the terminal and at the end in a file."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def add(self, *lines: str) -> None:
        """Print and keep."""
        for line in lines:
            print(line, flush=True)
            self.lines.append(line)

    def save(self, path: Path) -> None:
        """Write all lines so far."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(self.lines) + "\n", encoding="utf-8")

    def add_rows(self, works: Sequence[str], measure: Callable[[str, str], list[str]], output: Path | None) -> None:
        """Add a row of cells for each work, measured with an empty cache of compiled programs; save what there is."""
        for work in works:
            with tempfile.TemporaryDirectory() as cache:
                self.add(f"| {' | '.join(measure(work, cache))} |")
        if output is not None:
            self.save(output)


# Processes


def end_tree(process: int) -> None:
    """Kill a process and all that come from it: ranks are no members of mpirun's process group."""
    shown = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    children: dict[int, list[int]] = {}
    for line in shown.splitlines():
        pid, parent = map(int, line.split())
        children.setdefault(parent, []).append(pid)
    pids = [process]
    for pid in pids:
        pids += children.get(pid, [])
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


# Workers: a process that answers questions, one JSON object a line


class WorkerError(Exception):
    """A worker's process ended, was too slow or refused; the message is one line."""


class WorkerTimeoutError(WorkerError):
    """A worker did not answer in time."""


def answering() -> tuple[Iterator[Any], TextIO]:
    """In a worker, return the questions and where answers go; whatever a library prints must not look like one."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return (json.loads(line) for line in sys.stdin), answers


def answer(answers: TextIO, value: Any) -> None:
    """In a worker, answer a question."""
    print(json.dumps(value), file=answers, flush=True)


def worker_start(script: str, threads: int, **environment: str) -> tuple[list[str], dict[str, str]]:
    """Return command and environment of a script's workers."""
    variables = {name: str(threads) for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    return [sys.executable, str(Path(script).resolve()), "--worker"], variables | environment


class WorkerProcess:
    """A worker process, seen from its parent; its output goes to a file, whose last lines explain its end.

    `quiet` keeps standard error for that reason, else it goes to the terminal.
    """

    def __init__(
        self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None, quiet: bool = False
    ) -> None:
        self.name = name
        # Open as long as the process lives.
        self._errors = tempfile.TemporaryFile("w+", errors="replace") if quiet else None  # noqa: SIM115
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, **(environment or {})},
            start_new_session=quiet,  # so that what it starts can be ended with it
        )
        self._rest = b""

    def ask(self, question: Any, timeout: float | None = None) -> Any:
        """Send a question and wait for the answer; a WorkerError after `timeout` seconds, or if the process ends."""
        self.send(question)
        return self.receive(timeout)

    def send(self, question: Any) -> None:
        """Send a question; WorkerError if the process ended."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise WorkerError(self._why_it_ended()) from None

    def receive(self, timeout: float | None = None) -> Any:
        """Wait for the answer to a question that was sent; errors as `ask`."""
        assert self._process.stdout is not None
        until = None if timeout is None else time.monotonic() + timeout
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._rest:
                left = None if until is None else until - time.monotonic()
                if (left is not None and left <= 0) or not selector.select(left):
                    self.kill()
                    raise WorkerTimeoutError(f"no answer within {timeout:.0f} s")
                more = os.read(self._process.stdout.fileno(), 1 << 16)
                if not more:
                    raise WorkerError(self._why_it_ended())
                self._rest += more
        line, self._rest = self._rest.split(b"\n", 1)
        return json.loads(line)

    def close(self) -> None:
        """Let the process end, and end it where it does not."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.kill()
        assert self._process.stdout is not None
        self._process.stdout.close()
        if self._errors is not None:
            self._kill_group()
            self._errors.close()

    def kill(self) -> None:
        """End the process and what it started."""
        self._kill_group() if self._errors is not None else self._process.kill()
        self._process.wait()

    def _kill_group(self) -> None:
        # The group's number stays taken while any process of it lives.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _why_it_ended(self) -> str:
        try:
            code = self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.kill()
            return "the process closed its output and did not end"
        if self._errors is None:
            return f"the {self.name} process ended with exit code {code}; its message is above"
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors.read().splitlines() if line.strip()]
        return one_line(f"the process ended with exit code {code}: {lines[-1] if lines else 'no message'}")


# Trainings: whole epochs for so many seconds after a first one, with so many samples; they return samples a second, and
# the mean loss of the last epoch.
Trainee = Callable[..., tuple[float, float]]


def fitted(module: Any, model: Any, x: Any, y: Any, batch: int) -> Trainee:
    """Return what trains a compiled model of dptrain or Keras within one call of `fit`."""

    def train(seconds: float, count: int = len(x)) -> tuple[float, float]:
        times: list[float] = []

        def on_epoch_end(epoch: int, logs: Any = None) -> None:
            times.append(time.perf_counter())
            model.stop_training = times[-1] - times[0] >= seconds

        callback = module.callbacks.LambdaCallback(on_epoch_end=on_epoch_end)
        options = {"batch_size": batch, "epochs": 10**6, "verbose": 0, "callbacks": [callback]}
        losses = model.fit(x[:count], y[:count], **options).history["loss"]
        return (len(times) - 1) * count / max(times[-1] - times[0], 1e-9), losses[-1]

    return train


def repeated(epoch: Callable[[int], float], most: int) -> Trainee:
    """Return what trains by a function that trains an epoch of so many samples and returns their mean loss."""

    def train(seconds: float, count: int = most) -> tuple[float, float]:
        loss, begun, samples = epoch(count), time.perf_counter(), 0
        while time.perf_counter() - begun < seconds:
            loss, samples = epoch(count), samples + count
        return samples / max(time.perf_counter() - begun, 1e-9), loss

    return train


def prepared(make: Callable[[], Trainee], first: int) -> tuple[Trainee, dict[str, float]]:
    """Return a trainee that has trained one epoch, seconds until its first samples were trained, and memory since."""
    before, begun = begin_peak(), time.perf_counter()
    trainee = make()
    trainee(0, first)
    seconds = time.perf_counter() - begun
    trainee(0)
    return trainee, {"first": seconds, "memory": peak_bytes() - before}
