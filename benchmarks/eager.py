"""What an eager call costs: small ops one by one, beside Keras on PyTorch where it is installed.

Ours and Keras' work in processes of their own, which take turns; a number is the least CPU time of a call over rounds,
which other work on the machine disturbs least.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import time
import timeit
from pathlib import Path
from typing import Any

CALLS, REPEATS = 100, 20


def measure(who: str) -> dict[str, float]:
    """Return microseconds of a call by what is called."""
    if who == "Keras on PyTorch":
        os.environ["KERAS_BACKEND"] = "torch"
        import torch
        from keras import ops, random

        torch.set_num_threads(1)
    else:
        from dptrain import ops, random  # type: ignore[no-redef]
    import numpy as np

    rng = np.random.default_rng(0)
    x, y, w, b = (
        ops.convert_to_tensor(rng.random(shape, np.float32)) for shape in ((32, 64), (32, 64), (64, 32), (64,))
    )
    calls: dict[str, Any] = {
        "x + y": lambda: x + y,
        "x + 1.0": lambda: x + 1.0,
        "x + row": lambda: x + b,
        "x @ w": lambda: x @ w,
        "ops.add": lambda: ops.add(x, y),
        "ops.exp": lambda: ops.exp(x),
        "ops.sum": lambda: ops.sum(x),
        "ops.mean, axis": lambda: ops.mean(x, axis=-1),
        "ops.softmax": lambda: ops.softmax(x),
        "ops.where": lambda: ops.where(x > y, x, y),
        "ops.reshape": lambda: ops.reshape(x, (64, 32)),
        "ops.concatenate": lambda: ops.concatenate([x, y], axis=0),
        "x[0]": lambda: x[0],
        "x[1:5]": lambda: x[1:5],
        "x[:, None]": lambda: x[:, None],
        "random.uniform (32, 64)": lambda: random.uniform((32, 64)),
        "random.normal (32, 64)": lambda: random.normal((32, 64)),
        "random.normal (3,)": lambda: random.normal((3,)),
    }
    times = {}
    for name, call in calls.items():
        call()
        seconds = timeit.repeat(call, number=CALLS, repeat=REPEATS, timer=time.process_time)
        times[name] = min(seconds) / CALLS * 1e6
    return times


def main() -> None:
    """Measure in turns and print, or write, a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, help="write the report here as well")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(measure(options.worker)))
        return
    peers = [name for name in ("torch", "keras") if importlib.util.find_spec(name)]
    who = ["dptrain", "Keras on PyTorch"] if len(peers) == 2 else ["dptrain"]
    best: dict[str, dict[str, float]] = {library: {} for library in who}
    for _ in range(options.rounds):
        for library in who:
            command = [sys.executable, __file__, "--worker", library]
            output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            for name, value in json.loads(output.splitlines()[-1]).items():
                best[library][name] = min(value, best[library].get(name, value))
    versions = ", ".join(f"{package} {importlib.metadata.version(package)}" for package in ("dptrain", "numpy", *peers))
    lines = [
        "# Cost of eager calls",
        "",
        f"- Command: `python {' '.join(sys.argv)}`",
        f"- Machine: {os.cpu_count()} cores, load average at the end {os.getloadavg()[0]:.1f}",
        f"- Versions: Python {sys.version.split()[0]}, {versions}",
        "",
        f"Microseconds of CPU time a call, the least of {options.rounds * REPEATS} times {CALLS} calls.",
        "x and y are (32, 64), w is (64, 32).",
        "",
        f"| call | {' | '.join(who)} |" + (" ratio |" if len(who) == 2 else ""),
        "|---|" + "---:|" * (3 if len(who) == 2 else 1),
    ]
    for name, ours in best["dptrain"].items():
        numbers = [best[library][name] for library in who]
        ratio = f" {ours / numbers[1]:.1f} |" if len(numbers) == 2 else ""
        lines.append(f"| `{name}` | {' | '.join(f'{number:.1f}' for number in numbers)} |{ratio}")
    report = "\n".join(lines) + "\n"
    print(report)
    if options.output:
        options.output.write_text(report)


if __name__ == "__main__":
    main()
