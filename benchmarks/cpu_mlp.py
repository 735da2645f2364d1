"""Training speed on the CPU: dptrain beside PyTorch and JAX, in one invocation.

    python benchmarks/cpu_mlp.py
    python benchmarks/cpu_mlp.py --rounds 9 --seconds 2 --output benchmarks/results/cpu_mlp_HARDWARE_DATE.md
    python benchmarks/cpu_mlp.py --denormals

Each framework lives in a process of its own, so that thread pools, allocators and floating-point switches do not meet,
and only one of them works at a time. Rounds go A B C A B C: what else the machine does then hits all alike, and the
ratio of two neighbours in a round says more than their speeds.

Every round trains the same 784-H-10 network afresh: same initial weights, same uint8 data, Adam (1e-3, epsilon 1e-7),
mean loss of every epoch, all samples in a new order each epoch, the last partial batch included. One epoch is not
timed, the others are, permutation included. All frameworks train the same number of epochs, and their losses are
compared at the end: a fast step that computes something else would be no result.
"""

import argparse
import importlib.util
import os
import statistics
import sys
import time
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common import (
    BETA_1,
    BETA_2,
    CLASSES,
    EPSILON,
    LEARNING_RATE,
    Epoch,
    Report,
    WorkerError,
    WorkerProcess,
    answer,
    answering,
    command_line,
    glorot,
    machine_line,
    numbers,
    peak_bytes,
    spread,
    versions,
)

FRAMEWORKS = {"dptrain": "dptrain", "dptrain-numpy": "dptrain", "PyTorch": "torch", "JAX": "jax"}  # name -> module
# Orders of samples and the place of epsilon in Adam differ between the frameworks, so their losses do, by this much.
LOSS_TOLERANCE = {"first": 0.03, "last": 0.10}


@dataclass(frozen=True)
class Work:
    """What a worker trains."""

    data: str  # name or path of the data set
    samples: int | None  # rows; None for all
    batch_size: int
    hidden: int
    threads: int
    accuracy: bool  # also count correct samples in every step
    seed: int


# Workers: what runs in a process of its own. Frameworks are imported here and nowhere else.


class Trainee(ABC):
    """A framework with the network, the data and the optimizer."""

    def __init__(self, work: Work) -> None:
        import numpy as np

        from dptrain import datasets

        self.work = work
        (x, y), _ = datasets.load(work.data)
        x, y = x[: work.samples], y[: work.samples]
        self.samples = len(x)
        # Not copied here: the peak memory of the process is reported.
        self.x_NF = x.reshape(len(x), -1)
        self.y_N = y.astype(np.int64)
        self.initial = glorot((self.x_NF.shape[1], work.hidden, CLASSES), work.seed)

    @abstractmethod
    def train(self, epochs: int) -> list[Epoch]:
        """Train a fresh model from the initial weights."""


class Dptrain(Trainee):
    """The public API as a user calls it, steps compiled; a callback reads the clock."""

    jit_compile = True

    def __init__(self, work: Work) -> None:
        import dptrain as dp

        super().__init__(work)
        self.model = dp.Sequential(
            [
                dp.layers.Rescaling(1 / 255),
                dp.layers.Flatten(),
                dp.layers.Dense(work.hidden, activation="relu"),
                dp.layers.Dense(CLASSES, activation="softmax"),
            ],
            seed=work.seed,
        )
        self.model.build((None, self.x_NF.shape[1]))

    def train(self, epochs: int, *more: Any) -> list[Epoch]:
        import dptrain as dp

        history: list[Epoch] = []

        class Stopwatch(dp.callbacks.Callback):
            def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
                self.started = time.perf_counter()

            def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
                history.append(Epoch(time.perf_counter() - self.started, logs["loss"]))

        self.model.compile(
            dp.optimizers.Adam(LEARNING_RATE, BETA_1, BETA_2, EPSILON),
            "sparse_categorical_crossentropy",
            metrics=["accuracy"] if self.work.accuracy else None,
            device="cpu",
            jit_compile=self.jit_compile,
        )
        self.model.set_weights(self.initial)
        # Stopwatch last: its clock starts after the other callbacks' work at an epoch's begin.
        callbacks = [*more, Stopwatch()]
        self.model.fit(self.x_NF, self.y_N, self.work.batch_size, epochs, verbose=0, callbacks=callbacks)
        return history


