"""Random geometric augmentation of images: flips, shifts, rotations, zooms, shears, perspectives, waves, crops."""

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from dptrain import ops
from dptrain.errors import ConfigError
from dptrain.layers.arguments import positive
from dptrain.layers.preprocessing.moved_boxes import in_box, placed, through_affine, through_homography
from dptrain.layers.preprocessing.random_images import (
    Factor,
    RandomImageLayer,
    check_choice,
    factor_range,
    limits,
    per_image,
    value_range_of,
)
from dptrain.ops import random
from dptrain.ops.image.resizing import cropped_box
from dptrain.ops.image.warping import FILL_MODES, INTERPOLATIONS, homography
from dptrain.program.tensor import Tensor

_FILL_MODES = tuple(mode for mode in FILL_MODES if mode != "mirror")


class RandomFlip(RandomImageLayer):
    """Flips half of the images along the axes of `mode`; with both axes they turn upside down.

    `mode` is "horizontal" (left to right), "vertical" or "horizontal_and_vertical".
    """

    _motion = "flipped"

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

    def _draw(self, rows: Any, height: Any, width: Any, channels: Any) -> Any:
        return {"flips": self._uniform(rows, 0, 1) <= 0.5}

    def _apply(self, x: Tensor, transformation: Any) -> Tensor:
        vertical, horizontal = self._space_of(x)
        axes = [vertical] * ("vertical" in self.mode) + [horizontal] * ("horizontal" in self.mode)
        outputs: Tensor = ops.where(per_image(transformation["flips"]), ops.flip(x, axes), x)
        return outputs

    def _moved_corners(self, corners: Tensor, transformation: Any, training: bool, size: Any) -> Tensor:
        left, top, right, bottom = (corners[..., index] for index in range(4))
        if "vertical" in self.mode:
            top, bottom = size[0] - bottom, size[0] - top
        if "horizontal" in self.mode:
            left, right = size[1] - right, size[1] - left
        flips = ops.reshape(ops.convert_to_tensor(transformation["flips"]), (-1, 1, 1))
        return ops.where(flips, ops.stack([left, top, right, bottom], -1), corners)


class Affine(RandomImageLayer):
    """Samples pixels through an affine map that a subclass chooses.

    Args:
        fill_mode: outside the image, "reflect", "wrap", "constant" or "nearest": see `ops.image.affine_transform`.
        interpolation: "bilinear" or "nearest".
        fill_value: of "constant".
        seed, data_format: see `RandomImageLayer`.
    """

    _motion = "affine"

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
        check_choice("fill_mode", fill_mode, _FILL_MODES)
        check_choice("interpolation", interpolation, INTERPOLATIONS)
        self.fill_mode, self.interpolation, self.fill_value = fill_mode, interpolation, float(fill_value)

    @abstractmethod
    def _matrix(self, transformation: Any, height: Any, width: Any) -> Sequence[Any]:
        """Return a0, a1, a2, b0, b1 and b2 of `ops.image.affine_transform`: numbers, or one for each image."""

    def _apply(self, x: Tensor, transformation: Any) -> Tensor:
        return self._moved(x, self._matrix(transformation, *self._height_and_width(x)))

    def _moved_corners(self, corners: Tensor, transformation: Any, training: bool, size: Any) -> Tensor:
        return through_affine(corners, self._matrix(transformation, *size))

    def _moved(self, x: Tensor, numbers: Sequence[Any], interpolation: str | None = None) -> Tensor:
        """Return images sampled through the affine map with the numbers of `_matrix`."""
        interpolation = interpolation or self.interpolation
        rows = x.shape[0]
        columns = [
            ops.cast(number, self._exact_dtype) * ops.ones((rows,), self._exact_dtype) for number in (*numbers, 0, 0)
        ]
        return ops.image.affine_transform(
            x, ops.stack(columns, 1), interpolation, self.fill_mode, self.fill_value, self.data_format
        )


