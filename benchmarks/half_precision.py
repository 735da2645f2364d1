"""Dtype policies beside float32 on this machine, in turns: seconds of an epoch.

python benchmarks/half_precision.py [--rounds 9]
"""

import argparse
import statistics
import time

import numpy as np

import dptrain as dp
from dptrain import layers
from dptrain.models import Model

POLICIES = ("float32", "mixed_bfloat16", "mixed_float16")
SIZES = ((128, 128), (512, 128), (512, 1024), (2048, 1024))
SAMPLES = 12_800


def model(units: int, policy: str) -> Model:
    """Return a network of one hidden layer, compiled."""
    dp.utils.set_random_seed(1)
    last = layers.Activation("softmax", dtype="float32")
    network = dp.Sequential([dp.Input((784,)), layers.Dense(units, "relu"), layers.Dense(10), last])
    network.compile("adam", "sparse_categorical_crossentropy", device="cpu", dtype=policy)
    return network


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    rng = np.random.default_rng(0)
    x, y = rng.random((SAMPLES, 784)).astype(np.float32), rng.integers(0, 10, SAMPLES)
    print("| network | batch | policy | seconds an epoch (median, range) | speed / float32 (median, range) | loss |")
    print("|---|---|---|---|---|---|")
    for units, batch in SIZES:
        models = {policy: model(units, policy) for policy in POLICIES}
        losses = {
            p: network.fit(x, y, epochs=1, batch_size=batch, verbose=0).history["loss"][-1]
            for p, network in models.items()
        }
        seconds: dict[str, list[float]] = {policy: [] for policy in POLICIES}
        for _ in range(rounds):
            for policy, network in models.items():
                start = time.perf_counter()
                network.fit(x, y, epochs=1, batch_size=batch, verbose=0)
                seconds[policy].append(time.perf_counter() - start)
        for policy, times in seconds.items():
            ratios = sorted(a / b for a, b in zip(seconds["float32"], times, strict=True))
            speed = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
            time_of = f"{statistics.median(times):.3f} ({min(times):.3f} to {max(times):.3f})"
            print(f"| 784-{units}-10 | {batch} | {policy} | {time_of} | {speed} | {losses[policy]:.5f} |")


if __name__ == "__main__":
    main()
