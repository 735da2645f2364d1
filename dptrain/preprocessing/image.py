"""Images as arrays."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dptrain.ops.image.resizing import resize
from dptrain.registry.names import not_there
from dptrain.utils import array_to_img, img_to_array, load_img, save_img

__all__ = ["array_to_img", "img_to_array", "load_img", "save_img", "smart_resize"]

if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__ = not_there("preprocessing.image", __all__)


def smart_resize(
    x: Any, size: Sequence[int], interpolation: str = "bilinear", data_format: str = "channels_last"
) -> Any:
    """Resize images, cropped in the middle to the new aspect ratio: an array for an array, else a tensor.

    Images are (height, width, channels) or (rows, height, width, channels), or "channels_first"; `size` is (height,
    width), for `interpolation` see `ops.image.resize`. Unknown arguments raise ConfigError.
    """
    resized = resize(x, size, interpolation, crop_to_aspect_ratio=True, data_format=data_format)
    return resized.numpy() if isinstance(x, np.ndarray) else resized
