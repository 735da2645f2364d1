"""Training speed of two versions of dptrain, in turns: is a change slower, or another computation?

    git worktree add ../before 1234567
    python benchmarks/before_after.py --before ../before --output benchmarks/results/before-after_HARDWARE_DATE.md

Each version lives in a process of its own and trains the same: MLPs with Adam at several batch sizes, a small
convolutional network, LeNet-5, a ResNet, and sweeps of 16 runs side by side. Only one works at a time; rounds go A B A
B, and a ratio is that of two neighbours. Losses are compared to the last digit: they say whether the same is computed.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from common import Report, WorkerProcess, answer, answering, command_line, machine_line, spread, versions

ROOT = Path(__file__).resolve().parents[1]
SAMPLES, IMAGES, RUNS, FEW = 8192, 1024, 16, 256
WORKS = {
    **{f"784-{hidden}-10, batch {batch}": ("mlp", hidden, batch) for hidden in (128, 512) for batch in (32, 128, 1024)},
    "convolutions 28x28, batch 64": ("convolutions", 8, 64),
    "LeNet-5 28x28, batch 64": ("lenet", 6, 64),
    "ResNet of 3 blocks 32x32, batch 32": ("resnet", 16, 32),
    "784-1024-10, a block of 1,024 units under a condition: taken, batch 1024": ("taken", 1024, 1024),
    "784-1024-10, a block of 1,024 units under a condition: not taken, batch 1024": ("not taken", 1024, 1024),
    f"sweep of {RUNS} runs of 784-128-10, batch 128": ("sweep", 128, 128),
    f"sweep of {RUNS} runs of 784-128-10, an epoch of {FEW} samples, batch 32": ("short sweep", 128, 32),
}


def main() -> int:
    """Run as the parent, or as one version."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--before", type=Path, help="a folder with the other version's dptrain/ and kernels/")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=1.0, help="that each version trains in a round, at least")
    parser.add_argument("--only", nargs="*", choices=list(WORKS), help="some of what is trained")
    parser.add_argument("--output", type=Path, help="a file for the report")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work()
        return 0
    if options.before is None:
        parser.error("--before is required")
    return compare(options)


def compare(options: argparse.Namespace) -> int:
    """Measure, report, and return 1 where losses differ by more than 1e-6."""
    report, command = Report(), [sys.executable, str(Path(__file__).resolve()), "--worker"]
    report.add("# Two versions, in turns", "", command_line(), machine_line(), f"- Versions: {versions(('numpy',))}")
    report.add(
        f"- {options.rounds} rounds of at least {options.seconds} s each; ratios are speeds after / before of a round",
        "",
        "| training | samples/s before | after | ratio: median (min to max) | losses |",
        "|---|---|---|---|---|",
    )
    workers = {
        name: WorkerProcess(name, command, {"PYTHONPATH": str(folder.resolve())})
        for name, folder in (("before", options.before), ("after", ROOT))
    }
    differ = False
    for name in options.only or WORKS:
        losses = {version: worker.ask(["prepare", *WORKS[name]]) for version, worker in workers.items()}
        rates: dict[str, list[float]] = {version: [] for version in workers}
        for number in range(options.rounds):
            for version in list(workers)[:: 1 if number % 2 else -1]:
                rates[version].append(workers[version].ask(["run", options.seconds]))
        ratios = [after / before for before, after in zip(rates["before"], rates["after"], strict=True)]
        apart = max(abs(a - b) / abs(b) for a, b in zip(losses["after"], losses["before"], strict=True))
        differ = differ or apart > 1e-6
        speeds = [f"{statistics.median(rates[version]):,.0f}" for version in ("before", "after")]
        same = "the same bits" if losses["after"] == losses["before"] else f"{apart:.0e} apart"
        report.add(f"| {name} | {speeds[0]} | {speeds[1]} | {spread(ratios, '.3f')} | {same} |")
    for worker in workers.values():
        worker.close()
    if options.output is not None:
        report.save(options.output)
    return int(differ)


def work() -> None:
    """Answer as one version."""
    questions, answers = answering()
    epoch: Any = None
    for kind, *arguments in questions:
        if kind == "prepare":
            epoch, losses = prepared(*arguments)
            answer(answers, losses)
        else:
            samples, begun = 0, time.perf_counter()
            while time.perf_counter() - begun < arguments[0]:
                samples += epoch()
            answer(answers, samples / (time.perf_counter() - begun))


