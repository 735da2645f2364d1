"""SpectralNormalization: a kernel whose greatest singular value is 1."""

from typing import Any

from dptrain import initializers, ops
from dptrain.errors import ConfigError
from dptrain.layers.base import BuildShape, Layer
from dptrain.layers.core.wrapper import Wrapper
from dptrain.layers.input_spec import InputSpec
from dptrain.program.tensor import Tensor, Variable
from dptrain.runtime.types import is_floating


class SpectralNormalization(Wrapper):
    """Scales a layer's `kernel` or `embeddings`, a matrix with a column per output, to greatest singular value 1.

    In training each call divides the kernel by an estimate of that value, from `power_iterations` further steps of the
    power method, and trains the result: the kernel itself changes, as in Keras on PyTorch and TensorFlow.

    Source: T. Miyato et al., "Spectral normalization for generative adversarial networks", ICLR 2018.
    """

    def __init__(self, layer: Layer, power_iterations: int = 1, **options: Any) -> None:
        super().__init__(layer, **options)
        if power_iterations <= 0:
            raise ConfigError(
                f"`power_iterations` should be greater than zero. Received: `power_iterations={power_iterations}`"
            )
        self.power_iterations = int(power_iterations)

    def build(self, input_shape: BuildShape) -> None:
        """Make the weights of the layer, and the vector of the power method."""
        super().build(input_shape)
        self.input_spec = InputSpec(min_ndim=1, axes={-1: input_shape[-1]})
        kernel = getattr(self.layer, "kernel", getattr(self.layer, "embeddings", None))
        if kernel is None:
            raise ConfigError(f"{type(self.layer).__name__} object has no attribute 'kernel' nor 'embeddings'")
        if not isinstance(kernel, Variable):
            raise ConfigError(f"not supported: SpectralNormalization of layer {self.layer.name!r}, which has LoRA")
        self.kernel = kernel
        self.vector_u = self.add_weight(
            (1, kernel.shape[-1]), initializers.TruncatedNormal(stddev=0.02), trainable=False, name="vector_u"
        )

    def call(self, inputs: Tensor, training: bool = False) -> Tensor:
        """Call the layer; in training, normalize its kernel first."""
        if training:
            self._normalize()
        outputs = self.layer(inputs)
        return ops.cast(outputs, inputs.dtype) if is_floating(inputs.dtype) else outputs

    def _normalize(self) -> None:
        kernel = ops.stop_gradient(self.kernel.value)
        matrix, u = ops.reshape(kernel, (-1, kernel.shape[-1])), self.vector_u.value
        for _ in range(self.power_iterations):
            v = ops.normalize(ops.matmul(u, ops.transpose(matrix)))
            u = ops.normalize(ops.matmul(v, matrix))
        greatest = ops.matmul(ops.matmul(v, matrix), ops.transpose(u))
        empty = ops.all(ops.equal(kernel, 0))
        self.vector_u.assign(ops.where(empty, self.vector_u.value, u))
        normalized = ops.where(empty, kernel, kernel / ops.reshape(greatest, ()))
        # The gradient is that in the normalized kernel, which takes the kernel's place.
        self.kernel.assign(normalized + (self.kernel.value - kernel))
