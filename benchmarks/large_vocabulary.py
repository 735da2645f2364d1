"""Memory and time of a training step with logits of a large vocabulary: in chunks, whole, and by PyTorch's eager step.

    python benchmarks/large_vocabulary.py [--classes 50257] [--features 256] [--positions 512] [--rows 4] [--rounds 3]

Each round starts a process for each of them, in turn: an embedding, a normalization, a layer of logits; SGD, float32.
CPU seconds of a step are the median of three after the first; memory is the process's peak above its size before the
model, weights included. PyTorch is left out where it is not installed, or runs in `--torch PYTHON`.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time

import numpy as np

WHOLE, CHUNKED, PYTORCH = "whole logits", "chunks of positions", "PyTorch, eager"


def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def dptrain_step(given, x, y, chunked):
    """Return a function that trains a step and returns its loss."""
    import dptrain as dp
    from dptrain.train import chunking

    if not chunked:
        chunking.LEAST_LOGITS = 1 << 62
    inputs = dp.Input((given.positions,), dtype="int32")
    features = dp.layers.LayerNormalization()(dp.layers.Embedding(512, given.features)(inputs))
    model = dp.Model(inputs, dp.layers.Dense(given.classes, use_bias=False)(features))
    model.compile(dp.optimizers.SGD(0.1), dp.losses.SparseCategoricalCrossentropy(from_logits=True), device="cpu")
    return lambda: model.fit(x, y, batch_size=given.rows, verbose=0).history["loss"][0]


def pytorch_step(given, x, y):
    import torch

    embedding, norm = torch.nn.Embedding(512, given.features), torch.nn.LayerNorm(given.features)
    head = torch.nn.Linear(given.features, given.classes, bias=False)
    model = torch.nn.Sequential(embedding, norm, head)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x, y = torch.tensor(x), torch.tensor(y).reshape(-1)

    def step():
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x).reshape(-1, given.classes), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def measure(given):
    """Print [CPU seconds of a step, MiB, losses]."""
    rng = np.random.default_rng(0)
    shape = (given.rows, given.positions)
    x, y = rng.integers(0, 512, shape), rng.integers(0, given.classes, shape)
    if given.variant == PYTORCH:
        import torch  # noqa: F401 - before its memory is measured

        before, step = peak(), pytorch_step(given, x, y)
    else:
        before, step = peak(), dptrain_step(given, x, y, given.variant == CHUNKED)
    seconds, losses = [], []
    for _ in range(4):
        begun = time.process_time()
        losses.append(step())
        seconds.append(time.process_time() - begun)
    print(json.dumps([statistics.median(seconds[1:]), peak() - before, losses]))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("classes", 50257), ("features", 256), ("positions", 512), ("rows", 4), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--torch", default=sys.executable, metavar="PYTHON", help="an interpreter with PyTorch")
    parser.add_argument("--variant", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.variant:
        measure(given)
        return
    results = {WHOLE: [], CHUNKED: [], PYTORCH: []}
    for _ in range(given.rounds):
        for variant, rounds in results.items():
            python = given.torch if variant == PYTORCH else sys.executable
            environment = {
                name: value for name, value in os.environ.items() if python == sys.executable or name != "PYTHONPATH"
            }
            command = [python, __file__, *sys.argv[1:], "--variant", variant]
            done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
            if done.returncode == 0:
                rounds.append(json.loads(done.stdout.splitlines()[-1]))
            elif variant != PYTORCH:
                sys.exit(done.stderr)
    print("| | CPU seconds of a step | to PyTorch | MiB | to PyTorch |\n|---|---|---|---|---|")
    peers = results[PYTORCH] or [[float("nan"), float("nan")]]
    for variant, rounds in results.items():
        if rounds:
            seconds, memory = ([values[index] for values in rounds] for index in (0, 1))
            ratios = [
                f"{statistics.median(own[k] / peer[k] for own, peer in zip(rounds, peers, strict=False)):.2f}"
                for k in (0, 1)
            ]
            times = f"{statistics.median(seconds):.2f} ({min(seconds):.2f} to {max(seconds):.2f})"
            print(f"| {variant} | {times} | {ratios[0]} | {statistics.median(memory):.0f} | {ratios[1]} |")


if __name__ == "__main__":
    main()
