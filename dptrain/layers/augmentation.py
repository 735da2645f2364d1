"""Pictures changed at random in training: flips, moves, turns, zooms, contrast, brightness and crops.

What is drawn for a sample is a function of (seed, number of draws before, place in the global batch), as of `Dropout`:
the same on any number of ranks, and another in every step and epoch.
"""

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from dptrain import ops
from dptrain.errors import ConfigError
from dptrain.layers.arguments import positive
from dptrain.layers.pictures import ImageLayer
from dptrain.ops import random
from dptrain.ops.image import cropped_box
from dptrain.program.tensor import Tensor
from dptrain.random import Purpose, own_seed

Factor = float | Sequence[float]
_FILL_MODES = ("reflect", "wrap", "constant", "nearest")
_INTERPOLATIONS = ("nearest", "bilinear")


class RandomImageLayer(ImageLayer):
    """Draws a transformation for each image in training, and applies it; other images stay as they are."""

    def __init__(self, seed: int | None, **options: Any) -> None:
        super().__init__(**options)
        self.seed, self.built = own_seed(seed), True
        self.generator = self.add_seed_generator(Purpose.NOISE, seed)

    def _uniform(self, rows: Any, least: float, most: float) -> Tensor:
        """Return a number for each row."""
        return random.uniform((rows,), least, most, self._exact, seed=self.generator)

    @property
    def _exact(self) -> str:
        """The type of places and factors: half precision is too coarse for them."""
        return "float64" if self.compute_dtype == "float64" else "float32"

    def get_random_transformation(self, data: Any, training: bool = True, seed: Any = None) -> Any:
        """Return what is drawn for images, None where nothing is.

        Args:
            data: the images, (rows, height, width, channels) or (height, width, channels), or as `call`.
            training: whether anything is.
            seed: what to draw from, in the place of the layer's own.
        """
        if not training:
            return None
        images = data["images"] if isinstance(data, Mapping) else data
        own, self.generator = self.generator, self.generator if seed is None else seed
        try:
            return self._draw(images.shape[0] if images.ndim == 4 else 1, *self._height_and_width(images))
        finally:
            self.generator = own

    @abstractmethod
    def _draw(self, rows: Any, height: Any, width: Any) -> Any:
        """Return a transformation for each of so many images."""

    def _transformed(self, images: Tensor, training: bool) -> Tensor:
        return self.transform_images(images, self.get_random_transformation(images, training), training)

    def transform_images(self, images: Any, transformation: Any, training: bool = True) -> Tensor:
        """Return images, in training transformed.

        Args:
            images: as `get_random_transformation`.
            transformation: what it returned.
            training: as above.
        """
        x = self._floating(self._as_tensor(images))
        return self._apply(x, transformation) if training and transformation is not None else x

    @abstractmethod
    def _apply(self, x: Tensor, transformation: Any) -> Tensor:
        """Return images transformed."""


def _along(x: Tensor, number: Tensor) -> Tensor:
    """Return a number for each image in a shape that is broadcast to theirs."""
    return ops.cast(ops.reshape(number, (-1, *(1,) * (x.ndim - 1)) if x.ndim == 4 else (1,) * x.ndim), x.dtype)


