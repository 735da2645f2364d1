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
import functools
import statistics
import sys
from collections.abc import Callable
from typing import Any

from common import (
    BETA_1,
    BETA_2,
    CLASSES,
    EPSILON,
    LEARNING_RATE,
    Report,
    Trainee,
    WorkerError,
    WorkerProcess,
    answer,
    answering,
    command_line,
    fitted,
    machine_line,
    prepared,
    repeated,
    spread,
    training_options,
    versions,
    worker_start,
)

# What is trained: steps of a sample, units, batch.
WORKS = {"LSTM": (100, 128, 64), "GRU characters": (100, 256, 64)}
FEATURES, LETTERS, WIDTH = 64, 80, 64
FRAMEWORKS = ("dptrain", "PyTorch", "Keras on JAX")
# Seconds that a framework may take for an answer.
PATIENCE = 300.0


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

    return fitted(module, model, x, y, batch)


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

    return repeated(epoch, count)


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
            if framework == "PyTorch":
                make = functools.partial(torch_trainee, name, count, threads)
            else:
                module = __import__("dptrain" if framework == "dptrain" else "keras")
                make = functools.partial(keras_trainee, module, name, count)
            trainee, facts = prepared(make, WORKS[name][2])
            answer(answers, facts)
        else:
            answer(answers, trainee(*arguments))


def measure(name: str, options: argparse.Namespace, cache: str) -> list[str]:
    """Return the line of one work in the report."""
    command, environment = worker_start(__file__, options.threads, DPTRAIN_CACHE=cache, KERAS_BACKEND="jax")
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
    parser = training_options(__doc__, list(WORKS))
    parser.add_argument("--seconds", type=float, default=1.0, help="that each trains in a round, at least")
    parser.add_argument("--samples", type=int, default=512, metavar="N", help="of an epoch")
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
    report.add_rows(options.works, lambda name, cache: measure(name, options, cache), options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
