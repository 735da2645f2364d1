"""Meshes of devices, and layouts: which mesh axis divides each axis of a tensor. Source: `keras.distribution`."""

import math
import re
from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from dptrain.distribution.devices import list_devices
from dptrain.errors import ConfigError
from dptrain.ops.manipulation import unshard
from dptrain.ops.operation_calls import operation
from dptrain.program.tensor import Tensor, as_tensors
from dptrain.registry.names import not_supported

T = TypeVar("T")

# For each axis of a tensor the mesh axis that divides it, or None if it is whole.
AxisNames = Sequence[str | None]


class DeviceMesh:
    """The ranks of the job as a grid with named axes; the last axis runs fastest, as in NumPy.

    Args:
        shape: lengths of the axes, such as (2, 4); their product is the number of ranks, with a device each.
        axis_names: a name for each axis, such as ["batch", "model"].
        devices: those of `list_devices()`, the default, in that order, in any shape; as an attribute of the mesh's
            shape.

    Raises:
        ConfigError: lengths and names that do not match, another size than the number of ranks, or other devices.
    """

    backend_mesh = not_supported("backend_mesh", "dptrain places programs on the mesh itself")

    def __init__(self, shape: Sequence[int], axis_names: Sequence[str], devices: npt.ArrayLike | None = None) -> None:
        received = f"Received: shape={shape}, axis_names={axis_names}"
        if not shape or not axis_names:
            raise ConfigError(f"Shape and axis_names cannot be empty. {received}")
        if len(shape) != len(axis_names):
            raise ConfigError(f"Shape and axis_names should have same size. {received}")
        if len(set(axis_names)) < len(axis_names):
            raise ConfigError(f"axis_names should be different from each other. {received}")
        if min(shape) < 1:
            raise ConfigError(f"shape should be of integers >= 1. {received}")
        names = np.array(list_devices() if devices is None else devices)
        if math.prod(shape) != names.size:
            advice = "" if devices is not None else f"; each rank is a device: use mpirun -n {math.prod(shape)}"
            raise ConfigError(
                "Shape does not match the number of devices. "
                f"Received: shape={shape}; devices.shape={names.shape}{advice}"
            )
        device_names = [str(name) for name in names.flat]
        # A GPU's rank has its CPU as well, on which `compile(device="cpu")` trains.
        if devices is not None and device_names not in (list_devices(), list_devices("cpu")):
            raise ConfigError(
                f"not supported: a mesh of devices={device_names}; expected {list_devices()}: a mesh has the device "
                "of each rank once, in rank order"
            )
        self.shape, self.axis_names = shape, axis_names
        self.devices: npt.NDArray[Any] = names.reshape(tuple(shape))

    @property
    def _lengths(self) -> dict[str, int]:
        """The length of each axis by its name."""
        return dict(zip(self.axis_names, self.shape, strict=True))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} shape={self.shape}, axis_names={self.axis_names}>"


def require_mesh(mesh: Any) -> DeviceMesh:
    """Return a mesh, or raise ConfigError if it is none."""
    if not isinstance(mesh, DeviceMesh):
        raise ConfigError(
            f"Expect `mesh` to be an instance of `DeviceMesh`. Received: mesh={mesh} (of type {type(mesh)})"
        )
    return mesh


class TensorLayout:
    """How a tensor is divided among the ranks of a mesh.

    Args:
        axes: for each axis of the tensor the name of the mesh axis that divides it (else ConfigError), or None; as an
            attribute a tuple.
        device_mesh: the mesh; it may be set later, once.
    """

    backend_layout = not_supported("backend_layout", "dptrain places programs on the mesh itself")

    def __init__(self, axes: AxisNames, device_mesh: DeviceMesh | None = None) -> None:
        self.axes = tuple(axes)
        self._device_mesh = self._checked(device_mesh)

    @property
    def device_mesh(self) -> DeviceMesh | None:
        """The mesh, or None if not set yet; ConfigError if set twice, or to a mesh without one of the axes."""
        return self._device_mesh

    @device_mesh.setter
    def device_mesh(self, device_mesh: DeviceMesh | None) -> None:
        if self._device_mesh is not None:
            raise ConfigError(f"Cannot override device mesh value. Existing value is {self._device_mesh}")
        self._device_mesh = self._checked(device_mesh)

    def _checked(self, mesh: DeviceMesh | None) -> DeviceMesh | None:
        axis_names = [] if mesh is None else list(mesh.axis_names)
        unknown = [name for name in self.axes if name is not None and name not in axis_names]
        if mesh is not None and unknown:
            raise ConfigError(f"Invalid axis names for Layout. Valid axis names: {axis_names}, Got {unknown}")
        return mesh

    def __repr__(self) -> str:
        return f"<{type(self).__name__} axes={self.axes}, device_mesh={self.device_mesh}>"


