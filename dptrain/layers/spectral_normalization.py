"""SpectralNormalization: a kernel whose greatest singular value is 1."""

from typing import Any

from dptrain import initializers, ops
from dptrain.errors import ConfigError
from dptrain.layers.base import BuildShape, Layer
from dptrain.layers.input_spec import InputSpec
from dptrain.layers.wrapper import Wrapper
from dptrain.program.tensor import Tensor


class SpectralNormalization(Wrapper):
    """A layer whose kernel, as a matrix of as many columns as outputs, has the greatest singular value 1.

    In training each call divides the kernel by an estimate of that value, one step of the power method further than
    the call before, and trains what comes out: the kernel itself changes, as in Keras on PyTorch and TensorFlow.

    Source: T. Miyato et al., "Spectral normalization for generative adversarial networks", ICLR 2018.

    Args:
        layer: a layer with a `kernel` or `embeddings`.
        power_iterations: steps of a call, at least 1.
        options: keyword arguments of `Layer`.

    Raises:
        ConfigError: the number of steps is out of range, or the layer has neither.
    """

    def __init__(self, layer: Layer, power_iterations: int = 1, **options: Any) -> None:
        super().__init__(layer, **options)
        if power_iterations <= 0:
            raise ConfigError(
                f"`power_iterations` should be greater than zero. Received: `power_iterations={power_iterations}`"
            )
        self.power_iterations = int(power_iterations)

    def build(self, input_shape: BuildShape) -> None:
        """Make the weights of the other layer, and the vector that the power method goes on from."""
        super().build(input_shape)
        self.input_spec = InputSpec(min_ndim=1, axes={-1: input_shape[-1]})
        kernel = getattr(self.layer, "kernel", getattr(self.layer, "embeddings", None))
        if kernel is None:
            raise ConfigError(f"{type(self.layer).__name__} object has no attribute 'kernel' nor 'embeddings'")
        self.kernel = kernel
        self.vector_u = self.add_weight(
            (1, kernel.shape[-1]), initializers.TruncatedNormal(stddev=0.02), trainable=False, name="vector_u"
        )

    def call(self, inputs: Tensor, training: bool = False) -> Tensor:
        """Return what the layer makes of the input; in training, normalize its kernel before."""
        if training:
            self._normalize()
        outputs = self.layer(inputs)
        return ops.cast(outputs, inputs.dtype) if inputs.dtype.kind in "fV" else outputs

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
