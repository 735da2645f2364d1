"""What executes ops on a device: the vocabulary that layers, losses, metrics and optimizers are written in.

Legend of shape suffixes, the same in every module and kernel: N rows of the data set, B rows of a batch, F features
of a sample, I inputs, O outputs of a dense layer, C classes, P elements of the flat parameter buffer.

A buffer is what `empty` returns: an array on the device that can be sliced and reshaped without copying. Ops write
into buffers that they are given; unless an op says "adds", it overwrites.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import numpy.typing as npt

from dptrain.backend.custom import Op
from dptrain.backend.transfers import Buffer as Buffer
from dptrain.backend.transfers import Exchange, Staging
from dptrain.backend.transfers import HostArray as HostArray

# Activations whose gradient is a function of their output, which is all that backward keeps.
ACTIVATIONS = ("linear", "relu", "sigmoid", "tanh", "softmax")


class Backend(ABC):
    """Memory and ops on one device.

    Attributes:
        name: "numpy" or "cuda".
        dtype: floating-point type of parameters, activations and gradients.
        description: the device in words, for the start-up table.
        numerics: what the bits of results depend on; must be the same on all ranks.
        gpu: identity of the GPU in use, which no two ranks should share; None on the CPU.
    """

    name: str
    dtype: np.dtype[Any]
    description: str
    numerics: str
    gpu: str | None = None

    # Memory, whose names appear in messages where it is short

    @abstractmethod
    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike | None = None, name: str = "") -> Buffer:
        """Return an uninitialised buffer of `dtype` (default: the backend's)."""

    @abstractmethod
    def zeros(self, shape: tuple[int, ...], dtype: npt.DTypeLike | None = None, name: str = "") -> Buffer:
        """Return a buffer of zeros of `dtype` (default: the backend's)."""

    @abstractmethod
    def upload(self, array: HostArray, name: str = "") -> Buffer:
        """Return the array on the device; no copy where the device is the host."""

    @abstractmethod
    def download(self, buffer: Buffer) -> HostArray:
        """Return a host copy of a buffer, after all work queued before it."""

    @abstractmethod
    def write(self, buffer: Buffer, array: HostArray) -> None:
        """Overwrite a buffer with a host array of the same shape."""

    @abstractmethod
    def exchange(self, buffer: Buffer, *, direct: bool = False) -> Exchange:
        """Return the way of a buffer to MPI and back.

        Args:
            buffer: on the device.
            direct: MPI is given the device's memory itself instead of a copy on the host.
        """

    @abstractmethod
    def staging(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Staging:
        """Return a way for samples from the host to the device, with memory of that shape at both ends."""

    @abstractmethod
    def room_for_data(self) -> int | None:
        """Return how many bytes of samples the device could hold now; None where it reads the host's own memory."""

    @abstractmethod
    def step_scope(self) -> AbstractContextManager[None]:
        """Return the context in which ops run."""

    # Batches

    @abstractmethod
    def gather(self, x_NF: Buffer, rows_B: Buffer, scale: float, offset: float, out_BF: Buffer) -> None:
        """Batch op: out[b] = x[rows[b]] * scale + offset, cast from the stored dtype to the backend's."""

    @abstractmethod
    def gather_targets(self, y_N: Buffer, rows_B: Buffer, out_B: Buffer) -> None:
        """out[b] = y[rows[b]], without a cast; y may have further dimensions."""

    # Layers

    @abstractmethod
    def dense_forward(
        self, x_BI: Buffer, kernel_IO: Buffer, bias_O: Buffer | None, activation: str, y_BO: Buffer
    ) -> None:
        """y = activation(x @ kernel + bias)."""

    @abstractmethod
    def dense_backward(
        self,
        x_BI: Buffer,
        kernel_IO: Buffer,
        y_BO: Buffer,
        dy_BO: Buffer,
        activation: str,
        dkernel_IO: Buffer,
        dbias_O: Buffer | None,
        dx_BI: Buffer | None,
    ) -> None:
        """Gradients of `dense_forward`; dy is overwritten by the gradient before the activation; dx only if given."""

    @abstractmethod
    def activation_forward(self, x_BF: Buffer, activation: str, y_BF: Buffer) -> None:
        """y = activation(x), one of `ACTIVATIONS`; softmax over the last axis."""

    @abstractmethod
    def activation_backward(self, y_BF: Buffer, dy_BF: Buffer, activation: str, dx_BF: Buffer) -> None:
        """dx = dy times the activation's derivative, from its output y; dx may be dy."""

    @abstractmethod
    def affine(self, x_BF: Buffer, scale: float, offset: float, y_BF: Buffer) -> None:
        """y = x * scale + offset; y may be x."""

    @abstractmethod
    def dropout_mask(self, rate: float, seed: int, step: int, layer: int, first_row: int, mask_BF: Buffer) -> None:
        """mask = 1 / (1 - rate) with probability 1 - rate, else 0.

        Row b, feature f draws 32-bit number f of row `first_row + b` from Philox4x64-10 with key (seed, DROPOUT) and
        counter (block, step, layer, 0): a row begins a new block of eight 32-bit numbers, so that a sample's mask
        depends on its place in the global batch and not on the rank that computes it.
        """

    @abstractmethod
    def multiply(self, a: Buffer, b: Buffer, out: Buffer) -> None:
        """Elementwise out = a * b; out may be either."""

    @abstractmethod
    def copy(self, source: Buffer, out: Buffer) -> None:
        """Elementwise out = source."""

    # Losses and metrics add to one element of the reduction's tail

    @abstractmethod
    def softmax_cross_entropy(
        self,
        logits_BC: Buffer,
        labels_B: Buffer,
        dlogits_BC: Buffer | None,
        loss_sum: Buffer,
        correct_sum: Buffer | None,
    ) -> None:
        """Adds sum_b -log softmax(logits)[b, labels[b]] to loss_sum; dlogits = softmax(logits) - onehot(labels).

        The highest logit of a row is subtracted first, so that no exponential overflows. As it is at hand, the op also
        adds what `count_correct` of the logits would to correct_sum, where that is given.
        """

    @abstractmethod
    def squared_error(self, y_BF: Buffer, target_BF: Buffer, dy_BF: Buffer | None, loss_sum: Buffer) -> None:
        """Adds sum_b mean_f (y - target)**2 to loss_sum; dy = 2 (y - target) / F."""

    @abstractmethod
    def count_correct(self, scores_BC: Buffer, labels_B: Buffer, correct_sum: Buffer) -> None:
        """Adds the number of rows whose highest score (the first of equals) is at the label to correct_sum."""

    @abstractmethod
    def absolute_error(self, y_BF: Buffer, target_BF: Buffer, error_sum: Buffer) -> None:
        """Adds sum_b mean_f |y - target| to error_sum."""

    # Ops that users bring along

    @abstractmethod
    def custom(self, op: Op, buffers: Sequence[Buffer], numbers: Mapping[str, Any]) -> None:
        """Run a user's op, see `dptrain.ops`."""

    # Flat buffers

    @abstractmethod
    def sum(self, x: Buffer, total: Buffer) -> None:
        """Adds the sum of all elements of x to total, one element of float64, in float64.

        The order of the additions depends on the size alone.
        """

    @abstractmethod
    def squared_norm(self, x: Buffer, total: Buffer) -> None:
        """Adds sum_i x[i]^2 to total, one element of float64, in float64; ordered as `sum`."""

    @abstractmethod
    def count_nonfinite(self, x: Buffer, total: Buffer) -> None:
        """Adds the number of elements that are NaN or infinite to total, one element of float64."""

    @abstractmethod
    def fill(self, buffer: Buffer, value: float) -> None:
        """Set every element."""

    @abstractmethod
    def add(self, source: Buffer, out: Buffer) -> None:
        """Elementwise out += source."""

    @abstractmethod
    def adam(
        self,
        params_P: Buffer,
        grads_P: Buffer,
        momentum_P: Buffer,
        velocity_P: Buffer,
        weight: Buffer,
        alpha: float,
        beta_1: float,
        beta_2: float,
        epsilon: float,
    ) -> None:
        """Adam's update with g = grads / weight[0]; grads is destroyed.

        m += (g - m)(1 - beta_1), v += (g^2 - v)(1 - beta_2), p -= alpha m / (sqrt(v) + epsilon).

        Source: D. Kingma and J. Ba, "Adam: a method for stochastic optimization", ICLR 2015, in the order of the
        paragraph before section 2.1 (epsilon-hat), as Keras. `alpha` holds the bias corrections.
        """

    @abstractmethod
    def rmsprop(
        self,
        params_P: Buffer,
        grads_P: Buffer,
        velocity_P: Buffer,
        weight: Buffer,
        learning_rate: float,
        rho: float,
        epsilon: float,
    ) -> None:
        """RMSprop's update with g = grads / weight[0], as Keras; grads is destroyed.

        v = rho v + (1 - rho) g^2, p -= learning_rate g / sqrt(v + epsilon).
        """

    @abstractmethod
    def sgd(
        self,
        params_P: Buffer,
        grads_P: Buffer,
        momentum_P: Buffer | None,
        weight: Buffer,
        learning_rate: float,
        momentum: float,
    ) -> None:
        """Gradient descent with g = grads / weight[0]; grads is destroyed.

        m = momentum m - learning_rate g, p += m; without m, p -= learning_rate g.
        """


def flat_features(shape: Sequence[int]) -> int:
    """Return the number of features of one sample of that shape."""
    return int(np.prod(shape, dtype=np.int64))


def amount(nbytes: float) -> str:
    """Return a number of bytes as people read it."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes / 2**10:.1f} KiB" if nbytes >= 2**10 else f"{nbytes:.0f} bytes"
