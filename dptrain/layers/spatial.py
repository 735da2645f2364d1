"""Base of layers with axes of space."""

from typing import Any, ClassVar

from dptrain.layers.base import Layer
from dptrain.ops.nn.spatial import channels_first, channels_last
from dptrain.program.tensor import Tensor
from dptrain.runtime.image_format import checked_format


class SpatialLayer(Layer):
    """A layer of (rows, *space, channels), or with "channels_first" of (rows, channels, *space).

    Attributes:
        rank: the number of axes of space.
        data_format: "channels_last" or "channels_first".
    """

    rank: ClassVar[int]
    data_format: str

    def _set_format(self, data_format: Any) -> None:
        self.data_format = checked_format(data_format)

    @property
    def _channel_axis(self) -> int:
        return 1 if self.data_format == "channels_first" else -1

    @property
    def _space(self) -> tuple[int, ...]:
        """The axes of space."""
        first = 2 if self.data_format == "channels_first" else 1
        return tuple(range(first, first + self.rank))

    def _with_channels_last(self, x: Tensor) -> Tensor:
        return channels_last(x) if self.data_format == "channels_first" else x

    def _in_format(self, x: Tensor) -> Tensor:
        """Return a tensor with channels last in the layer's format."""
        return channels_first(x) if self.data_format == "channels_first" else x
