"""Layers of images before a network: resizing, cropping, bounding boxes."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from dptrain import ops
from dptrain.errors import ConfigError
from dptrain.layers.arguments import positive
from dptrain.layers.base import Layer
from dptrain.layers.preprocessing.bounding_boxes import clip_to_image_size, convert_format
from dptrain.layers.preprocessing.moved_boxes import clipped, in_box, placed
from dptrain.ops.image.resizing import RESIZE_INTERPOLATIONS, cropped_box
from dptrain.program.shapes import without_rows
from dptrain.program.tensor import Tensor
from dptrain.runtime.image_format import checked_format


class ImageLayer(Layer):
    """A layer of images (rows, height, width, channels) or (height, width, channels), or "channels_first".

    It also takes a dictionary with "images", whose "labels" stay as they are, and with "bounding_boxes" and
    "segmentation_masks", which move with the pixels. Boxes are a dictionary of "boxes" (rows, boxes, 4) and "labels"
    (rows, boxes), or the same of a single image; they are cut at the image's edges, and get the label -1 if nothing is
    left. Masks have the images' axes, and take the nearest pixel's number.

    Args:
        data_format: "channels_last" (the default) or "channels_first".
        bounding_box_format: of boxes, see `utils.bounding_boxes.convert_format`; must be passed if there are any.
        options: of `Layer`.
    """

    # How pixels move: None if they stay; "warped" where masks can follow, but boxes cannot.
    _motion: ClassVar[str | None] = None

    def __init__(
        self, *, data_format: str | None = None, bounding_box_format: str | None = None, **options: Any
    ) -> None:
        super().__init__(**options)
        self.data_format, self.bounding_box_format = checked_format(data_format), bounding_box_format

    def _get_config(self) -> dict[str, Any]:
        """Return the arguments, including the formats."""
        config = super()._get_config() | {"data_format": self.data_format}
        if self.bounding_box_format is None:
            config.pop("bounding_box_format", None)
            return config
        return config | {"bounding_box_format": self.bounding_box_format}

    def call(self, inputs: Any, training: bool = True) -> Any:
        """Return the transformed images, and what comes with them."""
        if not isinstance(inputs, Mapping):
            return self._transformed(self._checked(inputs), training)
        self._check_keys(inputs)
        images = self._checked(inputs["images"])
        if not {"bounding_boxes", "segmentation_masks"} & set(inputs):
            return {**inputs, "images": self._transformed(images, training)}
        return self._transformed_together(inputs, images, self.get_random_transformation(images, training), training)

    def _transformed_together(
        self, inputs: Mapping[str, Any], images: Tensor, transformation: Any, training: bool
    ) -> dict[str, Any]:
        """Return inputs with images, boxes and masks after a transformation."""
        outputs = {**inputs, "images": self.transform_images(images, transformation, training)}
        if "bounding_boxes" in inputs:
            boxes, size = inputs["bounding_boxes"], self._height_and_width(images)
            outputs["bounding_boxes"] = self._with_moved_boxes(boxes, transformation, training, size)
        if "segmentation_masks" in inputs:
            masks = inputs["segmentation_masks"]
            outputs["segmentation_masks"] = self.transform_segmentation_masks(masks, transformation, training)
        return outputs

    def _check_keys(self, inputs: Mapping[str, Any]) -> None:
        boxes = () if self._motion == "warped" else ("bounding_boxes",)
        known = ("images", "labels", *boxes, "segmentation_masks")
        if unknown := set(inputs) - set(known):
            raise ConfigError(
                f"not supported: {', '.join(sorted(unknown))} in the inputs of layer {self._display_name!r}; expected "
                f"{', '.join(known)}"
            )
        if "bounding_boxes" in inputs and self.bounding_box_format is None:
            raise ConfigError(
                "You passed an input with a 'bounding_boxes' key, but you didn't specify a bounding box format. Pass a "
                f"`bounding_box_format` argument to your {type(self).__name__} layer, e.g. "
                "`bounding_box_format='xyxy'`."
            )

    def get_random_transformation(self, data: Any, training: bool = True, seed: Any = None) -> Any:
        """Return what the layer does to images; a layer that draws nothing needs their shape alone."""
        return {"input_shape": (data["images"] if isinstance(data, Mapping) else data).shape}

    def transform_bounding_boxes(self, bounding_boxes: Any, transformation: Any = None, training: bool = True) -> Any:
        """Return boxes, see the class, after a transformation of `get_random_transformation`."""
        size: Any = (None, None)
        if isinstance(transformation, Mapping) and "input_shape" in transformation:
            shape = tuple(transformation["input_shape"])
            size = shape[-2:] if self.data_format == "channels_first" else shape[-3:-1]
        return self._with_moved_boxes(bounding_boxes, transformation, training, size)

    def _with_moved_boxes(self, boxes: Any, transformation: Any, training: bool, size: Any) -> dict[str, Any]:
        """Return boxes of images of a size (height, width) after a transformation."""
        if not isinstance(boxes, Mapping) or set(boxes) != {"boxes", "labels"}:
            raise ConfigError(
                f"layer {self._display_name!r}: bounding_boxes: expected a dictionary with 'boxes' and 'labels'"
            )
        dense = {name: self._as_tensor(values) for name, values in boxes.items()}
        if self._motion is None or not self._moves(transformation, training):
            return dense
        form, (height, width) = str(self.bounding_box_format), size
        corners = convert_format(dense["boxes"], form, "xyxy", height, width, self._box_dtype)
        single = corners.ndim == 2
        moved = self._moved_corners(corners[None] if single else corners, transformation, training, (height, width))
        new_height, new_width = self._size_after(height, width)
        outputs = {**dense, "boxes": moved[0] if single else moved}
        outputs = clip_to_image_size(outputs, new_height, new_width, bounding_box_format="xyxy")
        new_boxes = convert_format(outputs["boxes"], "xyxy", form, new_height, new_width, self._box_dtype)
        return {**outputs, "boxes": new_boxes}

    @property
    def _box_dtype(self) -> str:
        return "float64" if self.compute_dtype == "float64" else "float32"

    def _moves(self, transformation: Any, training: bool) -> bool:
        """Whether pixels move, of a layer with a `_motion`."""
        return True

    def _moved_corners(self, corners: Tensor, transformation: Any, training: bool, size: Any) -> Tensor:
        """Return boxes (rows, boxes, 4) of left, top, right and bottom after the transformation, in pixels."""
        raise NotImplementedError

    def _size_after(self, height: Any, width: Any) -> tuple[Any, Any]:
        """Return height and width of transformed images."""
        return height, width

    def transform_segmentation_masks(
        self, segmentation_masks: Any, transformation: Any = None, training: bool = True
    ) -> Tensor:
        """Return masks, with the axes of images, after a transformation of `get_random_transformation`."""
        masks: Tensor = self._as_tensor(segmentation_masks)
        if self._motion is None:
            return masks
        attribute = "interpolation" if "interpolation" in vars(self) else "_interpolation"
        chosen = getattr(self, attribute)
        setattr(self, attribute, "nearest")
        try:
            moved = self.transform_images(masks, transformation, training)
        finally:
            setattr(self, attribute, chosen)
        return ops.cast(moved, masks.dtype)

    # Samples pixels in a layer with a `_motion` that has no such argument.
    _interpolation: str = "bilinear"

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

    def __init__(self, max_number: int, fill_value: int = -1, **options: Any) -> None:
        super().__init__(**options)
        self.max_number, self.fill_value = positive("max_number", int(max_number)), int(fill_value)

    def _with_moved_boxes(self, boxes: Any, transformation: Any, training: bool, size: Any) -> dict[str, Any]:
        dense = super()._with_moved_boxes(boxes, transformation, training, size)
        axis = dense["boxes"].ndim - 2
        return {name: self._as_many(values, axis) for name, values in dense.items()}

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
    """Resizes images to height x width; for other arguments see `ops.image.resize`.

    Boxes of zeros, and of -1, stand for missing ones and become zeros.
    """

    _motion = "resized"

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

    def _moved_corners(self, corners: Tensor, transformation: Any, training: bool, size: Any) -> Tensor:
        height, width = map(int, size)
        missing = ops.logical_or(ops.all(corners == -1, -1), ops.all(corners == 0, -1))
        ratios = self.width / width, self.height / height
        offsets: tuple[float, float] = (0.0, 0.0)
        if self.pad_to_aspect_ratio:
            ratios = (min(ratios),) * 2
            offsets = (self.width - width * ratios[0]) // 2, (self.height - height * ratios[1]) // 2
        elif self.crop_to_aspect_ratio:
            ratios = (max(ratios),) * 2
            offsets = -((width * ratios[0] - self.width) // 2), -((height * ratios[1] - self.height) // 2)
        return ops.where(ops.expand_dims(missing, -1), 0.0, placed(corners, ratios, offsets))

    def _size_after(self, height: Any, width: Any) -> tuple[Any, Any]:
        return self.height, self.width


class CenterCrop(ImageLayer):
    """Crops the middle of images, height x width; images that are too small are resized and cropped instead."""

    _motion = "cropped"

    def __init__(self, height: int, width: int, data_format: str | None = None, **options: Any) -> None:
        super().__init__(data_format=data_format, **options)
        self.height, self.width = positive("height", height), positive("width", width)

    def _transformed(self, images: Tensor, training: bool) -> Tensor:
        x = self._floating(images)
        height, width = self._height_and_width(x)
        if height < self.height or width < self.width:
            size = self.height, self.width
            return ops.image.resize(
                x, size, self._interpolation, crop_to_aspect_ratio=True, data_format=self.data_format
            )
        key = [slice(None)] * x.ndim
        for axis, length, target in zip(self._space_of(x), (height, width), (self.height, self.width), strict=True):
            start = (length - target) // 2
            key[axis] = slice(start, start + target)
        return x[tuple(key)]

    def _moved_corners(self, corners: Tensor, transformation: Any, training: bool, size: Any) -> Tensor:
        height, width = map(int, size)
        if height < self.height or width < self.width:
            return in_box(corners, cropped_box(height, width, self.height, self.width), (self.height, self.width))
        top, left = (height - self.height) // 2, (width - self.width) // 2
        return placed(clipped(corners, (top, left, self.height, self.width)), (1.0, 1.0), (-left, -top))

    def _size_after(self, height: Any, width: Any) -> tuple[Any, Any]:
        return self.height, self.width
