"""Models of sequences of any length, trained on batches of many lengths, and how many texts are compiled for these."""

from collections import OrderedDict
from contextlib import contextmanager

import numpy as np

from dptrain import Input, Model, layers, ops
from dptrain.backend.cpu import compiled, parameters
from dptrain.utils import set_random_seed

L = layers
IDS, CLASSES = 30, 5


class Position(L.Layer):
    """Adds a trained vector for each position."""

    def __init__(self):
        super().__init__()
        self.supports_masking = True

    def build(self, input_shape):
        self.table = self.add_weight(shape=(2048, input_shape[-1]))

    def call(self, x):
        return x + self.table[: x.shape[1]]


def _attended(x, **options):
    return L.LayerNormalization()(L.Add()([x, L.MultiHeadAttention(2, 4)(x, x, **options)]))


def _scored(x):
    """Attention of single ops: a softmax of all pairs."""
    scores = L.Softmax()(L.Dot((2, 2))([x, x]))
    return L.Dot((2, 1))([scores, x])


# What maps (rows, length, channels) to another such tensor.
BLOCKS = {
    "dense": lambda x: L.Dense(6, "relu")(x),
    "norm": L.LayerNormalization(),
    "batch norm": L.BatchNormalization(),
    "attention": _attended,
    "causal attention": lambda x: _attended(x, use_causal_mask=True),
    "softmax": _scored,
    "same conv": lambda x: L.Conv1D(6, 3, padding="same", activation="relu")(x),
    "causal conv": lambda x: L.Conv1D(7, 3, padding="causal", dilation_rate=2)(x),
    "conv": lambda x: L.Conv1D(6, 3)(x),
    "strided conv": lambda x: L.Conv1D(6, 4, strides=3)(x),
    "pool": lambda x: L.MaxPooling1D(2)(x),
    "average": lambda x: L.AveragePooling1D(3, 2, padding="same")(x),
    "lstm": lambda x: L.LSTM(5, return_sequences=True)(x),
    "gru": lambda x: L.GRU(5, return_sequences=True)(x),
    "bidirectional": lambda x: L.Bidirectional(L.LSTM(3, return_sequences=True))(x),
    "position": lambda x: Position()(x),
    "dropout": lambda x: L.Dropout(0.3)(x),
    "padding": lambda x: L.ZeroPadding1D(1)(L.Cropping1D((1, 0))(x)),
    "reversed": lambda x: ops.flip(x, 1),
}
POOLS = {
    "mean": lambda x: L.GlobalAveragePooling1D()(x),
    "max": lambda x: L.GlobalMaxPooling1D()(x),
    "last": lambda x: L.GRU(4)(x),
}


def classifier(blocks, pool, *, masked=False):
    """Return a compiled model of ids; a class for each sample, or for each step with `pool` None."""
    set_random_seed(3)
    ids = Input((None,), dtype="int32")
    x = L.Embedding(IDS, 8, mask_zero=masked)(ids)
    for name in blocks:
        block = BLOCKS[name]
        x = (type(block)() if isinstance(block, L.Layer) else block)(x)
    model = Model(ids, L.Dense(CLASSES, "softmax")(x if pool is None else POOLS[pool](x)))
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"], jit_compile=True)
    return model


# Models as people write them.
MODELS = {
    "dense": (["dense", "norm"], "mean"),
    "attention": (["position", "attention", "dense"], "mean"),
    "masked attention": (["attention", "dense"], "mean", True),
    "language model": (["position", "causal attention", "dense", "norm"], None),
    "softmax": (["softmax", "dense"], "mean"),
    "convolutions": (["same conv", "batch norm", "pool", "conv"], "max"),
    "lstm": (["lstm"], "last"),
    "masked lstm": (["lstm"], "last", True),
    "masked bidirectional": (["bidirectional"], "mean", True),
}


def model_of(name):
    """Return one of `MODELS`."""
    blocks, pool, *masked = MODELS[name]
    return classifier(blocks, pool, masked=bool(masked))


def drawn(rng):
    """Return a drawn model that takes 16 steps or more, and the names of its blocks."""
    names = [str(name) for name in rng.choice(list(BLOCKS), rng.integers(1, 4), replace=False)]
    shrinks = {"conv", "strided conv", "pool", "average", "padding", "reversed"}
    pool = str(rng.choice(list(POOLS)))
    masked = bool(rng.integers(2)) and shrinks.isdisjoint(names) and pool != "max"
    return classifier(names, pool, masked=masked), names


def batch(length, of_steps, rows=5):
    """Return ids, of which the last are zeros, and classes."""
    rng = np.random.default_rng(length)
    x = rng.integers(1, IDS, (rows, length)) * (np.arange(length) < rng.integers(1, length + 1, (rows, 1)))
    return x, rng.integers(0, CLASSES, x.shape if of_steps else (rows,))


def results(model, lengths):
    """Train, evaluate and predict batches of each length; return all numbers and the weights."""
    found = []
    for length in lengths:
        x, y = batch(length, len(model.output_shape) == 3)
        found += [model.train_on_batch(x, y), model.test_on_batch(x, y), model.predict_on_batch(x)]
    return [*map(np.asarray, found), *model.get_weights()]


class _OwnText:
    """The C++ of each program as it is, as `parameters.Parameterized`."""

    is_shared = False

    def __init__(self, source, program):
        self.source, self.parameters = source, []


@contextmanager
def texts(*, shared=True):
    """Begin without cached programs; yield the list of texts that are compiled, those of all programs if not shared."""
    sources = []
    library, before = compiled.library, (compiled.Parameterized, compiled._LOWERED, parameters._KNOWN)

    def noted(source):
        if source not in sources:
            sources.append(source)
        return library(source)

    compiled.library, compiled._LOWERED, parameters._KNOWN = noted, OrderedDict(), OrderedDict()
    compiled.Parameterized = before[0] if shared else _OwnText
    try:
        yield sources
    finally:
        compiled.library = library
        compiled.Parameterized, compiled._LOWERED, parameters._KNOWN = before


class _Uncompiled:
    """A library whose functions do nothing."""

    def __getattr__(self, name):
        return lambda *arguments: 0


@contextmanager
def uncompiled():
    """Let programs do nothing, without a compiler: to count texts."""
    library, shared = compiled.library, compiled._shared
    compiled.library = lambda source: _Uncompiled()
    compiled._shared = lambda factors, tensors: [None] * (1 + len(compiled.IMPLEMENTATIONS) * len(compiled.FACTORS))
    try:
        yield
    finally:
        compiled.library, compiled._shared = library, shared