def resnet(filters: int) -> Any:
    """Return a residual network of three blocks, each with half the pixels and twice the channels of the one before."""
    import dptrain as dp

    images = tensor = dp.layers.Input((32, 32, 3))
    for block in range(3):
        channels, strides = filters * 2**block, min(block + 1, 2)
        branch = dp.layers.Conv2D(channels, 3, strides, padding="same", use_bias=False)(tensor)
        branch = dp.layers.Activation("relu")(dp.layers.BatchNormalization()(branch))
        branch = dp.layers.Conv2D(channels, 3, padding="same", use_bias=False)(branch)
        branch = dp.layers.BatchNormalization()(branch)
        shortcut = dp.layers.Conv2D(channels, 1, strides, use_bias=False)(tensor)
        tensor = dp.layers.Activation("relu")(dp.layers.Add()([branch, shortcut]))
    classes = dp.layers.Dense(10, "softmax")(dp.layers.GlobalAveragePooling2D()(tensor))
    model = dp.Model(images, classes)
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"], device="cpu")
    return model


def under_condition(size: int, is_taken: bool) -> Any:
    """Return a layer that a number of its state, which does not change, turns on or off."""
    import dptrain as dp

    class Block(dp.layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.dense = dp.layers.Dense(size, "relu")
            self.taken = self.add_weight((), "ones" if is_taken else "zeros", trainable=False, name="taken")

        def call(self, x: Any) -> Any:
            return dp.ops.cond(self.taken > 0, lambda: x + self.dense(x), lambda: x)

        def compute_output_shape(self, shape: Any) -> Any:
            return shape

    return Block()


def prepared(kind: str, size: int, batch: int) -> tuple[Any, list[float]]:
    """Return a function that trains for some epochs and returns the samples, and losses of a first training."""
    import numpy as np

    import dptrain as dp

    rng = np.random.default_rng(0)
    y = rng.integers(0, 10, SAMPLES)
    x = (rng.random((SAMPLES, 784), np.float32) + y[:, None] / 10).astype(np.float32)

    def compiled(*layers: Any, seed: int = 1) -> dp.Sequential:
        model = dp.Sequential([*layers, dp.layers.Dense(10, "softmax")], seed=seed)
        model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"], device="cpu")
        return model

    def mlp() -> dp.Sequential:
        return compiled(dp.layers.Input((784,)), dp.layers.Dense(size, "relu"))

    if kind in ("sweep", "short sweep"):
        many, samples = (4, SAMPLES) if kind == "sweep" else (1, FEW)

        def sweep(epochs: int = many) -> Any:
            data: dict[str, Any] = {"x": x[:samples], "y": y[:samples]}
            return dp.sweep(mlp, {}, seeds=range(RUNS), **data, batch_size=batch, epochs=epochs, verbose=0)

        losses = sorted(float(run["metrics"]["loss"]) for run in sweep(1).runs)
        return lambda: (sweep(), many * RUNS * samples)[1], losses
    if kind == "convolutions":
        x, y = x[:IMAGES].reshape(-1, 28, 28, 1), y[:IMAGES]
        model = compiled(
            dp.layers.Input((28, 28, 1)),
            dp.layers.Conv2D(size, 3, activation="relu"),
            dp.layers.MaxPooling2D(),
            dp.layers.Conv2D(2 * size, 3, activation="relu"),
            dp.layers.Flatten(),
        )
    elif kind == "lenet":
        x, y = x[:IMAGES].reshape(-1, 28, 28, 1), y[:IMAGES]
        model = compiled(
            dp.layers.Input((28, 28, 1)),
            *(dp.layers.Conv2D(size, 5, padding="same", activation="tanh"), dp.layers.AveragePooling2D()),
            *(dp.layers.Conv2D(16, 5, activation="tanh"), dp.layers.AveragePooling2D()),
            *(dp.layers.Flatten(), dp.layers.Dense(120, "tanh"), dp.layers.Dense(84, "tanh")),
        )
    elif kind in ("taken", "not taken"):
        block = under_condition(size, kind == "taken")
        model = compiled(dp.layers.Input((784,)), dp.layers.Dense(size, "relu"), block)
    elif kind == "resnet":
        x, y = np.tile(x[:FEW], 4)[:, : 32 * 32 * 3].reshape(-1, 32, 32, 3), y[:FEW]
        model = resnet(size)
    else:
        model = mlp()
    losses = model.fit(x, y, batch_size=batch, epochs=3, verbose=0).history["loss"]
    epochs = 8 if kind == "mlp" else 1
    return lambda: (model.fit(x, y, batch_size=batch, epochs=epochs, verbose=0), epochs * len(x))[1], losses


if __name__ == "__main__":
    sys.exit(main())