class RandomFlip(RandomImageLayer):
    """Mirrors every other image, on average; with both directions those that are turn upside down.

    Args:
        mode: "horizontal" (left to right), "vertical" or "horizontal_and_vertical".
        seed: of the draws; None for the model's.
        data_format: "channels_last", which None stands for, or "channels_first".
        options: as `Layer`.

    Raises:
        ConfigError: an argument is unknown.
    """

    def __init__(
        self,
        mode: str = "horizontal_and_vertical",
        seed: int | None = None,
        data_format: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(seed, data_format=data_format, **options)
        if mode not in ("horizontal", "vertical", "horizontal_and_vertical"):
            raise ConfigError(f"RandomFlip: mode={mode!r}; expected horizontal, vertical or horizontal_and_vertical")
        self.mode = mode

    def _draw(self, rows: Any, height: Any, width: Any) -> Any:
        return {"flips": self._uniform(rows, 0, 1) <= 0.5}

    def _apply(self, x: Tensor, transformation: Any) -> Tensor:
        vertical, horizontal = self._space_of(x)
        axes = [vertical] * ("vertical" in self.mode) + [horizontal] * ("horizontal" in self.mode)
        flips = ops.reshape(transformation["flips"], (-1, 1, 1, 1) if x.ndim == 4 else (1, 1, 1))
        found: Tensor = ops.where(flips, ops.flip(x, axes), x)
        return found


class _Affine(RandomImageLayer):
    """Takes pixels from other places."""

    def __init__(
        self,
        fill_mode: str,
        interpolation: str,
        seed: int | None,
        fill_value: float,
        data_format: str | None,
        **options: Any,
    ) -> None:
        super().__init__(seed, data_format=data_format, **options)
        for name, value, known in (
            ("fill_mode", fill_mode, _FILL_MODES),
            ("interpolation", interpolation, _INTERPOLATIONS),
        ):
            if value not in known:
                raise ConfigError(f"Unknown `{name}` {value}. Expected of one {known}.")
        self.fill_mode, self.interpolation, self.fill_value = fill_mode, interpolation, float(fill_value)

    @abstractmethod
    def _matrix(self, transformation: Any, height: Any, width: Any) -> Sequence[Any]:
        """Return a0, a1, a2, b0, b1 and b2 of `ops.image.affine_transform`: numbers, or one for each image."""

    def _apply(self, x: Tensor, transformation: Any) -> Tensor:
        numbers = self._matrix(transformation, *self._height_and_width(x))
        rows = next(one for one in numbers if isinstance(one, Tensor)).shape[0]
        columns = [ops.cast(one, self._exact) * ops.ones((rows,), self._exact) for one in (*numbers, 0, 0)]
        matrix = ops.stack(columns, 1)
        return ops.image.affine_transform(
            *(x, matrix if x.ndim == 4 else matrix[0], self.interpolation, self.fill_mode, self.fill_value),
            self.data_format,
        )


def _limits(name: str, factor: Factor, least: float, said: str, excluded: bool = False) -> tuple[float, float]:
    """Return the least and the greatest number that a factor stands for: f for those from -f to f.

    Args:
        name: of the argument.
        factor: the argument.
        least: that each number may be; 1 is the greatest.
        said: the message's beginning.
        excluded: whether `least` itself is not allowed.

    Raises:
        ConfigError: it is none.
    """
    pair: list[Any] = list(factor) if isinstance(factor, list | tuple) else [factor, factor]
    is_wrong = len(pair) != 2 or any(isinstance(one, bool) or not isinstance(one, int | float) for one in pair)
    if is_wrong or any(one > 1 or one < least or (excluded and one == least) for one in pair):
        raise ConfigError(f"{said}Received: {name}={factor}")
    if isinstance(factor, list | tuple):
        return min(pair), max(pair)
    return -abs(pair[0]), abs(pair[0])


class RandomTranslation(_Affine):
    """Moves images down and to the right.

    Args:
        height_factor: how far down at most, as a part of the height: one number f for -f to f, or two, from -1 to 1.
        width_factor: how far to the right, as a part of the width.
        fill_mode: what comes in, "reflect", "wrap", "constant" or "nearest", as of `ops.image.affine_transform`.
        interpolation: "bilinear" or "nearest".
        seed: of the draws; None for the model's.
        fill_value: of "constant".
        data_format: "channels_last", which None stands for, or "channels_first".
        options: as `Layer`.

    Raises:
        ConfigError: an argument is out of range or unknown.
    """

    _SAID = "The `factor` argument should be a number (or a list of two numbers) in the range [-1.0, 1.0]. "

    def __init__(
        self,
        height_factor: Factor,
        width_factor: Factor,
        fill_mode: str = "reflect",
        interpolation: str = "bilinear",
        seed: int | None = None,
        fill_value: float = 0.0,
        data_format: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(fill_mode, interpolation, seed, fill_value, data_format, **options)
        self.height_factor, self.width_factor = height_factor, width_factor
        self._down = _limits("height_factor", height_factor, -1, self._SAID)
        self._right = _limits("width_factor", width_factor, -1, self._SAID)

    def _draw(self, rows: Any, height: Any, width: Any) -> Any:
        down = self._uniform(rows, *self._down) * float(int(height))
        right = self._uniform(rows, *self._right) * float(int(width))
        return {"translations": ops.stack([right, down], 1)}

    def _matrix(self, transformation: Any, height: Any, width: Any) -> Sequence[Any]:
        translations = ops.convert_to_tensor(transformation["translations"])
        right, down = translations[:, 0], translations[:, 1]
        return 1, 0, -right, 0, 1, -down


class RandomRotation(_Affine):
    """Turns images around their middle.

    Args:
        factor: by how much at most, as a part of a full turn: one number f for -f to f, or two, from -1 to 1.
        fill_mode: as of `RandomTranslation`, and so what follows.
        interpolation: "bilinear" or "nearest".
        seed: of the draws; None for the model's.
        fill_value: of "constant".
        data_format: "channels_last", which None stands for, or "channels_first".
        options: as `Layer`.

    Raises:
        ConfigError: an argument is out of range or unknown.
    """

    def __init__(
        self,
        factor: Factor,
        fill_mode: str = "reflect",
        interpolation: str = "bilinear",
        seed: int | None = None,
        fill_value: float = 0.0,
        data_format: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(fill_mode, interpolation, seed, fill_value, data_format, **options)
        self.factor = _factor(factor, -1)

    def _draw(self, rows: Any, height: Any, width: Any) -> Any:
        return {"angle": self._uniform(rows, self.factor[0] * 360.0, self.factor[1] * 360.0)}

    def _matrix(self, transformation: Any, height: Any, width: Any) -> Sequence[Any]:
        angle = ops.convert_to_tensor(transformation["angle"]) * (math.pi / 180)
        cosine, sine = ops.cos(angle), ops.sin(angle)
        x, y = 0.5 * (int(width) - 1), 0.5 * (int(height) - 1)
        return cosine, -sine, x - x * cosine + y * sine, sine, cosine, y - x * sine - y * cosine


class RandomZoom(_Affine):
    """Zooms out (positive factors) or in (negative ones), around the middle.

    Args:
        height_factor: how much more of the height comes into the picture: one number f for -f to f, or two, above -1
            to 1.
        width_factor: the same of the width; None zooms both alike.
        fill_mode: as of `RandomTranslation`, and so what follows.
        interpolation: "bilinear" or "nearest".
        seed: of the draws; None for the model's.
        fill_value: of "constant".
        data_format: "channels_last", which None stands for, or "channels_first".
        options: as `Layer`.

    Raises:
        ConfigError: an argument is out of range or unknown.
    """

    _SAID = (
        "The `height_factor` and `width_factor` arguments should be a number (or a list of two numbers) in the range "
        "(-1.0, 1.0]. "
    )

    def __init__(
        self,
        height_factor: Factor,
        width_factor: Factor | None = None,
        fill_mode: str = "reflect",
        interpolation: str = "bilinear",
        seed: int | None = None,
        fill_value: float = 0.0,
        data_format: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(fill_mode, interpolation, seed, fill_value, data_format, **options)
        self.height_factor, self.width_factor = height_factor, width_factor
        self._of_height = _limits("height_factor", height_factor, -1, self._SAID, excluded=True)
        self._of_width = (
            None if width_factor is None else _limits("width_factor", width_factor, -1, self._SAID, excluded=True)
        )

    def _draw(self, rows: Any, height: Any, width: Any) -> Any:
        height_zoom = self._uniform(rows, 1 + self._of_height[0], 1 + self._of_height[1])
        width_zoom = height_zoom
        if self._of_width is not None:
            width_zoom = self._uniform(rows, 1 + self._of_width[0], 1 + self._of_width[1])
        return {"height_zoom": ops.expand_dims(height_zoom, 1), "width_zoom": ops.expand_dims(width_zoom, 1)}

    def _matrix(self, transformation: Any, height: Any, width: Any) -> Sequence[Any]:
        y, x = (ops.cast(transformation[name][:, 0], self._exact) for name in ("height_zoom", "width_zoom"))
        return x, 0, (int(width) - 1) / 2 * (1 - x), 0, y, (int(height) - 1) / 2 * (1 - y)


def _factor(factor: Factor | None, least: float) -> tuple[float, float]:
    """Return the range of a factor, whose numbers are cut off at `least` and 1 where only one is given.

    Raises:
        ConfigError: it is none.
    """
    said = f"The `factor` argument should be a number (or a list of two numbers) in the range [{least}, 1]. "
    given = 0.0 if factor is None else factor
    if isinstance(given, list | tuple):
        if len(given) != 2 or given[0] > 1 or given[1] < least:
            raise ConfigError(f"{said}Received: factor={factor}")
        return min(given), max(given)
    low, high = _limits("factor", given, least, said)
    return max(low, least), high


def _range(given: Any) -> tuple[float, float]:
    """Return the least and the greatest value of pixels.

    Raises:
        ConfigError: they are not two numbers.
    """
    if not isinstance(given, list | tuple) or len(given) != 2:
        raise ConfigError(f"The `value_range` argument should be a list of two numbers. Received: value_range={given}")
    return given[0], given[1]


class RandomContrast(RandomImageLayer):
    """y = (x - mean) * contrast + mean, each channel's mean of each image, kept within the values of pixels.

    Args:
        factor: the contrast is from 1 - lower to 1 + upper: one number for 0 and itself, or both, from 0 to 1.
        value_range: least and greatest value of pixels.
        seed: of the draws; None for the model's.
        options: as `Layer`, and `data_format`.

    Raises:
        ConfigError: an argument is out of range.
    """

    _bounds: ClassVar[float] = 0

    def __init__(
        self,
        factor: Factor,
        value_range: Sequence[float] = (0, 255),
        seed: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(seed, **options)
        self.factor, self.value_range = _factor(factor, self._bounds), _range(value_range)

    def config(self) -> dict[str, Any]:
        """Return the arguments, the format among them."""
        return super().config() | {"data_format": self.data_format}

    def _draw(self, rows: Any, height: Any, width: Any) -> Any:
        return {"contrast_factor": self._uniform(rows, 1 - self.factor[0], 1 + self.factor[1])}

    def _apply(self, x: Tensor, transformation: Any) -> Tensor:
        mean = ops.mean(x, self._space_of(x), keepdims=True)
        found = (x - mean) * _along(x, transformation["contrast_factor"]) + mean
        return ops.clip(found, self.value_range[0], self.value_range[1])


class RandomBrightness(RandomContrast):
    """y = x + a number, the same for all channels of an image, kept within the values of pixels.

    Args:
        factor: the number, as a part of the range of values: one number f for -f to f, or two, from -1 to 1.
        value_range: least and greatest value of pixels.
        seed: of the draws; None for the model's.
        options: as `Layer`, and `data_format`.

    Raises:
        ConfigError: an argument is out of range.
    """

    _bounds: ClassVar[float] = -1

    def __init__(
        self,
        factor: Factor,
        value_range: Sequence[float] = (0, 255),
        seed: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(factor, value_range, seed, **options)
        self.value_range = min(self.value_range), max(self.value_range)

    def _draw(self, rows: Any, height: Any, width: Any) -> Any:
        drawn = self._uniform(rows, *self.factor)
        return {"rgb_delta": drawn * float(self.value_range[1] - self.value_range[0])}

    def _apply(self, x: Tensor, transformation: Any) -> Tensor:
        return ops.clip(x + _along(x, transformation["rgb_delta"]), self.value_range[0], self.value_range[1])


class RandomCrop(RandomImageLayer):
    """A part of each image: in training anywhere, the same place for a batch; else the middle, resized to that size.

    Of images that are no larger in one direction, what fits is resized in training as well.

    Args:
        height: of what comes out.
        width: of what comes out.
        seed: of the draws; None for the model's.
        data_format: "channels_last", which None stands for, or "channels_first".
        name: as `Layer`.
        options: as `Layer`.

    Raises:
        ConfigError: an argument is out of range.
    """

    def __init__(
        self,
        height: int,
        width: int,
        seed: int | None = None,
        data_format: str | None = None,
        name: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(seed, data_format=data_format, name=name, **options)
        self.height, self.width = positive("height", height), positive("width", width)

    def _draw(self, rows: Any, height: Any, width: Any) -> Any:
        if height <= self.height or width <= self.width:
            return cropped_box(int(height), int(width), self.height, self.width)[:2]
        starts = ((height, self.height), (width, self.width))
        return tuple(random.randint((1,), 0, int(n) - target + 1, seed=self.generator) for n, target in starts)

    def transform_images(self, images: Any, transformation: Any, training: bool = True) -> Tensor:
        """Return parts of images; as `RandomImageLayer.transform_images`."""
        x = self._floating(self._as_tensor(images))
        if training:
            return self._apply(x, transformation)
        height, width = (int(n) for n in self._height_and_width(x))
        top, left, own_height, own_width = cropped_box(height, width, self.height, self.width)
        key: list[slice] = [slice(None)] * x.ndim
        vertical, horizontal = self._space_of(x)
        key[vertical], key[horizontal] = slice(top, top + own_height), slice(left, left + own_width)
        return ops.image.resize(x[tuple(key)], (self.height, self.width), data_format=self.data_format)

    def _apply(self, x: Tensor, transformation: Any) -> Tensor:
        size = self.height, self.width
        for axis, start, length in zip(self._space_of(x), transformation, size, strict=True):
            if isinstance(start, int):
                x = x[(*(slice(None),) * axis, slice(start, start + length))]
            else:
                x = ops.take(x, ops.cast(start, "int32") + np.arange(length, dtype=np.int32), axis)
        return x if self._height_and_width(x) == size else ops.image.resize(x, size, data_format=self.data_format)
