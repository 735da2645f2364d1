"""Candidates for half precision's largest products (`kernels/product_tma.cuh`): right or wrong, and how fast.

    python benchmarks/gpu_tma.py --minutes 2 --output benchmarks/results/gpu-tma_HARDWARE_DATE.md
    tests/emulator/run python benchmarks/gpu_tma.py --quick       # does everything work?

Each candidate has a process of its own, so that one that faults or hangs ends alone. There it multiplies in all four
layouts, beside NumPy in float64; if it is right, it is timed, in turns with the kernel that programs use, and the first
one with PyTorch's cuBLAS too (where it is installed). All of them write bfloat16.

No program chooses a candidate. Without a GPU of compute capability 9.0 it ends with one line.
"""

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from common import Report, command_line, machine_line, nvidia_smi, one_line, spread, versions
from gpu_kernels import Gpu, on, ours, theirs

LAYOUTS = {"nn": (False, False), "nt": (False, True), "tn": (True, False), "tt": (True, True)}
# Those of 784-4096x3-10 at batch 1024, fewer terms, and as many as hide every epilogue.
TIMED = [(1024, 4096, 4096), (4096, 4096, 1024), (4096, 4096, 4096), (8192, 8192, 1024)]
CHECKED = [(1032, 2056, 520), (4096, 4096, 1032)]
LIMIT = 1e-5


class Operands:
    """a, b and c on the GPU; a and b are bfloat16 with all digits."""

    def __init__(self, sizes: tuple[int, int, int], turned: tuple[bool, bool], result: str) -> None:
        import ml_dtypes
        import numpy as np

        from dptrain.backend.cuda.gpu.device import cuda

        M, N, K = sizes
        rng, self.result = np.random.default_rng(M + N + K), result
        self.a, self.b = (
            rng.standard_normal(shape, np.float32).astype(ml_dtypes.bfloat16) for shape in ((M, K), (K, N))
        )
        laid = (np.ascontiguousarray(x.T if turn else x) for x, turn in zip((self.a, self.b), turned, strict=True))
        self.places = [cuda.to_device(x.view(np.uint16)) for x in laid]
        self.c = cuda.mem_alloc(M * N * (4 if result == "float32" else 2))

    def addresses(self) -> tuple[int, int]:
        """Return those of a and b."""
        return int(self.places[0]), int(self.places[1])


def difference(gpu: Gpu, name: str, sizes: tuple[int, int, int], layout: str) -> float:
    """Return how far a candidate's product is from float64's, as a norm over a norm."""
    import numpy as np

    from dptrain.backend.cuda import tma
    from dptrain.backend.cuda.gpu.device import cuda

    operands = Operands(sizes, LAYOUTS[layout], "float32")
    stream = gpu.backend("float32").stream
    queue = tma.prepared(gpu.record, tma.CANDIDATES[name], sizes, LAYOUTS[layout], "bfloat16")
    queue.launch(queue.maps(*operands.addresses()), int(operands.c), stream)
    stream.synchronize()
    values = cuda.from_device(operands.c, sizes[:2], np.float32)
    expected = operands.a.astype(np.float64) @ operands.b.astype(np.float64)
    return float(np.linalg.norm(values - expected) / np.linalg.norm(expected))


def providers(gpu: Gpu, name: str, sizes: tuple[int, int, int], peers: bool) -> dict[str, Callable[[], object]]:
    """Return what queues the product: the candidate, programs' kernel, and with `peers` PyTorch's."""
    from dptrain.backend.cuda import tma

    stream, operands = gpu.backend("float32").stream, Operands(sizes, LAYOUTS["nn"], "bfloat16")
    queue = tma.prepared(gpu.record, tma.CANDIDATES[name], sizes, LAYOUTS["nn"], "bfloat16", result="bfloat16")
    maps = queue.maps(*operands.addresses())
    by_name: dict[str, Callable[[], object]] = {
        "candidate": lambda: queue.launch(maps, int(operands.c), stream),
        "product_wgmma": ours(gpu, "product", "bfloat16", sizes, library=False),
    }
    if not peers:
        return by_name
    try:
        by_name["PyTorch"] = on(stream, theirs("product", "bfloat16", sizes))
    except Exception as error:  # not installed, or sees no GPU
        print(one_line(f"no PyTorch: {error}"), file=sys.stderr)
    return by_name


def repeat(queue: Callable[[], object], times: int) -> None:
    """Queue some work several times."""
    for _ in range(times):
        queue()


