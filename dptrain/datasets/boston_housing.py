"""Prices of houses in Boston, D. Harrison and D. L. Rubinfeld, 1978; under Keras' name."""

from pathlib import Path
from typing import TYPE_CHECKING

from dptrain.data.keras_sets import Split, houses
from dptrain.registry.arguments import checked_arguments
from dptrain.registry.names import not_there

__all__ = ["load_data"]

if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__ = not_there("datasets.boston_housing", __all__)


@checked_arguments
def load_data(path: str | Path = "boston_housing.npz", test_split: float = 0.2, seed: int = 113) -> Split:
    """Return `(x_train, y_train), (x_test, y_test)`: 13 features of each house, and prices, float64.

    Keras advises against this set, one of whose features is about race: use `california_housing`. `test_split` is the
    fraction of rows for tests, below 1; `seed` orders the rows. For `path` and errors see `datasets`.
    """
    checksum = "f553886a1f8d56431e820c5b82552d9d95cfcb96d1e678153f8839538947dff5"
    return houses(path, "boston_housing.npz", checksum, test_split, seed)
