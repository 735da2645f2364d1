"""Texts as ids of words: 0 fills up, 1 is a word that training has not seen, the others are a vocabulary's.

Words are in lower case and without punctuation, as `layers.TextVectorization` makes them of ASCII by default.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

FIRST_WORD = 2
"""The id of a vocabulary's first word."""

PUNCTUATION = re.compile(r'[!"#$%&()\*\+,\-./:;<=>?@\[\\\]^_`{|}~\']')
"""Characters that are no part of a word, as Keras' TextVectorization has them."""


def split_words(text: str) -> list[str]:
    """Return the words of a text."""
    return PUNCTUATION.sub("", text.lower()).split()


def learn_vocabulary(texts: Iterable[str], most: int) -> tuple[str, ...]:
    """Return the most frequent words, of equally frequent ones the first by letters."""
    counts = Counter(word for text in texts for word in split_words(text))
    return tuple(sorted(counts, key=lambda word: (-counts[word], word))[:most])


def word_ids(vocabulary: Iterable[str]) -> dict[str, int]:
    """Return the id of each word."""
    return {word: index for index, word in enumerate(vocabulary, FIRST_WORD)}


def encode_texts(texts: Sequence[str], ids_of: Mapping[str, int], length: int) -> npt.NDArray[Any]:
    """Return ids (rows, length), float32, of the first words of each text; 1 alone where there are none.

    `ids_of` is what `word_ids` returns.
    """
    ids = np.zeros((len(texts), length), np.float32)
    for row, text in enumerate(texts):
        words = split_words(text)[:length]
        ids[row, : max(1, len(words))] = [ids_of.get(word, 1) for word in words] or 1
    return ids
