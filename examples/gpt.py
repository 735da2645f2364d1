"""A miniature character-level GPT: it learns from a text, then generates one, character by character.

    python examples/gpt.py
    mpirun -n 2 python examples/gpt.py

Both print the same losses and the same text. `--text FILE` replaces the nursery rhymes. Source: A. Radford
et al., "Language models are unsupervised multitask learners", 2019; characters as in A. Karpathy's nanoGPT.
"""

import argparse
from pathlib import Path

import numpy as np

import dptrain as keras
from dptrain import layers

RHYMES = """\
Twinkle, twinkle, little star, how I wonder what you are! Up above the world so high, like a diamond in the sky.
Mary had a little lamb, its fleece was white as snow, and everywhere that Mary went the lamb was sure to go.
Jack and Jill went up the hill to fetch a pail of water. Jack fell down and broke his crown, and Jill came tumbling
after. Hey diddle diddle, the cat and the fiddle, the cow jumped over the moon. The little dog laughed to see such fun,
and the dish ran away with the spoon.
"""


class TokenAndPositionEmbedding(layers.Layer):
    """A vector for each character, and one for each place, added up."""

    def __init__(self, length, vocabulary, width):
        super().__init__()
        self.tokens = layers.Embedding(vocabulary, width)
        self.places = layers.Embedding(length, width)

    def call(self, ids):
        return self.tokens(ids) + self.places(np.arange(ids.shape[1]))


def make_block(x, heads, width, dropout):
    """Return what a block of a transformer makes of x: what is in front is looked at, then each place for itself."""
    seen = layers.LayerNormalization()(x)
    seen = layers.MultiHeadAttention(heads, width // heads)(seen, seen, use_causal_mask=True)
    x = layers.Add()([x, layers.Dropout(dropout)(seen)])
    each = layers.Dense(4 * width, "gelu")(layers.LayerNormalization()(x))
    return layers.Add()([x, layers.Dropout(dropout)(layers.Dense(width)(each))])


def make_gpt(length, vocabulary, blocks, heads, width, dropout):
    """Return a model from (rows, length) characters to scores of the next ones, (rows, length, vocabulary)."""
    inputs = keras.Input((length,), dtype="int32")
    x = TokenAndPositionEmbedding(length, vocabulary, width)(inputs)
    for _ in range(blocks):
        x = make_block(x, heads, width, dropout)
    return keras.Model(inputs, layers.Dense(vocabulary)(layers.LayerNormalization()(x)))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", metavar="FILE", help="what it reads")
    parser.add_argument("--length", type=int, default=64, metavar="N", help="characters that it looks at (default: 64)")
    parser.add_argument("--blocks", type=int, default=2, metavar="N")
    parser.add_argument("--heads", type=int, default=4, metavar="N")
    parser.add_argument("--width", type=int, default=64, metavar="N", help="of a character's vector (default: 64)")
    parser.add_argument("--dropout", type=float, default=0.1, metavar="RATE")
    parser.add_argument("--epochs", type=int, default=20, metavar="N")
    parser.add_argument("--batch-size", type=int, default=32, metavar="N")
    parser.add_argument("--count", type=int, default=60, metavar="N", help="characters that it writes (default: 60)")
    parser.add_argument("--dtype", default="float32")
    given = parser.parse_args()
    text = Path(given.text).read_text(encoding="utf-8") if given.text else RHYMES
    known = sorted(set(text))
    ids = np.array([known.index(character) for character in text], np.int32)
    starts = np.arange(len(ids) - given.length)
    x, y = (ids[starts[:, None] + np.arange(given.length) + ahead] for ahead in (0, 1))
    keras.utils.set_random_seed(1)
    model = make_gpt(given.length, len(known), given.blocks, given.heads, given.width, given.dropout)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.AdamW(3e-3), loss, dtype=given.dtype)
    history = model.fit(x, y, batch_size=given.batch_size, epochs=given.epochs, verbose=0).history
    written = model.generate(ids[:1], given.count, temperature=0.5, seed=1)
    if keras.rank() == 0:
        for epoch, value in enumerate(history["loss"], 1):
            print(f"epoch {epoch}: loss {value:.6f}")
        print("".join(known[number] for number in written))


if __name__ == "__main__":
    main()
