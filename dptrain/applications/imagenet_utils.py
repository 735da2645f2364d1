"""Preprocessing for networks trained on ImageNet, and class names of their outputs."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dptrain import ops
from dptrain.errors import ConfigError, DataError
from dptrain.program.tensor import Tensor, Variable, as_tensors
from dptrain.registry.names import not_there
from dptrain.runtime.floatx import floatx
from dptrain.runtime.image_format import FORMATS, checked_format
from dptrain.runtime.storage.cache import cache_dir
from dptrain.runtime.storage.files import open_regular
from dptrain.runtime.types import is_floating
from dptrain.saving.reading import parse_json, reading

__all__ = ["decode_predictions", "preprocess_input"]

if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__ = not_there("applications.imagenet_utils", __all__)

CLASSES = 1000
# The names of ImageNet's classes, {"0": ["n01440764", "tench"], ...}, as Keras fetches it; never fetched here.
_INDEX = "imagenet_class_index.json"
_MAX_INDEX = 2**20  # bytes; the file has 35 thousand
# By mode: the factor, then each channel's mean and divisor.
_MODES: dict[str, tuple[float, tuple[float, ...], tuple[float, ...]]] = {
    "caffe": (1.0, (103.939, 116.779, 123.68), (1.0, 1.0, 1.0)),
    "tf": (127.5, (1.0, 1.0, 1.0), (1.0, 1.0, 1.0)),
    "torch": (255.0, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
}


def preprocess_input(x: Any, data_format: str | None = None, mode: str = "caffe") -> Any:
    """Return images as networks for ImageNet take them, an array for an array, else a tensor; the input is not changed.

    Args:
        x: RGB images, values 0 to 255, (rows, height, width, 3) or (height, width, 3); integers become float32.
        data_format: "channels_last" (the default) or "channels_first".
        mode: "caffe" puts the channels in BGR order and subtracts ImageNet's means, "tf" scales to -1 to 1, "torch"
            scales to 0 to 1, subtracts ImageNet's means and divides by its deviations.

    Raises:
        ConfigError: another mode, another format, or not three channels.
    """
    if mode not in _MODES:
        raise ConfigError(f"Expected mode to be one of `caffe`, `tf` or `torch`. Received: mode={mode}")
    if data_format not in (None, *FORMATS):
        raise ConfigError(
            "Expected data_format to be one of `channels_first` or `channels_last`. "
            f"Received: data_format={data_format}"
        )
    images: Any = x.value if isinstance(x, Variable) else x
    if not isinstance(images, np.ndarray | Tensor):
        (images,) = as_tensors([images])
    if not is_floating(images.dtype):
        images = images.astype(floatx()) if isinstance(images, np.ndarray) else ops.cast(images, floatx())
    channels = images.ndim - 3 if checked_format(data_format) == "channels_first" else images.ndim - 1
    if images.ndim < 3 or (mode != "tf" and images.shape[channels] != 3):
        raise ConfigError(f"preprocess_input: expected RGB images, three channels, found shape {images.shape}")
    factor, means, deviations = _MODES[mode]
    if mode == "tf":
        return images / _like(images, factor) - _like(images, 1.0)
    if mode == "caffe":
        images = images[(*(slice(None),) * channels, slice(None, None, -1))]
    else:
        images = images / _like(images, factor)
    along = (3, *(1,) * (images.ndim - 1 - channels))
    images = images - _like(images, np.reshape(means, along))
    return images / _like(images, np.reshape(deviations, along)) if mode == "torch" else images


def _like(images: Any, value: Any) -> Any:
    """Return numbers in the images' dtype, which is then kept."""
    return np.asarray(value, images.dtype) if isinstance(images, np.ndarray) else ops.cast(value, images.dtype)


def preprocessing(mode: str | None) -> Callable[..., Any]:
    """Return a network's `preprocess_input` for a mode; None for a network that preprocesses itself."""

    def preprocess(x: Any, data_format: str | None = None) -> Any:
        return x if mode is None else preprocess_input(x, data_format, mode)

    does = "Return x: the network does it itself." if mode is None else f"Return images as mode {mode!r} makes them."
    preprocess.__name__ = preprocess.__qualname__ = "preprocess_input"
    preprocess.__doc__ = f"{does} See `imagenet_utils.preprocess_input`."
    return preprocess


def decode_predictions(preds: Any, top: int = 5) -> list[list[tuple[str, str, float]]]:
    """Return the `top` classes of ImageNet for each row of `preds` (rows, 1000), highest first.

    Each is (WordNet's number, word, output). The words come from Keras' file `imagenet_class_index.json`, in
    ~/.keras/models or the folder `models` of dptrain's cache; it is not fetched.

    Raises:
        ConfigError: another shape, or no such file.
        DataError: the file has other contents.
    """
    values = np.asarray(preds.numpy() if isinstance(preds, Tensor | Variable) else preds)
    if values.ndim != 2 or values.shape[1] != CLASSES:
        raise ConfigError(
            "`decode_predictions` expects a batch of predictions (i.e. a 2D array of shape (samples, 1000)). "
            f"Received array with shape: {values.shape}"
        )
    names = _class_names()
    results = []
    for row in values:
        rising = row.size - 1 - np.argsort(row[::-1], kind="stable")  # falling, the first of equal scores is first
        ranked = [(*names[place], row[place]) for place in rising[::-1][:top]]
        results.append(sorted(ranked, key=lambda entry: entry[2], reverse=True))
    return results


def _class_names() -> list[tuple[str, str]]:
    home = os.environ.get("KERAS_HOME") or os.path.join(os.path.expanduser("~"), ".keras")
    places = [Path(home) / "models" / _INDEX, cache_dir() / "models" / _INDEX]
    path = next((path for path in places if path.is_file()), None)
    if path is None:
        raise ConfigError(
            f"decode_predictions: no file {places[0]} or {places[1]}; put Keras' {_INDEX} there (dptrain downloads "
            "none)"
        )
    where = str(path)
    with reading(where), open_regular(path) as file:
        content = file.read(_MAX_INDEX + 1)
    if len(content) > _MAX_INDEX:
        raise DataError(f"{where}: more than {_MAX_INDEX} bytes; expected the names of {CLASSES} classes")
    table: Mapping[str, Any] = parse_json(where, content)
    names = []
    for number in range(CLASSES):
        entry = table.get(str(number))
        if not isinstance(entry, list) or len(entry) != 2 or not all(isinstance(word, str) for word in entry):
            raise DataError(f'{where}: class {number}: expected ["n...", "word"], found {str(entry)[:80]}')
        names.append((entry[0], entry[1]))
    return names
