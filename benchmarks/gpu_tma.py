"""Half precision's largest products by tensor maps (`kernels/product_tma.cuh`): right or wrong, and how fast.

    python benchmarks/gpu_tma.py --minutes 2 --output benchmarks/results/gpu-tma_HARDWARE_DATE.md
    tests/emulator/run python benchmarks/gpu_tma.py --quick       # does everything work?

Each schedule has a process of its own, so that one that faults or hangs ends alone. There programs multiply in all
four layouts: beside NumPy in float64, and bit by bit beside the kernel that programs use now (`product_wgmma`). If the
schedule is right, products are timed in turns with that kernel's, and so is a training step of 784-4096x3-10 in
bfloat16; the first schedule's process times PyTorch's cuBLAS too (where it is installed).

Programs use tensor maps only if `dptrain.backend.cuda.tma.SCHEDULE` is set, as here. Without a GPU of compute
capability 9.0 it ends with one line.
"""

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common import Report, command_line, machine_line, nvidia_smi, one_line, spread, versions
from gpu_kernels import Gpu, networks, on, op_program, ours, prepared, theirs

LAYOUTS = {"nn": (False, False), "nt": (False, True), "tn": (True, False), "tt": (True, True)}
# Those of 784-4096x3-10 at batch 1024, fewer terms, and as many as hide every epilogue.
TIMED = [(1024, 4096, 4096), (4096, 4096, 1024), (4096, 4096, 4096), (8192, 8192, 1024)]
CHECKED = [(1032, 2056, 520), (4096, 4096, 1032)]
# A training step, by whether it is quick.
STEP = {False: "784-4096x3-10, batch 1024, bfloat16", True: "6x6x3, 4 filters, batch 4, bfloat16"}
LIMIT = 1e-5


@contextmanager
def schedule(name: str | None, quick: bool) -> Iterator[None]:
    """Let programs that are composed within use a schedule; None: no tensor maps. `quick`: small products qualify."""
    from dptrain.backend.cuda import products, tma

    before = tma.SCHEDULE, products._WANTED_BLOCKS
    tma.SCHEDULE, products._WANTED_BLOCKS = None if name is None else tma.SCHEDULES[name], 1 if quick else before[1]
    products.product_plan.cache_clear()
    try:
        yield
    finally:
        tma.SCHEDULE, products._WANTED_BLOCKS = before
        products.product_plan.cache_clear()


def program_of(sizes: tuple[int, int, int], layout: str) -> Any:
    """Return a float32 product of bfloat16 matrices with all digits, and what float64 makes of it."""
    import numpy as np

    from dptrain import ops
    from dptrain.program.program import trace
    from dptrain.program.tensor import Variable
    from dptrain.runtime.types import TYPES

    M, N, K = sizes
    rng = np.random.default_rng(M + N + K)
    factors = [rng.standard_normal(shape, np.float32).astype(TYPES["bfloat16"].storage) for shape in ((M, K), (K, N))]
    stored = [
        Variable(np.ascontiguousarray(factor.T if flag else factor), name)
        for name, factor, flag in zip("ab", factors, LAYOUTS[layout], strict=True)
    ]

    def step() -> dict[str, Any]:
        wide = [ops.cast(variable.value, "float32") for variable in stored]
        a, b = (ops.transpose(x) if flag else x for x, flag in zip(wide, LAYOUTS[layout], strict=True))
        return {"c": a @ b}

    a, b = (factor.astype(np.float64) for factor in factors)
    return trace(step, {}).derived, a @ b


def difference(gpu: Gpu, name: str, sizes: tuple[int, int, int], layout: str) -> float:
    """Return how far a schedule's product is from float64's, as a norm over a norm; infinite if its bits are others."""
    import numpy as np

    values = []
    for schedule_name in (name, None):
        program, expected = program_of(sizes, layout)
        with schedule(schedule_name, gpu.quick):
            executable = gpu.backend("float32").executable(program, {})
        assert ("product_tma<" in executable.source) == (schedule_name is not None), executable.source
        executable.run()
        values.append(executable.outputs["c"])
        executable.close()
    if not np.array_equal(*values):
        return float("inf")
    return float(np.linalg.norm(values[0] - expected) / np.linalg.norm(expected))


