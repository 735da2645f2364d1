"""A Siamese network: one tower processes two images and learns distances that are small within a class. It is trained
with the contrastive loss and evaluated by how well the distance tells whether two images show the same digit.

    python examples/siamese.py
    mpirun -n 2 python examples/siamese.py

Both print the same losses. `--data-dir DIR` uses MNIST from DIR instead of the built-in strokes. Source: R. Hadsell, S.
Chopra and Y. LeCun, "Dimensionality reduction by learning an invariant mapping", CVPR 2006.
"""

import argparse

import numpy as np

import dptrain as keras
from dptrain import layers, ops

MARGIN = 1.0


def make_pairs(images, labels, seed):
    """Return (first, second) images and whether they differ: for every image one of its class and one of another."""
    rng = np.random.default_rng(seed)
    same = [rng.choice(np.flatnonzero(labels == label)) for label in labels]
    other = [rng.choice(np.flatnonzero(labels != label)) for label in labels]
    differ = np.repeat([0.0, 1.0], len(images))
    order = rng.permutation(len(differ))
    first, second = np.concatenate([images, images]), images[same + other]
    return (first[order], second[order]), differ[order]


def make_tower(width):
    """Return a model from (rows, 28, 28, 1) images to points in the plane of ten dimensions."""
    return keras.Sequential(
        [
            keras.Input(shape=(28, 28, 1)),
            layers.Conv2D(width, (5, 5), activation="tanh"),
            layers.AveragePooling2D((2, 2)),
            layers.Conv2D(4 * width, (5, 5), activation="tanh"),
            layers.AveragePooling2D((2, 2)),
            layers.Flatten(),
            layers.Dense(10),
        ],
        name="tower",
    )


def make_siamese(tower):
    """Return a model from two images to the Euclidean distance of their points, (rows, 1)."""
    first, second = keras.Input((28, 28, 1)), keras.Input((28, 28, 1))
    squared = ops.sum(ops.square(tower(first) - tower(second)), axis=1, keepdims=True)
    return keras.Model([first, second], ops.sqrt(ops.maximum(squared, 1e-7)))


def contrastive_loss(y_true, y_pred):
    """Return d^2 of pairs that are alike, max(margin - d, 0)^2 of those that differ."""
    apart = ops.square(ops.maximum(MARGIN - y_pred, 0.0))
    return ops.mean((1 - y_true) * ops.square(y_pred) + y_true * apart, axis=-1)


def main() -> None:
    """Train, and print the losses and how often the distance is right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", metavar="DIR", help="of MNIST's four files")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--dtype", default="float32", help="float32, or float64 on the CPU")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--images", type=int, default=2000, help="to make pairs of, two of each")
    parser.add_argument("--width", type=int, default=4, help="filters of the first convolution")
    arguments = parser.parse_args()

    if arguments.data_dir is None:
        train, test = keras.datasets.load("strokes")
    else:
        train, test = keras.datasets.mnist.load_data(arguments.data_dir)
    pairs = []
    for seed, (images, labels) in enumerate((train, test)):
        count = arguments.images if seed == 0 else arguments.images // 4
        images = np.reshape(images[:count], (-1, 28, 28, 1)).astype("float32") / 255
        pairs.append(make_pairs(images, labels[:count].astype(int), seed))

    keras.utils.set_random_seed(1)
    model = make_siamese(make_tower(arguments.width))
    accuracy = keras.metrics.BinaryAccuracy(threshold=MARGIN / 2)
    model.compile("adam", contrastive_loss, metrics=[accuracy], device=arguments.device, dtype=arguments.dtype)
    (train_pairs, train_differ), (test_pairs, test_differ) = pairs
    history = model.fit(
        train_pairs, train_differ, validation_data=(test_pairs, test_differ), epochs=arguments.epochs, verbose=0
    ).history
    if keras.rank() == 0:
        for epoch, losses in enumerate(zip(history["loss"], history["val_loss"], strict=True), 1):
            print(f"epoch {epoch}: loss {losses[0]:.5f} val_loss {losses[1]:.5f}")
        print(f"pairs that are told apart: {history['val_binary_accuracy'][-1]:.3f}")


if __name__ == "__main__":
    main()
