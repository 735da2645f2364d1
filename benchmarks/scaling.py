"""Whether `explain --ranks` tells the truth on a CPU: predicted beside measured seconds of a step on 1, 2 and 4 ranks.

    python benchmarks/scaling.py
    python benchmarks/scaling.py --rounds 9 --output benchmarks/results/scaling_prediction_HARDWARE_DATE.md

Every round starts dptrain on each number of ranks in turn, one thread a rank. Such a process first measures the machine
as `explain --ranks` does, then runs steps of each network; the fastest call counts, as neighbours on the machine only
add to it. What is predicted in a round comes from the rates of its one rank and the messages of its two ranks.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common import Report, command_line, machine_line, spread, versions

# Hidden layers, samples of a global batch, and steps of a call that is timed: as many as may run undisturbed even on a
# machine that others use too.
NETWORKS = {
    "784-128-10, batch 128": ([128], 128, 6),
    "784-512-10, batch 128": ([512], 128, 2),
}


def model_of(hidden: list[int]) -> Any:
    """Return a compiled network, as `python -m dptrain` builds it."""
    import dptrain as dp

    hidden_layers = [dp.layers.Dense(units, "relu") for units in hidden]
    head = dp.layers.Dense(10, "softmax")
    model = dp.Sequential(
        [dp.layers.Input((28, 28)), dp.layers.Rescaling(1 / 255), dp.layers.Flatten(), *hidden_layers, head]
    )
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"], device="cpu")
    return model


def work(calls: int) -> None:
    """Measure on the ranks that were started; rank 0 prints a line of JSON."""
    import numpy as np

    from dptrain import comm as comms
    from dptrain.batches.base import ArrayBatches
    from dptrain.batches.inputs import Samples
    from dptrain.batches.sampling import GlobalSampler
    from dptrain.cli.measuring import measured
    from dptrain.train.devices import open_backend

    comm = comms.current()
    facts: dict[str, Any] = {"rates": asdict(measured(open_backend(comm, device="cpu"), comm)), "steps": {}}
    rng = np.random.default_rng(0)
    for name, (hidden, batch, steps) in NETWORKS.items():
        model = model_of(hidden)
        trainer, step = model._open_trainer(comm), model._make_step("train")
        images = rng.integers(0, 256, (batch, 28, 28), np.uint8)
        samples = Samples(images, rng.integers(0, 10, batch), dtype=model._data_dtype)
        sampler = GlobalSampler(batch, batch, comm.rank, comm.size, shuffle=False)
        with ArrayBatches(*samples.stored(), sampler).open(trainer.backend, None) as batches:
            shards = [next(iter(batches.epoch(0)))] * steps
            rows, times = batches.rows(shards), list[float]()
            for _ in range(calls):
                comm.barrier()
                begun = time.perf_counter()
                trainer.programs.run(step, batches.spec, rows, shards)
                trainer.wait()
                times.append((time.perf_counter() - begun) / steps)
        facts["steps"][name] = max(comm.allgather(min(times)))
    if comm.rank == 0:
        print(json.dumps(facts), flush=True)


def started(ranks: int, options: argparse.Namespace) -> dict[str, Any]:
    """Run `work` on so many ranks and return what it measured."""
    shared = ranks > (os.cpu_count() or 1)  # ranks that share cores wait for each other most of the time
    calls = options.calls // 10 if shared else options.calls
    command = [sys.executable, __file__, "--work", "--calls", str(calls)]
    if ranks > 1:
        command = [shutil.which("mpirun") or "mpirun", "-n", str(ranks), *command]
    process = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=600
    )
    if process.returncode:
        raise SystemExit(f"{ranks} ranks: exit code {process.returncode}: {process.stderr[-2000:]}")
    facts: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return facts


def predicted(rounds: dict[int, dict[str, Any]], cores: int) -> dict[str, dict[int, float]]:
    """Return the predicted seconds of a step by network and ranks, from one round's rates."""
    from dptrain.cli.commands.scaling import cpu_hardware, of_model
    from dptrain.cli.measuring import Rates
    from dptrain.program.cost.hardware import Link

    own_rates, link = rounds[1]["rates"], rounds[2]["rates"]["link"]
    rates = Rates(own_rates["flops"], own_rates["bandwidth"], None)
    seconds = {}
    for name, (hidden, batch, _) in NETWORKS.items():
        hardware = cpu_hardware(rates, max(rounds), cores, link=Link(**link))
        data_parallel = of_model(model_of(hidden), batch, dtype="uint8")[0]
        seconds[name] = {ranks: data_parallel.predict(ranks, batch, hardware).seconds for ranks in rounds}
    return seconds


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--calls", type=int, default=300, help="that are timed, of each network (default: 300)")
    parser.add_argument("--ranks", default="1,2,4", help="the first two must be 1 and 2 (default: 1,2,4)")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.calls)
        return
    ranks, cores = [int(text) for text in options.ranks.split(",")], os.cpu_count() or 1
    report = Report()
    report.add("# Predicted and measured steps on a CPU", "", command_line(), machine_line())
    report.add(f"- Versions: {versions(('dptrain', 'numpy', 'mpi4py', 'mpich'))}", "")
    rounds, predictions = [], []
    for _ in range(options.rounds):
        rounds.append({count: started(count, options) for count in ranks})
        predictions.append(predicted(rounds[-1], cores))
    report.add(f"{options.rounds} rounds; medians (ranges). Samples are uint8, Adam, accuracy; one thread a rank.", "")
    report.add("| network | ranks | predicted, us | measured, us | predicted / measured, by round | / least measured |")
    report.add("|---|---:|---:|---:|---:|---:|")
    for name in NETWORKS:
        for count in ranks:
            measured = [1e6 * facts[count]["steps"][name] for facts in rounds]
            expected = [1e6 * prediction[name][count] for prediction in predictions]
            ratios = [a / b for a, b in zip(expected, measured, strict=True)]
            times = f"{spread(expected, ',.0f')} | {spread(measured, ',.0f')}"
            least = statistics.median(expected) / min(measured)
            report.add(f"| {name} | {count} | {times} | {spread(ratios, '.2f')} | {least:.2f} |")
    report.add("", "| network | ranks | speedup predicted | speedup measured, by round |", "|---|---:|---:|---:|")
    for name in NETWORKS:
        for count in ranks[1:]:
            measured = [facts[1]["steps"][name] / facts[count]["steps"][name] for facts in rounds]
            expected = [prediction[name][1] / prediction[name][count] for prediction in predictions]
            report.add(f"| {name} | {count} | {spread(expected, '.2f')} | {spread(measured, '.2f')} |")
    report.add("", "Rates, measured in the same rounds:", "")
    rates = [facts[1]["rates"] for facts in rounds]
    links = [facts[2]["rates"]["link"] for facts in rounds]
    report.add(f"- products: {spread([rate['flops'] / 1e9 for rate in rates], '.0f')} Gflop/s of one core")
    report.add(f"- memory: {spread([rate['bandwidth'] / 1e9 for rate in rates], '.0f')} GB/s")
    report.add(f"- messages of two ranks: {spread([link['bandwidth'] / 1e9 for link in links], '.1f')} GB/s")
    report.add(f"- their latency: {spread([1e6 * link['latency'] for link in links], '.1f')} us")
    if options.output:
        report.save(options.output)


if __name__ == "__main__":
    main()
