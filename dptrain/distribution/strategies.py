"""Strategies that divide rows of batches and variables over a mesh, and the current strategy.

Source: `keras.distribution`, Keras 3.15.
"""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from dptrain import comm as comms
from dptrain.distribution.devices import list_devices
from dptrain.distribution.layouts import DeviceMesh, LayoutMap, TensorLayout, require_mesh
from dptrain.errors import ConfigError
from dptrain.program.sharding.mesh import BATCH
from dptrain.program.tensor import Variable

T = TypeVar("T")


class Distribution(ABC):
    """How batches and variables are divided over a mesh.

    Args:
        device_mesh: the mesh.
        batch_dim_name: the axis over which rows of batches are divided; by default "batch" if the mesh has such an
            axis, else None, and every rank has all rows.
        auto_shard_dataset: all ranks get the same batches, and take their rows of them; must be True on several ranks.

    Attributes:
        device_mesh, batch_dim_name: see above.
        num_processes: the number of ranks.

    Raises:
        ConfigError: no mesh, no such axis, or `auto_shard_dataset` is False on several ranks.
    """

    def __init__(
        self, device_mesh: DeviceMesh, batch_dim_name: str | None = None, auto_shard_dataset: bool = True
    ) -> None:
        names = list(require_mesh(device_mesh).axis_names)
        if batch_dim_name is None and BATCH in names:
            batch_dim_name = BATCH
        if batch_dim_name is not None and batch_dim_name not in names:
            raise ConfigError(f"batch_dim_name = {batch_dim_name!r}: expected an axis of the mesh, {names}")
        if batch_dim_name not in (None, BATCH) and BATCH in names:
            raise ConfigError(
                f"not supported: batch_dim_name={batch_dim_name!r} on a mesh that also has an axis {BATCH!r}"
            )
        self.device_mesh, self.batch_dim_name = device_mesh, batch_dim_name
        self.num_processes = comms.current().size
        self.auto_shard_dataset = auto_shard_dataset

    @property
    def auto_shard_dataset(self) -> bool:
        """Whether all ranks get the same batches; ConfigError if set to False on several ranks."""
        return self._auto_shard_dataset

    @auto_shard_dataset.setter
    def auto_shard_dataset(self, auto_shard_dataset: bool) -> None:
        if not auto_shard_dataset and self.num_processes > 1:
            raise ConfigError(
                "not supported: auto_shard_dataset=False: every rank gets the same batches; to read only a rank's "
                "part, pass a utils.PyDataset with a method `shard`"
            )
        self._auto_shard_dataset = auto_shard_dataset

    @property
    def num_model_replicas(self) -> int:
        """Number of parts of a batch: the length of the batch axis."""
        return self.device_mesh._lengths[self.batch_dim_name] if self.batch_dim_name is not None else 1

    @property
    def data_shard_id(self) -> int:
        """Number of this rank's part."""
        if self.batch_dim_name is None:
            return 0
        places = np.unravel_index(comms.current().rank, tuple(self.device_mesh.shape))
        return int(places[list(self.device_mesh.axis_names).index(self.batch_dim_name)])

    def get_data_layout(self, data_shape: Sequence[int | None]) -> TensorLayout:
        """Return the layout of a batch of shape (rows, ...): rows are divided, other axes whole."""
        return TensorLayout([self.batch_dim_name, *[None] * len(data_shape)][: len(data_shape)], self.device_mesh)

    @abstractmethod
    def get_variable_layout(self, variable: Variable) -> TensorLayout:
        """Return the layout of a variable."""

    @abstractmethod
    def get_tensor_layout(self, path: str) -> TensorLayout | None:
        """Return the layout of an intermediate tensor by its path, such as "dense/output", or None."""

    def distribute_dataset(self, dataset: T) -> T:
        """Return the data set itself: `fit` gives each rank its rows of every batch."""
        return dataset

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Make this the current `distribution()` in a `with` block."""
        before = distribution()
        set_distribution(self)
        try:
            yield
        finally:
            set_distribution(before)

    def _replicated(self, variable: Variable) -> TensorLayout:
        return TensorLayout([None] * variable.ndim, self.device_mesh)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} device_mesh={self.device_mesh}>"


class DataParallel(Distribution):
    """Divides rows of batches; every rank has all variables, as without a distribution.

    Args:
        device_mesh: rows are divided over its first axis.
        devices: instead of a mesh, those of `list_devices()`, the default.
        auto_shard_dataset: see `Distribution`.
    """

    def __init__(
        self,
        device_mesh: DeviceMesh | None = None,
        devices: npt.ArrayLike | None = None,
        auto_shard_dataset: bool = True,
    ) -> None:
        if device_mesh is None:
            names = np.array(list_devices() if devices is None else devices)
            device_mesh = DeviceMesh(names.shape, [BATCH], names)
        super().__init__(device_mesh, require_mesh(device_mesh).axis_names[0], auto_shard_dataset)
        if len(device_mesh.shape) > 1:
            warnings.warn(
                f"Expect the input mesh to be 1D, but received mesh.devices.ndim={len(device_mesh.shape)}. "
                "The first axis will be used for data-parallel sharding.",
                stacklevel=2,
            )

    def get_variable_layout(self, variable: Variable) -> TensorLayout:
        """Return a replicated layout."""
        return self._replicated(variable)

    def get_tensor_layout(self, path: str) -> None:
        """Return None: intermediate tensors lie where their inputs do."""


class ModelParallel(Distribution):
    """Divides rows of batches over an axis of a mesh, and variables as a map says.

    Args:
        layout_map: by paths of variables; those without a layout are on every rank.
        batch_dim_name: the axis over which rows are divided; by default the mesh's first.
        auto_shard_dataset: see `Distribution`.
    """

    def __init__(
        self,
        *,
        layout_map: LayoutMap | None = None,
        batch_dim_name: str | None = None,
        auto_shard_dataset: bool = True,
    ) -> None:
        if layout_map is None:
            raise ConfigError("You must specify a layout_map argument.")
        if not isinstance(layout_map, LayoutMap):
            raise ConfigError(
                f"Argument `layout_map` must be a `LayoutMap` instance. Received: layout_map={layout_map}"
            )
        mesh = layout_map.device_mesh
        super().__init__(mesh, batch_dim_name or mesh.axis_names[0], auto_shard_dataset)
        self._layout_map = layout_map

    def get_variable_layout(self, variable: Variable) -> TensorLayout:
        """Return the map's layout of a variable's path, else a replicated one."""
        layout = self._layout_map[variable.path] or self._layout_map[variable._path]
        return layout or self._replicated(variable)

    def get_tensor_layout(self, path: str) -> TensorLayout | None:
        """Return the map's layout of a path, or None."""
        return self._layout_map[path]


_current: Distribution | None = None


def distribution() -> Distribution | None:
    """Return the distribution of `set_distribution` or a `Distribution.scope`, or None."""
    return _current


def set_distribution(value: Distribution | None) -> None:
    """Set how batches and variables are divided from now on; None divides rows of batches over all ranks.

    Call it on every rank. ConfigError for something else.
    """
    global _current
    if value is not None and not isinstance(value, Distribution):
        raise ConfigError(f"set_distribution: expected a Distribution or None. Received: {value!r}")
    _current = value
