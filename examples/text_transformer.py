"""Text classification with a block of a transformer: whether a review is kind. Sentences are made by rule, with words
that a "not" in front turns around, so that counting words does not tell.

    python examples/text_transformer.py
    mpirun -n 2 python examples/text_transformer.py

prints the same losses. `mask_zero` marks places behind the end of a sentence; attention and the mean leave them out.
Source: A. Nandan, "Text classification with Transformer", keras.io, 2020.
"""

import argparse

import numpy as np

import dptrain as keras
from dptrain import layers

KIND, UNKIND = ("good", "lovely", "bright", "clever", "warm"), ("bad", "dull", "cold", "slow", "weak")
FILLING = ("the", "film", "was", "and", "its", "end", "really", "a", "bit", "story")
WORDS = ("", "not", *KIND, *UNKIND, *FILLING)


def make_reviews(count, length, seed):
    """Return (count, length) numbers of words, 0 behind the end of a sentence, and whether each is kind (count,)."""
    rng = np.random.default_rng(seed)
    ids, labels = np.zeros((count, length), np.int32), rng.integers(0, 2, count)
    for row, label in zip(ids, labels, strict=True):
        turned = rng.random() < 0.5
        opinion = rng.choice(KIND if label != turned else UNKIND)
        before, after = (rng.choice(FILLING, rng.integers(1, length // 2 - 1)) for _ in range(2))
        sentence = [*before, *(["not"] if turned else []), opinion, *after][:length]
        row[: len(sentence)] = [WORDS.index(word) for word in sentence]
    return ids, labels


class TokenAndPositionEmbedding(layers.Layer):
    """A vector for each word, and one for each place, added up; the words' mask goes on."""

    def __init__(self, length, vocabulary, width):
        super().__init__()
        self.tokens = layers.Embedding(vocabulary, width, mask_zero=True)
        self.places = layers.Embedding(length, width)

    def compute_mask(self, inputs, previous_mask=None):
        return self.tokens.compute_mask(inputs)

    def call(self, ids):
        return self.tokens(ids) + self.places(np.arange(ids.shape[1]))


def make_classifier(length, heads, width):
    """Return a model from (rows, length) words to how likely a review is kind, (rows, 1)."""
    inputs = keras.Input((length,), dtype="int32")
    x = TokenAndPositionEmbedding(length, len(WORDS), width)(inputs)
    x = layers.LayerNormalization()(layers.Add()([x, layers.MultiHeadAttention(heads, width // heads)(x, x)]))
    each = layers.Dense(width)(layers.Dense(2 * width, "relu")(x))
    x = layers.LayerNormalization()(layers.Add()([x, each]))
    return keras.Model(inputs, layers.Dense(1, "sigmoid")(layers.GlobalAveragePooling1D()(x)))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reviews", type=int, default=4000, metavar="N", help="to train on (default: 4000)")
    parser.add_argument("--length", type=int, default=16, metavar="N", help="of a review (default: 16)")
    parser.add_argument("--heads", type=int, default=2, metavar="N")
    parser.add_argument("--width", type=int, default=32, metavar="N", help="of a word's vector (default: 32)")
    parser.add_argument("--epochs", type=int, default=5, metavar="N")
    parser.add_argument("--batch-size", type=int, default=32, metavar="N")
    parser.add_argument("--dtype", default="float32")
    given = parser.parse_args()
    x, y = make_reviews(given.reviews, given.length, 1)
    keras.utils.set_random_seed(1)
    model = make_classifier(given.length, given.heads, given.width)
    model.compile(keras.optimizers.Adam(3e-3), "binary_crossentropy", metrics=["accuracy"], dtype=given.dtype)
    history = model.fit(x, y, batch_size=given.batch_size, epochs=given.epochs, verbose=0).history
    _, accuracy = model.evaluate(*make_reviews(500, given.length, 2), verbose=0)
    if keras.rank() == 0:
        for epoch, value in enumerate(history["loss"], 1):
            print(f"epoch {epoch}: loss {value:.6f}")
        print(f"Test accuracy: {accuracy:.4f}")


if __name__ == "__main__":
    main()
