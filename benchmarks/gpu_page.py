"""The page that benchmarks/gpu_machine.sh leaves: what ran, what failed first, predicted and measured times.

    python benchmarks/gpu_page.py OUTDIR

It reads what the steps have written so far, and leaves out what they have not.
"""

import json
import re
import statistics
import sys
from pathlib import Path
from typing import Any


def loaded(path: Path) -> Any:
    """Return what a JSON file holds, or None where it is not whole."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def ran(out: Path) -> list[str]:
    """Return the steps with how each ended."""
    machine = out / "machine.txt"
    lines = ["## What ran", "", "```text"]
    if machine.exists():
        lines += [
            line for line in machine.read_text(errors="replace").splitlines() if line.startswith(("pycuda", "nvcc"))
        ]
    lines += (out / "summary.txt").read_text(errors="replace").splitlines()
    return [*lines, "```"]


def failed(out: Path) -> list[str]:
    """Return the first errors of each log."""
    lines = ["", "## What failed first", ""]
    for log in sorted((out / "logs").glob("*.log"), key=lambda path: path.stat().st_mtime):
        text = log.read_text(errors="replace")
        pattern = r"^(?:FAILED|ERROR|E  |Fatal|Timeout|========= (?:ERROR|Error|Invalid|Hazard|Race)).*$"
        first = re.findall(pattern, text, re.MULTILINE)[:8]
        if first:
            lines += [f"{log.stem}:", "```text", *(line[:240] for line in first), "```"]
    return lines if len(lines) > 3 else [*lines, "Nothing."]


def kernels(records: list[dict[str, Any]]) -> list[str]:
    """Return a line a network: the step as predicted, its kernels' sum, and in a graph; then its slowest kernels."""
    lines = ["", "## Steps, predicted and measured: us", ""]
    lines += [
        "| network | predicted, H100 | predicted, H200 | sum of kernels | step in a graph |",
        "|---|---:|---:|---:|---:|",
    ]
    for record in records:
        predicted, here = record["predicted"], 1e6 * sum(record["kernels"])
        cells = [f"{1e6 * predicted[gpu]:,.1f}" for gpu in ("H100", "H200")]
        lines.append(f"| {record['name']} | {' | '.join(cells)} | {here:,.1f} | {1e6 * record['in_graph']:,.1f} |")
    lines += ["", "The three slowest kernels of each:", ""]
    for record in records:
        rows = zip(record["names"], record["kernels"], record["predicted_kernels"]["H200"], strict=True)
        for name, seconds, predicted in sorted(rows, key=lambda row: -row[1])[:3]:
            lines.append(
                f"- {record['name']}: {1e6 * seconds:,.1f} us, H200 predicted {1e6 * predicted:,.1f}: `{name[:90]}`"
            )
    return lines


def speeds(measured: list[dict[str, Any]], title: str) -> list[str]:
    """Return a line a configuration: samples/s by framework."""
    lines = ["", f"## {title}: samples/s, medians", ""]
    for entry in measured:
        work = entry["work"]
        runs = f", {work['runs']} runs" if "runs" in work else ""
        rates = []
        for name, row in entry["rows"].items():
            rate = f"{statistics.median(row['speeds']):,.0f}" if row["speeds"] else row["failed"][:80] or "-"
            rates.append(f"{name} {rate}")
        hidden = "-".join(map(str, work["hidden"]))
        lines.append(f"- {work['precision']}, 784-{hidden}-10, batch {work['batch_size']}{runs}: {'; '.join(rates)}")
    return lines


def rows_of(table: Path) -> list[str]:
    """Return the tables of a report, each behind an empty line."""
    rows: list[str] = []
    previous = ""
    for line in table.read_text(errors="replace").splitlines():
        if line.startswith("|"):
            rows += ["", line] if not previous.startswith("|") else [line]
        previous = line
    return rows


def main() -> int:
    """Print the page."""
    out = Path(sys.argv[1])
    lines = ["# dptrain on a GPU machine", "", *ran(out), *failed(out)]
    if records := loaded(out / "gpu-kernels.json"):
        lines += kernels(records)
    if (candidates := out / "gpu-tma.md").exists():
        lines += ["", "## Products by tensor maps: right or wrong, us and Tflop/s", *rows_of(candidates)]
    for name in ("gpu-mlp-small", "gpu-mlp-large", "sweep"):
        if content := loaded(out / f"{name}.json"):
            lines += speeds(content["measured"], name)
    for table in sorted(out.glob("conv-*.md")):
        lines += ["", f"## {table.stem}", *rows_of(table)]
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
