"""Changes of the colours of images, at random in training or always. For shared arguments see `RandomImageLayer`."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from dptrain import ops
from dptrain.errors import ConfigError
from dptrain.layers.arguments import lengths
from dptrain.layers.preprocessing.images import ImageLayer
from dptrain.layers.preprocessing.random_images import Factor, RandomImageLayer, factor_range, per_image, value_range_of
from dptrain.ops import random
from dptrain.ops.indexing import add_rows, take_each
from dptrain.ops.nn.spatial import channels_first, channels_last
from dptrain.program.tensor import Tensor

Array = npt.NDArray[Any]
Range = tuple[float, float]
_BYTES = (0, 255)


def _rescaled(x: Tensor, source: Range, target: Range) -> Tensor:
    """Map values from one range to another."""
    if source == target:
        return x
    return (x - source[0]) / (source[1] - source[0]) * (target[1] - target[0]) + target[0]


class RandomContrast(RandomImageLayer):
    """y = (x - mean) * contrast + mean, with each channel's mean in each image, clipped to `value_range`.

    The contrast is from 1 - lower to 1 + upper: `factor` is (lower, upper), or a number for both, from 0 to 1.
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
        self.factor, self.value_range = factor_range(factor, self._bounds), value_range_of(value_range)

    def _draw(self, rows: Any, height: Any, width: Any, channels: Any) -> Any:
        return {"contrast_factor": self._uniform(rows, 1 - self.factor[0], 1 + self.factor[1])}

    def _apply(self, x: Tensor, transformation: Any) -> Tensor:
        mean = ops.mean(x, self._space_of(x), keepdims=True)
        outputs = (x - mean) * per_image(transformation["contrast_factor"], x) + mean
        return ops.clip(outputs, *self.value_range)