def products_of(gpu: Gpu, name: str, sizes: tuple[int, int, int], peers: bool) -> dict[str, Callable[[], object]]:
    """Return what queues a product: by a schedule, by the kernel of programs, and with `peers` by PyTorch."""
    queues = by_both(name, gpu.quick, lambda: ours(gpu, "product", "bfloat16", sizes, library=False))
    if peers:
        try:
            queues["PyTorch"] = on(gpu.backend("float32").stream, theirs("product", "bfloat16", sizes))
        except Exception as error:  # not installed, or sees no GPU
            print(one_line(f"no PyTorch: {error}"), file=sys.stderr)
    return queues


def steps_of(gpu: Gpu, name: str) -> dict[str, Callable[[], object]]:
    """Return what queues a training step: with products by a schedule, and by the kernel of programs."""

    def prepare() -> Callable[[], object]:
        (step,) = prepared(gpu, STEP[gpu.quick])
        run: Callable[[], object] = step.executable.run
        return run

    return by_both(name, gpu.quick, prepare)


def by_both(name: str, quick: bool, prepare: Callable[[], Callable[[], object]]) -> dict[str, Callable[[], object]]:
    """Return what `prepare` returns with a schedule, and without tensor maps."""
    queues = {}
    for kernel, schedule_name in (("tensor maps", name), ("product_wgmma", None)):
        with schedule(schedule_name, quick):
            queues[kernel] = prepare()
    return queues


def repeat(queue: Callable[[], object], times: int) -> None:
    """Queue some work several times."""
    for _ in range(times):
        queue()


def compile_all() -> None:
    """Compile all kernels for compute capability 9.0, side by side, into the cache."""
    from dptrain.backend.cuda.compile import compiled_text
    from dptrain.backend.cuda.compose import Composition
    from dptrain.backend.cuda.tma import SCHEDULES
    from dptrain.models.explaining import program_of as step_of

    steps = [step_of(model, rows, dtype="uint8") for _, _, rows, model in networks(False, STEP[False])]
    programs = [program_of(sizes, layout)[0] for sizes in CHECKED for layout in LAYOUTS]
    programs += [op_program("product", "bfloat16", sizes) for sizes in TIMED]
    texts = set[str]()
    for name in (*SCHEDULES, None):
        with schedule(name, quick=False):
            for program in (*programs, *steps):
                texts |= Composition(program, of_halves="wgmma").sources().keys()
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        list(threads.map(lambda text: compiled_text("program", text, "sm_90a"), texts))


def timed(gpu: Gpu, queues: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Return seconds by name, of rounds in which all have their turn."""
    repeats, stream = 1 if gpu.quick else 10, gpu.backend("float32").stream
    times: dict[str, list[float]] = {name: [] for name in queues}
    for queue in queues.values():
        queue()
    for _ in range(rounds):
        for name, queue in queues.items():
            (taken,) = gpu.timed(stream, [functools.partial(repeat, queue, repeats)])
            times[name].append(taken / repeats)
    return times


def measured(name: str, quick: bool, seconds: float, rounds: int, peers: bool) -> dict[str, Any]:
    """Check and time one schedule, in this process; nothing is begun so many seconds after the checks."""
    gpu = Gpu(quick)
    checked = [(136, 264, 72)] if quick else CHECKED
    worst = max(difference(gpu, name, sizes, layout) for sizes in checked for layout in LAYOUTS)
    record: dict[str, Any] = {"worst": worst, "times": {}}
    print(json.dumps(record), flush=True)
    if worst > LIMIT:
        return record
    until = time.monotonic() + seconds
    work = {
        " x ".join(map(str, sizes)): functools.partial(products_of, gpu, name, sizes, peers)
        for sizes in ([(264, 264, 136)] if quick else TIMED)
    }
    for label, prepare in {**work, STEP[quick]: functools.partial(steps_of, gpu, name)}.items():
        if time.monotonic() > until:
            break
        record["times"][label] = timed(gpu, prepare(), rounds)
        print(json.dumps(record), flush=True)
    return record


def started(name: str, quick: bool, limit: float, rounds: int, peers: bool) -> dict[str, Any]:
    """Return what a process of a schedule's own said last, with "failed" where it did not end well."""
    command = [sys.executable, __file__, "--only", name, "--minutes", str(limit / 60), "--rounds", str(rounds)]
    command += [*(["--quick"] if quick else []), *(["--peers"] if peers else [])]
    patience = limit + (600 if quick else 40)  # the emulator's kernels compile meanwhile
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=patience, stdin=subprocess.DEVNULL)
        output, failed = process.stdout, process.returncode
        said = process.stderr.splitlines()[-1:] or [""]
        why = f"exit code {failed}: {said[0]}" if failed else ""
    except subprocess.TimeoutExpired as error:
        output = error.stdout.decode() if isinstance(error.stdout, bytes) else error.stdout or ""
        why = f"no answer within {patience:.0f} s"
    lines = [line for line in output.splitlines() if line.startswith("{")]
    record: dict[str, Any] = json.loads(lines[-1]) if lines else {"times": {}}
    return record | ({"failed": one_line(why)} if why else {})


