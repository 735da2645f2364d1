"""Base of layers that transform images at random.

Draws for a sample are a function of (seed, number of earlier draws, place in the global batch): the same on any number
of ranks, and different in every step and epoch.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dptrain import ops
from dptrain.errors import ConfigError
from dptrain.layers.preprocessing.images import ImageLayer
from dptrain.ops import random
from dptrain.program.tensor import Tensor
from dptrain.random import Purpose, own_seed

Factor = float | Sequence[float]


class RandomImageLayer(ImageLayer):
    """Draws a transformation for each image in training, and applies it; other images stay as they are.

    Arguments that subclasses share:

    Args:
        factor: unless documented otherwise, the probability for each image: f draws it from 0 to f, or a range.
        value_range: least and greatest value of pixels.
        seed: of the random draws; by default the model's.
        data_format: "channels_last" (the default) or "channels_first".
    """

    _has_no_weights = True

    def __init__(self, seed: int | None, **options: Any) -> None:
        super().__init__(**options)
        self.seed = own_seed(seed)
        self.generator = self._add_seed_generator(Purpose.NOISE, seed)

    def _uniform(self, rows: Any, least: float, most: float) -> Tensor:
        return random.uniform((rows,), least, most, self._exact_dtype, seed=self.generator)

    @property
    def _exact_dtype(self) -> str:
        """The type of coordinates and factors: half precision is too coarse."""
        return "float64" if self.compute_dtype == "float64" else "float32"

    def get_random_transformation(self, data: Any, training: bool = True, seed: Any = None) -> Any:
        """Draw a transformation for images; None outside of training.

        Args:
            data: the images, (rows, height, width, channels) or (height, width, channels), or see `call`.
            training: whether to draw.
            seed: replaces the layer's generator.
        """
        if not training:
            return None
        images = data["images"] if isinstance(data, Mapping) else data
        rows = images.shape[0] if images.ndim == 4 else 1
        shape = rows, *self._height_and_width(images), images.shape[self._channels_of(images)]
        transformation = self._draw_with(self.generator if seed is None else seed, *shape)
        is_mapping = isinstance(transformation, Mapping)
        return {**transformation, "input_shape": tuple(images.shape)} if is_mapping else transformation

    def _draw_with(self, generator: Any, *shape: Any) -> Any:
        """Draw a transformation with another seed generator; `shape` is rows, height, width and channels."""
        layer_generator, self.generator = self.generator, generator
        try:
            return self._draw(*shape)
        finally:
            self.generator = layer_generator

    def _moves(self, transformation: Any, training: bool) -> bool:
        return training and transformation is not None

    @abstractmethod
    def _draw(self, rows: Any, height: Any, width: Any, channels: Any) -> Any:
        """Return a transformation for each of these images."""

    def _transformed(self, images: Tensor, training: bool) -> Tensor:
        return self.transform_images(images, self.get_random_transformation(images, training), training)

    def transform_images(self, images: Any, transformation: Any = None, training: bool = True) -> Tensor:
        """Transform images in training, by what `get_random_transformation` returned."""
        x = self._floating(self._as_tensor(images))
        if not training or transformation is None:
            return x
        return self._apply(x, transformation) if x.ndim == 4 else self._apply(x[None], transformation)[0]

    @abstractmethod
    def _apply(self, x: Tensor, transformation: Any) -> Tensor:
        """Transform images (rows, ...)."""

    def _box_masks(self, rows: Any, height: Any, width: Any, down: Tensor, across: Tensor) -> Tensor:
        """Return masks of a random box per image, with fractions of its height (`down`) and width (`across`), (rows,).

        Booleans (rows, height, width, 1), with "channels_first" (rows, 1, height, width).
        """
        shapes = ((-1, 1), (1, -1))
        inside: Any = True
        for part, length, shape in zip((down, across), (int(height), int(width)), shapes, strict=True):
            start = self._uniform(rows, 0, 1) * (length - part * length)
            places = np.arange(length).reshape(shape)
            begin, end = (ops.reshape(edge, (-1, 1, 1)) for edge in (start, start + part * length))
            inside = ops.logical_and(inside, ops.logical_and(places >= begin, places < end))
        return ops.expand_dims(inside, 1 if self.data_format == "channels_first" else -1)

    def _random_flags(self, rows: Any, chances: tuple[float, float]) -> Tensor:
        """Return a boolean for each row, true with a probability drawn from a range."""
        chance = self._uniform(rows, *chances)
        return self._uniform(rows, 0, 1) < chance


def per_image(number: Any, x: Tensor | None = None) -> Tensor:
    """Return a number for each image as (rows, 1, 1, 1), in the type of `images` if passed."""
    column = ops.reshape(ops.convert_to_tensor(number), (-1, 1, 1, 1))
    return column if x is None else ops.cast(column, x.dtype)


def limits(name: str, factor: Factor, least: float, message: str, excluded: bool = False) -> tuple[float, float]:
    """Return the range of a factor: (-f, f) for a number f. `message` begins the error."""
    pair: list[Any] = list(factor) if isinstance(factor, list | tuple) else [factor, factor]
    is_wrong = len(pair) != 2 or any(isinstance(number, bool) or not isinstance(number, int | float) for number in pair)
    if is_wrong or any(number > 1 or number < least or (excluded and number == least) for number in pair):
        raise ConfigError(f"{message}Received: {name}={factor}")
    if isinstance(factor, list | tuple):
        return min(pair), max(pair)
    return -abs(pair[0]), abs(pair[0])


def factor_range(factor: Factor | None, least: float, most: float = 1, name: str = "factor") -> tuple[float, float]:
    """Return the range of a factor: (max(-f, least), f) for a number f."""
    message = f"The `{name}` argument should be a number (or a list of two numbers) in the range [{least}, {most}]. "
    number: Any = 0.0 if factor is None else factor
    if isinstance(number, list | tuple):
        if len(number) != 2 or number[0] > most or number[1] < least:
            raise ConfigError(f"{message}Received: {name}={factor}")
        return min(number), max(number)
    if isinstance(number, bool) or not isinstance(number, int | float) or not least <= number <= most:
        raise ConfigError(f"{message}Received: {name}={factor}")
    return max(-abs(number), least), abs(number)


def value_range_of(value_range: Any) -> tuple[float, float]:
    """Check and return the least and greatest pixel value."""
    if not isinstance(value_range, list | tuple) or len(value_range) != 2:
        raise ConfigError(
            f"The `value_range` argument should be a list of two numbers. Received: value_range={value_range}"
        )
    return min(value_range), max(value_range)


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Refuse an argument that is none of the choices."""
    if value not in choices:
        raise ConfigError(f"Unknown `{name}` {value}. Expected of one {tuple(choices)}.")
