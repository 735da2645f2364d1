"""Batches and single images, channels last or first: shared by functions of images."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dptrain.errors import ConfigError
from dptrain.ops.elementwise import cast
from dptrain.ops.manipulation import expand_dims, squeeze
from dptrain.ops.nn.spatial import channels_first, channels_last
from dptrain.program.tensor import Tensor, Variable, as_tensors, constant
from dptrain.runtime.image_format import checked_format


def batched(images: Any, data_format: str | None) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Return (rows, height, width, channels), and a function that restores the images' format."""
    (x,) = as_tensors([images])
    if x.ndim not in (3, 4):
        raise ConfigError(
            "Invalid images rank: expected rank 3 (single image) or rank 4 (batch of images). Received input with "
            f"shape: images.shape={x.shape}"
        )
    single, first = x.ndim == 3, checked_format(data_format) == "channels_first"
    x = expand_dims(x, 0) if single else x
    x = channels_last(x) if first else x

    def restored(result: Tensor) -> Tensor:
        result = channels_first(result) if first else result
        return squeeze(result, 0) if single else result

    return x, restored


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Refuse an argument that is none of the choices."""
    if not isinstance(value, str) or value not in choices:
        raise ConfigError(
            f"Invalid value for argument `{name}`. Expected of one {tuple(choices)}. Received: {name}={value}"
        )


def to_dtype(value: Any, dtype: str) -> Tensor:
    """Return a floating-point tensor; numbers are converted directly, without rounding on the way."""
    return cast(value, dtype) if isinstance(value, Tensor | Variable) else constant(np.asarray(value), np.dtype(dtype))


def exact_dtype(x: Tensor) -> str:
    """Return the type of coordinates and weights of images: half precision is too coarse."""
    return "float64" if x.dtype == np.float64 else "float32"
