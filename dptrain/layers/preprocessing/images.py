"""Layers of images before a network: resizing, cropping, bounding boxes."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from dptrain import ops
from dptrain.errors import ConfigError
from dptrain.layers.arguments import positive
from dptrain.layers.base import Layer
from dptrain.ops.image.resizing import RESIZE_INTERPOLATIONS
from dptrain.program.shapes import without_rows
from dptrain.program.tensor import Tensor
from dptrain.runtime.image_format import checked_format


class ImageLayer(Layer):
    """A layer of images (rows, height, width, channels) or (height, width, channels), or "channels_first".

    It also takes a dictionary with "images", whose "labels" stay as they are.
    """

    _accepted_keys: ClassVar[tuple[str, ...]] = ("images", "labels")

    def __init__(self, *, data_format: str | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.data_format = checked_format(data_format)

    def _get_config(self) -> dict[str, Any]:
        """Return the arguments, including the format."""
        return super()._get_config() | {"data_format": self.data_format}

    def call(self, inputs: Any, training: bool = True) -> Any:
        """Return the transformed images."""
        if not isinstance(inputs, Mapping):
            return self._transformed(self._checked(inputs), training)
        if unknown := set(inputs) - set(self._accepted_keys):
            raise ConfigError(
                f"not supported: {', '.join(sorted(unknown))} in the inputs of layer {self._display_name!r}; expected "
                f"{', '.join(self._accepted_keys)}"
            )
        return {**inputs, "images": self._transformed(self._checked(inputs["images"]), training)}

    def transform_images(self, images: Any, transformation: Any = None, training: bool = True) -> Tensor:
        """Return the transformed images.

        Args:
            images: see `call`.
            transformation: from `get_random_transformation`, if the layer has it.
            training: whether the layer is called in training.
        """
        return self._transformed(self._as_tensor(images), training)

    def _checked(self, images: Tensor) -> Tensor:
        if images.ndim not in (3, 4):
            raise ConfigError(
                "Expected image tensor to have rank 3 (single image) or 4 (batch of images). Received: "
                f"data.shape={without_rows(images.shape)}"
            )
        return images

    @abstractmethod
    def _transformed(self, images: Tensor, training: bool) -> Tensor:
        """Transform images."""

    def _space_of(self, images: Any) -> tuple[int, int]:
        """Return the axes of height and width."""
        last = images.ndim - 1
        return (last - 1, last) if self.data_format == "channels_first" else (last - 2, last - 1)

    def _channels_of(self, images: Any) -> int:
        return int(images.ndim) - (3 if self.data_format == "channels_first" else 1)

    def _height_and_width(self, images: Any) -> tuple[Any, Any]:
        vertical, horizontal = self._space_of(images)
        return images.shape[vertical], images.shape[horizontal]


class MaxNumBoundingBoxes(ImageLayer):
    """Cuts or fills the bounding boxes of every image to `max_number`; images stay.

    It takes a dictionary with "images" and "bounding_boxes", a dictionary of "boxes" (rows, boxes, 4) and "labels"
    (rows, boxes), or the same of a single image. `fill_value` stands for missing boxes and labels;
    `bounding_box_format`, such as "xyxy", must be passed if there are boxes, and has no effect.
    """

    _accepted_keys = ("images", "labels", "bounding_boxes")

    def __init__(
        self, max_number: int, fill_value: int = -1, *, bounding_box_format: str | None = None, **options: Any
    ) -> None:
        super().__init__(**options)
        self.max_number, self.fill_value = positive("max_number", int(max_number)), int(fill_value)
        self.bounding_box_format = bounding_box_format

    def call(self, inputs: Any, training: bool = True) -> Any:
        """Return the images, and `max_number` boxes each."""
        outputs = super().call(inputs, training)
        if not isinstance(inputs, Mapping) or "bounding_boxes" not in inputs:
            return outputs
        if self.bounding_box_format is None:
            raise ConfigError(
                "You passed an input with a 'bounding_boxes' key, but you didn't specify a bounding box format. Pass a "
                f"`bounding_box_format` argument to your {type(self).__name__} layer, e.g. "
                "`bounding_box_format='xyxy'`."
            )
        boxes = inputs["bounding_boxes"]
        if not isinstance(boxes, Mapping) or set(boxes) != {"boxes", "labels"}:
            raise ConfigError(
                f"layer {self._display_name!r}: bounding_boxes: expected a dictionary with 'boxes' and 'labels'"
            )
        axis = inputs["images"].ndim - 3
        return {**outputs, "bounding_boxes": {name: self._as_many(values, axis) for name, values in boxes.items()}}

    def _as_many(self, x: Any, axis: int) -> Tensor:
        x = self._as_tensor(x)
        first_boxes = x[(slice(None),) * axis + (slice(None, self.max_number),)]
        missing = [
            (0, self.max_number - int(first_boxes.shape[axis]) if place == axis else 0) for place in range(x.ndim)
        ]
        return ops.pad(first_boxes, missing, constant_values=self.fill_value)

    def _transformed(self, images: Tensor, training: bool) -> Tensor:
        return images


class Resizing(ImageLayer):
    """Resizes images to height x width; for other arguments see `ops.image.resize`."""

    def __init__(
        self,
        height: int,
        width: int,
        interpolation: str = "bilinear",
        crop_to_aspect_ratio: bool = False,
        pad_to_aspect_ratio: bool = False,
        fill_mode: str = "constant",
        fill_value: float = 0.0,
        antialias: bool = False,
        data_format: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(data_format=data_format, **options)
        self.height, self.width = positive("height", height), positive("width", width)
        if interpolation not in RESIZE_INTERPOLATIONS:
            raise ConfigError(
                f"Invalid value for argument `interpolation`. Expected of one {RESIZE_INTERPOLATIONS}. Received: "
                f"interpolation={interpolation}"
            )
        self.interpolation, self.antialias = interpolation, bool(antialias)
        self.crop_to_aspect_ratio, self.pad_to_aspect_ratio = bool(crop_to_aspect_ratio), bool(pad_to_aspect_ratio)
        self.fill_mode, self.fill_value = fill_mode, float(fill_value)

    def _transformed(self, images: Tensor, training: bool) -> Tensor:
        return ops.image.resize(
            *(images, (self.height, self.width), self.interpolation, self.antialias, self.crop_to_aspect_ratio),
            *(self.pad_to_aspect_ratio, self.fill_mode, self.fill_value, self.data_format),
        )


class CenterCrop(ImageLayer):
    """Crops the middle of images, height x width; images that are too small are resized and cropped instead."""

    def __init__(self, height: int, width: int, data_format: str | None = None, **options: Any) -> None:
        super().__init__(data_format=data_format, **options)
        self.height, self.width = positive("height", height), positive("width", width)

    def _transformed(self, images: Tensor, training: bool) -> Tensor:
        x = self._floating(images)
        height, width = self._height_and_width(x)
        if height < self.height or width < self.width:
            size = self.height, self.width
            return ops.image.resize(x, size, crop_to_aspect_ratio=True, data_format=self.data_format)
        key = [slice(None)] * x.ndim
        for axis, length, target in zip(self._space_of(x), (height, width), (self.height, self.width), strict=True):
            start = (length - target) // 2
            key[axis] = slice(start, start + target)
        return x[tuple(key)]
