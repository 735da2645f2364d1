"""How long `predict` of one row takes, warm, and predictions whose number of rows changes.

    python benchmarks/predict.py [--before FOLDER]

Prints medians and the range of the middle half. With --before, FOLDER holds another version's dptrain/ and kernels/,
which is measured in turn with this one, a second at a time, so that both meet the same machine.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TURNS = 7


def models():
    """Yield names, models and samples."""
    import numpy as np

    import dptrain as dp
    from dptrain import layers

    stack = [layers.Input((784,)), layers.Dense(128, "relu"), layers.Dense(10, "softmax")]
    yield "784-128-10", dp.Sequential(stack), np.random.default_rng(0).random((64, 784), np.float32)
    stack = [layers.Input((28, 28, 1)), layers.Conv2D(16, 3, activation="relu"), layers.MaxPooling2D()]
    stack += [layers.Conv2D(32, 3, activation="relu"), layers.MaxPooling2D(), layers.Flatten(), layers.Dense(10)]
    yield "small convolutional", dp.Sequential(stack), np.random.default_rng(0).random((64, 28, 28, 1), np.float32)
    x = first = layers.Input((64,))
    for _ in range(30):
        x = layers.Add()([x, layers.Dense(64, "gelu")(layers.LayerNormalization()(x))])
    yield "30 residual blocks", dp.Model(first, x), np.random.default_rng(0).random((64, 64), np.float32)


def measure() -> dict[str, list[float]]:
    """Return milliseconds of single calls."""
    times_by_way: dict[str, list[float]] = {}
    for name, model, x in models():
        model.compile(device="cpu")
        ways = {
            "predict, one row": lambda n, model=model, x=x: model.predict(x[:1], verbose=0),
            "predict_on_batch, one row": lambda n, model=model, x=x: model.predict_on_batch(x[:1]),
            "model(x), one row": lambda n, model=model, x=x: model(x[:1]).numpy(),
            "predict, 1 to 64 rows in turn": lambda n, model=model, x=x: model.predict(x[: 1 + n * 27 % 64], verbose=0),
        }
        for way, call in ways.items():
            for n in range(3):
                call(n)
            end, times = time.perf_counter() + 0.3, []
            while time.perf_counter() < end:
                begun = time.perf_counter()
                call(len(times))
                times.append(1000 * (time.perf_counter() - begun))
            times_by_way[f"{name}: {way}"] = times
    return times_by_way


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="a folder with another version")
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.once:
        print(json.dumps(measure()))
        return
    versions = {"now": ROOT} | ({} if options.before is None else {"before": options.before.resolve()})
    times_by_version: dict[str, dict[str, list[float]]] = {version: {} for version in versions}
    for _ in range(TURNS):
        for version, folder in versions.items():
            text = (
                f"import sys; sys.path.insert(0, {str(folder)!r}); sys.argv[1:] = ['--once']; __file__ = {__file__!r}"
            )
            command = [sys.executable, "-c", f"{text}; exec(compile(open(__file__).read(), __file__, 'exec'))"]
            process = subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder)
            for way, times in json.loads(process.stdout).items():
                times_by_version[version].setdefault(way, []).extend(times)
    print("| milliseconds a call | " + " | ".join(versions) + " |")
    print("| --- " * (1 + len(versions)) + "|")
    for way in times_by_version["now"]:
        cells = []
        for version in versions:
            low, middle, high = statistics.quantiles(times_by_version[version][way], n=4)
            cells.append(f"{middle:.2f} ({low:.2f} to {high:.2f})")
        print(f"| {way} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