class RandomTranslation(Affine):
    """Shifts images down and to the right; see `Affine` for other arguments.

    Args:
        height_factor: how far down, as a part of the height: f for -f to f, or a range within -1 to 1.
        width_factor: how far to the right, as a part of the width.
    """

    _RANGE_MESSAGE = "The `factor` argument should be a number (or a list of two numbers) in the range [-1.0, 1.0]. "

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
        self._down_range = limits("height_factor", height_factor, -1, self._RANGE_MESSAGE)
        self._right_range = limits("width_factor", width_factor, -1, self._RANGE_MESSAGE)

    def _draw(self, rows: Any, height: Any, width: Any, channels: Any) -> Any:
        down = self._uniform(rows, *self._down_range) * float(int(height))
        right = self._uniform(rows, *self._right_range) * float(int(width))
        return {"translations": ops.stack([right, down], 1)}

    def _matrix(self, transformation: Any, height: Any, width: Any) -> Sequence[Any]:
        translations = ops.convert_to_tensor(transformation["translations"])
        right, down = translations[:, 0], translations[:, 1]
        return 1, 0, -right, 0, 1, -down


class RandomRotation(Affine):
    """Rotates images around their middle; see `Affine` for other arguments.

    `factor` is the part of a full turn: f for -f to f, or a range within -1 to 1.
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
        self.factor = factor_range(factor, -1)

    def _draw(self, rows: Any, height: Any, width: Any, channels: Any) -> Any:
        return {"angle": self._uniform(rows, self.factor[0] * 360.0, self.factor[1] * 360.0)}

    def _matrix(self, transformation: Any, height: Any, width: Any) -> Sequence[Any]:
        angle = ops.convert_to_tensor(transformation["angle"]) * (math.pi / 180)
        cosine, sine = ops.cos(angle), ops.sin(angle)
        x, y = 0.5 * (int(width) - 1), 0.5 * (int(height) - 1)
        return cosine, -sine, x - x * cosine + y * sine, sine, cosine, y - x * sine - y * cosine


class RandomZoom(Affine):
    """Zooms out (positive factors) or in (negative ones), around the middle; see `Affine` for other arguments.

    Args:
        height_factor: added part of the height: f for -f to f, or a range above -1 to 1.
        width_factor: likewise for the width; None zooms both alike.
    """

    _RANGE_MESSAGE = (
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
        self._height_range = limits("height_factor", height_factor, -1, self._RANGE_MESSAGE, excluded=True)
        self._width_range = (
            None
            if width_factor is None
            else limits("width_factor", width_factor, -1, self._RANGE_MESSAGE, excluded=True)
        )

    def _draw(self, rows: Any, height: Any, width: Any, channels: Any) -> Any:
        height_zoom = self._uniform(rows, 1 + self._height_range[0], 1 + self._height_range[1])
        width_zoom = height_zoom
        if self._width_range is not None:
            width_zoom = self._uniform(rows, 1 + self._width_range[0], 1 + self._width_range[1])
        return {"height_zoom": ops.expand_dims(height_zoom, 1), "width_zoom": ops.expand_dims(width_zoom, 1)}

    def _matrix(self, transformation: Any, height: Any, width: Any) -> Sequence[Any]:
        y, x = (ops.cast(transformation[name][:, 0], self._exact_dtype) for name in ("height_zoom", "width_zoom"))
        return x, 0, (int(width) - 1) / 2 * (1 - x), 0, y, (int(height) - 1) / 2 * (1 - y)


class RandomShear(Affine):
    """Slants images: each row moves sideways by a part of its distance from the top, each column downwards likewise.

    `x_factor` of rows and `y_factor` of columns are f of 0 to 1 for -f to f, or a range within -1 to 1; see `Affine`
    for other arguments.
    """

    def __init__(
        self,
        x_factor: Factor = 0.0,
        y_factor: Factor = 0.0,
        interpolation: str = "bilinear",
        fill_mode: str = "reflect",
        fill_value: float = 0.0,
        data_format: str | None = None,
        seed: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(fill_mode, interpolation, seed, fill_value, data_format, **options)
        message = "The `factor` argument should be a number (or a list of two numbers) in the range [0, 1.0]. "
        self._right_range, self._down_range = (
            limits(name, factor, -1 if isinstance(factor, list | tuple) else 0, message)
            for name, factor in (("x_factor", x_factor), ("y_factor", y_factor))
        )
        # Keras writes f as the range -f to f, but reads only f.
        self.x_factor, self.y_factor = (
            most if least == -most else factor
            for factor, (least, most) in ((x_factor, self._right_range), (y_factor, self._down_range))
        )

    def _draw(self, rows: Any, height: Any, width: Any, channels: Any) -> Any:
        sign = ops.where(self._uniform(rows, 0, 1) > 0.5, -1.0, 1.0)
        right, down = self._uniform(rows, *self._right_range), self._uniform(rows, *self._down_range)
        return {"shear_factor": ops.stack([right * sign, down * sign], 1)}

    def _matrix(self, transformation: Any, height: Any, width: Any) -> Sequence[Any]:
        factors = ops.convert_to_tensor(transformation["shear_factor"])
        return 1, factors[:, 0], 0, factors[:, 1], 1, 0


class RandomPerspective(RandomImageLayer):
    """Changes the perspective of images: corners move towards or away from the top left corner.

    Args:
        factor: see `RandomImageLayer`.
        scale: greatest movement of a corner, 0 to 1: half of its distance to the top left.
        interpolation: "bilinear" or "nearest".
        fill_value: of pixels outside the image.
        seed, data_format: see `RandomImageLayer`.
    """

    _motion = "perspective"

    def __init__(
        self,
        factor: Factor = 1.0,
        scale: float = 1.0,
        interpolation: str = "bilinear",
        fill_value: float = 0.0,
        seed: int | None = None,
        data_format: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(seed, data_format=data_format, **options)
        self.factor = factor_range(factor, 0)
        if not 0 <= scale <= 1:
            raise ConfigError(f"The `scale` argument should be a number in the range [0,1]. Received: scale={scale}")
        check_choice("interpolation", interpolation, INTERPOLATIONS)
        self.scale, self.interpolation, self.fill_value = float(scale), interpolation, float(fill_value)

    def _draw(self, rows: Any, height: Any, width: Any, channels: Any) -> Any:
        apply = self._random_flags(rows, self.factor)
        right, bottom = int(width) - 1.0, int(height) - 1.0
        corners = np.array([[0, 0], [right, 0], [0, bottom], [right, bottom]], self._exact_dtype)
        moves = random.uniform(
            (rows, 4, 2), -0.5 * self.scale, 0.5 * self.scale, self._exact_dtype, seed=self.generator
        )
        starts = corners * ops.ones((rows, 1, 1), self._exact_dtype)
        return {"apply_perspective": apply, "start_points": starts, "end_points": starts + starts * moves}

    def _apply(self, x: Tensor, transformation: Any) -> Tensor:
        moved = ops.image.perspective_transform(
            *(x, transformation["start_points"], transformation["end_points"], self.interpolation, self.fill_value),
            self.data_format,
        )
        outputs: Tensor = ops.where(per_image(transformation["apply_perspective"]), moved, x)
        return outputs

    def _moved_corners(self, corners: Tensor, transformation: Any, training: bool, size: Any) -> Tensor:
        starts, ends = (ops.cast(transformation[name], corners.dtype) for name in ("start_points", "end_points"))
        moved = through_homography(corners, homography(ends, starts))
        return ops.where(ops.reshape(transformation["apply_perspective"], (-1, 1, 1)), moved, corners)


class RandomElasticTransform(RandomImageLayer):
    """Distorts images by smooth random fields, see `ops.image.elastic_transform`.

    Args:
        factor, value_range, seed, data_format: see `RandomImageLayer`.
        scale: strength for a batch, 0 to 1: s draws it from 0 to s, or a range. At 1 the fields are as smooth as a
            Gaussian of a twentieth of the shorter side.
        interpolation: "bilinear" or "nearest".
        fill_mode, fill_value: see `Affine`.
    """

    _motion = "warped"

    def __init__(
        self,
        factor: Factor = 1.0,
        scale: Factor = 1.0,
        interpolation: str = "bilinear",
        fill_mode: str = "reflect",
        fill_value: float = 0.0,
        value_range: Sequence[float] = (0, 255),
        seed: int | None = None,
        data_format: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(seed, data_format=data_format, **options)
        self.factor, self.scale = factor_range(factor, 0), factor_range(scale, 0, name="scale")
        check_choice("interpolation", interpolation, INTERPOLATIONS)
        check_choice("fill_mode", fill_mode, FILL_MODES)
        self.interpolation, self.fill_mode, self.fill_value = interpolation, fill_mode, float(fill_value)
        self.value_range = value_range_of(value_range)

    def _draw(self, rows: Any, height: Any, width: Any, channels: Any) -> Any:
        if not self.scale[1] or not self.factor[1]:
            return None
        apply = self._random_flags(rows, self.factor)
        return {"apply_transform": apply, "distortion_factor": self._uniform(1, *self.scale)[0], "seed": self.generator}

    def _apply(self, x: Tensor, transformation: Any) -> Tensor:
        height, width = (int(n) for n in self._height_and_width(x))
        # With strength 0 the Gaussian would have no width.
        strength = ops.maximum(transformation["distortion_factor"], 1e-6)
        moved = ops.image.elastic_transform(
            *(x, max(height, width) * 0.1 * strength, min(height, width) * 0.05 * strength, self.interpolation),
            *(self.fill_mode, self.fill_value, transformation["seed"], self.data_format),
        )
        outputs = ops.where(per_image(transformation["apply_transform"]), moved, x)
        return ops.clip(outputs, *self.value_range)


class RandomCrop(RandomImageLayer):
    """Crops images to height x width: in training at a random place per batch; else the middle, resized to that size.

    Images that are no larger in one direction are cropped and resized in training as well.
    """

    _motion = "cropped"

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

    def _draw(self, rows: Any, height: Any, width: Any, channels: Any) -> Any:
        if height <= self.height or width <= self.width:
            return cropped_box(int(height), int(width), self.height, self.width)[:2]
        starts = ((height, self.height), (width, self.width))
        return tuple(random.randint((1,), 0, int(n) - target + 1, seed=self.generator) for n, target in starts)

    def transform_images(self, images: Any, transformation: Any = None, training: bool = True) -> Tensor:
        """Return parts of images; see `RandomImageLayer.transform_images`."""
        x = self._floating(self._as_tensor(images))
        if training:
            return self._apply(x, transformation)
        height, width = (int(n) for n in self._height_and_width(x))
        top, left, crop_height, crop_width = cropped_box(height, width, self.height, self.width)
        key: list[slice] = [slice(None)] * x.ndim
        vertical, horizontal = self._space_of(x)
        key[vertical], key[horizontal] = slice(top, top + crop_height), slice(left, left + crop_width)
        return self._resized(x[tuple(key)])

    def _apply(self, x: Tensor, transformation: Any) -> Tensor:
        size = self.height, self.width
        for axis, start, length in zip(self._space_of(x), transformation, size, strict=True):
            if isinstance(start, int):
                x = x[(*(slice(None),) * axis, slice(start, start + length))]
            else:
                x = ops.take(x, ops.cast(start, "int32") + np.arange(length, dtype=np.int32), axis)
        return x if self._height_and_width(x) == size else self._resized(x)

    def _resized(self, x: Tensor) -> Tensor:
        outputs: Tensor = ops.image.resize(
            x, (self.height, self.width), self._interpolation, data_format=self.data_format
        )
        return outputs

    def _moves(self, transformation: Any, training: bool) -> bool:
        return True

    def _moved_corners(self, corners: Tensor, transformation: Any, training: bool, size: Any) -> Tensor:
        target = self.height, self.width
        height, width = (own if length is None else int(length) for own, length in zip(target, size, strict=True))
        if not training:
            return in_box(corners, cropped_box(height, width, *target), target)
        if any(isinstance(start, int) for start in transformation):
            top, left = transformation
            return in_box(corners, (top, left, min(self.height, height - top), min(self.width, width - left)), target)
        top, left = (ops.cast(start, corners.dtype) for start in transformation)
        return placed(corners, (1.0, 1.0), (-left, -top))

    def _size_after(self, height: Any, width: Any) -> tuple[Any, Any]:
        return self.height, self.width
