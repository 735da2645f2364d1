"""Where a compiled step's time goes on a CPU: each of its kernels, on one thread and on several.

    python benchmarks/step_profile.py --batch-size 128 --output benchmarks/results/step-profile_HARDWARE_DATE.md

The C++ of a training step of 784-HIDDEN-10 with Adam and accuracy is compiled with a clock around each kernel, and
trains in a process of its own for each number of threads, in turns. A kernel's time is a low percentile of all steps'
times, since others on the machine only add to it: on a busy one few steps have all of their threads on cores.
"""

import argparse
import ctypes
import os
import re
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from common import Report, WorkerProcess, answer, answering, command_line, machine_line, versions

ROOT = Path(__file__).resolve().parents[1]
SAMPLES, KEPT = 8192, 4096
# A clock around each kernel of `native0`, in nanoseconds, of the last `KEPT` steps; the last one is the whole step.
CLOCK = """
#include <time.h>
extern "C" { float step_times[64][%d]; int64_t step_number = 0; }
static inline int64_t step_clock() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000ll + t.tv_nsec;
}
"""


def main() -> int:
    """Compare numbers of threads, or be one of them."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of training in a round")
    parser.add_argument("--percentile", type=float, default=2.0, help="of the steps of a round")
    parser.add_argument("--output", type=Path, help="a file for the report")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work()
        return 0
    report, command = Report(), [sys.executable, str(Path(__file__).resolve()), "--worker"]
    report.add(f"# A step of 784-{options.hidden}-10 at batch {options.batch_size}, kernel by kernel", "")
    report.add(command_line(), machine_line(), f"- Versions: {versions(('numpy',))}")
    low = f"{options.percentile:g}th percentile of a round's steps"
    report.add(f"- Microseconds: the {low}, least of {options.rounds} rounds (in brackets their median)", "")
    rounds_by_threads: dict[int, list[dict[str, float]]] = {count: [] for count in options.threads}
    workers = {
        count: WorkerProcess(f"{count} threads", command, {"OMP_NUM_THREADS": str(count), "PYTHONPATH": str(ROOT)})
        for count in options.threads
    }
    for _ in range(options.rounds):
        for count, worker in workers.items():
            rounds_by_threads[count].append(
                worker.ask([count, options.hidden, options.batch_size, options.seconds, options.percentile])
            )
    for worker in workers.values():
        worker.close()
    counts = [f"{count} thread{'s' * (count > 1)}" for count in rounds_by_threads]
    columns = [*counts, *(["ratio"] if len(rounds_by_threads) > 1 else [])]
    report.add(f"| kernel | {' | '.join(columns)} |", f"|---{'|---' * len(columns)}|")
    for name in rounds_by_threads[options.threads[0]][0]:
        times = [[times[name] for times in rounds] for rounds in rounds_by_threads.values()]
        cells = [f"{min(times):,.1f} ({statistics.median(times):,.1f})" for times in times]
        cells += [f"{min(times[0]) / max(min(times[-1]), 1e-9):.2f}"] if len(rounds_by_threads) > 1 else []
        report.add(f"| {name} | {' | '.join(cells)} |")
    if options.output is not None:
        report.save(options.output)
    return 0


def work() -> None:
    """Train, and tell the times."""
    from dptrain.backend.cpu import compiled

    names: list[str] = []
    libraries: list[ctypes.CDLL] = []
    generate, library = compiled.generate, compiled.library

    def timed(fused: Any) -> Any:
        code = generate(fused)
        if fused.program.updates and len(code.parts) == 1:
            names.clear()
            for kernel in fused.kernels:
                if kernel in code.epilogues:
                    names[-1] += f", then {_named(kernel)}"
                else:
                    names.append(f"{len(names) + 1}: {_named(kernel)}")
            code.source = _with_clocks(code.source, names)
        return code

    def loaded(source: str) -> ctypes.CDLL:
        loaded_library = library(source)
        if "step_times" in source:
            libraries.append(loaded_library)
        return loaded_library

    compiled.generate, compiled.library = timed, loaded  # type: ignore[assignment]
    questions, answers = answering()
    model: Any = None
    for threads, hidden, batch, seconds, percentile in questions:
        import numpy as np

        import dptrain as dp

        if model is None:
            assert int(os.environ["OMP_NUM_THREADS"]) == threads
            rng = np.random.default_rng(0)
            x, y = rng.random((SAMPLES, 784), np.float32), rng.integers(0, 10, SAMPLES)
            model = dp.Sequential(
                [dp.layers.Input((784,)), dp.layers.Dense(hidden, "relu"), dp.layers.Dense(10, "softmax")]
            )
            model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"], device="cpu")
            model.fit(x, y, batch_size=batch, epochs=1, verbose=0)
        last = libraries[-1]
        number = ctypes.c_int64.in_dll(last, "step_number")
        number.value, begun = 0, time.perf_counter()
        while time.perf_counter() - begun < seconds:
            model.fit(x, y, batch_size=batch, epochs=4, verbose=0)
        times = np.frombuffer((ctypes.c_float * (64 * KEPT)).in_dll(last, "step_times"), np.float32).reshape(64, KEPT)
        count = min(number.value, KEPT)
        low = np.percentile(times[: len(names) + 1, :count], percentile, axis=1) / 1000
        answer(answers, dict(zip([*names, "all of it"], map(float, low), strict=True)))


def _named(kernel: Any) -> str:
    first, shape = kernel.tensors[0].op.name, ", ".join(str(n) for n in kernel.tensors[0].shape)
    more = len(kernel.tensors) - 1
    return f"{type(kernel).__name__.removesuffix('Kernel').lower()} {first} ({shape}){f' and {more} more' * (more > 0)}"


def _with_clocks(source: str, names: list[str]) -> str:
    """Return a program's C++ with a clock around each kernel that its one native function calls."""
    head, function, rest = re.split(
        r'(extern "C" void native\d+\(Context &c, int last\) \{\n.*?\n\}\n)', source, flags=re.DOTALL
    )
    lines, number = [], 0
    for line in function.splitlines():
        if re.match(r"  (if \(last\) )?(kernel\d|dp_)", line):
            lines.append(f"  {{ const int64_t t = step_clock();{line}")
            lines.append(f"  step_times[{number}][step_number % {KEPT}] = step_clock() - t; }}")
            number += 1
        else:
            lines.append(line)
    assert number == len(names), f"{number} calls of {len(names)} kernels"
    lines[1:1] = ["  const int64_t begun = step_clock();"]
    lines[-1:] = [f"  step_times[{number}][step_number++ % {KEPT}] = step_clock() - begun;", "}", ""]
    return CLOCK % KEPT + head + "\n".join(lines) + rest


if __name__ == "__main__":
    sys.exit(main())
