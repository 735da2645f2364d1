"""Keras' `keras.ops.image`: resizing, borders, colours, filters and warps of images.

Images are (rows, height, width, channels) or (height, width, channels); with `data_format` "channels_first" channels
come before the height.
"""

from typing import TYPE_CHECKING

from dptrain.ops.image.colors import hsv_to_rgb, rgb_to_grayscale, rgb_to_hsv
from dptrain.ops.image.filters import extract_patches, extract_patches_3d, gaussian_blur, sobel_edges, ssim
from dptrain.ops.image.resizing import crop_images, pad_images, resize, scale_and_translate
from dptrain.ops.image.warping import affine_transform, elastic_transform, map_coordinates, perspective_transform
from dptrain.registry.names import not_there

__all__ = [
    "affine_transform",
    "crop_images",
    "elastic_transform",
    "extract_patches",
    "extract_patches_3d",
    "gaussian_blur",
    "hsv_to_rgb",
    "map_coordinates",
    "pad_images",
    "perspective_transform",
    "resize",
    "rgb_to_grayscale",
    "rgb_to_hsv",
    "scale_and_translate",
    "sobel_edges",
    "ssim",
]

if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__ = not_there("ops.image", __all__)