class RandomBrightness(RandomContrast):
    """y = x + a number, the same for all channels of an image, clipped to `value_range`.

    The number is `factor` times the range of values: f for -f to f, or a range within -1 to 1.
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

    def _draw(self, rows: Any, height: Any, width: Any, channels: Any) -> Any:
        fractions = self._uniform(rows, *self.factor)
        return {"rgb_delta": fractions * float(self.value_range[1] - self.value_range[0])}

    def _apply(self, x: Tensor, transformation: Any) -> Tensor:
        return ops.clip(x + per_image(transformation["rgb_delta"], x), *self.value_range)


class _Coloring(RandomImageLayer):
    """Changes colours by a random factor per image; takes the arguments of `RandomHue`."""

    _bounds: ClassVar[tuple[float, float]] = (0, 1)

    def __init__(
        self,
        factor: Factor,
        value_range: Sequence[float] = _BYTES,
        data_format: str | None = None,
        seed: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(seed, data_format=data_format, **options)
        self.factor, self.value_range = factor_range(factor, *self._bounds), value_range_of(value_range)

    def _draw(self, rows: Any, height: Any, width: Any, channels: Any) -> Any:
        return {"factor": self._uniform(rows, *self.factor)}

    def _with_channel(self, x: Tensor, number: int, channel: Tensor) -> Tensor:
        """Return RGB images with a channel replaced."""
        axis = self._channels_of(x)
        return ops.concatenate([channel if n == number else self._channel(x, n) for n in range(3)], axis)

    def _channel(self, x: Tensor, number: int) -> Tensor:
        return x[(*(slice(None),) * self._channels_of(x), slice(number, number + 1))]


class RandomHue(_Coloring):
    """Shifts hues by `factor` of half the colour circle, in either direction: f of 0 to 1 for 0 to f, or a range."""

    def _draw(self, rows: Any, height: Any, width: Any, channels: Any) -> Any:
        sign = ops.where(self._uniform(rows, 0, 1) > 0.5, -0.5, 0.5)
        return {"factor": sign * self._uniform(rows, *self.factor)}

    def _apply(self, x: Tensor, transformation: Any) -> Tensor:
        colors = ops.image.rgb_to_hsv(_rescaled(x, self.value_range, (0, 1)), self.data_format)
        hue = self._channel(colors, 0) + per_image(transformation["factor"], x)
        hue = ops.where(hue > 1, hue - 1, hue)
        moved = self._with_channel(colors, 0, ops.where(hue < 0, hue + 1, hue))
        moved = ops.clip(ops.image.hsv_to_rgb(moved, self.data_format), 0, 1)
        return _rescaled(moved, (0, 1), self.value_range)


class RandomSaturation(_Coloring):
    """Makes colours paler or more vivid: saturation times factor / (1 - factor), at most 1; negative values have none.

    `factor` 0 leaves grey, 0.5 the image as it is, 1 no grey; f draws from -f to f, where negative ones leave grey, or
    a range.
    """

    _bounds = (-1, 1)

    def _draw(self, rows: Any, height: Any, width: Any, channels: Any) -> Any:
        factor = self._uniform(rows, *self.factor)
        return {"factor": factor / (1 - factor + 1e-7)}

    def _apply(self, x: Tensor, transformation: Any) -> Tensor:
        colors = ops.image.rgb_to_hsv(x, self.data_format)
        saturation = ops.clip(self._channel(colors, 1) * per_image(transformation["factor"], x), 0, 1)
        return ops.image.hsv_to_rgb(self._with_channel(colors, 1, saturation), self.data_format)


class RandomColorDegeneration(_Coloring):
    """Blends images with grey: fully for `factor` 1, more vivid if negative; f draws from -f to f, or a range."""

    _bounds = (-1, 1)

    def _apply(self, x: Tensor, transformation: Any) -> Tensor:
        gray = ops.image.rgb_to_grayscale(x, self.data_format)
        return ops.clip(x + per_image(transformation["factor"], x) * (gray - x), *self.value_range)


class RandomSharpness(_Coloring):
    """Blurs or sharpens images by the difference from a 3 x 3 smoothing filter.

    `factor` 0 leaves the filtered image, 0.5 the image as it is, 1 doubles what the filter removes; f draws from 0 to
    f, or a range.
    """

    def _apply(self, x: Tensor, transformation: Any) -> Tensor:
        weights = np.full((3, 3, 1, 1), 1 / 13)
        weights[1, 1] = 5 / 13
        kernel = ops.cast(np.tile(weights, (1, 1, int(x.shape[self._channels_of(x)]), 1)), x.dtype)
        smooth = ops.depthwise_conv(x, kernel, padding="same", data_format=self.data_format)
        factor = per_image(transformation["factor"], x) * 2
        return ops.clip(x + (1 - factor) * (smooth - x), *self.value_range)


class RandomPosterization(_Coloring):
    """Reduces the levels of each colour.

    `factor` is how many of eight bits stay: n for 1 to n - 1 (for 1 always 1), or a range, whose end is excluded where
    it differs from the start.
    """

    _bounds = (1, 8)

    def _draw(self, rows: Any, height: Any, width: Any, channels: Any) -> Any:
        least, most = (int(number) for number in self.factor)
        if least == most:
            return {"shift_factor": ops.full((rows,), 8 - least, "int32")}
        return {"shift_factor": 8 - random.randint((rows,), least, most, seed=self.generator)}

    def _apply(self, x: Tensor, transformation: Any) -> Tensor:
        exact = ops.clip(_rescaled(ops.cast(x, self._exact_dtype), self.value_range, _BYTES), *_BYTES)
        step = ops.exp2(per_image(transformation["shift_factor"], exact))
        step = ops.round(step)  # a power of 2, exactly
        return ops.cast(_rescaled(ops.floor(ops.floor(exact) / step) * step, _BYTES, self.value_range), x.dtype)


class RandomInvert(RandomImageLayer):
    """Inverts some images: the greatest value minus each pixel."""

    def __init__(
        self,
        factor: Factor = 1.0,
        value_range: Sequence[float] = _BYTES,
        seed: int | None = None,
        data_format: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(seed, data_format=data_format, **options)
        self.factor, self.value_range = factor_range(factor, 0), value_range_of(value_range)

    def _draw(self, rows: Any, height: Any, width: Any, channels: Any) -> Any:
        return {"apply_inversion": self._random_flags(rows, self.factor)}

    def _apply(self, x: Tensor, transformation: Any) -> Tensor:
        outputs: Tensor = ops.where(per_image(transformation["apply_inversion"]), self.value_range[1] - x, x)
        return outputs


class RandomGrayscale(RandomImageLayer):
    """Turns some images grey, with unchanged channels; `factor` is the probability of each, 0 to 1."""

    def __init__(
        self, factor: float = 0.5, data_format: str | None = None, seed: int | None = None, **options: Any
    ) -> None:
        super().__init__(seed, data_format=data_format, **options)
        if not 0 <= factor <= 1:
            raise ConfigError(f"`factor` should be between 0 and 1. Received: factor={factor}")
        self.factor = float(factor)

    def _draw(self, rows: Any, height: Any, width: Any, channels: Any) -> Any:
        return per_image(self._uniform(rows, 0, 1) < self.factor)

    def _apply(self, x: Tensor, transformation: Any) -> Tensor:
        outputs: Tensor = ops.where(transformation, ops.image.rgb_to_grayscale(x, self.data_format), x)
        return outputs


class RandomGaussianBlur(RandomImageLayer):
    """Blurs some images, see `ops.image.gaussian_blur`.

    `kernel_size` is the Gaussian's width and height, odd, or a pair; `sigma` its deviation in each direction, drawn for
    a batch: s of 0 to 1 for 0 to s, or a range.
    """

    def __init__(
        self,
        factor: Factor = 1.0,
        kernel_size: int | Sequence[int] = 3,
        sigma: Factor = 1.0,
        value_range: Sequence[float] = _BYTES,
        data_format: str | None = None,
        seed: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(seed, data_format=data_format, **options)
        self.factor, self.value_range = factor_range(factor, 0), value_range_of(value_range)
        sizes = tuple(kernel_size) if isinstance(kernel_size, list | tuple) else (kernel_size,) * 2
        if len(sizes) != 2 or any(not isinstance(size, int) or size < 1 or not size % 2 for size in sizes):
            raise ConfigError(f"kernel_size must be an odd number. Received: kernel_size={kernel_size}")
        self.kernel_size, self.sigma = sizes, factor_range(sigma, 0, name="sigma")

    def _draw(self, rows: Any, height: Any, width: Any, channels: Any) -> Any:
        apply = self._random_flags(rows, self.factor)
        return {"should_apply_blur": apply, "blur_factor": self._uniform(2, *self.sigma) + 1e-6}

    def _apply(self, x: Tensor, transformation: Any) -> Tensor:
        smooth = ops.image.gaussian_blur(x, self.kernel_size, transformation["blur_factor"], self.data_format)
        outputs = ops.where(per_image(transformation["should_apply_blur"]), smooth, x)
        return ops.clip(outputs, *self.value_range)


class RandomErasing(RandomImageLayer):
    """Erases a box in some images, by noise or a colour.

    Source: Z. Zhong et al., "Random erasing data augmentation", AAAI 2020.

    Args:
        scale: range of squares of the box's height and width, as parts of the image: s of 0 to 1 for 0 to s, or a
            range.
        fill_value: a number, or one for each of three channels; None for noise with the greatest value as its
            deviation.
        factor, value_range, seed, data_format: see `RandomImageLayer`.
    """

    def __init__(
        self,
        factor: Factor = 1.0,
        scale: Factor = (0.02, 0.33),
        fill_value: float | Sequence[float] | None = None,
        value_range: Sequence[float] = _BYTES,
        seed: int | None = None,
        data_format: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(seed, data_format=data_format, **options)
        self.factor, self.scale = factor_range(factor, 0), factor_range(scale, 0, name="scale")
        self.value_range = value_range_of(value_range)
        several = isinstance(fill_value, list | tuple)
        if (fill_value is not None and not isinstance(fill_value, int | float | list | tuple)) or (
            several and len(fill_value) != 3  # type: ignore[arg-type]
        ):
            raise ConfigError(
                "The `fill_value` argument should be a number (or a list of three numbers). "
                f"Received: fill_value={fill_value}"
            )
        self.fill_value = fill_value

    def _draw(self, rows: Any, height: Any, width: Any, channels: Any) -> Any:
        across, down = (ops.sqrt(self._uniform(rows, *self.scale)) for _ in range(2))
        masks = self._box_masks(rows, height, width, down, across)
        apply = self._random_flags(rows, self.factor)
        if self.fill_value is None:
            first = self.data_format == "channels_first"
            shape = (rows, channels, height, width) if first else (rows, height, width, channels)
            fill = random.normal(shape, 0.0, self.value_range[1], self._exact_dtype, seed=self.generator)
        else:
            values = np.asarray(self.fill_value, self._exact_dtype)
            fill = ops.convert_to_tensor(values.reshape(-1, 1, 1) if self.data_format == "channels_first" else values)
        return {"apply_erasing": apply, "batch_masks": masks, "fill_value": ops.clip(fill, *self.value_range)}

    def _apply(self, x: Tensor, transformation: Any) -> Tensor:
        fill = ops.cast(transformation["fill_value"], x.dtype)
        erased = ops.logical_and(per_image(transformation["apply_erasing"]), transformation["batch_masks"])
        outputs: Tensor = ops.where(erased, fill, x)
        return outputs


class Solarization(RandomImageLayer):
    """Brightens pixels by a number, then inverts those above a threshold.

    `addition_factor` and `threshold_factor` are parts of 255 of the range: f of 0 to 1 for 0 to f, or a range.
    """

    def __init__(
        self,
        addition_factor: Factor = 0.0,
        threshold_factor: Factor = 0.0,
        value_range: Sequence[float] = _BYTES,
        seed: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(seed, **options)
        self.addition_factor = factor_range(addition_factor, 0, name="addition_factor")
        self.threshold_factor = factor_range(threshold_factor, 0, name="threshold_factor")
        self.value_range = value_range_of(value_range)

    def _draw(self, rows: Any, height: Any, width: Any, channels: Any) -> Any:
        # As in Keras, the lower end is not multiplied.
        additions, thresholds = (
            per_image(self._uniform(rows, least, most * 255))
            for least, most in (self.addition_factor, self.threshold_factor)
        )
        return {"additions": additions, "thresholds": thresholds}

    def _apply(self, x: Tensor, transformation: Any) -> Tensor:
        outputs = _rescaled(x, self.value_range, _BYTES) + per_image(transformation["additions"], x)
        outputs = ops.clip(outputs, *_BYTES)
        outputs = ops.where(outputs < per_image(transformation["thresholds"], x), outputs, 255 - outputs)
        return _rescaled(outputs, _BYTES, self.value_range)


class AutoContrast(ImageLayer):
    """Stretches each channel of each image over `value_range`; uniform channels stay as they are."""

    def __init__(self, value_range: Sequence[float] = _BYTES, **options: Any) -> None:
        super().__init__(**options)
        self.value_range = value_range_of(value_range)

    def _transformed(self, images: Tensor, training: bool) -> Tensor:
        x = self._floating(images)
        space = self._space_of(x)
        low, high = ops.min(x, space, keepdims=True), ops.max(x, space, keepdims=True)
        least, most = self.value_range
        even = ops.equal(high, low)
        stretched = (x - low) / ops.where(even, 1, high - low) * (most - least) + least
        return ops.where(even, x, ops.clip(stretched, least, most))


class Equalization(ImageLayer):
    """Equalizes each channel's histogram, of `bins` bins, in training, over all images of a batch."""

    def __init__(
        self,
        value_range: Sequence[float] = _BYTES,
        bins: int = 256,
        data_format: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(data_format=data_format, **options)
        if isinstance(bins, bool) or not isinstance(bins, int) or bins < 2:
            raise ConfigError(f"bins={bins!r} of Equalization: expected an integer >= 2")
        self.value_range, self.bins = value_range_of(value_range), bins

    def _transformed(self, images: Tensor, training: bool) -> Tensor:
        x = self._floating(images)
        if not training:
            return x
        exact = ops.cast(x, "float64" if x.dtype == np.float64 else "float32")
        exact = _rescaled(exact, self.value_range, _BYTES)
        numbers = ops.cast(ops.clip(exact / 255 * (self.bins - 1), 0, self.bins - 1), "int32")
        channels = int(x.shape[self._channels_of(x)])
        shape = (channels, 1, 1) if self.data_format == "channels_first" else (channels,)
        numbers = numbers + np.arange(0, channels * self.bins, self.bins, dtype=np.int32).reshape(shape)
        counts = ops.reshape(
            add_rows(ops.ones_like(numbers), numbers, length=channels * self.bins), (channels, self.bins)
        )
        below = ops.cumsum(counts, 1)
        total, first = below[:, -1:], ops.min(ops.where(below > 0, below, below[:, -1:]), 1, keepdims=True)
        spread = ops.cast(total - first, exact.dtype)
        table = ops.cast(below - first, exact.dtype) * 255 / ops.where(spread == 0, 1, spread)
        table = ops.clip(ops.round(table), *_BYTES)
        equalized = ops.take(ops.reshape(table, -1), numbers)
        even = ops.reshape(ops.sum(ops.cast(counts > 0, "int32"), 1) <= 1, shape)
        return ops.cast(_rescaled(ops.where(even, exact, equalized), _BYTES, self.value_range), x.dtype)


class ContrastLimitedAdaptiveHistogramEqualization(ImageLayer):
    """Equalizes the histogram of each channel of each image locally, in tiles.

    A value becomes the part of its tile's values below it, where no value counts more than a limit, so that noise in
    uniform regions stays small; between the middles of tiles it is interpolated. `value_range` is cut into 256 levels.

    Source: K. Zuiderveld, "Contrast limited adaptive histogram equalization", Graphics Gems IV, 1994.

    Args:
        value_range, data_format: see `RandomImageLayer`.
        clip_limit: how often a value counts at most, in multiples of its mean frequency; 0 for no limit.
        tile_grid_size: tiles along height and width.
    """

    def __init__(
        self,
        value_range: Sequence[float] = _BYTES,
        clip_limit: float = 4.0,
        tile_grid_size: Sequence[int] = (8, 8),
        data_format: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(data_format=data_format, **options)
        self.value_range, self.clip_limit = value_range_of(value_range), clip_limit
        self.tile_grid_size = lengths("tile_grid_size", tile_grid_size, 2)

    def _transformed(self, images: Tensor, training: bool) -> Tensor:
        x = self._floating(images)
        outputs = ops.cast(x, "float64" if x.dtype == np.float64 else "float32")
        outputs = outputs if x.ndim == 4 else outputs[None]
        outputs = channels_last(outputs) if self.data_format == "channels_first" else outputs
        outputs = _rescaled(self._equalized(_rescaled(outputs, self.value_range, _BYTES)), _BYTES, self.value_range)
        outputs = channels_first(outputs) if self.data_format == "channels_first" else outputs
        return ops.cast(outputs if x.ndim == 4 else outputs[0], x.dtype)

    def _equalized(self, x: Tensor) -> Tensor:
        """Equalize images (rows, height, width, channels) of 0 to 255."""
        rows, height, width, channels = x.shape[0], *map(int, x.shape[1:])
        (down, across), levels = self.tile_grid_size, 256
        # Tiles of equal size; the image is mirrored to fill the last ones.
        tall, wide = -(-height // down), -(-width // across)
        values = ops.clip(ops.cast(ops.clip(x, *_BYTES), "int32"), *_BYTES)  # also brings NaN into the range
        tiles = ops.pad(values, ((0, 0), (0, tall * down - height), (0, wide * across - width), (0, 0)), "symmetric")
        tiles = ops.reshape(tiles, (rows, down, tall, across, wide, channels))
        tiles = ops.reshape(ops.transpose(tiles, (0, 1, 3, 5, 2, 4)), (rows, down, across, channels, tall * wide))
        counts = ops.sum(ops.one_hot(tiles, levels, dtype=x.dtype.name), -2)
        if self.clip_limit > 0:
            clipped = ops.minimum(counts, self.clip_limit * tall * wide / levels)
            counts = clipped + ops.sum(counts - clipped, -1, keepdims=True) / levels
        below = ops.cumsum(counts, -1)
        first = below[..., :1]  # the least, as they rise
        spread = tall * wide - first
        table = ops.clip((below - first) * 255 / ops.where(spread == 0, 1, spread), *_BYTES)
        table = ops.reshape(table, (rows, down * across * channels * levels))

        def between(length: int, size: int, tiles: int) -> list[tuple[Array, Array]]:
            """Return the tile before and after each pixel along an axis, with their weights."""
            place = (np.arange(length) - size / 2) / size
            before = np.floor(place).astype(np.int32)
            weight = place - before
            ends = np.clip(before, 0, tiles - 1), np.clip(before + 1, 0, tiles - 1)
            return [(ends[0], 1 - weight), (ends[1], weight)]

        base_index = ops.reshape(
            values + np.arange(channels, dtype=np.int32) * levels, (rows, height * width * channels)
        )
        total: Tensor | float = 0.0
        for row, row_weight in between(height, tall, down):
            for column, column_weight in between(width, wide, across):
                start = (row[:, None] * across + column).astype(np.int32) * (channels * levels)
                place = base_index + np.broadcast_to(start[..., None], (height, width, channels)).reshape(-1)
                level = ops.reshape(take_each(table, place), (rows, height, width, channels))
                weight = (row_weight[:, None] * column_weight)[..., None].astype(x.dtype)
                total = level * weight + total
        return ops.convert_to_tensor(total)


class RandomColorJitter(RandomImageLayer):
    """`RandomBrightness`, `RandomContrast`, `RandomSaturation` and `RandomHue` in turn, each with its factor.

    A factor of None leaves its layer out.
    """

    def __init__(
        self,
        value_range: Sequence[float] = _BYTES,
        brightness_factor: Factor | None = None,
        contrast_factor: Factor | None = None,
        saturation_factor: Factor | None = None,
        hue_factor: Factor | None = None,
        seed: int | None = None,
        data_format: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(seed, data_format=data_format, **options)
        self.value_range = value_range_of(value_range)
        self.brightness_factor, self.contrast_factor = brightness_factor, contrast_factor
        self.saturation_factor, self.hue_factor = saturation_factor, hue_factor
        common: dict[str, Any] = {"value_range": self.value_range, "seed": seed, "data_format": data_format}
        self.random_brightness, self.random_contrast, self.random_saturation, self.random_hue = (
            None if factor is None else kind(factor, **common)
            for kind, factor in (
                (RandomBrightness, brightness_factor),
                (RandomContrast, contrast_factor),
                (RandomSaturation, saturation_factor),
                (RandomHue, hue_factor),
            )
        )

    def _parts(self) -> Mapping[str, RandomImageLayer]:
        names = ("random_brightness", "random_contrast", "random_saturation", "random_hue")
        return {name: layer for name in names if (layer := getattr(self, name)) is not None}

    def _draw(self, rows: Any, height: Any, width: Any, channels: Any) -> Any:
        shape = rows, height, width, channels
        return {name: layer._draw_with(self.generator, *shape) for name, layer in self._parts().items()}

    def _apply(self, x: Tensor, transformation: Any) -> Tensor:
        for name, layer in self._parts().items():
            x = layer.transform_images(x, transformation[name])
        return x
