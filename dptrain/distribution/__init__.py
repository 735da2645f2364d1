"""Keras' meshes and layouts: which rank has which part of the batch and of each variable."""

from typing import TYPE_CHECKING

from dptrain.distribution.devices import get_device_count, initialize, list_devices
from dptrain.distribution.layouts import DeviceMesh, LayoutMap, TensorLayout, all_gather, distribute_tensor
from dptrain.distribution.strategies import (
    DataParallel,
    Distribution,
    ModelParallel,
    distribution,
    set_distribution,
)
from dptrain.registry.names import not_there

__all__ = [
    "DataParallel",
    "DeviceMesh",
    "Distribution",
    "LayoutMap",
    "ModelParallel",
    "TensorLayout",
    "all_gather",
    "distribute_tensor",
    "distribution",
    "get_device_count",
    "initialize",
    "list_devices",
    "set_distribution",
]

if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__ = not_there("distribution", __all__)
