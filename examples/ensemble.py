"""How reliable are a network's probabilities? A single network compared with an ensemble.

    python examples/ensemble.py
    mpirun -n 2 python examples/ensemble.py     # the ranks share the members

Members differ only in their seeds: initial weights and order of the samples. The mean of their probabilities is better
calibrated than those of one member: a network that is trained for long is overconfident where it is wrong.
`--data-dir DIR` uses MNIST from DIR instead of the built-in strokes. Sources: B. Lakshminarayanan et al., "Simple and
scalable predictive uncertainty estimation using deep ensembles", NeurIPS 2017; C. Guo et al., "On calibration of modern
neural networks", ICML 2017 (the expected calibration error).
"""

import argparse

import numpy as np

import dptrain as keras
from dptrain import layers


def build_model():
    """Return a new classifier."""
    model = keras.Sequential(
        [
            layers.Rescaling(1 / 255, input_shape=(28, 28)),
            layers.Flatten(),
            layers.Dense(128, activation="relu"),
            layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def negative_log_likelihood(probabilities, labels):
    """Return the mean over samples of -log p(label); infinitely bad for who is sure and wrong."""
    return -np.log(np.maximum(probabilities[np.arange(len(labels)), labels], 1e-30)).mean()


def expected_calibration_error(probabilities, labels, bins=15):
    """Return by how much confidence and accuracy differ, over bins of equal confidence: 0 for calibrated ones."""
    confidence, right = probabilities.max(axis=1), probabilities.argmax(axis=1) == labels
    error = 0.0
    for low in np.arange(bins) / bins:
        inside = (confidence > low) & (confidence <= low + 1 / bins)
        if inside.any():
            error += inside.mean() * abs(confidence[inside].mean() - right[inside].mean())
    return error


def main() -> None:
    """Train, and print how good and how calibrated the probabilities are."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", metavar="DIR", help="of MNIST's four files")
    parser.add_argument("--members", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--samples", type=int, default=10000, help="that are trained on")
    arguments = parser.parse_args()

    if arguments.data_dir is None:
        (x, y), (x_test, y_test) = keras.datasets.load("strokes")
    else:
        (x, y), (x_test, y_test) = keras.datasets.mnist.load_data(arguments.data_dir)
    x, y = x[: arguments.samples], y[: arguments.samples]

    ensemble = keras.Ensemble(build_model, seeds=arguments.members)
    ensemble.fit(x, y, batch_size=32, epochs=arguments.epochs)
    prediction = ensemble.predict(x_test, verbose=0)

    if keras.rank() == 0:
        rows = {
            "a member, on average": np.mean([scores(one, y_test) for one in prediction.members], axis=0),
            "the ensemble": scores(prediction.mean, y_test),
        }
        print(f"{'':22}accuracy  negative log likelihood  calibration error")
        for name, (accuracy, likelihood, calibration) in rows.items():
            print(f"{name:22}{accuracy:8.4f}  {likelihood:23.4f}  {calibration:17.4f}")
        wrong, spread = prediction.mean.argmax(axis=1) != y_test, prediction.std.max(axis=1)
        right = spread[~wrong].mean()
        print(f"members disagree by {right:.3f} where they are right together, {spread[wrong].mean():.3f} where wrong")


def scores(probabilities, labels):
    """Return accuracy, negative log likelihood and expected calibration error."""
    right = (probabilities.argmax(axis=1) == labels).mean()
    return right, negative_log_likelihood(probabilities, labels), expected_calibration_error(probabilities, labels)


if __name__ == "__main__":
    main()
