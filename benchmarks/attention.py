"""Training speed of a transformer and of bags of words on the CPU: dptrain beside PyTorch and Keras on JAX.

    python benchmarks/attention.py
    python benchmarks/attention.py --works GPT --rounds 9 --output benchmarks/results/attention_HARDWARE_DATE.md

Each lives in a process of its own, and only one works at a time; rounds go A B C A B C. All train the same network with
batches of the same size, Adam and the mean cross-entropy. PyTorch is eager, with its fused attention.

- GPT: 4 blocks, width 256, 8 heads, 256 characters of 96, batch 16.
- bags: the mean of 200 vectors of a table of 50,000 x 128, and a dense layer of 2 classes, batch 64.

The first start is what training takes until one step is done, with an empty cache of compiled programs.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from common import (
    BETA_1,
    BETA_2,
    EPSILON,
    LEARNING_RATE,
    Report,
    WorkerError,
    WorkerProcess,
    answer,
    answering,
    command_line,
    machine_line,
    spread,
    training_options,
    versions,
    words,
    worker_start,
)

BLOCKS, WIDTH, HEADS, LENGTH, CHARACTERS = 4, 256, 8, 256, 96
BAG, TABLE, VECTOR = 200, 50_000, 128
# Batches, and how many of them a round trains.
WORKS = {"GPT": (16, 2), "bags": (64, 12)}
FRAMEWORKS = ("dptrain", "PyTorch", "Keras on JAX")
# Seconds for an answer: to import, compile and train.
PATIENCE = 400.0
Train = Callable[[int], float]


def samples(work: str, count: int) -> tuple[Any, Any]:
    """Return inputs and targets."""
    import numpy as np

    rng = np.random.default_rng(0)
    if work == "GPT":
        ids = rng.integers(0, CHARACTERS, (count, LENGTH + 1)).astype(np.int32)
        return ids[:, :-1], ids[:, 1:]
    return rng.integers(0, TABLE, (count, BAG)).astype(np.int32), rng.integers(0, 2, count).astype(np.int32)


def keras_model(k: Any, work: str) -> Any:
    """Return a model of Keras or dptrain, not yet compiled."""
    layers = k.layers
    if work == "bags":
        inputs = k.Input((BAG,), dtype="int32")
        x = layers.GlobalAveragePooling1D()(layers.Embedding(TABLE, VECTOR)(inputs))
        return k.Model(inputs, layers.Dense(2)(x))
    inputs = k.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(CHARACTERS, WIDTH)(inputs)
    for _ in range(BLOCKS):
        attended = layers.LayerNormalization()(x)
        attended = layers.MultiHeadAttention(HEADS, WIDTH // HEADS)(attended, attended, use_causal_mask=True)
        x = layers.Add()([x, attended])
        each = layers.Dense(4 * WIDTH, "gelu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dense(WIDTH)(each)])
    return k.Model(inputs, layers.Dense(CHARACTERS)(layers.LayerNormalization()(x)))


def keras_train(k: Any, work: str) -> Train:
    """Return what trains a model of Keras or dptrain on so many batches, and returns the loss."""
    batch, _ = WORKS[work]
    model = keras_model(k, work)
    adam = k.optimizers.Adam(LEARNING_RATE, BETA_1, BETA_2, EPSILON)
    model.compile(adam, k.losses.SparseCategoricalCrossentropy(from_logits=True))

    def train(batches: int) -> float:
        x, y = samples(work, batches * batch)
        history = model.fit(x, y, batch_size=batch, epochs=1, shuffle=False, verbose=0).history
        return float(history["loss"][-1])

    return train


def torch_train(work: str, threads: int) -> Train:
    """Return what trains a module of PyTorch on so many batches, and returns the mean loss."""
    import torch
    from torch import nn

    torch.set_num_threads(threads)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList([nn.LayerNorm(WIDTH, 1e-3) for _ in range(2)])
            self.heads, self.joined = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
            self.each = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

        def forward(self, x: Any) -> Any:
            parts = self.heads(self.norms[0](x)).chunk(3, -1)
            q, k, v = (part.view(-1, LENGTH, HEADS, WIDTH // HEADS).transpose(1, 2) for part in parts)
            attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.joined(attended.transpose(1, 2).reshape(-1, LENGTH, WIDTH))
            return x + self.each(self.norms[1](x))

    if work == "GPT":
        parts = [*(Block() for _ in range(BLOCKS)), nn.LayerNorm(WIDTH, 1e-3), nn.Linear(WIDTH, CHARACTERS)]
        model = nn.Sequential(nn.Embedding(CHARACTERS, WIDTH), *parts)
    else:
        model = nn.Sequential(nn.EmbeddingBag(TABLE, VECTOR, mode="mean"), nn.Linear(VECTOR, 2))
    adam = torch.optim.Adam(model.parameters(), LEARNING_RATE, (BETA_1, BETA_2), EPSILON)
    batch, _ = WORKS[work]

    def train(batches: int) -> float:
        x, y = (torch.from_numpy(array).long() for array in samples(work, batches * batch))
        total = 0.0
        for begin in range(0, len(x), batch):
            adam.zero_grad()
            scores = model(x[begin : begin + batch])
            loss = nn.functional.cross_entropy(scores.flatten(0, -2), y[begin : begin + batch].flatten())
            loss.backward()
            adam.step()
            total += float(loss.detach())
        return total / batches

    return train


def trainee(framework: str, work: str, threads: int) -> Train:
    """Return what trains."""
    if framework == "PyTorch":
        return torch_train(work, threads)
    if framework == "dptrain":
        import dptrain

        return keras_train(dptrain, work)
    import keras

    return keras_train(keras, work)


def work() -> None:
    """Answer as one framework: [framework, work, threads], and then numbers of batches, with seconds and a loss."""
    questions, answers = answering()
    train = trainee(*next(questions))
    answer(answers, "ready")
    for batches in questions:
        begun = time.perf_counter()
        loss = train(batches)
        answer(answers, [time.perf_counter() - begun, loss])


def measure(name: str, options: argparse.Namespace, cache: str) -> list[str]:
    """Return the cells of a row of the report."""
    batch, batches = WORKS[name]
    variables = {"DPTRAIN_CACHE": cache, "KERAS_BACKEND": "jax", "CUDA_VISIBLE_DEVICES": ""}
    command, environment = worker_start(__file__, options.threads, **variables)
    rates: dict[str, list[float]] = {framework: [] for framework in options.frameworks}
    starts, losses = dict[str, float](), dict[str, float]()
    workers = {
        framework: WorkerProcess(framework, command, environment, quiet=True) for framework in options.frameworks
    }
    try:
        for framework, worker in workers.items():
            worker.ask([framework, name, options.threads], PATIENCE)
            starts[framework], _ = worker.ask(1, PATIENCE)
        for _ in range(options.rounds):
            for framework, worker in workers.items():
                seconds, losses[framework] = worker.ask(batches, PATIENCE)
                rates[framework].append(batch * batches / seconds)
    except WorkerError as error:
        return [name, str(error), *[""] * (len(workers) + 2)]
    finally:
        for worker in workers.values():
            worker.close()
    ratios = [rate / max(others) for rate, *others in zip(*rates.values(), strict=True)] if len(workers) > 1 else [1.0]
    return [
        name,
        *(f"{statistics.median(rates[framework]):.1f}" for framework in workers),
        spread(ratios, ".2f"),
        ", ".join(f"{starts[framework]:.1f}" for framework in workers),
        ", ".join(f"{losses[framework]:.3f}" for framework in workers),
    ]


def main() -> int:
    """Run as the parent, or as one framework."""
    parser = training_options(__doc__, list(WORKS))
    parser.add_argument(
        "--frameworks", type=words(FRAMEWORKS), default=list(FRAMEWORKS), help="dptrain and some others"
    )
    options = parser.parse_args()
    if options.worker:
        work()
        return 0
    report = Report()
    report.add("# A transformer and bags of words on the CPU", "", command_line(), machine_line())
    report.add(f"- Versions: {versions(('dptrain', 'numpy', 'torch', 'keras', 'jax'))}; {options.threads} threads")
    report.add(
        f"- {options.rounds} rounds; samples/s as medians; ratios to the best other of a round: median (min to max)",
        "",
        f"| model | {' | '.join(options.frameworks)} | ratio | first start, s | loss |",
        f"|---|{'---:|' * (len(options.frameworks) + 3)}",
    )
    report.add_rows(options.works, lambda name, cache: measure(name, options, cache), options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
