"""Random numbers: functions of (seed, purpose, count, stream) and of the row of the global batch.

So a rank draws for its rows what one device would draw for them, whatever the number of ranks, and an execution that is
repeated from the same state draws the same again. The bits are those of Philox (`dptrain.random`), in the layout of
`kernels/dropout.cu`.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dptrain.errors import ConfigError
from dptrain.ops.elementwise import cast, cos, greater_equal, log, sqrt, where
from dptrain.ops.manipulation import reshape
from dptrain.ops.sharing import Axes
from dptrain.program.shapes import Shape, row_axis
from dptrain.program.tensor import FLOATX, Array, Sharing, Tensor, Variable, as_tensors, op
from dptrain.random import Purpose, stream


def _sharing(shapes: Sequence[Shape], axes: Axes, out: Shape, attributes: Mapping[str, Any]) -> Sharing:
    return Sharing((None,), row_axis(out))


@op(
    shape=lambda count, *, shape, seed, purpose, number: shape,
    sharing=_sharing,
    dtype=lambda count, *, shape, seed, purpose, number: np.uint32,
    by_row=True,
)
def random_bits(
    count: Array, *, shape: Shape, seed: int, purpose: int, number: int, first_row: int = 0, out: Array
) -> None:
    """32 random bits for each element of (rows, features); a row begins a block of eight of them."""
    rows, features = shape
    blocks = -(-features // 8)
    generator = stream(seed, Purpose(purpose), int(count), number, offset=first_row * blocks).bit_generator
    raw = np.asarray(generator.random_raw(rows * blocks * 4))
    out[...] = raw.astype("<u8", copy=False).view("<u4").reshape(rows, blocks * 8)[:, :features]


class SeedGenerator:
    """The state of random numbers, as Keras': every draw is another one, and a program has the state among its own.

    Args:
        seed: 0 to 2**64 - 1.
        name: of the state.
        purpose: what the numbers are for.
        number: tells generators of one seed and purpose apart.

    Attributes:
        count: how many draws there have been.
    """

    def __init__(
        self, seed: int, name: str = "seed_generator", *, purpose: Purpose = Purpose.NOISE, number: int = 0
    ) -> None:
        if not 0 <= seed < 2**64:
            raise ConfigError(f"seed = {seed}: expected 0 to 2**64 - 1")
        self.seed, self.purpose, self.number = seed, purpose, number
        self.count = Variable(np.array(0, np.int64), name, trainable=False)

    def bits(self, shape: Sequence[int]) -> Tensor:
        """Return 32 random bits for each element (uint32), and count the draw.

        Args:
            shape: a length that counts rows of the batch must be the first.

        Raises:
            ConfigError: it is not.
        """
        wanted = tuple(shape)
        if row_axis(wanted) not in (None, 0):
            raise ConfigError(f"random numbers of shape {wanted}: rows of the batch must come first")
        flat = (wanted[0], math.prod(wanted[1:])) if wanted else (1, 1)
        settings = {"seed": self.seed, "purpose": int(self.purpose), "number": self.number}
        drawn = random_bits(self.count, shape=flat, **settings)
        self.count.assign(self.count + 1)
        return reshape(drawn, wanted)


def uniform(
    shape: Sequence[int],
    minval: float = 0.0,
    maxval: float = 1.0,
    dtype: npt.DTypeLike = FLOATX,
    *,
    seed: SeedGenerator,
) -> Tensor:
    """Return numbers that are equally likely in [minval, maxval), 2^24 different ones (float64: 2^32)."""
    kept = 24 if np.dtype(dtype) == np.float32 else 32  # all of them are exact, and 1 does not come out
    unit = cast(seed.bits(shape) // 2 ** (32 - kept), dtype) * 2.0**-kept
    return unit * (maxval - minval) + minval


def normal(
    shape: Sequence[int],
    mean: float = 0.0,
    stddev: float = 1.0,
    dtype: npt.DTypeLike = FLOATX,
    *,
    seed: SeedGenerator,
) -> Tensor:
    """Return normally distributed numbers.

    Source: G. Box and M. Muller, "A note on the generation of random normal deviates", Annals of Mathematical
    Statistics 29 (1958).
    """
    radius = sqrt(-2.0 * log(1.0 - uniform(shape, dtype=dtype, seed=seed)))
    return radius * cos(uniform(shape, 0.0, 2 * math.pi, dtype, seed=seed)) * stddev + mean


def dropout(x: Any, rate: float, *, seed: SeedGenerator) -> Tensor:
    """Return x with elements set to 0 with this probability and the others divided by 1 - rate.

    Raises:
        ConfigError: the rate is not 0 to below 1.
    """
    (tensor,) = as_tensors([x])
    if not 0 <= rate < 1:
        raise ConfigError(f"rate = {rate}: expected 0 to below 1")
    if rate == 0:
        return tensor
    kept = greater_equal(seed.bits(tensor.shape), np.uint32(rate * 2**32))
    return where(kept, tensor * (1 / (1 - rate)), 0)
