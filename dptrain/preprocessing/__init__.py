"""Keras 2's module of array helpers for images and sequences; the functions are those of `dptrain.utils`."""

from typing import TYPE_CHECKING

from dptrain.preprocessing import image, sequence
from dptrain.registry.names import not_there
from dptrain.utils import image_dataset_from_directory, text_dataset_from_directory, timeseries_dataset_from_array

__all__ = [
    "image",
    "image_dataset_from_directory",
    "sequence",
    "text_dataset_from_directory",
    "timeseries_dataset_from_array",
]

if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__ = not_there("preprocessing", __all__)
