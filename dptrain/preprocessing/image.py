"""Pictures as arrays."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dptrain.ops.image import resize
from dptrain.registry.names import not_there
from dptrain.utils import array_to_img, img_to_array, load_img, save_img

__all__ = ["array_to_img", "img_to_array", "load_img", "save_img", "smart_resize"]

if not TYPE_CHECKING:  # for which any name would do
    __getattr__ = not_there("preprocessing.image", __all__)


def smart_resize(
    x: Any, size: Sequence[int], interpolation: str = "bilinear", data_format: str = "channels_last"
) -> Any:
    """Return images of another size, cut to its aspect ratio in the middle: `ops.image.resize`.

    Args:
        x: an array or a tensor (height, width, channels) or (rows, height, width, channels); or with channels first.
        size: (height, width).
        interpolation: as `ops.image.resize`.
        data_format: "channels_last" or "channels_first".

    Returns:
        An array of an array, else a tensor.

    Raises:
        ConfigError: an argument is unknown or out of range.
    """
    resized = resize(x, size, interpolation, crop_to_aspect_ratio=True, data_format=data_format)
    return resized.numpy() if isinstance(x, np.ndarray) else resized