class LayoutMap(MutableMapping[str, Any]):
    """Layouts by the paths of variables, read by path and set by a key, which is a regular expression.

    A path gets the layout of the equal key, else of the one that matches all of it (`re.fullmatch`), else None. So
    "dense.*kernel" is the key of "dense/kernel" and "dense_1/kernel". `device_mesh` is that of the layouts.
    """

    def __init__(self, device_mesh: DeviceMesh) -> None:
        self.device_mesh = require_mesh(device_mesh)
        self._layouts: dict[str, TensorLayout] = {}

    def __getitem__(self, key: str) -> TensorLayout | None:
        """Return the layout of a path, or None; ConfigError if several keys match it."""
        if key in self._layouts:
            return self._layouts[key]
        matches = [pattern for pattern in self._layouts if re.fullmatch(pattern, key)]
        if len(matches) > 1:
            raise ConfigError(
                f"Path '{key}' matches multiple layout specification keys: {matches}. Please make sure each "
                "tensor/variable path only matches at most one layout specification key in the LayoutMap."
            )
        return self._layouts[matches[0]] if matches else None

    def __setitem__(self, key: str, layout: TensorLayout | AxisNames) -> None:
        """Give paths that match a regular expression a layout.

        Args:
            key: the regular expression.
            layout: a `TensorLayout`, which takes the map's mesh if it has none, or its axes as a tuple or list.

        Raises:
            ConfigError: the key has a layout or is no regular expression, or the layout is on another mesh or invalid.
        """
        if key in self._layouts:
            raise ConfigError(
                f"{key} already exist in the LayoutMap with value {self._layouts[key]}. Please make sure to not use "
                "duplicated keys."
            )
        if isinstance(layout, tuple | list):
            layout = TensorLayout(layout)
        if not isinstance(layout, TensorLayout):
            raise ConfigError(f"{layout} should be a TensorLayout type, got {type(layout)}")
        try:
            re.compile(key)
        except (re.error, TypeError) as error:
            raise ConfigError(f"LayoutMap: the key {key!r} is not a regular expression: {error}") from error
        if layout.device_mesh is None:
            layout.device_mesh = self.device_mesh
        elif layout.device_mesh._lengths != self.device_mesh._lengths:
            raise ConfigError(
                f"LayoutMap: the layout of {key!r} is on {layout.device_mesh}, the map's on {self.device_mesh}"
            )
        self._layouts[key] = layout

    def __delitem__(self, key: str) -> None:
        del self._layouts[key]

    def __contains__(self, key: object) -> bool:
        """Return whether a path has a layout."""
        return isinstance(key, str) and self[key] is not None

    def __len__(self) -> int:
        return len(self._layouts)

    def __iter__(self) -> Iterator[str]:
        return iter(self._layouts)


@operation
def all_gather(x: Any) -> Tensor:
    """Return x with the rows of all ranks on each of them, in a step; elsewhere x.

    The value is x's: a step's tensors are those of the whole batch, and an op that needs all rows gets them without
    this. It says where ranks gather: once, where otherwise each op would gather its own operands, which may be larger.

    Args:
        x: a tensor of any shape and type.
    """
    return unshard(*as_tensors([x]))


def distribute_tensor(tensor: T, layout: TensorLayout) -> T:
    """Return the tensor itself: its value is the same in any layout; ConfigError for something that is not a layout.

    Keras moves a tensor's parts to their devices here. In dptrain the layouts of batches and variables decide where the
    tensors of a step lie.
    """
    if not isinstance(layout, TensorLayout):
        raise ConfigError(f"{layout} should be a TensorLayout type, got {type(layout)}")
    return tensor
