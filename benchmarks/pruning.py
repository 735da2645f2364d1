"""What zeros cost: LeNet-5 on MNIST, dense and pruned, over the same seeds, epochs and learning rates.

python benchmarks/pruning.py --variants dense,default --seeds 0-4 --journal runs.jsonl

Every run is appended to the journal, and what it holds already is not trained again. The table at the end compares each
variant with "dense" (or, with a cosine learning rate, "dense-cosine") seed by seed: a seed has the same initial weights
and the same order of samples in both.
"""

import argparse
import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import dptrain as dp
from dptrain import layers, pruning
from dptrain.optimizers.schedules import CosineDecay

BATCH, SAMPLES = 128, 60_000
STEPS = -(-SAMPLES // BATCH)

# What each variant changes; `begin` and `end` are parts of the training.
VARIANTS: dict[str, dict[str, Any]] = {
    "dense": {"sparsity": None},
    "dense-cosine": {"sparsity": None, "cosine": True},
    "layer": {},
    "layer-first-and-last-dense": {"layers": ["conv2d_1", "dense", "dense_1"]},
    "global": {"scope": "global"},
    "global-every-10": {"scope": "global", "frequency": 10},
    "global-every-10-power-1": {"scope": "global", "frequency": 10, "power": 1},
    "global-every-10-to-25%": {"scope": "global", "frequency": 10, "end": 0.25},
    "global-every-10-from-20%-to-70%": {"scope": "global", "frequency": 10, "begin": 0.2, "end": 0.7},
    "global-from-20%-to-70%": {"scope": "global", "begin": 0.2, "end": 0.7},
    "layer-every-10-from-20%-to-70%": {"frequency": 10, "begin": 0.2, "end": 0.7},
    "global-every-10-regrow": {"scope": "global", "frequency": 10, "regrow": 0.3},
    "global-every-10-to-75%": {"scope": "global", "frequency": 10, "end": 0.75},
    "global-regrow": {"scope": "global", "regrow": 0.3},
    "global-every-10-cosine": {"scope": "global", "frequency": 10, "cosine": True},
    "global-every-10-cosine-to-75%": {"scope": "global", "frequency": 10, "cosine": True, "end": 0.75},
    "rigl-layer": {"constant": True, "regrow": 0.3, "end": 0.75},
}
USUAL = {
    "sparsity": 0.9,
    "scope": "layer",
    "begin": 0.0,
    "end": 0.5,
    "frequency": 100,
    "power": 3,
    "regrow": None,
    "layers": None,
    "constant": False,
    "cosine": False,
}


def lenet(seed: int) -> dp.Sequential:
    """Return LeNet-5 with 61,706 parameters."""
    return dp.Sequential(
        [
            layers.Input((28, 28)),
            layers.Rescaling(1 / 255),
            layers.Reshape((28, 28, 1)),
            layers.Conv2D(6, 5, padding="same", activation="relu", name="conv2d"),
            layers.MaxPooling2D(),
            layers.Conv2D(16, 5, activation="relu", name="conv2d_1"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(120, "relu", name="dense"),
            layers.Dense(84, "relu", name="dense_1"),
            layers.Dense(10, "softmax", name="dense_2"),
        ],
        seed=seed,
    )


def train(variant: Mapping[str, Any], seed: int, epochs: int, data: Any) -> dict[str, Any]:
    """Return the accuracy in percent on the test part after the last epoch, and the parts of zeros by layer."""
    (x, y), (x_test, y_test) = data
    chosen = {**USUAL, **variant}
    model, steps = lenet(seed), STEPS * epochs
    if chosen["sparsity"] is not None:
        begin, end = round(chosen["begin"] * steps), round(chosen["end"] * steps)
        schedule: pruning.PruningSchedule
        if chosen["constant"]:
            schedule = pruning.ConstantSparsity(chosen["sparsity"], begin, end, chosen["frequency"])
        else:
            schedule = pruning.PolynomialDecay(
                0.0, chosen["sparsity"], begin, end, chosen["power"], frequency=chosen["frequency"]
            )
        pruning.prune_low_magnitude(
            model,
            schedule,
            global_unstructured=chosen["scope"] == "global",
            regrowth=chosen["regrow"],
            layers=chosen["layers"],
        )
    rate = CosineDecay(1e-3, steps) if chosen["cosine"] else 1e-3
    model.compile(dp.optimizers.Adam(rate), "sparse_categorical_crossentropy", metrics=["accuracy"], device="cpu")
    history = model.fit(x, y, batch_size=BATCH, epochs=epochs, verbose=0).history
    logs = model.evaluate(x_test, y_test, verbose=0, return_dict=True)
    zeros = {layer.name: round(pruning.sparsity(layer), 3) for layer in model.layers if layer.weights}
    return {
        "accuracy": 100 * logs["accuracy"],
        "loss": logs["loss"],
        "train_loss": history["loss"],
        "sparsity": history.get("sparsity", [0.0])[-1],
        "zeros": zeros,
    }


def main() -> None:
    """Train what the journal lacks, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--seeds", default="0-4", help="FIRST-LAST")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--data", help="the folder of MNIST's four files")
    parser.add_argument("--journal", type=Path, default=Path("pruning.jsonl"))
    options = parser.parse_args()
    first, _, last = options.seeds.partition("-")
    names = options.variants.split(",")
    journal = (
        [json.loads(line) for line in options.journal.read_text().splitlines()] if options.journal.exists() else []
    )
    runs = {(run["variant"], run["seed"]): run for run in journal if run["epochs"] == options.epochs}
    data = dp.datasets.mnist.load_data(options.data)
    seeds = range(int(first), int(last or first) + 1)
    for seed in seeds:
        for name in names:
            if (name, seed) not in runs:
                result = train(VARIANTS[name], seed, options.epochs, data)
                runs[name, seed] = {"variant": name, "seed": seed, "epochs": options.epochs, **result}
                with options.journal.open("a") as file:
                    file.write(json.dumps(runs[name, seed]) + "\n")
    print("| variant | accuracy, mean | each seed | minus dense, mean (standard error) | zeros |")
    print("|---|---|---|---|---|")
    for name in names:
        accuracies = [runs[name, seed]["accuracy"] for seed in seeds]
        base = "dense-cosine" if VARIANTS[name].get("cosine") else "dense"
        lost = [runs[name, seed]["accuracy"] - runs[base, seed]["accuracy"] for seed in seeds if (base, seed) in runs]
        error = statistics.stdev(lost) / len(lost) ** 0.5 if len(lost) > 1 else float("nan")
        minus = f"{statistics.fmean(lost):+.2f} ({error:.2f})" if lost and name != base else ""
        zeros = f"{runs[name, seeds[0]]['sparsity']:.1%}"
        each = ", ".join(f"{value:.2f}" for value in accuracies)
        print(f"| {name} | {statistics.fmean(accuracies):.2f} | {each} | {minus} | {zeros} |")


if __name__ == "__main__":
    main()
