"""The factors of channels in ConvNeXt, which Keras keeps in the network's module."""

from typing import Any

from dptrain.initializers import Constant
from dptrain.layers.base import Layer
from dptrain.program.tensor import Tensor


class LayerScale(Layer):
    """A factor for each of `projection_dim` channels, initially `init_values`.

    Source: Touvron et al., Going deeper with Image Transformers, 2021, https://arxiv.org/abs/2103.17239
    """

    def __init__(self, init_values: float, projection_dim: int, **options: Any) -> None:
        super().__init__(**options)
        self.init_values, self.projection_dim = init_values, projection_dim

    def build(self, input_shape: Any) -> None:
        """Make the factors."""
        self.gamma = self.add_weight((self.projection_dim,), Constant(self.init_values))

    def call(self, inputs: Tensor) -> Tensor:
        """Return the channels times their factors."""
        return inputs * self.gamma
