"""What gradients in half precision do to an accuracy: MNIST, 784-128-10 with Adam, on ranks, several seeds.

mpirun -n 2 python benchmarks/comm_dtype.py DATA_DIR [--seeds 5] [--epochs 3]
"""

import argparse
import statistics
from pathlib import Path

import numpy as np

import dptrain as dp
from dptrain import layers
from dptrain.comm import current

SENT = (None, "bfloat16", "float16")


def accuracy(data: tuple, seed: int, epochs: int, comm_dtype: str | None) -> tuple[float, float]:
    """Return the loss of the last epoch, and the accuracy on the test images."""
    (x, y), (x_test, y_test) = data
    dp.utils.set_random_seed(seed)
    model = dp.Sequential([dp.Input((784,)), layers.Dense(128, "relu"), layers.Dense(10, "softmax")])
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"], device="cpu", comm_dtype=comm_dtype)
    history = model.fit(x, y, epochs=epochs, batch_size=128, verbose=0).history
    return history["loss"][-1], model.evaluate(x_test, y_test, verbose=0)[1]


def main() -> None:
    """Train, and print a table on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, help="folder of MNIST's four files")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()
    images = [
        ((x.reshape(-1, 784) / 255).astype(np.float32), y) for x, y in dp.datasets.load("mnist", data_dir=options.data)
    ]
    if current().rank == 0:
        print(
            "| gradients travel in | loss: mean (standard deviation) | accuracy: mean (standard deviation) | of seeds |"
        )
        print("|---|---|---|---|")
    for comm_dtype in SENT:
        losses, accuracies = zip(
            *(accuracy(tuple(images), seed, options.epochs, comm_dtype) for seed in range(options.seeds)), strict=True
        )
        if current().rank == 0:
            cells = [
                f"{statistics.mean(values):.5f} ({statistics.stdev(values):.5f})" for values in (losses, accuracies)
            ]
            each = ", ".join(f"{value:.4f}" for value in accuracies)
            print(f"| {comm_dtype or 'float32'} | {' | '.join(cells)} | {each} |", flush=True)


if __name__ == "__main__":
    main()
