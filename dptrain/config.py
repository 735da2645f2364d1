"""Keras' global settings. Those that dptrain fixes can be read, and set to no other value."""

from typing import TYPE_CHECKING, Any

from dptrain.errors import ConfigError
from dptrain.mixed_precision import dtype_policy, set_dtype_policy
from dptrain.registry.names import not_there
from dptrain.runtime import floatx as _floatx
from dptrain.runtime import image_format, limits
from dptrain.runtime.output import terminal
from dptrain.runtime.types import POLICY_TYPES, TYPES

__all__ = [
    "backend",
    "disable_flash_attention",
    "disable_interactive_logging",
    "disable_traceback_filtering",
    "dtype_policy",
    "enable_flash_attention",
    "enable_interactive_logging",
    "enable_traceback_filtering",
    "enable_unsafe_deserialization",
    "epsilon",
    "floatx",
    "image_data_format",
    "is_flash_attention_enabled",
    "is_interactive_logging_enabled",
    "is_nnx_enabled",
    "is_traceback_filtering_enabled",
    "max_epochs",
    "max_steps_per_epoch",
    "set_backend",
    "set_dtype_policy",
    "set_epsilon",
    "set_floatx",
    "set_image_data_format",
    "set_max_epochs",
    "set_max_steps_per_epoch",
]

_flash_attention: bool | None = None

_FLOATS = tuple(sorted(known.name for known in POLICY_TYPES))

if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__ = not_there("config", __all__)


def backend() -> str:
    """Return "dptrain", which computes itself."""
    return "dptrain"


def floatx() -> str:
    """Return the type that ops give to Python's numbers, "float32" by default; for layers see `dtype_policy`."""
    return _floatx.floatx().name


def epsilon() -> float:
    """Return 1e-7, which keeps divisors and logarithms of losses, metrics and constraints away from 0."""
    return 1e-7


def image_data_format() -> str:
    """Return where layers, ops and data sets have an image's channels by default, "channels_last" at first."""
    return image_format.image_data_format()


def set_floatx(value: str) -> None:
    """Set the type of Python's numbers, of arrays made without a type, and of layers without a policy.

    Call it on every rank, before models are made: traced programs keep their type.

    Args:
        value: "float32", "float64", "float16" or "bfloat16" (else ConfigError).
    """
    if value not in _FLOATS:
        raise ConfigError(f"Unknown `floatx` value: {value}. Expected one of {_FLOATS}")
    _floatx.set_floatx(TYPES[value].storage)


def set_epsilon(value: float) -> None:
    """Accept 1e-7; ConfigError for other numbers."""
    _only("epsilon", value, epsilon())


def set_image_data_format(data_format: str) -> None:
    """Set the `data_format` of layers, ops and data sets that are given none.

    Call it on every rank, before models are made: layers keep the format that they were made with.

    Args:
        data_format: "channels_last", (rows, height, width, channels), or "channels_first".

    Raises:
        ConfigError: another word.
    """
    image_format.set_image_data_format(data_format)


def enable_flash_attention() -> None:
    """Make layers created from now on refuse what flash attention cannot do: dropout, and returning scores."""
    _set_flash_attention(True)


def disable_flash_attention() -> None:
    """Make layers created from now on compute the matrix of scores, like `flash_attention=False`."""
    _set_flash_attention(False)


def is_flash_attention_enabled() -> bool | None:
    """Return which of the two functions above was called last; None for neither: flash attention where it applies."""
    return _flash_attention


def _set_flash_attention(value: bool) -> None:
    global _flash_attention
    _flash_attention = value


def max_epochs() -> int | None:
    """Return the greatest number of epochs of `fit`; None for no limit."""
    return limits.limit("epochs")


def max_steps_per_epoch() -> int | None:
    """Return the greatest number of steps in an epoch of `fit`, and in `evaluate` and `predict`; None for no limit."""
    return limits.limit("steps_per_epoch")


def set_max_epochs(max_epochs: int | None) -> None:
    """Limit the epochs of `fit`, to try a script out; call it on every rank.

    None sets no limit; initially the limit is the environment's KERAS_MAX_EPOCHS. ConfigError if not a positive
    integer.
    """
    limits.set_limit("epochs", max_epochs)


def set_max_steps_per_epoch(max_steps_per_epoch: int | None) -> None:
    """Limit the steps in an epoch of `fit`, and in `evaluate` and `predict`; call it on every rank.

    None sets no limit; initially it is the environment's KERAS_MAX_STEPS_PER_EPOCH. ConfigError if not a positive
    integer.
    """
    limits.set_limit("steps_per_epoch", max_steps_per_epoch)


def set_backend(backend: str) -> None:
    """Accept "dptrain"; ConfigError for others."""
    _only("backend", backend, "dptrain")


def is_nnx_enabled() -> bool:
    """Return False."""
    return False


def enable_unsafe_deserialization() -> None:
    """Raise ConfigError: dptrain never runs code from files."""
    raise ConfigError("not supported: unsafe deserialization; dptrain runs no code from files")


def enable_interactive_logging() -> None:
    """Show live progress lines where they are requested, the default."""
    terminal.set_interactive(True)


def disable_interactive_logging() -> None:
    """Show a line per epoch where live progress lines are requested."""
    terminal.set_interactive(False)


def is_interactive_logging_enabled() -> bool:
    """Return whether live progress lines may be shown."""
    return terminal.is_interactive()


def enable_traceback_filtering() -> None:
    """Raise ConfigError: tracebacks are never shortened."""
    raise ConfigError("not supported: traceback filtering; tracebacks always have dptrain's own lines")


def disable_traceback_filtering() -> None:
    """Do nothing: tracebacks always have dptrain's own lines."""


def is_traceback_filtering_enabled() -> bool:
    """Return False."""
    return False


def _only(name: str, value: Any, supported: Any) -> None:
    if value != supported:
        raise ConfigError(f"not supported: {name} = {value!r}; expected {supported!r}")
