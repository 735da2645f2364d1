"""Windows of a time series as batches: `utils.timeseries_dataset_from_array`."""

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from dptrain.batches.py_dataset import PassDataset
from dptrain.comm.parts import cut
from dptrain.errors import ConfigError
from dptrain.random import Purpose, default_seed, stream
from dptrain.registry.arguments import checked_arguments
from dptrain.runtime.text import short

Array = npt.NDArray[Any]


class SeriesDataset(PassDataset):
    """Batches of windows (rows, sequence_length, ...); returned by `timeseries_dataset_from_array`."""

    def __init__(
        self, data: Array, targets: Array | None, places: Array, window: Array, batch_size: int, seed: int | None
    ) -> None:
        super().__init__()
        self._data, self._targets, self._begins, self._window = data, targets, places, window
        self._batch_size, self._seed = batch_size, seed
        self.on_pass_begin(0)

    def __len__(self) -> int:
        return math.ceil(len(self._begins) / self._batch_size)

    def on_pass_begin(self, number: int) -> None:
        """Draw the order of pass `number`."""
        shuffled = self._seed is not None
        self._order = stream(self._seed or 0, Purpose.SHUFFLE, number).permutation(self._begins) if shuffled else None

    def shard(self, index: int, part: int, parts: int) -> Any:
        """Return a part of a batch."""
        order = self._begins if self._order is None else self._order
        places = order[index * self._batch_size : (index + 1) * self._batch_size]
        places = places[slice(*cut(0, len(places), parts)[part])]
        x = self._data[places[:, None] + self._window]
        return x if self._targets is None else (x, self._targets[places])


@checked_arguments
def timeseries_dataset_from_array(
    data: Any,
    targets: Any,
    sequence_length: int,
    sequence_stride: int = 1,
    sampling_rate: int = 1,
    batch_size: int | None = 128,
    shuffle: bool = False,
    seed: int | None = None,
    start_index: int | None = None,
    end_index: int | None = None,
    format: str = "tf",
) -> SeriesDataset:
    """Return windows of a series as batches for `fit`, as `keras.utils.timeseries_dataset_from_array`.

    Args:
        data: (steps, ...).
        targets: (steps, ...), of the window that begins at each step of `data`, or None. If there are fewer, windows
            without a target are left out.
        sequence_length: steps of a window.
        sequence_stride: between the beginnings of two windows.
        sampling_rate: between two steps of a window.
        batch_size: windows of a global batch; None for all.
        shuffle: whether each pass has another order.
        seed: of the orders; by default that of `set_random_seed`.
        start_index: first step in use.
        end_index: first step no longer in use.
        format: "tf" or "grain", as in Keras; makes no difference.

    Raises:
        ConfigError: an argument is out of range.
    """
    series = np.asarray(data)
    for name, array in (("data", series), ("targets", np.asarray(targets if targets is not None else [0]))):
        if not array.ndim or array.dtype == object:
            raise ConfigError(f"timeseries_dataset_from_array: {name} = {short(array)}: expected an array (steps, ...)")
    if seed is not None and seed < 0:
        raise ConfigError(f"`seed` must be 0 or greater. Received: seed={seed}")
    steps = len(series)
    _check_range(start_index, end_index, steps)
    for name, value in (("sampling_rate", sampling_rate), ("sequence_stride", sequence_stride)):
        if value <= 0:
            raise ConfigError(f"`{name}` must be higher than 0. Received: {name}={value}")
        if value >= steps:
            raise ConfigError(
                f"`{name}` must be lower than the length of the data. Received: {name}={value}, for data of length "
                f"{steps}"
            )
    if format not in ("tf", "grain"):
        raise ConfigError(f'`format` should be either "tf" or "grain". Received: format={format}')
    if sequence_length < 1:
        raise ConfigError(f"`sequence_length` must be higher than 0. Received: sequence_length={sequence_length}")
    if batch_size is not None and batch_size < 1:
        raise ConfigError(f"`batch_size` must be higher than 0, or None. Received: batch_size={batch_size}")
    first, end = start_index or 0, steps if end_index is None else end_index
    windows = end - first - (sequence_length - 1) * sampling_rate
    target_rows = None if targets is None else np.asarray(targets)[first:end]  # cut as the data are
    windows = windows if target_rows is None else min(windows, len(target_rows))
    begins = np.arange(0, windows, sequence_stride)
    if not len(begins):
        raise ConfigError(
            f"no window of {sequence_length} steps, {sampling_rate} apart, in {end - first} steps"
            + ("" if target_rows is None else f" with {len(target_rows)} targets")
        )
    window = np.arange(sequence_length) * sampling_rate
    chosen = (default_seed() if seed is None else seed) if shuffle else None
    return SeriesDataset(series[first:end], target_rows, begins, window, batch_size or len(begins), chosen)


def _check_range(start_index: int | None, end_index: int | None, steps: int) -> None:
    if start_index:
        if start_index < 0:
            raise ConfigError(f"`start_index` must be 0 or greater. Received: start_index={start_index}")
        if start_index >= steps:
            raise ConfigError(
                "`start_index` must be lower than the length of the data. Received: "
                f"start_index={start_index}, for data of length {steps}"
            )
    if end_index:
        if start_index and end_index <= start_index:
            raise ConfigError(
                f"`end_index` must be higher than `start_index`. Received: start_index={start_index}, and "
                f"end_index={end_index} "
            )
        if end_index >= steps:
            raise ConfigError(
                f"`end_index` must be lower than the length of the data. Received: end_index={end_index}, for data of "
                f"length {steps}"
            )
        if end_index <= 0:
            raise ConfigError(f"`end_index` must be higher than 0. Received: end_index={end_index}")
