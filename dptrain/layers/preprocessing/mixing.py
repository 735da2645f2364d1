"""Images mixed with others of the batch, or with other versions of themselves."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from dptrain import ops
from dptrain.errors import ConfigError
from dptrain.layers.preprocessing.augmentation import Affine, RandomRotation, RandomShear, RandomTranslation
from dptrain.layers.preprocessing.colors import (
    AutoContrast,
    Equalization,
    RandomBrightness,
    RandomColorDegeneration,
    RandomContrast,
    RandomPosterization,
    RandomSharpness,
    Solarization,
)
from dptrain.layers.preprocessing.images import ImageLayer
from dptrain.layers.preprocessing.moved_boxes import clipped, through_affine
from dptrain.layers.preprocessing.random_images import (
    Factor,
    RandomImageLayer,
    check_choice,
    factor_range,
    per_image,
    value_range_of,
)
from dptrain.ops import random
from dptrain.ops.image.warping import INTERPOLATIONS
from dptrain.ops.indexing import gather_rows_along
from dptrain.program.shapes import is_one
from dptrain.program.tensor import Tensor
from dptrain.random import Purpose


class _Mixing(RandomImageLayer):
    """Mixes each image of a batch, and its labels, with another of the global batch; ranks exchange images."""

    def call(self, inputs: Any, training: bool = True) -> Any:
        if not isinstance(inputs, Mapping) or "labels" not in inputs or not training:
            return super().call(inputs, training)
        self._check_keys(inputs)
        images = self._checked(inputs["images"])
        transformation = self.get_random_transformation(images)
        mixed = self._transformed_together(inputs, images, transformation, training)
        return {**mixed, "labels": self.transform_labels(inputs["labels"], transformation)}

    def transform_labels(self, labels: Any, transformation: Any, training: bool = True) -> Tensor:
        """Mix labels (rows, classes), such as one-hot vectors, or numbers to predict, like images.

        `transformation` is what was drawn; labels stay as they are unless `training`. ConfigError for class numbers,
        which cannot be mixed.
        """
        targets: Tensor = self._as_tensor(labels)
        if not training or transformation is None:
            return targets
        if targets.ndim < 2 and targets.dtype.kind in "iub":
            raise ConfigError(
                f"labels of layer {self._display_name!r}: expected vectors, such as `ops.one_hot` of the classes"
            )
        targets = self._floating(targets)
        weight = ops.cast(transformation["mix_weight"], targets.dtype)
        weight = ops.reshape(weight, (-1, *(1,) * (targets.ndim - 1))) if targets.ndim else weight[0]
        mixed: Tensor = weight * targets + (1 - weight) * _partners(targets, transformation)
        return mixed

    def _draw_partners(self, rows: Any) -> dict[str, Tensor]:
        """Draw a random order of the global batch, whose rows are mixed with its own."""
        generator = self.generator
        if not isinstance(generator, random.SeedGenerator):
            generator = random.SeedGenerator(generator, purpose=Purpose.NOISE)
        positions, order = generator.permutation(rows)
        return {"permutation_order": order, "positions": positions}


def _partners(x: Tensor, transformation: Any) -> Tensor:
    order = ops.convert_to_tensor(transformation["permutation_order"])
    if is_one(order.shape[0]):
        return x
    if "positions" in transformation:  # else a single rank has the batch
        x = gather_rows_along(x, [0])
    return ops.take(x, order, 0)


class MixUp(_Mixing):
    """Replaces each image and its label by a weighted mean with another of the batch.

    Weights are drawn from beta(alpha, alpha), alpha above 0; the smaller, the less is mixed. An image keeps its
    bounding boxes and gets the other's behind them; segmentation masks become weighted means, like labels.

    Source: H. Zhang et al., "mixup: beyond empirical risk minimization", ICLR 2018.
    """

    def __init__(
        self, alpha: float = 0.2, data_format: str | None = None, seed: int | None = None, **options: Any
    ) -> None:
        super().__init__(seed, data_format=data_format, **options)
        if not alpha > 0:
            raise ConfigError(f"alpha = {alpha} of MixUp: expected a number above 0")
        self.alpha = float(alpha)

    def _draw(self, rows: Any, height: Any, width: Any, channels: Any) -> Any:
        weight = random.beta((rows,), self.alpha, self.alpha, self._exact_dtype, seed=self.generator)
        return {"mix_weight": weight, **self._draw_partners(rows)}

    def _apply(self, x: Tensor, transformation: Any) -> Tensor:
        weight = per_image(transformation["mix_weight"], x)
        return weight * x + (1 - weight) * _partners(x, transformation)

    def _with_moved_boxes(self, boxes: Any, transformation: Any, training: bool, size: Any) -> dict[str, Any]:
        own = super()._with_moved_boxes(boxes, transformation, training, size)
        if not self._moves(transformation, training) or own["boxes"].ndim < 3:  # a single image has no partner
            return own
        return {name: ops.concatenate([x, _partners(x, transformation)], 1) for name, x in own.items()}

    def transform_segmentation_masks(
        self, segmentation_masks: Any, transformation: Any = None, training: bool = True
    ) -> Tensor:
        """Mix masks like images."""
        masks: Tensor = self._as_tensor(segmentation_masks)
        if not self._moves(transformation, training):
            return masks
        return self.transform_images(masks, transformation)


class CutMix(_Mixing):
    """Replaces a box of each image by that of another of the batch, and mixes labels by its area.

    The part of an image that stays is drawn from beta(alpha, alpha); `factor` is the alpha of a batch: f of 0 to 1
    draws it from 0 to f, or a range.

    Source: S. Yun et al., "CutMix: regularization strategy to train strong classifiers with localizable features",
    ICCV 2019.
    """

    _motion = "warped"

    def __init__(
        self, factor: Factor = 1.0, seed: int | None = None, data_format: str | None = None, **options: Any
    ) -> None:
        super().__init__(seed, data_format=data_format, **options)
        self.factor = factor_range(factor, 0)

    def _draw(self, rows: Any, height: Any, width: Any, channels: Any) -> Any:
        alpha = self._uniform(1, *self.factor)[0] + 1e-6
        part = ops.sqrt(1 - random.beta((rows,), alpha, alpha, self._exact_dtype, seed=self.generator))
        masks = self._box_masks(rows, height, width, part, part)
        return {"batch_masks": masks, "mix_weight": 1 - ops.square(part), **self._draw_partners(rows)}

    def _apply(self, x: Tensor, transformation: Any) -> Tensor:
        outputs: Tensor = ops.where(transformation["batch_masks"], _partners(x, transformation), x)
        return outputs


class _AugmentationPool(RandomImageLayer):
    """A pool of augmentation layers; each batch draws some."""

    _names: ClassVar[Sequence[str]] = (
        *("random_shear", "random_translation", "random_rotation", "random_brightness", "random_color_degeneration"),
        *("random_contrast", "random_sharpness", "random_posterization", "solarization", "auto_contrast"),
        "equalization",
    )

    def __init__(
        self,
        value_range: Sequence[float],
        factor: Factor,
        interpolation: str,
        seed: int | None,
        data_format: str | None,
        **options: Any,
    ) -> None:
        super().__init__(seed, data_format=data_format, **options)
        self.value_range, self.factor = value_range_of(value_range), factor_range(factor, 0)
        check_choice("interpolation", interpolation, INTERPOLATIONS)
        self.interpolation = interpolation
        common = {"data_format": data_format, **{key: value for key, value in options.items() if key == "dtype"}}
        moving = {"interpolation": interpolation, "seed": seed, **common}
        coloring = {"value_range": self.value_range, "seed": seed, **common}
        self.random_shear = RandomShear(self.factor, self.factor, **moving)
        self.random_translation = RandomTranslation(self.factor, self.factor, **moving)
        self.random_rotation = RandomRotation(self.factor, **moving)
        self.random_brightness = RandomBrightness(self.factor, **coloring)
        self.random_color_degeneration = RandomColorDegeneration(self.factor, **coloring)
        self.random_contrast = RandomContrast(self.factor, **coloring)
        self.random_sharpness = RandomSharpness(self.factor, **coloring)
        self.random_posterization = RandomPosterization(max(1, int(8 * self.factor[1])), **coloring)
        self.solarization = Solarization(self.factor, self.factor, **coloring)
        self.auto_contrast = AutoContrast(self.value_range, **common)
        self.equalization = Equalization(self.value_range, **common)

    def _draw_all(self, names: Sequence[str], *shape: Any) -> dict[str, Any]:
        """Draw the transformations of the named layers."""
        return {
            name: layer._draw_with(self.generator, *shape) if isinstance(layer, RandomImageLayer) else None
            for name in names
            for layer in [getattr(self, name)]
        }

    def _apply_selected(self, x: Tensor, number: Tensor, transformations: Mapping[str, Any]) -> Tensor:
        """Apply the layer with this number, if any, to images; layers that move pixels share an affine map."""
        outputs = x
        for n, (name, transformation) in enumerate(transformations.items()):
            layer: ImageLayer = getattr(self, name)
            if not isinstance(layer, Affine):
                outputs = ops.where(ops.equal(number, n), layer.transform_images(x, transformation), outputs)
        return self._move_selected(x, outputs, number, transformations)

    def _move_selected(
        self,
        x: Tensor,
        otherwise: Tensor,
        number: Tensor,
        transformations: Mapping[str, Any],
        interpolation: str | None = None,
    ) -> Tensor:
        """Return what the layer with this number makes of x if it moves pixels, else `otherwise`."""
        matrix: list[Any] = [1.0, 0.0, 0.0, 0.0, 1.0, 0.0]
        moving, moves = None, None
        for n, (name, transformation) in enumerate(transformations.items()):
            layer: ImageLayer = getattr(self, name)
            if isinstance(layer, Affine):
                picked = ops.equal(number, n)
                layer_matrix = layer._matrix(transformation, *self._height_and_width(x))
                matrix = [
                    ops.where(picked, coefficient, previous)
                    for coefficient, previous in zip(layer_matrix, matrix, strict=True)
                ]
                moving, moves = layer, picked if moves is None else ops.logical_or(moves, picked)
        return otherwise if moving is None else ops.where(moves, moving._moved(x, matrix, interpolation), otherwise)


class RandAugment(_AugmentationPool):
    """Applies some of eleven geometric and colour changes in turn, the same ones for a batch.

    Bounding boxes and segmentation masks move with the pixels.

    Source: E. Cubuk et al., "RandAugment: practical automated data augmentation with a reduced search space", 2020.

    Args:
        num_ops: how many changes.
        factor: their strength: f of 0 to 1 for 0 to f, or a range.
        interpolation: "bilinear" or "nearest".
        value_range, seed, data_format: see `RandomImageLayer`.
    """

    _motion = "affine"

    def __init__(
        self,
        value_range: Sequence[float] = (0, 255),
        num_ops: int = 2,
        factor: Factor = 0.5,
        interpolation: str = "bilinear",
        seed: int | None = None,
        data_format: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(value_range, factor, interpolation, seed, data_format, **options)
        if isinstance(num_ops, bool) or not isinstance(num_ops, int) or num_ops < 1:
            raise ConfigError(f"num_ops={num_ops!r} of RandAugment: expected an integer >= 1")
        self.num_ops = num_ops

    def _draw(self, rows: Any, height: Any, width: Any, channels: Any) -> Any:
        numbers = random.randint((self.num_ops,), 0, len(self._names), seed=self.generator)
        return {
            "layer_idxes": numbers,
            "transforms": self._draw_all(self._names, rows, height, width, channels),
        }

    def _apply(self, x: Tensor, transformation: Any) -> Tensor:
        numbers = ops.convert_to_tensor(transformation["layer_idxes"])
        for n in range(self.num_ops):
            x = self._apply_selected(x, numbers[n], transformation["transforms"])
        return x

    def _moved_corners(self, corners: Tensor, transformation: Any, training: bool, size: Any) -> Tensor:
        numbers = ops.convert_to_tensor(transformation["layer_idxes"])
        for n in range(self.num_ops):
            before = corners
            for index, (name, values) in enumerate(transformation["transforms"].items()):
                layer: ImageLayer = getattr(self, name)
                if isinstance(layer, Affine):
                    moved = clipped(through_affine(before, layer._matrix(values, *size)), (0, 0, *size))
                    corners = ops.where(ops.equal(numbers[n], index), moved, corners)
        return corners

    def transform_segmentation_masks(
        self, segmentation_masks: Any, transformation: Any = None, training: bool = True
    ) -> Tensor:
        """Move masks like images; changes of colour leave them as they are."""
        masks: Tensor = self._as_tensor(segmentation_masks)
        if not self._moves(transformation, training):
            return masks
        x = self._floating(masks if masks.ndim == 4 else masks[None])
        numbers = ops.convert_to_tensor(transformation["layer_idxes"])
        for n in range(self.num_ops):
            x = self._move_selected(x, x, numbers[n], transformation["transforms"], "nearest")
        return ops.cast(x if masks.ndim == 4 else x[0], masks.dtype)


class AugMix(_AugmentationPool):
    """A weighted mean of an image and of chains of changes of it, the same chains for a batch.

    Bounding boxes and segmentation masks stay those of the image.

    Source: D. Hendrycks et al., "AugMix: a simple data processing method to improve robustness and uncertainty", ICLR
    2020.

    Args:
        num_chains: number of chains.
        chain_depth: greatest number of changes in a chain.
        factor: their strength: f of 0 to 1 for 0 to f, or a range.
        alpha: of the Dirichlet and beta distributions of the weights.
        all_ops: include brightness, colours, contrast and sharpness.
        interpolation: "bilinear" or "nearest".
        value_range, seed, data_format: see `RandomImageLayer`.
    """

    _names = (
        *("random_shear", "random_translation", "random_rotation", "random_posterization", "solarization"),
        *("auto_contrast", "equalization"),
    )
    _color_names = ("random_brightness", "random_color_degeneration", "random_contrast", "random_sharpness")

    def __init__(
        self,
        value_range: Sequence[float] = (0, 255),
        num_chains: int = 3,
        chain_depth: int = 3,
        factor: Factor = 0.3,
        alpha: float = 1.0,
        all_ops: bool = True,
        interpolation: str = "bilinear",
        seed: int | None = None,
        data_format: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(value_range, factor, interpolation, seed, data_format, **options)
        for name, value in (("num_chains", num_chains), ("chain_depth", chain_depth)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name}={value!r} of AugMix: expected an integer >= 1")
        if not alpha > 0:
            raise ConfigError(f"alpha = {alpha} of AugMix: expected a number above 0")
        self.num_chains, self.chain_depth = num_chains, chain_depth
        self.alpha, self.all_ops = float(alpha), bool(all_ops)

    def _draw(self, rows: Any, height: Any, width: Any, channels: Any) -> Any:
        names = (*self._names, *(self._color_names if self.all_ops else ()))
        shape = self.num_chains, self.chain_depth
        weights = random.dirichlet((self.num_chains,), self.alpha, self._exact_dtype, seed=self.generator)
        return {
            "chain_mixing_weights": weights,
            "weight_sample": random.beta((1,), self.alpha, self.alpha, self._exact_dtype, seed=self.generator)[0],
            "layer_idxes": random.randint(shape, 0, len(names) + 1, seed=self.generator),
            "chain_transforms": [
                [self._draw_all(names, rows, height, width, channels) for _ in range(self.chain_depth)]
                for _ in range(self.num_chains)
            ],
        }

    def _apply(self, x: Tensor, transformation: Any) -> Tensor:
        numbers = ops.convert_to_tensor(transformation["layer_idxes"])
        weights, image_weight = (
            ops.cast(transformation[name], x.dtype) for name in ("chain_mixing_weights", "weight_sample")
        )
        total: Any = 0.0
        for chain, transforms in enumerate(transformation["chain_transforms"]):
            augmented = x
            for depth, transformations in enumerate(transforms):
                augmented = self._apply_selected(augmented, numbers[chain, depth], transformations)
            total = total + augmented * weights[chain]
        return ops.clip(image_weight * x + (1 - image_weight) * total, *self.value_range)
