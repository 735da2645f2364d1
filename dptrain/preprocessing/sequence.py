"""Sequences of different lengths as arrays."""

from typing import TYPE_CHECKING

from dptrain.registry.names import not_there
from dptrain.utils import pad_sequences

__all__ = ["pad_sequences"]

if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__ = not_there("preprocessing.sequence", __all__)
