"""Colours of images: grey, and hue, saturation and value."""

from collections.abc import Callable, Sequence
from typing import Any

from dptrain.errors import ConfigError
from dptrain.ops.common import limits
from dptrain.ops.elementwise import absolute, cast, clip, equal, floating, less, maximum, minimum, where
from dptrain.ops.image.formats import batched
from dptrain.ops.manipulation import concatenate
from dptrain.ops.math.division import mod
from dptrain.ops.operation_calls import operation
from dptrain.program.tensor import Tensor, as_tensors
from dptrain.runtime.types import is_floating

# Of red, green and blue: ITU-R BT.601.
_GRAY = (0.2989, 0.587, 0.114)


@operation
def rgb_to_grayscale(images: Any, data_format: str | None = None) -> Tensor:
    """Return the brightness of images as one channel instead of three; images of one channel stay as they are."""
    x, restored = batched(images, data_format)
    if x.shape[3] not in (1, 3):
        raise ConfigError(
            "Invalid channel size: expected 3 (RGB) or 1 (Grayscale). Received input with shape: "
            f"images.shape={as_tensors([images])[0].shape}"
        )
    if x.shape[3] == 1:
        return as_tensors([images])[0]
    colours = floating(x)
    gray = sum((colours[..., n : n + 1] * weight for n, weight in enumerate(_GRAY[1:], 1)), colours[..., :1] * _GRAY[0])
    return restored(cast(gray, x.dtype))


@operation
def rgb_to_hsv(images: Any, data_format: str | None = None) -> Tensor:
    """Convert floating-point RGB images to hue and saturation from 0 to 1, and value in the units of the colours.

    Source: A. R. Smith, "Color gamut transform pairs", SIGGRAPH 1978.
    """
    return _map_channels(images, data_format, _to_hsv)


@operation
def hsv_to_rgb(images: Any, data_format: str | None = None) -> Tensor:
    """Convert floating-point images of hue, saturation and value (`rgb_to_hsv`) to RGB; hues have period 1."""
    return _map_channels(images, data_format, _to_rgb)


def _map_channels(
    images: Any, data_format: str | None, function: Callable[[Sequence[Tensor]], Sequence[Tensor]]
) -> Tensor:
    """Apply a function to the three channels of images."""
    x, restored = batched(images, data_format)
    if not is_floating(x.dtype):
        raise ConfigError(f"Invalid images dtype: expected float dtype. Received: images.dtype={x.dtype.name}")
    if x.shape[3] != 3:
        raise ConfigError(f"Invalid channel size: expected 3. Received: images.shape={tuple(x.shape)}")
    return restored(concatenate(function([x[..., n : n + 1] for n in range(3)]), 3))


def _to_hsv(colors: Sequence[Tensor]) -> Sequence[Tensor]:
    smallest = float(limits(colors[0].dtype).eps)
    red, green, blue = (where(less(absolute(channel), smallest), 0, channel) for channel in colors)
    value = maximum(maximum(red, green), blue)
    spread = value - minimum(minimum(red, green), blue)
    saturation = where(value > 0, spread / where(value > 0, value, 1), 0)
    sixth = 1 / (6 * where(spread > 0, spread, 1))
    hue = where(equal(value, green), sixth * (blue - red) + 2 / 6, sixth * (red - green) + 4 / 6)
    hue = where(equal(value, red), sixth * (green - blue), hue)
    return where(spread > 0, hue, 0) + cast(less(hue, 0), hue.dtype), saturation, value


def _to_rgb(planes: Sequence[Tensor]) -> Sequence[Tensor]:
    hue, saturation, value = planes
    around = mod(hue, 1) * 6
    parts = (
        clip(absolute(around - 3) - 1, 0, 1),
        clip(2 - absolute(around - 2), 0, 1),
        clip(2 - absolute(around - 4), 0, 1),
    )
    return [value * (1 - saturation + saturation * part) for part in parts]
