"""Export, load and first call of an LSTM: CPU seconds and file sizes, as a program and as ONNX.

    python benchmarks/exported_loops.py --before FOLDER --output benchmarks/results/exported-loops_HARDWARE_DATE.md

Each round is a process of its own, with an empty cache of compiled code. Seconds are those of the processor: of Python,
and apart from them of the C++ compiler at the first call. `--before` takes another version's folder, and has both
take turns. A round that takes longer than `--limit` seconds is given up, and the cell says so.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import Report, command_line, machine_line, spread, versions

ROOT = Path(__file__).resolve().parents[1]
STEPS = (10, 200, 1000)
ROWS = 32
COLUMNS = {
    "nodes": ",.0f",
    "file, bytes": ",.0f",
    "export": ".3f",
    "load": ".3f",
    "first call": ".3f",
    "C++ compiler": ".2f",
    "later call": ".4f",
    "ONNX nodes": ",.0f",
    "ONNX file, bytes": ",.0f",
    "ONNX export": ".3f",
    "ONNX Runtime's load": ".3f",
    "ONNX Runtime's call": ".4f",
}


def main() -> int:
    """Run as the parent, or as one round."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--before", type=Path, help="a folder with another version's dptrain/ and kernels/")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, nargs="*", default=STEPS)
    parser.add_argument("--limit", type=float, default=600, help="seconds of a round")
    parser.add_argument("--output", type=Path, help="a file for the report")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        measure(options.worker)
        return 0
    report = Report()
    report.add("# Loops in exported files", "", command_line(), machine_line())
    report.add(f"- Versions: {versions(('numpy', 'onnx', 'onnxruntime'))}")
    report.add(f"- CPU seconds, and counts; median (least to most) of {options.rounds}", "")
    report.add(f"`Input((steps, 64)), LSTM(128), Dense(10)` for {ROWS} rows of float32, with OMP_NUM_THREADS=1.", "")
    report.add(f"| steps | version | {' | '.join(COLUMNS)} |", f"|---|---{'|---' * len(COLUMNS)}|")
    folders = {"before": options.before, "after": ROOT} if options.before else {"this": ROOT}
    for steps in options.steps:
        rounds: dict[str, list[dict[str, float]]] = {version: [] for version in folders}
        for _ in range(options.rounds):
            for version, folder in folders.items():
                rounds[version].append(of_process(steps, folder.resolve(), options.limit))
        for version, values in rounds.items():
            cells = (cell([value[name] for value in values if name in value], form) for name, form in COLUMNS.items())
            report.add(f"| {steps} | {version} | {' | '.join(cells)} |")
    if options.output is not None:
        report.save(options.output)
    return 0


def cell(values: list[float], form: str) -> str:
    """Return the median and range of what rounds came to."""
    if len(set(values)) < 2:
        return format(values[0], form) if values else "too long"
    return spread(values, form)


def of_process(steps: int, folder: Path, limit: float) -> dict[str, float]:
    """Return what a process with a version's code measures within the limit."""
    with tempfile.TemporaryDirectory() as cache:
        settings = {"PYTHONPATH": str(folder), "DPTRAIN_CACHE": cache, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(Path(__file__).resolve()), "--worker", str(steps)]
        try:
            run = subprocess.run(command, env=os.environ | settings, stdout=subprocess.PIPE, timeout=limit, check=True)
            text = run.stdout
        except subprocess.TimeoutExpired as expired:
            text = expired.stdout or b""
    pairs = (line.split("\t") for line in text.decode().splitlines())
    return {name: float(value) for name, value in pairs}


def measure(steps: int) -> None:
    """Print the columns of a round, each when it is measured."""
    import json

    import numpy as np
    import onnx
    import onnxruntime

    import dptrain as dp
    from dptrain import layers
    from dptrain.saving import onnx_file  # noqa: F401  # whose import is not counted

    x = np.random.default_rng(0).normal(size=(ROWS, steps, 64)).astype(np.float32)
    warm = dp.Sequential([layers.Input((3,)), layers.Dense(2)])
    model = dp.Sequential([layers.Input((steps, 64)), layers.LSTM(128), layers.Dense(10)], seed=1)
    with tempfile.TemporaryDirectory() as folder:
        path, onnx_path = Path(folder, "program"), Path(folder, "model.onnx")
        for format_name in ("onnx", "program"):  # with what is imported at the first
            warm.export(Path(folder, "warm"), format=format_name)
        dp.saving.load_program(Path(folder, "warm"), device="cpu")
        timed("export", lambda: model.export(path))
        header = json.loads(path.read_bytes()[8 : 8 + int.from_bytes(path.read_bytes()[:8], "little")])
        nodes = json.loads(header["__metadata__"]["about"])["nodes"]
        note("nodes", sum(1 + len(node.get("body", {}).get("nodes", [])) for node in nodes))
        note("file, bytes", path.stat().st_size)
        program = timed("load", lambda: dp.saving.load_program(path, device="cpu"))
        before = children()
        timed("first call", lambda: program(x))
        note("C++ compiler", children() - before)
        timed("later call", lambda: program(x))
        timed("ONNX export", lambda: model.export(onnx_path, format="onnx"))
        note("ONNX nodes", counted(onnx.load(onnx_path).graph))
        note("ONNX file, bytes", onnx_path.stat().st_size)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        session = timed(
            "ONNX Runtime's load",
            lambda: onnxruntime.InferenceSession(onnx_path, options, providers=["CPUExecutionProvider"]),
        )
        inputs = {session.get_inputs()[0].name: x}
        session.run(None, inputs)
        timed("ONNX Runtime's call", lambda: session.run(None, inputs))


def note(name: str, value: float) -> None:
    """Print a column at once, for a parent that may not wait for the last."""
    print(f"{name}\t{value}", flush=True)


def timed(name: str, work: Callable[[], Any]) -> Any:
    """Print what some work takes, and return its result."""
    begun = time.process_time()
    result = work()
    note(name, time.process_time() - begun)
    return result


def children() -> float:
    """Return the CPU seconds of processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def counted(graph: Any) -> int:
    """Return how many nodes an ONNX graph has, with those of its bodies."""
    return sum(
        1 + sum(counted(attribute.g) for attribute in node.attribute if attribute.HasField("g")) for node in graph.node
    )


if __name__ == "__main__":
    sys.exit(main())
