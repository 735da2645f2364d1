"""Prices of houses in California, R. K. Pace and R. Barry, 1997; under Keras' name."""

from pathlib import Path
from typing import TYPE_CHECKING

from dptrain.data.keras_sets import Split, houses
from dptrain.errors import ConfigError
from dptrain.registry.arguments import checked_arguments
from dptrain.registry.names import not_there

__all__ = ["load_data"]

if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__ = not_there("datasets.california_housing", __all__)


@checked_arguments
def load_data(
    version: str = "large", path: str | Path = "california_housing.npz", test_split: float = 0.2, seed: int = 113
) -> Split:
    """Return `(x_train, y_train), (x_test, y_test)`: 8 features of each block of houses, and prices in dollars.

    `version` is "large" for 20,640 rows, "small" for the first 600; for other arguments see `boston_housing.load_data`.
    """
    if version not in ("small", "large"):
        raise ConfigError(f"Argument `version` must be one of 'small', 'large'. Received: version={version}")
    checksum = "1a2e3a52e0398de6463aebe6f4a8da34fb21fbb6b934cf88c3425e766f2a1a6f"
    return houses(path, "california_housing.npz", checksum, test_split, seed, 600 if version == "small" else None)
