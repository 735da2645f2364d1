"""Training speed of recurrent networks on the CPU: dptrain beside PyTorch and Keras on JAX, in one invocation.

    python benchmarks/sequences.py
    python benchmarks/sequences.py --rounds 9 --output benchmarks/results/sequences_HARDWARE_DATE.md

Each lives in a process of its own, and only one works at a time; rounds go A B C C B A. All train the same network with
batches of the same size, Adam and the mean cross-entropy; PyTorch eager, with `nn.LSTM` and `nn.GRU` (oneDNN) and fused
Adam. A round takes as many epochs as fit into its seconds; the ratio is to the better of the others in each round.

The memory is the highest resident size of a process while it trains, less what it had when its framework was imported.
The first start is what `fit` takes until one step is done, with an empty cache of compiled programs.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import (
    BETA_1,
    BETA_2,
    CLASSES,
    EPSILON,
    LEARNING_RATE,
    Report,
    WorkerError,
    WorkerProcess,
    answer,
    answering,
    begin_peak,
    command_line,
    machine_line,
    peak_bytes,
    spread,
    versions,
    words,
)

# What is trained: steps of a sample, units, batch.
WORKS = {"LSTM": (100, 128, 64), "GRU characters": (100, 256, 64)}
FEATURES, LETTERS, WIDTH = 64, 80, 64
FRAMEWORKS = ("dptrain", "PyTorch", "Keras on JAX")
# Seconds that a framework may take for an answer.
PATIENCE = 300.0
# Trains for so many seconds after a first epoch, with so many samples; returns samples a second, and the last loss.
Trainee = Callable[..., tuple[float, float]]


def samples(name: str, count: int) -> tuple[Any, Any]:
    """Return sequences and labels: numbers with a class each, or letters with the one that follows each."""
    import numpy as np

    rng, (steps, _, _) = np.random.default_rng(0), WORKS[name]
    if name == "LSTM":
        y = rng.integers(0, CLASSES, count)
        return (rng.random((count, steps, FEATURES), np.float32) + y[:, None, None] / 10).astype(np.float32), y
    text = np.cumsum(rng.integers(0, 3, (count, steps + 1)), axis=1) % LETTERS
    return text[:, :-1].astype(np.int32), text[:, 1:].astype(np.int64)


def keras_trainee(module: Any, name: str, count: int) -> Trainee:
    """Return what trains in dptrain or Keras, within one call of `fit`."""
    layers, (steps, units, batch) = module.layers, WORKS[name]
    x, y = samples(name, count)
    if name == "LSTM":
        network = [module.Input((steps, FEATURES)), layers.LSTM(units), layers.Dense(CLASSES)]
    else:
        recurrent = layers.GRU(units, return_sequences=True)
        letters = module.Input((steps,), dtype="int32")
        network = [letters, layers.Embedding(LETTERS, WIDTH), recurrent, layers.Dense(LETTERS)]
    model = module.Sequential(network)
    loss = module.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(module.optimizers.Adam(LEARNING_RATE, BETA_1, BETA_2, EPSILON), loss)

    def train(seconds: float, count: int = count) -> tuple[float, float]:
        times: list[float] = []

        def on_epoch_end(epoch: int, logs: Any = None) -> None:
            times.append(time.perf_counter())
            model.stop_training = times[-1] - times[0] >= seconds

        callback = module.callbacks.LambdaCallback(on_epoch_end=on_epoch_end)
        options = {"batch_size": batch, "epochs": 10**6, "verbose": 0, "callbacks": [callback]}
        losses = model.fit(x[:count], y[:count], **options).history["loss"]
        return (len(times) - 1) * count / max(times[-1] - times[0], 1e-9), losses[-1]

    return train


def torch_trainee(name: str, count: int, threads: int) -> Trainee:
    """As `keras_trainee`, in PyTorch."""
    import torch
    from torch import nn

    torch.set_num_threads(threads)
    torch.set_flush_denormal(True)
    _, units, batch = WORKS[name]
    x, y = map(torch.from_numpy, samples(name, count))

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            if name == "LSTM":
                self.recurrent: Any = nn.LSTM(FEATURES, units, batch_first=True)
                self.dense = nn.Linear(units, CLASSES)
            else:
                self.embedding = nn.Embedding(LETTERS, WIDTH)
                self.recurrent = nn.GRU(WIDTH, units, batch_first=True)
                self.dense = nn.Linear(units, LETTERS)

        def forward(self, x: Any) -> Any:
            if name == "LSTM":
                return self.dense(self.recurrent(x)[0][:, -1])
            return self.dense(self.recurrent(self.embedding(x))[0]).flatten(0, 1)

    model, loss_of = Network(), nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), LEARNING_RATE, (BETA_1, BETA_2), EPSILON, fused=True)

    def epoch(count: int) -> float:
        total, rows = 0.0, torch.randperm(count)
        for first in range(0, count, batch):
            chosen = rows[first : first + batch]
            optimizer.zero_grad(set_to_none=True)
            loss = loss_of(model(x[chosen]), y[chosen].flatten())
            loss.backward()
            optimizer.step()
            total += float(loss) * len(chosen)
        return total / count

    def train(seconds: float, count: int = count) -> tuple[float, float]:
        loss, begun, samples = epoch(count), time.perf_counter(), 0
        while time.perf_counter() - begun < seconds:
            loss, samples = epoch(count), samples + count
        return samples / max(time.perf_counter() - begun, 1e-9), loss

    return train


def work() -> None:
    """Answer as one framework."""
    questions, answers = answering()
    trainee: Any = None
    for kind, *arguments in questions:
        if kind == "import":
            __import__({"dptrain": "dptrain", "PyTorch": "torch"}.get(arguments[0], "keras"))
            answer(answers, None)
        elif kind == "prepare":
            framework, name, threads, count = arguments
            before, begun = begin_peak(), time.perf_counter()
            if framework == "PyTorch":
                trainee = torch_trainee(name, count, threads)
            else:
                trainee = keras_trainee(__import__("dptrain" if framework == "dptrain" else "keras"), name, count)
            trainee(0, WORKS[name][2])
            first = time.perf_counter() - begun
            trainee(0)
            answer(answers, {"first": first, "memory": peak_bytes() - before})
        else:
            answer(answers, trainee(*arguments))


def measure(name: str, options: argparse.Namespace, cache: str) -> list[str]:
    """Return the line of one work in the report."""
    command = [sys.executable, str(Path(__file__).resolve()), "--worker"]
    threads = {variable: str(options.threads) for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    environment = {**threads, "DPTRAIN_CACHE": cache, "KERAS_BACKEND": "jax"}
    workers: dict[str, WorkerProcess] = {}
    facts: dict[str, Any] = {}
    for framework in FRAMEWORKS:
        worker = WorkerProcess(framework, command, environment, quiet=True)
        try:
            worker.ask(["import", framework], PATIENCE)
            facts[framework] = worker.ask(["prepare", framework, name, options.threads, options.samples], PATIENCE)
            workers[framework] = worker
        except WorkerError as error:
            print(f"{name}: {framework} left out: {error}", flush=True)
    speeds: dict[str, list[float]] = {framework: [] for framework in workers}
    losses: dict[str, float] = {}
    for number in range(options.rounds):
        for framework in list(workers)[:: 1 if number % 2 else -1]:
            speed, losses[framework] = workers[framework].ask(["run", options.seconds], PATIENCE)
            speeds[framework].append(speed)
    for worker in workers.values():
        worker.close()
    others = [speeds[framework] for framework in workers if framework != "dptrain"]
    ratios = [mine / max(rates) for mine, *rates in zip(speeds["dptrain"], *others, strict=True)] if others else []

    def each(show: Callable[[str], str]) -> list[str]:
        return [show(framework) if framework in workers else "-" for framework in FRAMEWORKS]

    return [
        name,
        *each(lambda framework: f"{statistics.median(speeds[framework]):,.0f}"),
        spread(ratios, ".2f") if ratios else "",
        " / ".join(each(lambda framework: f"{facts[framework]['first']:.1f}")),
        " / ".join(each(lambda framework: f"{facts[framework]['memory'] / 1e6:.0f}")),
        " / ".join(each(lambda framework: f"{losses[framework]:.2f}")),
    ]


def main() -> int:
    """Run as the parent, or as one framework."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=1.0, help="that each trains in a round, at least")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--samples", type=int, default=512, metavar="N", help="of an epoch")
    parser.add_argument("--works", type=words(list(WORKS)), default=list(WORKS), help="some of what is trained")
    parser.add_argument("--output", type=Path, help="a file for the report")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work()
        return 0
    report = Report()
    report.add("# Recurrent networks on the CPU", "", command_line(), machine_line())
    packages = ("dptrain", "numpy", "torch", "keras", "jax")
    report.add(
        f"- Versions: {versions(packages)}; {options.threads} threads each",
        f"- {options.rounds} rounds of at least {options.seconds} s each; samples/s as medians; ratios of dptrain to "
        "the better of the others of a round: median (min to max)",
        "- LSTM(128) over 100 x 64; GRU(256) over 100 letters, of which it forecasts the next ones; batch 64",
        "- First start in s, memory in MB and the loss at the end, in the order of the columns",
        "",
        f"| network | {' | '.join(FRAMEWORKS)} | ratio | first start | memory | loss |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    )
    for name in options.works:
        with tempfile.TemporaryDirectory() as cache:
            report.add(f"| {' | '.join(measure(name, options, cache))} |")
    if options.output is not None:
        report.save(options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