class DptrainNumpy(Dptrain):
    """The same without a compiler: NumPy's calls, one after the other."""

    jit_compile = False


class PyTorch(Trainee):
    """Eager PyTorch without a DataLoader: data resident, one indexed read a batch, fused Adam, no synchronisation."""

    def __init__(self, work: Work) -> None:
        import torch

        torch.set_num_threads(work.threads)
        torch.set_flush_denormal(True)  # before the first parallel region: its threads inherit the switch
        super().__init__(work)
        torch.manual_seed(work.seed)
        self.x = torch.tensor(self.x_NF)
        self.y = torch.from_numpy(self.y_N)

    def train(self, epochs: int) -> list[Epoch]:
        import torch
        from torch import nn
        from torch.nn.functional import cross_entropy

        model = nn.Sequential(
            nn.Linear(self.x.shape[1], self.work.hidden), nn.ReLU(), nn.Linear(self.work.hidden, CLASSES)
        )
        with torch.no_grad():
            for layer, kernel, bias in ((model[0], *self.initial[:2]), (model[2], *self.initial[2:])):
                layer.weight.copy_(torch.from_numpy(kernel.T.copy()))
                layer.bias.copy_(torch.from_numpy(bias))
        adam = torch.optim.Adam(model.parameters(), LEARNING_RATE, (BETA_1, BETA_2), EPSILON, fused=True)
        history = []
        for _ in range(epochs):
            started = time.perf_counter()
            loss_sum, correct = torch.zeros(()), torch.zeros((), dtype=torch.int64)
            for rows in torch.randperm(self.samples).split(self.work.batch_size):
                batch = self.x.index_select(0, rows).to(torch.float32).mul_(1 / 255)
                labels = self.y.index_select(0, rows)
                logits = model(batch)
                loss = cross_entropy(logits, labels)
                adam.zero_grad(set_to_none=True)
                loss.backward()
                adam.step()
                loss_sum.add_(loss.detach(), alpha=len(rows))
                if self.work.accuracy:
                    correct += (logits.detach().argmax(1) == labels).sum()
            loss_mean = loss_sum.item() / self.samples
            history.append(Epoch(time.perf_counter() - started, loss_mean))
        return history


class Jax(Trainee):
    """One jitted call an epoch: `lax.scan` over full batches, the partial batch after it, all state donated."""

    def __init__(self, work: Work) -> None:
        os.environ["JAX_PLATFORMS"] = "cpu"
        import jax
        import numpy as np

        super().__init__(work)
        self.x = jax.device_put(self.x_NF)
        self.y = jax.device_put(self.y_N.astype(np.int32))
        # NumPy's permutation: jax.random's sorts, several times slower on a CPU.
        self.rng = np.random.default_rng(work.seed)
        self.epoch = jax.jit(self._epoch, donate_argnums=(0,))

    def _loss(self, params: list[Any], batch: Any, labels: Any) -> tuple[Any, Any]:
        """Mean loss; the number of correct samples."""
        import jax
        import jax.numpy as jnp

        hidden = jax.nn.relu(batch @ params[0] + params[1])
        logits = hidden @ params[2] + params[3]
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1)
        correct = (logits.argmax(1) == labels).sum() if self.work.accuracy else jnp.int32(0)
        return -picked.mean(), correct

    def _step(self, state: Any, x: Any, y: Any, rows: Any) -> tuple[Any, tuple[Any, Any]]:
        """One update; the sums of loss and correct samples."""
        import jax
        import jax.numpy as jnp

        params, first, second, t = state
        batch = jnp.take(x, rows, axis=0, mode="clip").astype(jnp.float32) * (1 / 255)
        labels = jnp.take(y, rows, mode="clip")
        (loss, correct), grads = jax.value_and_grad(self._loss, has_aux=True)(params, batch, labels)
        t = t + 1
        alpha = LEARNING_RATE * jnp.sqrt(1 - BETA_2**t) / (1 - BETA_1**t)
        first = [BETA_1 * m + (1 - BETA_1) * g for m, g in zip(first, grads, strict=True)]
        second = [BETA_2 * v + (1 - BETA_2) * g * g for v, g in zip(second, grads, strict=True)]
        params = [p - alpha * m / (jnp.sqrt(v) + EPSILON) for p, m, v in zip(params, first, second, strict=True)]
        return (params, first, second, t), (loss * len(rows), correct)

    def _epoch(self, state: Any, x: Any, y: Any, order: Any) -> tuple[Any, Any, Any]:
        from jax import lax

        size = self.work.batch_size
        full = len(order) // size * size
        state, (losses, corrects) = lax.scan(
            lambda carry, rows: self._step(carry, x, y, rows), state, order[:full].reshape(-1, size)
        )
        loss, correct = losses.sum(), corrects.sum()
        if full < len(order):
            state, (last_loss, last_correct) = self._step(state, x, y, order[full:])
            loss, correct = loss + last_loss, correct + last_correct
        return state, loss, correct

    def train(self, epochs: int) -> list[Epoch]:
        import jax.numpy as jnp
        import numpy as np

        params = [jnp.array(weight) for weight in self.initial]
        state = (params, [jnp.zeros_like(p) for p in params], [jnp.zeros_like(p) for p in params], jnp.float32(0))
        history = []
        for _ in range(epochs):
            started = time.perf_counter()
            order = self.rng.permutation(self.samples).astype(np.int32)
            state, loss, _ = self.epoch(state, self.x, self.y, order)
            loss_mean = float(loss) / self.samples  # waits for the epoch
            history.append(Epoch(time.perf_counter() - started, loss_mean))
        return history