def compile_all() -> None:
    """Compile all kernels for compute capability 9.0, side by side, into the cache."""
    from dptrain.backend.cuda import tma
    from dptrain.backend.cuda.compile import compiled_text

    texts = [
        tma.source(candidate, turned, "dp_bfloat16", result)
        for candidate in tma.CANDIDATES.values()
        for layout, turned in LAYOUTS.items()
        for result in ("float", "dp_bfloat16")[: 2 if layout == "nn" else 1]
    ]
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        list(threads.map(lambda text: compiled_text("product_tma", text, "sm_90a"), texts))


def one(name: str, quick: bool, seconds: float, rounds: int, peers: bool) -> dict[str, Any]:
    """Check and time one candidate, in this process; no product is begun so many seconds after the checks."""
    from dptrain.backend.cuda import tma

    gpu = Gpu(quick)
    checked = [(136, 264, 72)] if quick else CHECKED
    worst = max(difference(gpu, name, sizes, layout) for sizes in checked for layout in LAYOUTS)
    record: dict[str, Any] = {"worst": worst, "times": {}}
    print(json.dumps(record), flush=True)
    if worst > LIMIT:
        return record
    until = time.monotonic() + seconds
    for sizes in [(264, 264, 136)] if quick else TIMED:
        if time.monotonic() > until:
            break
        assert quick or tma.suits(*sizes), sizes
        repeats, work = 1 if quick else 10, providers(gpu, name, sizes, peers)
        times: dict[str, list[float]] = {provider: [] for provider in work}
        for provider in work.values():
            provider()
        for _ in range(rounds):
            for provider, queue in work.items():
                (taken,) = gpu.timed(gpu.backend("float32").stream, [functools.partial(repeat, queue, repeats)])
                times[provider].append(taken / repeats)
        record["times"][" x ".join(map(str, sizes))] = times
        print(json.dumps(record), flush=True)
    return record


def started(name: str, quick: bool, limit: float, rounds: int, peers: bool) -> dict[str, Any]:
    """Return what a process of a candidate's own said last, with "failed" where it did not end well."""
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
    from dptrain.backend.cuda.tma import CANDIDATES, COLUMNS

    report.add("", "| candidate | from float64, four layouts | verdict | L2 bytes an operation |", "|---|---|---|---|")
    for name, record in records.items():
        worst = record.get("worst")
        verdict = record.get("failed") or ("right" if worst is not None and worst <= LIMIT else "WRONG")
        shown = "" if worst is None else f"{worst:.1e}"
        # A block reads its rows, and its part of the columns.
        rows, cluster = CANDIDATES[name].rows, CANDIDATES[name].cluster
        report.add(f"| {name} | {shown} | {verdict} | {(rows + COLUMNS / cluster) / (rows * COLUMNS):.4f} |")
    report.add("", "Microseconds, and Tflop/s of their median:", "")
    report.add("| candidate | M x N x K | candidate | product_wgmma | PyTorch |", "|---|---|---|---|---|")
    for name, record in records.items():
        for sizes, times in record["times"].items():
            M, N, K = map(int, sizes.split(" x "))
            cells = [
                f"{spread([1e6 * t for t in seconds], '.1f')}, "
                f"{2 * M * N * K / max(statistics.median(seconds), 1e-9) / 1e12:.0f}"
                for seconds in (times.get(provider, []) for provider in ("candidate", "product_wgmma", "PyTorch"))
                if seconds
            ]
            report.add(f"| {name} | {sizes} | {' | '.join([*cells, '', ''][:3])} |")


def main() -> int:
    """Return 1 where a candidate is wrong, fails or hangs, or where there is no GPU for them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=2.0, metavar="M", help="for all candidates together")
    parser.add_argument("--rounds", type=int, default=None, metavar="N", help="default 20")
    parser.add_argument("--only", metavar="NAME", help="this candidate alone, in this process, as JSON")
    parser.add_argument("--peers", action="store_true", help="PyTorch beside the candidate of --only")
    parser.add_argument("--compile", action="store_true", help="only compile all kernels into the cache; needs no GPU")
    parser.add_argument("--quick", action="store_true", help="tiny matrices: does everything work?")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the report there")
    options = parser.parse_args()
    from dptrain.backend.cuda.tma import CANDIDATES

    rounds = options.rounds or (2 if options.quick else 20)
    if options.only:
        one(options.only, options.quick, 60 * options.minutes, rounds, options.peers)
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
    seconds = 60 * options.minutes / len(CANDIDATES)
    if not options.quick:
        compile_all()
    first = next(iter(CANDIDATES))
    records = {name: started(name, options.quick, seconds, rounds, name == first) for name in CANDIDATES}
    table(report, records)
    if options.output:
        report.save(options.output)
        options.output.with_suffix(".json").write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
    failed = [name for name, record in records.items() if "failed" in record or not record.get("worst", 1) <= LIMIT]
    report.add("", f"{len(records) - len(failed)} of {len(records)} candidates are right")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
