"""Training speed of convolutional networks, on the CPU or a GPU: dptrain beside PyTorch, in one invocation.

    python benchmarks/conv.py
    python benchmarks/conv.py --rounds 9 --output benchmarks/results/conv_HARDWARE_DATE.md
    python benchmarks/conv.py --device cuda --precision tf32 --works LeNet,ResNet --minutes 1

PyTorch is measured with its images in either order of memory, (B, C, H, W) and `channels_last`, eager, with oneDNN, and
the ratio is to the better of both in each round. Each lives in a process of its own, and only one works at a time;
rounds go A B C A B C. All train the same network with batches of the same size, Adam and the mean cross-entropy. A
round takes as many epochs as fit into its seconds. On a GPU the samples lie there, and PyTorch is also measured with a
whole step in a CUDA graph (`torch.cuda.CUDAGraph`), in its order of memory `channels_last`.

The memory is the highest resident size of a process while it trains, less what it had when its framework was imported.
The first start is what `fit` takes until one step is done, with an empty cache of compiled programs.
"""

import argparse
import functools
import statistics
import sys
import time
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
    nvidia_smi,
    prepared,
    repeated,
    spread,
    training_options,
    versions,
    worker_start,
)

# What is trained: the shape of its images, and the batch. Its layers are below, for each framework.
WORKS: dict[str, tuple[tuple[int, int, int], int]] = {
    "LeNet": ((28, 28, 1), 64),
    "convnet": ((28, 28, 1), 128),
    "ResNet": ((32, 32, 3), 64),
    "MobileNet": ((32, 32, 3), 64),
}
FRAMEWORKS = {
    "cpu": ("dptrain", "PyTorch", "PyTorch, channels_last"),
    "cuda": ("dptrain", "PyTorch, channels_last", "PyTorch, channels_last, graph"),
}
# Of an epoch: on a GPU many, so that what happens between epochs does not count.
SAMPLES = {"cpu": 1024, "cuda": 16384}
# Seconds that a framework may take for an answer: to import, compile and capture; to train.
PATIENCE = 300.0
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
        arguments = {"padding": size // 2, "bias": False, "groups": groups}
        return [nn.Conv2d(inputs, filters, size, stride, **arguments), nn.BatchNorm2d(filters, eps=1e-3, momentum=0.01)]

    class Block(nn.Module):
        def __init__(self, inputs: int, filters: int, stride: int) -> None:
            super().__init__()
            first = (*normalized(inputs, filters, 3, stride), nn.ReLU())
            self.main = nn.Sequential(*first, *normalized(filters, filters, 3, 1))
            self.beside = nn.Sequential(*(normalized(inputs, filters, 1, stride) if stride > 1 else ()))
            self.relu = nn.ReLU()

        def forward(self, x: Any) -> Any:
            return self.relu(self.main(x) + self.beside(x))

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


def samples(shape: tuple[int, ...], count: int) -> tuple[Any, Any]:
    """Return images and labels."""
    import numpy as np

    rng = np.random.default_rng(0)
    y = rng.integers(0, CLASSES, count)
    return (rng.random((count, *shape), np.float32) + y[:, None, None, None] / 10).astype(np.float32), y


def dptrain_trainee(name: str, count: int, device: str, precision: str) -> Trainee:
    """Return what trains in dptrain, within one call of `fit`."""
    import dptrain as dp

    shape, batch = WORKS[name]
    x, y = samples(shape, count)
    model = dptrain_model(name, shape)
    loss = dp.losses.SparseCategoricalCrossentropy(from_logits=True)
    half = {"dtype": "mixed_bfloat16"} if precision == "bfloat16" else {"precision": precision}
    model.compile(dp.optimizers.Adam(LEARNING_RATE, BETA_1, BETA_2, EPSILON), loss, device=device, **half)

    return fitted(dp, model, x, y, batch)


def torch_trainee(name: str, count: int, device: str, precision: str, threads: int, form: str) -> Trainee:
    """As `dptrain_trainee`; `form` says the order of memory, and whether a step is a graph."""
    import torch

    torch.set_num_threads(threads)
    torch.set_flush_denormal(True)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision == "tf32"
    torch.backends.cudnn.benchmark = True
    shape, batch = WORKS[name]
    x, y = (torch.from_numpy(array).to(device) for array in samples(shape, count))
    order = torch.channels_last if "last" in form else torch.contiguous_format
    x = x.permute(0, 3, 1, 2).contiguous(memory_format=order)
    model = torch_model(name).to(device, memory_format=order).train()
    graph = "graph" in form
    adam: dict[str, Any] = {"fused": True, "capturable": graph} if device == "cuda" else {"fused": True}
    optimizer = torch.optim.Adam(model.parameters(), LEARNING_RATE, (BETA_1, BETA_2), EPSILON, **adam)
    loss_of = torch.nn.CrossEntropyLoss()
    chosen, total = torch.zeros(batch, dtype=torch.int64, device=device), torch.zeros((), device=device)

    def step() -> None:
        optimizer.zero_grad(set_to_none=not graph)
        with torch.autocast(device, torch.bfloat16, enabled=precision == "bfloat16"):
            outputs = model(x[chosen].contiguous(memory_format=order))
        loss = loss_of(outputs.float(), y[chosen])
        loss.backward()
        optimizer.step()
        total.add_(loss.detach(), alpha=batch)

    run = torch_graph(step) if graph else step

    def epoch(count: int) -> float:
        total.zero_()
        rows = torch.randperm(count, device=device)
        for first in range(0, count, batch):  # whole batches
            chosen.copy_(rows[first : first + batch])
            run()
        return float(total) / count  # waits

    return repeated(epoch, count)


def torch_graph(step: Callable[[], None]) -> Callable[[], None]:
    """Return what replays a step that was captured after three warm-up steps on a side stream."""
    import torch

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()

    def replay(captured: Callable[[], None] = step) -> None:  # a graph keeps nothing that it reads
        graph.replay()

    return replay


def work() -> None:
    """Answer as one framework."""
    questions, answers = answering()
    trainees: list[Trainee] = []
    for kind, *arguments in questions:
        if kind == "import":
            __import__("dptrain" if arguments[0] == "dptrain" else "torch")
            answer(answers, None)
        elif kind == "prepare":
            framework, name, threads, *setting = arguments
            if framework == "dptrain":
                make = functools.partial(dptrain_trainee, name, *setting)
            else:
                make = functools.partial(torch_trainee, name, *setting, threads, framework)
            trainee, facts = prepared(make, WORKS[name][1])
            trainees.append(trainee)
            answer(answers, facts)
        else:
            answer(answers, trainees[-1](*arguments))


def measure(name: str, options: argparse.Namespace, cache: str) -> list[str]:
    """Return the line of one work in the report."""
    more = {} if options.device == "cuda" else {"DPTRAIN_CACHE": cache}
    command, environment = worker_start(__file__, options.threads, **more)
    frameworks = FRAMEWORKS[options.device]
    setting = (options.samples or SAMPLES[options.device], options.device, options.precision)
    workers = {framework: WorkerProcess(framework, command, environment, quiet=True) for framework in frameworks}
    failed: dict[str, str] = {}
    facts: dict[str, Any] = {}
    speeds: dict[str, list[float]] = {framework: [] for framework in frameworks}
    losses: dict[str, float] = {}

    def tried(framework: str, action: Callable[[], Any]) -> Any:
        """Return what an action of a framework's worker returns, or None from its first failure on."""
        if framework in failed:
            return None
        try:
            return action()
        except WorkerError as error:
            failed[framework] = str(error)
            return None

    def ask(framework: str, question: list[Any]) -> Any:
        return tried(framework, lambda: workers[framework].ask(question, PATIENCE))

    for framework in frameworks:  # at the same time
        tried(framework, functools.partial(workers[framework].send, ["import", framework]))
    for framework in frameworks:
        tried(framework, functools.partial(workers[framework].receive, PATIENCE))
    for framework in frameworks:
        facts[framework] = ask(framework, ["prepare", framework, name, options.threads, *setting])
    for number in range(options.rounds):
        if number and time.monotonic() > options.until:
            break
        for framework in frameworks[:: 1 if number % 2 else -1]:
            if answer := ask(framework, ["run", options.seconds]):
                speeds[framework].append(answer[0])
                losses[framework] = answer[1]
    for worker in workers.values():
        worker.close()
    for framework, why in failed.items():
        print(f"{name}: {framework} left out: {why}", flush=True)
    ours = speeds["dptrain"]
    theirs = [rates for framework, rates in speeds.items() if framework != "dptrain" and framework not in failed]
    ratios = [mine / max(others) for mine, *others in zip(ours, *theirs, strict=True)] if theirs else []
    cells = [name, *(f"{statistics.median(rates):,.0f}" if rates else "failed" for rates in speeds.values())]
    cells.append(spread(ratios, ".2f") if ratios else "")
    cells.append(f"{facts['dptrain']['first']:.1f}" if facts["dptrain"] else "")
    cells.append(" / ".join(f"{state['memory'] / 1e6:.0f}" if state else "-" for state in facts.values()))
    cells.append(" / ".join(f"{losses[framework]:.2f}" if framework in losses else "-" for framework in frameworks))
    return cells


def main() -> int:
    """Run as the parent, or as one framework."""
    parser = training_options(__doc__, list(WORKS))
    parser.add_argument("--seconds", type=float, default=1.0, help="that each trains in a round, at least")
    parser.add_argument("--device", choices=FRAMEWORKS, default="cpu")
    parser.add_argument("--precision", choices=("float32", "tf32", "bfloat16"), default="float32", help="on a GPU")
    parser.add_argument("--samples", type=int, metavar="N", help="of an epoch; default 1024, on a GPU 16384")
    parser.add_argument("--minutes", type=float, default=60.0, help="of the whole; later rounds are dropped")
    options = parser.parse_args()
    if options.worker:
        work()
        return 0
    report = Report()
    on = "the CPU" if options.device == "cpu" else f"a GPU, {options.precision}"
    report.add(f"# Convolutional networks on {on}", "", command_line(), machine_line())
    if options.device == "cuda":
        report.add(f"- GPU: {nvidia_smi()}")
    report.add(f"- Versions: {versions(('dptrain', 'numpy', 'pycuda', 'torch'))}; {options.threads} threads each")
    report.add(
        f"- {options.rounds} rounds of at least {options.seconds} s each; samples/s as medians; ratios of dptrain to "
        "the better PyTorch of a round: median (min to max)",
        "- Memory in MB of host memory, in the order of the columns, and so the losses at the end",
        "",
        f"| network | {' | '.join(FRAMEWORKS[options.device])} | ratio | first start, s | memory | loss |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    )
    begun, all_seconds = time.monotonic(), 60 * options.minutes

    def row(name: str, cache: str) -> list[str]:
        options.until = begun + all_seconds * (options.works.index(name) + 1) / len(options.works)
        return measure(name, options, cache)

    report.add_rows(options.works, row, options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