class Denormals(Dptrain):
    """dptrain on blank images with Adam moments that start every epoch at `moment`.

    The first kernel's gradient is then exactly zero, as for a pixel that is always dark, and its moments stay where
    decay leaves them: from 1e-40 among the denormals, unless dptrain flushes them (`flush`).
    """

    def __init__(self, work: Work, moment: float, flush: bool) -> None:
        import numpy as np

        super().__init__(work)
        self.x_NF = np.zeros_like(self.x_NF)
        self.moment = moment
        if not flush:
            from contextlib import nullcontext

            from dptrain.backend.cpu import denormals

            denormals.flush_to_zero = nullcontext  # type: ignore[assignment]
            denormals.enable_flush_to_zero = lambda: None

    def train(self, epochs: int, *more: Any) -> list[Epoch]:
        import numpy as np

        import dptrain as dp

        moment = self.moment

        class Refill(dp.callbacks.Callback):
            def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
                for variable in self.model.trainable_weights:
                    for slot in self.model.optimizer.slots_of(variable).values():
                        slot.assign(np.full(slot.shape, moment))

        return super().train(epochs, Refill(), *more)


WORKERS: dict[str, Any] = {
    "dptrain": Dptrain,
    "dptrain-numpy": DptrainNumpy,
    "PyTorch": PyTorch,
    "JAX": Jax,
    "normal": lambda work: Denormals(work, 1e-8, flush=True),
    "denormal": lambda work: Denormals(work, 1e-40, flush=True),
    "denormal, no flush": lambda work: Denormals(work, 1e-40, flush=False),
}


def serve(name: str) -> None:
    """Answer commands, one JSON object a line, until the pipe closes: first the work, then numbers of epochs."""
    questions, answers = answering()
    work = Work(**next(questions))
    if hasattr(os, "sched_setaffinity"):
        # The one limit that all thread pools respect, XLA's included, which has no switch of its own.
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: work.threads])
    trainee: Trainee = WORKERS[name](work)
    answer(answers, {"samples": trainee.samples})
    for epochs in questions:
        history = trainee.train(epochs)
        answer(answers, {"epochs": [asdict(epoch) for epoch in history], "peak": peak_bytes()})


# The parent: commands the workers, imports no framework


class Worker:
    """A framework in its own process, idle until commanded."""

    def __init__(self, name: str, work: Work) -> None:
        self.name = name
        self.peak = 0
        self._process = WorkerProcess(name, [sys.executable, __file__, "--worker", name])
        self.samples: int = self._ask(asdict(work))["samples"]

    def train(self, epochs: int) -> list[Epoch]:
        """Train a fresh model in the worker and wait for it."""
        answer = self._ask(epochs)
        self.peak = answer["peak"]
        return [Epoch(**fields) for fields in answer["epochs"]]

    def close(self) -> None:
        """End the process."""
        self._process.close()

    def _ask(self, question: Any) -> Any:
        try:
            return self._process.ask(question)
        except WorkerError as error:
            raise SystemExit(str(error)) from None


