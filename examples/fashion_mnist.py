"""Classify images of clothing: Keras' first tutorial, with only the import line changed.

    python examples/fashion_mnist.py
    mpirun -n 4 python examples/fashion_mnist.py     # the same training on four ranks

`--data-dir DIR` reads the data set's four files from DIR instead of downloading them, `--epochs N` trains for N epochs.
"""

import argparse

import numpy as np

import dptrain as keras

parser = argparse.ArgumentParser(description="Classify images of clothing.")
parser.add_argument("--data-dir", metavar="DIR")
parser.add_argument("--epochs", type=int, default=10)
options = parser.parse_args()

# The data: 60,000 images of 28 x 28 pixels with labels 0 to 9, and 10,000 more to test with.
(train_images, train_labels), (test_images, test_labels) = keras.datasets.fashion_mnist.load_data(options.data_dir)
class_names = ["T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"]

model = keras.Sequential(
    [
        keras.layers.Rescaling(1 / 255, input_shape=(28, 28)),  # images stay bytes, in memory and on a GPU
        keras.layers.Flatten(),
        keras.layers.Dense(128, activation="relu"),
        keras.layers.Dense(10),
    ]
)
model.summary()
model.compile(
    optimizer="adam",
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
model.fit(train_images, train_labels, epochs=options.epochs)

test_loss, test_accuracy = model.evaluate(test_images, test_labels, verbose=0)
logits = model.predict(test_images[:5], verbose=0)  # the same on every rank
if keras.rank() == 0:
    print(f"Test accuracy: {test_accuracy:.4f}")
    for row, label in zip(logits, test_labels, strict=False):
        print(f"{class_names[int(np.argmax(row))]:12} (it is: {class_names[label]})")
