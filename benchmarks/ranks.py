"""Training speed of ranks on one CPU node beside one process with as many threads.

    python benchmarks/ranks.py --output benchmarks/results/ranks-on-a-cpu-node_HARDWARE_DATE.md
    python benchmarks/ranks.py --before ../before          # another version's ranks as well
    python benchmarks/ranks.py --through "chrt -f 20"      # on a machine that others use as well

One process with N threads, and `mpirun -n N` with one thread each, train the same MLP with Adam on the same rows, in
turns, each in processes of its own; an epoch begins once all ranks have come, after a pause in which the machine rests.
A ratio is that of two neighbours in a round.
"""

import argparse
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from common import CLASSES, Report, command_line, machine_line, numbers, spread, versions

# Seconds of rest before an epoch: real-time priority is taken away from who uses a core all the time.
PAUSE = 0.6


def work(hidden: list[int], batch: int, samples: int, epochs: int) -> None:
    """Train, and print the seconds of each epoch but the first, and the last loss."""
    import numpy as np

    import dptrain as dp
    from dptrain.comm import current

    (x, y), _ = dp.datasets.load("strokes")
    seconds: list[float] = []

    class Stopwatch(dp.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            time.sleep(PAUSE)
            current().barrier()
            self.started = time.perf_counter()

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            seconds.append(time.perf_counter() - self.started)

    layers = [dp.layers.Dense(units, activation="relu") for units in hidden]
    model = dp.Sequential(
        [dp.layers.Rescaling(1 / 255), *layers, dp.layers.Dense(CLASSES, activation="softmax")], seed=1
    )
    model.compile(dp.optimizers.Adam(), "sparse_categorical_crossentropy", device="cpu")
    rows = x.reshape(len(x), -1)[:samples], y.astype(np.int64)[:samples]
    losses = model.fit(*rows, batch, 1 + epochs, verbose=0, callbacks=[Stopwatch()]).history["loss"]
    if dp.rank() == 0:
        print(json.dumps([seconds[1:], losses[-1]]))


def timed(ranks: int, threads: int, version: Path, options: argparse.Namespace, *arguments: Any) -> tuple[float, float]:
    """Return samples/s of the median epoch of some ranks, and their last loss."""
    launcher = [*shlex.split(options.through), *(["mpirun", "-n", str(ranks)] if ranks > 1 else [])]
    limits = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))
    command = [*launcher, sys.executable, __file__, "--worker", json.dumps(arguments)]
    environment = {**os.environ, **limits, "PYTHONPATH": str(version)}
    process = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    seconds, loss = json.loads(process.stdout.splitlines()[-1])
    return arguments[2] / statistics.median(seconds), loss


def main() -> int:
    """Measure all networks, and report."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--networks", nargs="*", default=["128", "512-512"], help="units of the hidden layers")
    parser.add_argument("--batch-sizes", type=numbers, default=[32, 128, 1024], metavar="N,N")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=5, help="timed in a round")
    parser.add_argument("--samples", type=int, default=20_000)
    parser.add_argument("--before", type=Path, help="a folder with another version's dptrain/ and kernels/")
    parser.add_argument("--through", default="", metavar="COMMAND", help="that starts both")
    parser.add_argument("--output", type=Path, help="a file for the report")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(*json.loads(options.worker))
        return 0
    if shutil.which("mpirun") is None:
        parser.error("there is no mpirun: pip install mpich")
    root, ranks = Path(__file__).resolve().parents[1], options.ranks
    ways = {"one process": (1, ranks, root), f"{ranks} ranks": (ranks, 1, root)}
    if options.before is not None:
        ways[f"{ranks} ranks before"] = ranks, 1, options.before.resolve()
    first, *others = ways
    report = Report()
    report.add("# Ranks on one CPU node", "", command_line(), machine_line())
    report.add(f"- Versions: {versions(('dptrain', 'numpy', 'mpi4py', 'mpich'))}")
    report.add(
        f"- One process with {ranks} threads, and {ranks} ranks with one each; {options.rounds} rounds of "
        f"{options.epochs} epochs of {options.samples} samples; samples/s of the median epoch, median (min to max) of "
        "the rounds; ratios are those of a round; losses of the last epoch",
        "",
        "| network | batch | " + " | ".join([*ways, *(f"{name} / one" for name in others), "losses"]) + " |",
        "|---|---|" + "---|" * (len(ways) + len(others) + 1),
    )
    for network in options.networks:
        for batch in options.batch_sizes:
            arguments = [int(units) for units in network.split("-")], batch, options.samples, options.epochs
            times: dict[str, list[float]] = {name: [] for name in ways}
            losses = {}
            for _ in range(options.rounds):
                for name, way in ways.items():
                    speed, losses[name] = timed(*way, options, *arguments)
                    times[name].append(speed)
            ratios = [[a / b for a, b in zip(times[name], times[first], strict=True)] for name in others]
            cells = [spread(times[name], ",.0f") for name in ways] + [spread(ratio, ".2f") for ratio in ratios]
            cells.append(", ".join(f"{losses[name]:.6f}" for name in ways))
            report.add(f"| 784-{network}-{CLASSES} | {batch} | " + " | ".join(cells) + " |")
    if options.output:
        report.save(options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
