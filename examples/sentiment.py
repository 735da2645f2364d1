"""Sentiment analysis with a bidirectional LSTM, as in Keras' example "Bidirectional LSTM on IMDB" (F. Chollet, 2020),
with `import dptrain as keras`, on generated sentences.

    python examples/sentiment.py
    mpirun -n 2 python examples/sentiment.py

Both print the same numbers. Words have values, and a negation inverts the next one; a sentence is positive if its sum
is above 0. Sentences have 5 to `--length` words; the embedding's mask hides the padding.
"""

import argparse

import numpy as np

import dptrain as keras
from dptrain import layers

WORDS, NOT = 40, 1


def sentences(count, length, seed):
    """Return ids (count, length), 0 behind the last word, and whether each is good."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(2, WORDS, (count, length))
    ids[rng.random(ids.shape) < 0.15] = NOT
    ids *= np.arange(length) < rng.integers(5, length + 1, (count, 1))
    values = np.where(ids >= 2, np.where(ids % 2, 1.0, -1.0), 0.0)
    turned = np.roll(ids == NOT, 1, axis=1)
    turned[:, 0] = False
    totals = np.where(turned, -values, values).sum(1) + 0.5 * np.where(rng.random(count) < 0.5, 1, -1)
    return ids, (totals > 0).astype(np.int64)


def main() -> None:
    """Train on sentences, and print how well others are understood."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--samples", type=int, default=2500)
    parser.add_argument("--length", type=int, default=20)
    parser.add_argument("--units", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()

    inputs = keras.Input((None,), dtype="int32")
    hidden = layers.Embedding(WORDS, 16, mask_zero=True)(inputs)
    hidden = layers.Bidirectional(layers.LSTM(options.units, return_sequences=True))(hidden)
    hidden = layers.Bidirectional(layers.LSTM(options.units))(hidden)
    outputs = layers.Dense(1, activation="sigmoid")(hidden)
    model = keras.Model(inputs, outputs, seed=1)
    model.compile(
        keras.optimizers.Adam(0.01),
        "binary_crossentropy",
        metrics=["accuracy"],
        device=options.device,
        dtype=options.dtype,
    )

    x, y = sentences(options.samples, options.length, seed=0)
    history = model.fit(x, y, batch_size=options.batch_size, epochs=options.epochs, verbose=0).history
    loss, accuracy = model.evaluate(*sentences(options.samples // 4, options.length, seed=1), verbose=0)
    if keras.rank() == 0:
        for epoch, (train_loss, train_accuracy) in enumerate(zip(history["loss"], history["accuracy"], strict=True), 1):
            print(f"epoch {epoch}: loss {train_loss:.6f} accuracy {train_accuracy:.4f}")
        print(f"other sentences: loss {loss:.6f} accuracy {accuracy:.4f}")


if __name__ == "__main__":
    main()
