"""Training speed of convolutional networks on the CPU: dptrain beside PyTorch, in one invocation.

    python benchmarks/conv.py
    python benchmarks/conv.py --rounds 9 --output benchmarks/results/conv_HARDWARE_DATE.md

PyTorch is measured with its images in either order of memory, (B, C, H, W) and `channels_last`, eager, with oneDNN, and
the ratio is to the better of both in each round. Each lives in a process of its own, and only one works at a time;
rounds go A B C A B C. All train the same network with batches of the same size, Adam and the mean cross-entropy. A
round takes as many epochs as fit into its seconds.

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

# What is trained: the shape of its images, and the batch. Its layers are below, for each framework.
WORKS: dict[str, tuple[tuple[int, int, int], int]] = {
    "LeNet": ((28, 28, 1), 64),
    "convnet": ((28, 28, 1), 128),
    "ResNet": ((32, 32, 3), 64),
    "MobileNet": ((32, 32, 3), 64),
}
ONES = ("dptrain", "PyTorch", "PyTorch, channels_last")
SAMPLES = 1024
# Trains for so many seconds after a first epoch, with so many samples, whole epochs; returns samples a second, and the
# mean loss of the last epoch.
Trainee = Callable[..., tuple[float, float]]
# (channels, stride of its first convolution) of blocks.
RESIDUAL = ((16, 1), (16, 1), (32, 2), (32, 1), (64, 2), (64, 1))
SEPARABLE = ((64, 1), (128, 2), (128, 1), (256, 2), (256, 1))


def dptrain_model(name: str, shape: tuple[int, ...]) -> Any:
    """Return a model of dptrain, not yet compiled."""
    import dptrain as dp

    layers = dp.layers
    x = inputs = dp.Input(shape)
    if name == "LeNet":
        for filters in (6, 16):
            padding = "same" if filters == 6 else "valid"
            x = layers.MaxPooling2D()(layers.Conv2D(filters, 5, padding=padding, activation="relu")(x))
        x = layers.Flatten()(x)
        for units in (120, 84):
            x = layers.Dense(units, "relu")(x)
    elif name == "convnet":  # keras.io's "Simple MNIST convnet"
        for filters in (32, 64):
            x = layers.MaxPooling2D()(layers.Conv2D(filters, 3, activation="relu")(x))
        x = layers.Dropout(0.5)(layers.Flatten()(x))
    elif name == "ResNet":

        def normalized(x: Any, filters: int, size: int, stride: int) -> Any:
            x = layers.Conv2D(filters, size, stride, padding="same", use_bias=False)(x)
            return layers.BatchNormalization()(x)

        x = layers.ReLU()(normalized(x, 16, 3, 1))
        for filters, stride in RESIDUAL:
            y = layers.ReLU()(normalized(x, filters, 3, stride))
            y = normalized(y, filters, 3, 1)
            x = layers.ReLU()(y + (x if stride == 1 else normalized(x, filters, 1, stride)))
        x = layers.GlobalAveragePooling2D()(x)
    else:

        def activated(x: Any) -> Any:
            return layers.ReLU()(layers.BatchNormalization()(x))

        x = activated(layers.Conv2D(32, 3, padding="same", use_bias=False)(x))
        for filters, stride in SEPARABLE:
            x = activated(layers.DepthwiseConv2D(3, stride, padding="same", use_bias=False)(x))
            x = activated(layers.Conv2D(filters, 1, use_bias=False)(x))
        x = layers.GlobalAveragePooling2D()(x)
    return dp.Model(inputs, layers.Dense(CLASSES)(x))


def torch_model(name: str) -> Any:
    """Return the same of PyTorch."""
    from torch import nn

    def normalized(inputs: int, filters: int, size: int, stride: int, groups: int = 1) -> list[Any]:
        own = {"padding": size // 2, "bias": False, "groups": groups}
        return [nn.Conv2d(inputs, filters, size, stride, **own), nn.BatchNorm2d(filters, eps=1e-3, momentum=0.01)]

    class Block(nn.Module):
        def __init__(self, inputs: int, filters: int, stride: int) -> None:
            super().__init__()
            first = (*normalized(inputs, filters, 3, stride), nn.ReLU())
            self.own = nn.Sequential(*first, *normalized(filters, filters, 3, 1))
            self.beside = nn.Sequential(*(normalized(inputs, filters, 1, stride) if stride > 1 else ()))
            self.relu = nn.ReLU()

        def forward(self, x: Any) -> Any:
            return self.relu(self.own(x) + self.beside(x))

    if name == "LeNet":
        convolutions = (nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU())
        dense = (nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, CLASSES))
        return nn.Sequential(*convolutions, nn.MaxPool2d(2), nn.Flatten(), *dense)
    if name == "convnet":
        convolutions = (nn.Conv2d(1, 32, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 3), nn.ReLU())
        dense = (nn.Flatten(), nn.Dropout(0.5), nn.Linear(1600, CLASSES))
        return nn.Sequential(*convolutions, nn.MaxPool2d(2), *dense)
    if name == "ResNet":
        layers, inputs = [*normalized(3, 16, 3, 1), nn.ReLU()], 16
        for filters, stride in RESIDUAL:
            layers.append(Block(inputs, filters, stride))
            inputs = filters
    else:
        layers, inputs = [*normalized(3, 32, 3, 1), nn.ReLU()], 32
        for filters, stride in SEPARABLE:
            layers += [*normalized(inputs, inputs, 3, stride, inputs), nn.ReLU()]
            layers += [*normalized(inputs, filters, 1, 1), nn.ReLU()]
            inputs = filters
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, CLASSES))


def samples(shape: tuple[int, ...]) -> tuple[Any, Any]:
    """Return images and labels."""
    import numpy as np

    rng = np.random.default_rng(0)
    y = rng.integers(0, CLASSES, SAMPLES)
    return (rng.random((SAMPLES, *shape), np.float32) + y[:, None, None, None] / 10).astype(np.float32), y


def dptrain_trainee(name: str, threads: int) -> Trainee:
    """Return what trains in dptrain, within one call of `fit`."""
    import dptrain as dp

    shape, batch = WORKS[name]
    x, y = samples(shape)
    model = dptrain_model(name, shape)
    loss = dp.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(dp.optimizers.Adam(LEARNING_RATE, BETA_1, BETA_2, EPSILON), loss, device="cpu")

    def train(seconds: float, count: int = SAMPLES) -> tuple[float, float]:
        times: list[float] = []

        def done(epoch: int, logs: Any = None) -> None:
            times.append(time.perf_counter())
            model.stop_training = times[-1] - times[0] >= seconds

        told = dp.callbacks.LambdaCallback(on_epoch_end=done)
        own = {"batch_size": batch, "epochs": 10**6, "verbose": 0, "callbacks": [told]}
        losses = model.fit(x[:count], y[:count], **own).history["loss"]
        return (len(times) - 1) * count / max(times[-1] - times[0], 1e-9), losses[-1]

    return train


def torch_trainee(name: str, threads: int, last: bool) -> Trainee:
    """As `dptrain_trainee`."""
    import torch

    torch.set_num_threads(threads)
    torch.set_flush_denormal(True)
    shape, batch = WORKS[name]
    x, y = (torch.from_numpy(one) for one in samples(shape))
    order = torch.channels_last if last else torch.contiguous_format
    x = x.permute(0, 3, 1, 2).contiguous(memory_format=order)
    model = torch_model(name).to(memory_format=order).train()
    optimizer = torch.optim.Adam(model.parameters(), LEARNING_RATE, (BETA_1, BETA_2), EPSILON, fused=True)
    loss_of = torch.nn.CrossEntropyLoss()

    def epoch(count: int) -> float:
        total, rows = torch.zeros(()), torch.randperm(count)
        for first in range(0, count, batch):
            chosen = rows[first : first + batch]
            optimizer.zero_grad()
            loss = loss_of(model(x[chosen].contiguous(memory_format=order)), y[chosen])
            loss.backward()
            optimizer.step()
            total += loss.detach() * len(chosen) / count
        return float(total)

    def train(seconds: float, count: int = SAMPLES) -> tuple[float, float]:
        loss, begun, done = epoch(count), time.perf_counter(), 0
        while time.perf_counter() - begun < seconds:
            loss, done = epoch(count), done + count
        return done / max(time.perf_counter() - begun, 1e-9), loss

    return train


def work() -> None:
    """Answer as one framework."""
    questions, answers = answering()
    trainees: list[Trainee] = []
    for kind, *arguments in questions:
        if kind == "import":
            __import__("dptrain" if arguments[0] == "dptrain" else "torch")
            answer(answers, None)
        elif kind == "prepare":
            one, name, threads = arguments
            before, begun = begin_peak(), time.perf_counter()
            own = dptrain_trainee(name, threads) if one == "dptrain" else torch_trainee(name, threads, "last" in one)
            own(0, WORKS[name][1])
            first = time.perf_counter() - begun
            own(0)
            trainees.append(own)
            answer(answers, {"first": first, "memory": peak_bytes() - before})
        else:
            answer(answers, trainees[-1](*arguments))


def measure(name: str, options: argparse.Namespace, cache: str) -> list[str]:
    """Return the line of one work in the report."""
    command = [sys.executable, str(Path(__file__).resolve()), "--worker"]
    threads = {variable: str(options.threads) for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    workers = {one: WorkerProcess(one, command, {**threads, "DPTRAIN_CACHE": cache}, quiet=True) for one in ONES}
    for one, worker in workers.items():
        worker.ask(["import", one])
    about = {one: worker.ask(["prepare", one, name, options.threads]) for one, worker in workers.items()}
    speeds: dict[str, list[float]] = {one: [] for one in ONES}
    losses: dict[str, float] = {}
    for number in range(options.rounds):
        for one in list(workers)[:: 1 if number % 2 else -1]:
            speed, loss = workers[one].ask(["run", options.seconds])
            speeds[one].append(speed)
            losses[one] = loss
    for worker in workers.values():
        worker.close()
    ours, *theirs = (speeds[one] for one in ONES)
    best = [max(pair) for pair in zip(*theirs, strict=True)]
    ratios = [a / b for a, b in zip(ours, best, strict=True)]
    cells = [name, *(f"{statistics.median(speeds[one]):,.0f}" for one in ONES), spread(ratios, ".2f")]
    cells.append(f"{about['dptrain']['first']:.1f}")
    cells += [" / ".join(f"{about[one]['memory'] / 1e6:.0f}" for one in ONES)]
    cells.append(" / ".join(f"{losses[one]:.2f}" for one in ONES))
    return cells


def main() -> int:
    """Run as the parent, or as one framework."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=1.0, help="that each trains in a round, at least")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--works", type=words(list(WORKS)), default=list(WORKS), help="some of what is trained")
    parser.add_argument("--output", type=Path, help="a file for the report")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work()
        return 0
    report = Report()
    report.add("# Convolutional networks on the CPU", "", command_line(), machine_line())
    report.add(f"- Versions: {versions(('dptrain', 'numpy', 'torch'))}; {options.threads} threads each")
    report.add(
        f"- {options.rounds} rounds of at least {options.seconds} s each; samples/s as medians; ratios of dptrain to "
        "the better PyTorch of a round: median (min to max)",
        "- Memory in MB of dptrain / PyTorch / PyTorch with channels_last, and so the losses at the end",
        "",
        f"| network | {' | '.join(ONES)} | ratio | first start, s | memory | loss |",
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
