"""Checks of ids that a layer looks up in a table, or counts."""

import numpy as np

from dptrain.ops.indexing import take_rows
from dptrain.program.absent_rows import absent_row
from dptrain.program.tensor import Tensor, as_tensors


def require_rows(layer: str, length: int, places: Tensor) -> None:
    """Raise DataError for a known id that is not 0 to length - 1, named with its layer and its sample."""
    if places.value is not None and (error := absent_row(layer, length, places.value)):
        raise error


def existing_rows(layer: str, length: int, places: Tensor) -> Tensor:
    """Return ids; DataError for one that is not 0 to length - 1, in a step when it runs."""
    require_rows(layer, length, places)
    if places.value is not None:
        return places
    (table,) = as_tensors([np.arange(length, dtype=places.dtype if places.dtype.itemsize > 4 else np.int32)])
    return take_rows(table, places)  # which backends check