def table(report: Report, records: dict[str, dict[str, Any]]) -> None:
    """Add what is right, and what is fast."""
    from dptrain.backend.cuda.tma import COLUMNS, SCHEDULES

    report.add("", "| schedule | from float64, four layouts | verdict | L2 bytes an operation |", "|---|---|---|---|")
    for name, record in records.items():
        worst = record.get("worst")
        verdict = record.get("failed") or ("right" if worst is not None and worst <= LIMIT else "WRONG")
        shown = "" if worst is None else f"{worst:.1e}"
        # A block reads its rows, and its part of the columns.
        rows, cluster = SCHEDULES[name].rows, SCHEDULES[name].cluster
        report.add(f"| {name} | {shown} | {verdict} | {(rows + COLUMNS / cluster) / (rows * COLUMNS):.4f} |")
    report.add("", "Microseconds, and of products Tflop/s of their median:", "")
    report.add("| schedule | M x N x K, or a step | tensor maps | product_wgmma | PyTorch |", "|---|---|---|---|---|")
    for name, record in records.items():
        for label, times in record["times"].items():
            cells = [
                cell(label, times[kernel]) for kernel in ("tensor maps", "product_wgmma", "PyTorch") if kernel in times
            ]
            report.add(f"| {name} | {label} | {' | '.join([*cells, '', ''][:3])} |")


def cell(label: str, seconds: list[float]) -> str:
    """Return microseconds, and the speed of a product."""
    text, sizes = spread([1e6 * t for t in seconds], ".1f"), label.split(" x ")
    if len(sizes) < 3:
        return text
    M, N, K = map(int, sizes)
    return f"{text}, {2 * M * N * K / max(statistics.median(seconds), 1e-9) / 1e12:.0f}"


def main() -> int:
    """Return 1 where a schedule is wrong, fails or hangs, or where there is no GPU for them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=2.0, metavar="M", help="for all schedules together")
    parser.add_argument("--rounds", type=int, default=None, metavar="N", help="default 20")
    parser.add_argument("--only", metavar="NAME", help="this schedule alone, in this process, as JSON")
    parser.add_argument("--peers", action="store_true", help="PyTorch beside the schedule of --only")
    parser.add_argument("--compile", action="store_true", help="only compile all kernels into the cache; needs no GPU")
    parser.add_argument("--quick", action="store_true", help="tiny matrices: does everything work?")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the report there")
    options = parser.parse_args()
    from dptrain.backend.cuda.tma import SCHEDULES

    rounds = options.rounds or (2 if options.quick else 20)
    if options.only:
        measured(options.only, options.quick, 60 * options.minutes, rounds, options.peers)
        return 0
    if options.compile:
        compile_all()
        return 0
    from dptrain.errors import DeviceError, DptrainError

    try:
        if Gpu(options.quick).record.capability != (9, 0):
            raise DeviceError("the GPU is not of compute capability 9.0")
    except DptrainError as error:
        print(f"gpu_tma.py measures nothing here: {error}")
        return 1
    report = Report()
    report.add("# Products by tensor maps", "")
    if "EMULATOR_HOME" in os.environ:
        report.add("- On the emulated driver: this shows that the script works; no time means anything")
    report.add(
        command_line(), machine_line(), f"- GPU: {nvidia_smi()}", f"- Versions: {versions(('dptrain', 'torch'))}"
    )
    seconds = 60 * options.minutes / len(SCHEDULES)
    if not options.quick:
        compile_all()
    first = next(iter(SCHEDULES))
    records = {name: started(name, options.quick, seconds, rounds, name == first) for name in SCHEDULES}
    table(report, records)
    if options.output:
        report.save(options.output)
        options.output.with_suffix(".json").write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
    failed = [name for name, record in records.items() if "failed" in record or not record.get("worst", 1) <= LIMIT]
    report.add("", f"{len(records) - len(failed)} of {len(records)} schedules are right")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
