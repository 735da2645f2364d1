"""Recognize handwritten digits: 512 ReLU units, RMSprop, batches of 128, five epochs; the first example in many books.

    python examples/mnist_rmsprop.py
    mpirun -n 4 python examples/mnist_rmsprop.py     # the same training on four ranks

`--data-dir DIR` reads the data set's four files from DIR instead of downloading them, `--epochs N` trains for N epochs.
"""

import argparse

import dptrain as keras
from dptrain import layers
from dptrain.datasets import mnist

parser = argparse.ArgumentParser(description="Recognise handwritten digits.")
parser.add_argument("--data-dir", metavar="DIR")
parser.add_argument("--epochs", type=int, default=5)
options = parser.parse_args()

(train_images, train_labels), (test_images, test_labels) = mnist.load_data(options.data_dir)
train_images = train_images.reshape((60000, 28 * 28)).astype("float32") / 255
test_images = test_images.reshape((10000, 28 * 28)).astype("float32") / 255

model = keras.Sequential([layers.Dense(512, activation="relu"), layers.Dense(10, activation="softmax")])
model.compile(optimizer="rmsprop", loss="sparse_categorical_crossentropy", metrics=["accuracy"])
model.fit(train_images, train_labels, epochs=options.epochs, batch_size=128)

test_loss, test_accuracy = model.evaluate(test_images, test_labels, verbose=0)
predictions = model.predict(test_images[:10], verbose=0)
if keras.rank() == 0:
    print(f"test accuracy: {test_accuracy:.4f}")
    print("first ten digits:", predictions.argmax(axis=1).tolist(), "are:", test_labels[:10].tolist())