@dataclass
class Measured:
    """Rounds of one configuration."""

    work: Work
    samples: int
    epochs: int  # timed ones of a round
    steps: int  # updates of an epoch
    speeds: dict[str, list[float]]  # samples/s of every round, by worker
    first_loss: dict[str, float]  # mean of the first epoch, by worker
    last_loss: dict[str, float]  # median over rounds of the last epoch's mean, by worker
    peak: dict[str, int]  # highest resident bytes, by worker


def measure(work: Work, names: list[str], rounds: int, seconds: float) -> Measured:
    """Run all rounds of one configuration in fresh processes."""
    workers = [Worker(name, work) for name in names]
    try:
        samples = workers[0].samples
        fastest = min(worker.train(2)[-1].seconds for worker in workers)  # compiles and touches all memory
        epochs = max(1, round(seconds / fastest))
        speeds: dict[str, list[float]] = {name: [] for name in names}
        first: dict[str, list[float]] = {name: [] for name in names}
        last: dict[str, list[float]] = {name: [] for name in names}
        for _ in range(rounds):
            for worker in workers:
                time.sleep(0.05)  # idle threads of the one before spin for a while
                history = worker.train(1 + epochs)
                speeds[worker.name].append(samples * epochs / sum(epoch.seconds for epoch in history[1:]))
                first[worker.name].append(history[0].loss)
                last[worker.name].append(history[-1].loss)
        return Measured(
            work,
            samples,
            epochs,
            -(-samples // work.batch_size),
            speeds,
            {name: statistics.median(values) for name, values in first.items()},
            {name: statistics.median(values) for name, values in last.items()},
            {worker.name: worker.peak for worker in workers},
        )
    finally:
        for worker in workers:
            worker.close()


def disagreement(measured: Measured) -> str | None:
    """Return a line where the frameworks' losses differ by more than different orders of samples explain."""
    for when, losses in (("first", measured.first_loss), ("last", measured.last_loss)):
        low, high = min(losses.values()), max(losses.values())
        if not high - low <= LOSS_TOLERANCE[when] * high:
            shown = ", ".join(f"{name} {loss:.4f}" for name, loss in losses.items())
            return f"batch {measured.work.batch_size}, hidden {measured.work.hidden}: {when} losses disagree: {shown}"
    return None


def machine(threads: int) -> list[str]:
    """Return what the figures depend on, one line each."""
    return [
        command_line(),
        machine_line(),
        f"- Threads of each framework: {threads}; one framework works at a time",
        f"- Versions: {versions(('dptrain', 'numpy', 'torch', 'jax', 'jaxlib'))}",
    ]


def compare_frameworks(options: argparse.Namespace, report: Report) -> bool:
    """Measure all configurations; return whether the losses agreed in each."""
    names = []
    for name in options.frameworks:
        if importlib.util.find_spec(FRAMEWORKS[name]) is None:
            report.add(f"- {name} is not installed and left out (`pip install {FRAMEWORKS[name]}`)")
        else:
            names.append(name)
    ours = "dptrain" if "dptrain" in names else names[0]
    peers = [name for name in names if name != ours]
    ratios = [f"{ours} / {peer}" for peer in peers]
    report.add(
        "",
        f"Samples/s, median (min to max) of {options.rounds} rounds. A ratio above 1 means that {ours} is faster: first"
        " the ratio of the medians, then the median (min to max) of the ratios within each round.",
        "",
        "| network | batch | " + " | ".join([*names, *ratios, f"{ours} peak MB"]) + " |",
        "|---|---:|" + "---:|" * (len(names) + len(peers) + 1),
    )
    all_measured = []
    for hidden in options.hidden:
        for batch_size in options.batch_sizes:
            measured = measure(work_of(options, batch_size, hidden), names, options.rounds, options.seconds)
            all_measured.append(measured)
            cells = [spread(measured.speeds[name], ",.0f") for name in names]
            for peer in peers:
                mine, other = measured.speeds[ours], measured.speeds[peer]
                paired = [a / b for a, b in zip(mine, other, strict=True)]
                cells.append(f"{statistics.median(mine) / statistics.median(other):.2f}; {spread(paired, '.2f')}")
            cells.append(f"{measured.peak[ours] / 1e6:.0f}")
            report.add(f"| 784-{hidden}-{CLASSES} | {batch_size} | " + " | ".join(cells) + " |")
    report.add(
        "",
        "What was trained: mean loss of the first epoch, and of the last of a round (median over the rounds).",
        "",
        "| network | batch | timed epochs a round | " + " | ".join(f"{name} first, last" for name in names) + " |",
        "|---|---:|---:|" + "---:|" * len(names),
    )
    for measured in all_measured:
        cells = [f"{measured.first_loss[name]:.4f}, {measured.last_loss[name]:.4f}" for name in names]
        row = f"| 784-{measured.work.hidden}-{CLASSES} | {measured.work.batch_size} | {measured.epochs} | "
        report.add(row + " | ".join(cells) + " |")
    complaints = [line for line in map(disagreement, all_measured) if line is not None]
    report.add("", *(complaints or ["The losses agree."]))
    return not complaints


def compare_moments(options: argparse.Namespace, report: Report) -> None:
    """Measure dptrain's step with normal and with denormal Adam moments, with and without its protection."""
    names = ["normal", "denormal", "denormal, no flush"]
    report.add(
        "",
        "dptrain on blank images, whose gradient leaves the first kernel's Adam moments to decay: microseconds a step,"
        f" median (min to max) of {options.rounds} rounds, with moments that start each epoch at 1e-8 (normal) or 1e-40"
        " (denormal), and with dptrain's flush-to-zero switched off.",
        "",
        "| network | batch | " + " | ".join([*names, "denormal / normal", "no flush / normal"]) + " |",
        "|---|---:|---:|---:|---:|---:|---:|",
    )
    for hidden in options.hidden:
        for batch_size in options.batch_sizes:
            work = work_of(options, batch_size, hidden)
            measured = measure(work, names, options.rounds, options.seconds)
            rows = measured.samples / measured.steps
            times = {name: [1e6 * rows / speed for speed in measured.speeds[name]] for name in names}
            cells = [spread(times[name], ",.0f") for name in names]
            for name in names[1:]:
                paired = [a / b for a, b in zip(times[name], times["normal"], strict=True)]
                cells.append(spread(paired, ".2f"))
            report.add(f"| 784-{hidden}-{CLASSES} | {batch_size} | " + " | ".join(cells) + " |")


def work_of(options: argparse.Namespace, batch_size: int, hidden: int) -> Work:
    """Return one configuration of the options."""
    return Work(options.data, options.samples, batch_size, hidden, options.threads, options.accuracy, options.seed)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

    def frameworks(text: str) -> list[str]:
        names = {module: name for name, module in FRAMEWORKS.items()} | {name.lower(): name for name in FRAMEWORKS}
        unknown = [part for part in text.split(",") if part.lower() not in names]
        if unknown:
            raise argparse.ArgumentTypeError(f"unknown {', '.join(unknown)}; choose from {', '.join(FRAMEWORKS)}")
        return [names[part.lower()] for part in text.split(",")]

    parser.add_argument("--frameworks", type=frameworks, default=list(FRAMEWORKS), metavar="A,B")
    parser.add_argument("--batch-sizes", type=numbers, default=[32, 128, 1024], metavar="N,N")
    parser.add_argument("--hidden", type=numbers, default=[128, 512], metavar="N,N", help="units of the hidden layer")
    parser.add_argument("--rounds", type=int, default=7, metavar="N")
    parser.add_argument("--seconds", type=float, default=1.0, metavar="S", help="timed, of the fastest in a round")
    parser.add_argument("--data", default="strokes", metavar="NAME|PATH", help="10 classes; default: the built-in set")
    parser.add_argument("--samples", type=int, default=None, metavar="N", help="train on the first N rows alone")
    parser.add_argument("--threads", type=int, default=min(2, cores), metavar="N")
    parser.add_argument("--accuracy", action="store_true", help="count correct samples in every step too")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--denormals", action="store_true", help="dptrain alone, with denormal Adam moments")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the report there as well")
    parser.add_argument("--worker", choices=WORKERS, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main() -> int:
    """Return 1 where the frameworks did not do the same work."""
    options = parse()
    if options.worker:
        serve(options.worker)
        return 0
    report = Report()
    report.add("# Speed of training on the CPU", "", *machine(options.threads))
    agreed = True
    if options.denormals:
        compare_moments(options, report)
    else:
        agreed = compare_frameworks(options, report)
    if options.output:
        report.save(options.output)
    return 0 if agreed else 1


if __name__ == "__main__":
    sys.exit(main())
