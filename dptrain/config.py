"""Keras' global settings. What dptrain does in one way only can be asked, and set to nothing else."""

from typing import TYPE_CHECKING, Any

from dptrain.errors import ConfigError
from dptrain.mixed_precision import dtype_policy, set_dtype_policy
from dptrain.registry.names import not_there

__all__ = [
    "backend",
    "dtype_policy",
    "epsilon",
    "floatx",
    "image_data_format",
    "set_dtype_policy",
    "set_epsilon",
    "set_floatx",
    "set_image_data_format",
]

if not TYPE_CHECKING:  # for which any name would do
    __getattr__ = not_there("config", __all__)


def backend() -> str:
    """Return "dptrain", which computes itself."""
    return "dptrain"


def floatx() -> str:
    """Return the type that ops give to Python's numbers: "float32"; that of layers is `dtype_policy`."""
    return "float32"


def epsilon() -> float:
    """Return what losses, metrics and constraints keep divisors and logarithms away from 0 by."""
    return 1e-7


def image_data_format() -> str:
    """Return "channels_last": images are (rows, height, width, channels)."""
    return "channels_last"


def set_floatx(value: str) -> None:
    """Do nothing for "float32".

    Raises:
        ConfigError: another type; `set_dtype_policy` sets that of layers and models.
    """
    _only("floatx", value, floatx(), "; dptrain.config.set_dtype_policy sets the type of layers and models")


def set_epsilon(value: float) -> None:
    """Do nothing for 1e-7.

    Raises:
        ConfigError: another number.
    """
    _only("epsilon", value, epsilon())


def set_image_data_format(data_format: str) -> None:
    """Do nothing for "channels_last".

    Raises:
        ConfigError: another word.
    """
    _only("image_data_format", data_format, image_data_format())


def _only(name: str, value: Any, known: Any, advice: str = "") -> None:
    if value != known:
        raise ConfigError(f"not supported: {name} = {value!r}; it is {known!r}{advice}")
