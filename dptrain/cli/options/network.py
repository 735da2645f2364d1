"""The built-in networks: dense, behind convolutions of pictures, and an LSTM or attention for texts."""

from typing import Any

import numpy as np

from dptrain import layers, ops
from dptrain.cli.options.config import ModelConfig
from dptrain.data.loading import LoadedData
from dptrain.data.preprocessing import Column, Preprocessing
from dptrain.data.words import FIRST_WORD
from dptrain.errors import ConfigError
from dptrain.models import Model

# Filters of the blocks; each block halves height and width; pictures smaller than this have dense layers.
_FILTERS, _LEAST_SIDE = (16, 32, 64, 128), 16
# Momentum of the moving statistics: with Keras' 0.99 a small folder validates its first epochs with initial values.
_MOMENTUM = 0.9
# Numbers that stand for a word, units of each direction of an LSTM, and heads of a transformer's block.
_WORD, _UNITS, _HEADS = 64, 64, 4
# Largest shift and zoom of augmentation, as a part of the picture.
_SHIFT = 0.1


TEXT_NETWORKS = ("lstm", "transformer")


def is_convolutional(config: ModelConfig, data: LoadedData) -> bool:
    """Whether to use the convolutional network: on request, or for a folder of large enough pictures."""
    if config.network != "auto":
        return config.network == "convolutional"
    preprocessing = data.preprocessing
    return (
        preprocessing is not None
        and preprocessing.picture is not None
        and min(preprocessing.picture[:2]) >= _LEAST_SIDE
    )


def filters(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the filters of a network for (height, width, channels) pictures; no side shrinks below 4."""
    blocks = max(1, int(np.log2(max(1, min(shape[:2]) // 4))))
    return _FILTERS[:blocks]


def input_layers(data: LoadedData, network: str = "auto") -> list[layers.Layer]:
    """Return layers that flatten a sample to floats: pixels in [0, 1], standardised columns, vectors of texts."""
    if data.preprocessing is not None and data.preprocessing.columns:
        return table_layers(data.preprocessing, network)
    if network in TEXT_NETWORKS:
        raise ConfigError(f"model.network = {network}: expected a table with a column of text (--text); leave it out")
    if data.columns:
        return [layers.Normalization(input_shape=(data.columns,))]
    return [*_of_pixels(data), layers.Flatten(input_shape=data.train.x.shape[1:])]


def _of_pixels(data: LoadedData) -> list[layers.Layer]:
    """Return layers that scale integer pixels to [0, 1]; none for other samples."""
    shape, dtype = data.train.x.shape[1:], data.train.x.dtype
    return [layers.Rescaling(1 / np.iinfo(dtype).max, input_shape=shape)] if dtype.kind in "ui" else []


def table_layers(preprocessing: Preprocessing, network: str = "auto") -> list[layers.Layer]:
    """Return layers that standardise a table's numbers, embed its large categories and encode its texts."""
    plain, embedded = sum(column.width for column in preprocessing.plain_columns), preprocessing.embedded_columns
    texts = preprocessing.word_columns
    if network in TEXT_NETWORKS and not texts:
        raise ConfigError(
            f"model.network = {network}: the table has no column of text; name one (--text), or leave it out"
        )
    if not embedded and not texts:
        return [layers.Normalization(input_shape=(plain,))]
    start = layers.Input(preprocessing.sample_shape)
    parts = [layers.Normalization()(start[:, :plain])] if plain else []
    for place, column in enumerate(embedded, plain):
        rows = len(column.values)
        parts.append(layers.Embedding(rows, embedding_length(rows))(start[:, place]))
    at = plain + len(embedded)
    for column in texts:
        parts.append(_of_words(start[:, at : at + column.length], column, network))
        at += column.length
    together = layers.Concatenate()(parts) if len(parts) > 1 else parts[0]
    return [layers.InputLayer(preprocessing.sample_shape), Model(start, together, name="columns")]


def text_network(config: ModelConfig, data: LoadedData) -> str:
    """Return which network makes vectors of the texts: "lstm", "transformer" or "dense"; "" where there are none."""
    if data.preprocessing is None or not data.preprocessing.word_columns:
        return ""
    return "lstm" if config.network == "auto" else config.network


def _of_words(ids: Any, column: Column, network: str) -> Any:
    """Return a vector of a text, the ids of whose words are (rows, length) with zeros behind them."""
    rows = len(column.values) + FIRST_WORD
    counts = ops.not_equal(ids, 0)
    x = layers.Embedding(rows, _WORD)(ids)
    if network == "dense":
        return layers.GlobalAveragePooling1D()(x, mask=counts)
    if network != "transformer":
        return layers.Bidirectional(layers.LSTM(_UNITS))(x, mask=counts)
    places = ops.cumsum(ops.ones_like(ids), axis=1)
    x = layers.Add()([x, layers.Embedding(column.length + 1, _WORD)(places)])
    attended = layers.MultiHeadAttention(_HEADS, _WORD // _HEADS)(x, x, attention_mask=ops.expand_dims(counts, axis=1))
    x = layers.LayerNormalization()(layers.Add()([x, attended]))
    inner = layers.Dense(_WORD)(layers.Dense(2 * _WORD, activation="relu")(x))
    x = layers.LayerNormalization()(layers.Add()([x, inner]))
    return layers.GlobalAveragePooling1D()(x, mask=counts)


def embedding_length(categories: int) -> int:
    """Return a category's embedding length by fast.ai's rule of thumb: half its number of values, at most 50."""
    return min(50, (categories + 1) // 2)


def convolutional_layers(config: ModelConfig, data: LoadedData) -> list[layers.Layer]:
    """Return layers from a picture to a vector: augmentation, then blocks, then the global mean.

    Each block is a 3x3 convolution without bias, BatchNormalization, a rectifier and 2x2 max pooling.
    """
    shape = data.train.x.shape[1:]
    if len(shape) not in (2, 3):
        shown = "x".join(map(str, shape))
        raise ConfigError(f"model.network = convolutional: expected pictures, found samples of {shown}; leave it out")
    stack = [*_of_pixels(data)]
    if len(shape) == 2:
        shape = (*shape, 1)
        stack.append(layers.Reshape(shape, input_shape=shape[:2]))
    elif not stack:
        stack.append(layers.InputLayer(shape))
    if config.augment != "off":
        stack += [layers.RandomFlip("horizontal")] if config.augment == "flip" else []
        stack += [layers.RandomTranslation(_SHIFT, _SHIFT, fill_mode="nearest")]
        stack += [layers.RandomZoom(_SHIFT, fill_mode="nearest")]
    for number in filters(shape):
        stack += [
            layers.Conv2D(number, 3, padding="same", use_bias=False),
            layers.BatchNormalization(momentum=_MOMENTUM),
            layers.Activation("relu"),
            layers.MaxPooling2D(2),
        ]
    return [*stack, layers.GlobalAveragePooling2D()]
