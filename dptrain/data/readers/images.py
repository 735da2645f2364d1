"""Keras' `load_img`, `img_to_array`, `array_to_img` and `save_img`."""

import io
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dptrain.data.readers.pictures import open_picture, pillow
from dptrain.errors import ConfigError, DataError, printable
from dptrain.registry.arguments import checked_arguments
from dptrain.registry.names import lookup
from dptrain.runtime.failure import warn
from dptrain.runtime.image_format import checked_format
from dptrain.runtime.storage.files import write_through_links

Array = npt.NDArray[Any]

# Pillow's modes of Keras' words; grey pictures of more bits stay as they are.
_MODES = {
    "grayscale": ("L", ("L", "I;16", "I;16L", "I;16B", "I;16N", "I")),
    "rgb": ("RGB", ("RGB",)),
    "rgba": ("RGBA", ("RGBA",)),
}
_INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "hamming", "box", "lanczos")
_ADVICE = "choose another path"


@checked_arguments
def load_img(
    path: str | Path | io.BytesIO,
    color_mode: str = "rgb",
    target_size: tuple[int, int] | None = None,
    interpolation: str = "nearest",
    keep_aspect_ratio: bool = False,
) -> Any:
    """Load a picture as a Pillow image.

    Args:
        path: the file, or its content.
        color_mode: "rgb", "rgba" or "grayscale".
        target_size: (height, width) to resize to.
        interpolation: "nearest", "bilinear", "bicubic", "hamming", "box" or "lanczos", as Pillow computes them.
        keep_aspect_ratio: crop both sides equally instead of distorting.

    Raises:
        ConfigError: Pillow is missing, or an option is unknown.
        DataError: the file is missing, no picture, damaged or too large.
    """
    convert_to(None, color_mode)
    lookup("interpolation", interpolation, dict.fromkeys(_INTERPOLATIONS))
    with open_picture(path) as opened:
        image = convert_to(opened, color_mode, "" if isinstance(path, io.BytesIO) else path)
        image.load()
    if target_size is None or image.size == (target_size[1], target_size[0]):
        return image
    height, width = target_size
    box = None
    if keep_aspect_ratio:
        own_width = min(image.width, image.height * width // height)
        own_height = min(image.height, image.width * height // width)
        left, top = (image.width - own_width) // 2, (image.height - own_height) // 2
        box = (left, top, left + own_width, top + own_height)
    return image.resize((width, height), pillow().Resampling[interpolation.upper()], box=box)


def convert_to(image: Any, color_mode: str, where: Any = "", *, keeps_depth: bool = True) -> Any:
    """Return a Pillow image converted to Keras' `color_mode`; None stays None.

    Of 16 bits a pixel the upper eight count, where Pillow would clip at 255; `keeps_depth` leaves deep grey images
    alone.
    """
    if color_mode not in _MODES:
        raise ConfigError(f'color_mode must be "grayscale", "rgb", or "rgba". Received: color_mode={color_mode}')
    mode, accepted = _MODES[color_mode]
    if image is None or (image.mode in accepted and (keeps_depth or image.mode == mode)):
        return image
    return _in_8_bits(image, where).convert(mode)


def _in_8_bits(image: Any, where: Any) -> Any:
    """Return an image of at most 8 bits a channel; refuse deeper ones whose white level is unknown."""
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PNG"):
        return pillow().fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        low, high = image.getextrema()
        if low < 0 or high > 255:
            raise DataError(
                f"{printable(str(where or 'picture'))}: pixels of mode {image.mode} from {low} to "
                f"{high}; expected 8 or 16 bits per color: convert it, or load it as an array"
            )
    return image


@checked_arguments
def img_to_array(img: Any, data_format: str | None = None, dtype: npt.DTypeLike | None = None) -> Array:
    """Return a Pillow image as an array, 0 to 255: (height, width, channels), or (channels, height, width).

    Args:
        img: the image, or an array (height, width) or (height, width, channels).
        data_format: "channels_last" (the default) or "channels_first".
        dtype: of the array; float32 by default.

    Raises:
        ConfigError: an unknown format, or not two or three axes.
    """
    x = np.asarray(img, dtype or np.float32)
    if x.ndim not in (2, 3):
        raise ConfigError(f"Unsupported image shape: {x.shape}")
    x = x if x.ndim == 3 else x[..., None]
    return x.transpose(2, 0, 1) if _is_first(data_format) else x


@checked_arguments
def array_to_img(x: Any, data_format: str | None = None, scale: bool = True, dtype: npt.DTypeLike | None = None) -> Any:
    """Return an array as a Pillow image.

    Args:
        x: (height, width, channels) of 1, 3 or 4 channels; or channels first.
        data_format: "channels_last" (the default) or "channels_first".
        scale: stretch the values to 0 to 255.
        dtype: of the computation; float32 by default.

    Raises:
        ConfigError: Pillow is missing, or the format or the shape is not supported.
    """
    x = np.array(x, dtype or np.float32)
    if x.ndim != 3:
        raise ConfigError(f"Expected image array to have rank 3 (single image). Got array with shape: {x.shape}")
    x = x.transpose(1, 2, 0) if _is_first(data_format) else x
    if x.shape[2] not in (1, 3, 4):
        raise ConfigError(f"Unsupported channel number: {x.shape[2]}")
    if scale:
        x = x - np.min(x)
        x = x / (np.max(x) or 1) * 255
    if x.shape[2] == 1:
        return pillow().fromarray(x[..., 0].astype(np.int32 if np.max(x) > 255 else np.uint8))
    return pillow().fromarray(x.astype(np.uint8))


@checked_arguments
def save_img(
    path: Any, x: Any, data_format: str | None = None, file_format: str | None = None, scale: bool = True, **kwargs: Any
) -> None:
    """Write an array as a picture, replacing an existing file atomically. Every rank that calls it writes.

    Args:
        path: the file, whose ending gives the format; or an open file.
        x, data_format, scale: as `array_to_img`.
        file_format: such as "png", if the ending does not give it.
        kwargs: passed to Pillow's encoder.

    Raises:
        ConfigError: as `array_to_img`, or no such format.
        OutputError: the disk is full or access is denied.
    """
    is_path = isinstance(path, str | os.PathLike)
    if file_format is None and is_path:
        file_format = Path(path).suffix[1:]
    file_format = (file_format or "").lower().replace("jpg", "jpeg")
    image = array_to_img(x, data_format, scale)
    if image.mode == "RGBA" and file_format == "jpeg":
        warn("The JPEG format does not support RGBA images, converting to RGB.")
        image = image.convert("RGB")
    content = io.BytesIO()
    try:
        image.save(content, file_format, **kwargs)
    except (KeyError, OSError, ValueError) as error:
        raise ConfigError(f"save_img: a picture of mode {image.mode} as {file_format!r}: {error}") from error
    if is_path:
        write_through_links(Path(path), content.getvalue(), advice=_ADVICE)
    else:
        path.write(content.getvalue())


def _is_first(data_format: str | None) -> bool:
    return checked_format(data_format) == "channels_first"
