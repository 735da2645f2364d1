"""Keras' image_data_format: where this process has an image's channels by default."""

from typing import Any

from dptrain.errors import ConfigError

FORMATS = ("channels_last", "channels_first")
_default = FORMATS[0]


def image_data_format() -> str:
    """Return the default format."""
    return _default


def set_image_data_format(data_format: Any) -> None:
    """Set the default format."""
    global _default
    _default = checked_format(data_format)


def checked_format(data_format: Any) -> str:
    """Return a data format after checking it; the default for None."""
    form = _default if data_format is None else str(data_format).lower()
    if form not in FORMATS:
        raise ConfigError(
            "The `data_format` argument must be one of {'channels_first', 'channels_last'}. "
            f"Received: data_format={data_format}"
        )
    return form
