"""Time series forecasting with a GRU, as in Keras' example "Timeseries forecasting for weather prediction"
(P. Attri et al., 2020), with `import dptrain as keras`, on generated data.

    python examples/forecast.py
    mpirun -n 2 python examples/forecast.py

Both print the same numbers. Three sensors have daily and weekly cycles, drift and noise; from `--past` hours of all
three, the model forecasts the first one `--ahead` hours later. It must beat "same as now" and "same as a day ago".
"""

import argparse

import numpy as np

import dptrain as keras
from dptrain import layers


def series(hours, seed):
    """Return three sensors by the hour, (hours, 3)."""
    rng = np.random.default_rng(seed)
    hour = np.arange(hours)
    day, week = np.sin(2 * np.pi * hour / 24), np.sin(2 * np.pi * hour / 168)
    wind = np.convolve(rng.normal(0, 0.4, hours), np.ones(12) / 3, "same")
    first = day * (1 + 0.5 * week) + 0.5 * np.roll(wind, 8) + rng.normal(0, 0.05, hours)
    return np.stack([first, wind, week + rng.normal(0, 0.1, hours)], axis=1)


def main() -> None:
    """Train on the first hours, and print the error of the last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--hours", type=int, default=5000)
    parser.add_argument("--past", type=int, default=48)
    parser.add_argument("--ahead", type=int, default=6)
    parser.add_argument("--units", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()

    data = series(options.hours, seed=0)
    starts = np.arange(options.hours - options.past - options.ahead + 1)
    windows = data[starts[:, None] + np.arange(options.past)]
    targets = data[starts + options.past + options.ahead - 1, :1]
    split = 4 * len(starts) // 5

    normalization = layers.Normalization()
    normalization.adapt(windows[:split])
    model = keras.Sequential(
        [
            keras.Input((options.past, 3)),
            normalization,
            layers.GRU(options.units, return_sequences=True),
            layers.GRU(options.units),
            layers.Dense(1),
        ],
        seed=1,
    )
    model.compile(keras.optimizers.Adam(0.005), "mse", device=options.device, dtype=options.dtype)
    history = model.fit(
        windows[:split], targets[:split], batch_size=options.batch_size, epochs=options.epochs, verbose=0
    ).history
    error = model.evaluate(windows[split:], targets[split:], verbose=0)
    now = np.mean((windows[split:, -1, :1] - targets[split:]) ** 2)
    before = np.mean((windows[split:, -1 - (24 - options.ahead), :1] - targets[split:]) ** 2)
    if keras.rank() == 0:
        for epoch, loss in enumerate(history["loss"], 1):
            print(f"epoch {epoch}: loss {loss:.6f}")
        print(f"later hours: squared error {error:.6f}, as it is now {now:.6f}, as a day before {before:.6f}")


if __name__ == "__main__":
    main()
