"""Random numbers: functions of (seed, purpose, count, stream) and of the row of the global batch.

So ranks draw for their rows what one device would draw, whatever their number, and repeating an execution from the same
state draws the same again. The bits are Philox's (`dptrain.random`), in the layout of `kernels/random.cuh`.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dptrain.errors import ConfigError
from dptrain.ops.elementwise import (
    absolute,
    cast,
    clip,
    cos,
    equal,
    exp,
    floor_divide,
    greater,
    greater_equal,
    less,
    log,
    logical_and,
    maximum,
    sqrt,
    where,
)
from dptrain.ops.indexing import add_rows, row_numbers, take_at_axis
from dptrain.ops.manipulation import concatenate, expand_dims, reshape, stack, zeros, zeros_like
from dptrain.ops.nn.activation import sigmoid, softmax
from dptrain.ops.reduction import argmax
from dptrain.ops.reduction import sum as sum_over
from dptrain.program.dims import Dim
from dptrain.program.lowering import RandomBits
from dptrain.program.op import in_one_call, op
from dptrain.program.schema import Word
from dptrain.program.shapes import Shape, differ, normalized_axes, row_axis, without_rows
from dptrain.program.tensor import FLOATX, Array, Tensor, Variable, as_tensors, constant, is_tracing, untraced
from dptrain.program.turns import DRAWING, TURNS
from dptrain.random import Purpose, default_seed, next_position, own_seed, seeds_set, stream
from dptrain.registry.serialization import Configurable
from dptrain.runtime.floatx import floatx
from dptrain.runtime.types import type_of


@op(
    shape=lambda count, *, shape, seed, purpose, number: shape,
    letters="->aX",
    dtype=lambda count, *, shape, seed, purpose, number: np.uint32,
    by_row=True,
    lowering=RandomBits(),
    expensive=True,
)
def random_bits(
    count: Array, *, shape: Shape, seed: Word, purpose: Word, number: Word, first_row: int = 0, out: Array
) -> None:
    """32 random bits for each element of (rows, features); a row begins at a block of eight."""
    rows, features = shape
    blocks = -(-features // 8)
    generator = stream(seed, Purpose(purpose), int(count), number, offset=first_row * blocks).bit_generator
    raw = np.asarray(generator.random_raw(rows * blocks * 4))
    out[...] = raw.astype("<u8", copy=False).view("<u4").reshape(rows, blocks * 8)[:, :features]


class SeedGenerator(Configurable):
    """The state of random numbers, like Keras': every draw differs, and programs keep the state.

    Args:
        seed: 0 to 2**64 - 1; by default that of `dptrain.utils.set_random_seed`, in its own stream.
        name: of the state.
        purpose: what the numbers are for.
        number: distinguishes generators of one seed and purpose.

    Attributes:
        count: number of draws so far.
    """

    def __init__(
        self,
        seed: int | None = None,
        name: str | None = None,
        *,
        purpose: Purpose = Purpose.NOISE,
        number: int = 0,
        **kwargs: Any,
    ) -> None:
        if kwargs:
            raise ConfigError(f"Unrecognized keyword arguments: {kwargs}")
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
            raise ConfigError(f"Argument `seed` must be an integer. Received: seed={seed}")
        chosen_seed = own_seed(seed)
        self._initial_seed, self.name = chosen_seed, name or "seed_generator"
        self.seed, self.number = (default_seed(), next_position()) if chosen_seed is None else (chosen_seed, number)
        self.purpose = purpose
        self.count = Variable(np.array(0, np.int64), self.name, trainable=False)

    def _get_config(self) -> dict[str, Any]:
        """Return the seed that it was given, and the name."""
        return {"name": self.name, "seed": self._initial_seed}

    @property
    def state(self) -> Tensor:
        """What the next draw depends on: (seed, number of draws so far), uint64."""
        return stack([constant(np.uint64(self.seed)), cast(self.count, np.uint64)])

    def next(self, ordered: bool = True) -> Tensor:
        """Return the state and count a draw; states differ whether `ordered` or not."""
        with self._turn():
            state = self.state
            self.count.assign(self.count + 1)
        return state

    def _next_count(self) -> int:
        """Return the number of the next draw outside of a program, and count it."""
        with untraced(), self._turn():
            count = int(self.count.numpy())
            self.count.assign(count + 1)
        return count

    def bits(self, shape: Sequence[int]) -> Tensor:
        """Return 32 random bits for each element (uint32), and count the draw; only the first length may count rows."""

        def draw(shape: Shape) -> Tensor:
            bits = _bits(self.count, shape, self.seed, self.purpose, self.number)
            self.count.assign(self.count + 1)
            return bits

        with self._turn():
            return _draw_per_block(shape, draw)

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Keep other threads from drawing between a draw and its count."""
        if is_tracing():
            yield
            return
        with TURNS.writing(self.count), DRAWING:
            yield

    def permutation(self, rows: Any) -> tuple[Tensor, Tensor]:
        """Return each row's index in the global batch, and in a random order of it, both as vectors; count the draw.

        Every rank draws a key for all rows of the batch, and again for its own: the number of smaller keys is the index
        in the order. The program then holds for this number of rows only.
        """
        if isinstance(rows, Dim) and len(rows.blocks) > 1:
            rows = int(rows)  # a rank's rows of a concatenation are not consecutive
        with self._turn():
            own_bits, all_bits = (
                _bits(self.count, (n, 2), self.seed, self.purpose, self.number) for n in (rows, int(rows))
            )
            self.count.assign(self.count + 1)
        mine, all_keys = (
            cast(bits[:, 0], np.int64) * 2**31 + cast(bits[:, 1] // 2, np.int64) for bits in (own_bits, all_bits)
        )
        mine = reshape(mine, (-1, 1))
        return row_numbers(rows), sum_over(cast(less(all_keys, mine), np.int64), 1)


# A generator, a number that draws the same every time, or None for the generator shared by all such draws.
Seed = SeedGenerator | int | None

_global_generator: tuple[object, SeedGenerator] | None = None


def _draw_per_block(shape: Sequence[int], draw: Callable[[Shape], Tensor]) -> Tensor:
    """Draw a shape; concatenated rows block by block, as each rank has rows of all."""
    rows = shape[0] if shape else 0
    if not isinstance(rows, Dim) or len(rows.blocks) == 1:
        return draw(tuple(shape))
    return concatenate([draw((rows.times(scale), *shape[1:])) for scale in rows.blocks])


def _bits(count: Any, shape: Sequence[int], seed: int, purpose: Purpose, number: int) -> Tensor:
    lengths = tuple(shape)
    if row_axis(lengths) not in (None, 0):
        raise ConfigError(f"random numbers of shape {tuple(map(int, lengths))}: rows of the batch must come first")
    flat = (lengths[0], math.prod(lengths[1:])) if lengths else (1, 1)
    bits = random_bits(count, shape=flat, seed=seed, purpose=int(purpose), number=number)
    return bits if len(lengths) == 2 else reshape(bits, lengths)


def _bits_for_seed(shape: Sequence[int], seed: Seed) -> Tensor:
    global _global_generator
    if isinstance(seed, SeedGenerator):
        return seed.bits(shape)
    number = own_seed(seed)
    if number is not None:
        draws = itertools.count()
        return _draw_per_block(
            shape, lambda part_shape: _bits(np.array(next(draws), np.int64), part_shape, number, Purpose.NOISE, 1)
        )
    with DRAWING:
        if _global_generator is None or _global_generator[0] is not seeds_set():
            _global_generator = seeds_set(), SeedGenerator(name="global_seed_generator")
        generator = _global_generator[1]
    return generator.bits(shape)


class _Functions(NamedTuple):
    """What distributions need: functions of tensors, or NumPy's with the same bits."""

    cast: Callable[[Any, npt.DTypeLike], Any]
    sqrt: Callable[[Any], Any]
    log: Callable[[Any], Any]
    cos: Callable[[Any], Any]


_OF_TENSORS = _Functions(cast, sqrt, log, cos)
_OF_ARRAYS = _Functions(np.asarray, np.sqrt, np.log, np.cos)


def _apply_to_bits(bits: Tensor, make: Callable[[Any, _Functions], Any]) -> Tensor:
    """Apply a function to random bits, by NumPy where they are known."""
    result = in_one_call(lambda array: make(array, _OF_ARRAYS), bits)
    return make(bits, _OF_TENSORS) if result is None else result


def _computing_dtype(dtype: npt.DTypeLike) -> np.dtype[Any]:
    """Compute half precision in float32: its range is too small."""
    return type_of(np.dtype(dtype)).compute


def _fractions(bits: Any, dtype: npt.DTypeLike, of: _Functions) -> Any:
    """Return uniform numbers in [0, 1)."""
    bit_count = type_of(np.dtype(dtype)).random_bits
    return of.cast(bits // 2 ** (32 - bit_count), dtype) * 2.0**-bit_count


def _normal(bits: Any, dtype: npt.DTypeLike, of: _Functions) -> Any:
    pairs = _fractions(bits, dtype, of)
    return of.sqrt(-2.0 * of.log(1.0 - pairs[..., 0])) * of.cos(pairs[..., 1] * (2 * math.pi))


def uniform(
    shape: Sequence[int],
    minval: float = 0.0,
    maxval: float = 1.0,
    dtype: npt.DTypeLike | None = None,
    seed: Seed = None,
) -> Tensor:
    """Return uniform numbers in [minval, maxval): 2^24 different ones, in float64 2^32, float16 2^11, bfloat16 2^8."""
    kind = np.dtype(dtype or floatx())
    fractions = _apply_to_bits(_bits_for_seed(shape, seed), lambda bits, of: _fractions(bits, kind, of))
    return cast(_scaled(fractions, maxval - minval, minval), kind)


def _scaled(x: Tensor, scale: float, start: float) -> Tensor:
    """Return x * scale + start, leaving out what changes nothing."""
    scaled = x if isinstance(scale, int | float) and scale == 1 else x * scale
    return scaled if isinstance(start, int | float) and start == 0 else scaled + start


def randint(
    shape: Sequence[int], minval: int, maxval: int, dtype: npt.DTypeLike = "int32", seed: Seed = None
) -> Tensor:
    """Return integers that are equally likely, to 2^-32, in [minval, maxval)."""
    if np.dtype(dtype).kind not in "iu":
        raise ConfigError(f"`keras.random.randint` requires an integer `dtype`. Received: dtype={dtype} ")
    return cast(floor_divide(cast(_bits_for_seed(shape, seed), np.int64) * (maxval - minval), 2**32) + minval, dtype)


def normal(
    shape: Sequence[int],
    mean: float = 0.0,
    stddev: float = 1.0,
    dtype: npt.DTypeLike | None = None,
    seed: Seed = None,
) -> Tensor:
    """Return normally distributed numbers.

    Source: G. Box and M. Muller, "A note on the generation of random normal deviates", Annals of Mathematical
    Statistics 29 (1958).
    """
    kind = np.dtype(dtype or floatx())
    deviates = _apply_to_bits(
        _bits_for_seed((*shape, 2), seed), lambda bits, of: _normal(bits, _computing_dtype(kind), of)
    )
    return cast(_scaled(deviates, stddev, mean), kind)


def truncated_normal(
    shape: Sequence[int],
    mean: float = 0.0,
    stddev: float = 1.0,
    dtype: npt.DTypeLike | None = None,
    seed: Seed = None,
) -> Tensor:
    """Return normal numbers; those two or more standard deviations from the mean are redrawn."""
    kind = np.dtype(dtype or floatx())
    deviates = normal((*shape, _ROUNDS), dtype=_computing_dtype(kind), seed=seed)
    return cast(
        _scaled(sum_over(where(_first_accepted(less(absolute(deviates), 2.0)), deviates, 0.0), -1), stddev, mean), kind
    )


def gamma(shape: Sequence[int], alpha: Any, dtype: npt.DTypeLike | None = None, seed: Seed = None) -> Tensor:
    """Return gamma-distributed numbers of scale 1; `alpha`, the distribution's shape, is above 0 and broadcast."""
    kind = np.dtype(dtype or floatx())
    return cast(
        exp(_log_gamma(uniform((*shape, _FRACTIONS_PER_DRAW), dtype=_computing_dtype(kind), seed=seed), alpha)), kind
    )


def beta(shape: Sequence[int], alpha: Any, beta: Any, dtype: npt.DTypeLike | None = None, seed: Seed = None) -> Tensor:
    """Return beta-distributed numbers, x / (x + y) of gamma-distributed x and y with shapes `alpha` and `beta`."""
    kind = np.dtype(dtype or floatx())
    fractions = uniform((*shape, 2, _FRACTIONS_PER_DRAW), dtype=_computing_dtype(kind), seed=seed)
    return cast(sigmoid(_log_gamma(fractions[..., 0, :], alpha) - _log_gamma(fractions[..., 1, :], beta)), kind)


def dirichlet(shape: Sequence[int], alpha: Any, dtype: npt.DTypeLike | None = None, seed: Seed = None) -> Tensor:
    """Return numbers of a symmetric Dirichlet distribution, with sum 1 along the last axis; see `gamma`."""
    kind = np.dtype(dtype or floatx())
    return cast(
        softmax(_log_gamma(uniform((*shape, _FRACTIONS_PER_DRAW), dtype=_computing_dtype(kind), seed=seed), alpha)),
        kind,
    )


def categorical(logits: Any, num_samples: int, dtype: npt.DTypeLike = "int32", seed: Seed = None) -> Tensor:
    """Draw `num_samples` classes for each row: (rows, num_samples).

    `logits` are (rows, classes) unnormalized log-probabilities. The largest of logits with Gumbel noise wins (E.
    Gumbel, "Statistical theory of extreme values", 1954).
    """
    (tensor,) = as_tensors([logits])
    if tensor.ndim != 2:
        raise ConfigError(f"categorical: logits of shape {tensor.shape}; expected (rows, classes)")
    kind = tensor.dtype if tensor.dtype == np.float64 else np.dtype(FLOATX)
    fractions = uniform((tensor.shape[0], int(num_samples), int(tensor.shape[1])), dtype=kind, seed=seed)
    noise = -log(-log(1.0 - fractions))  # -infinity for 0, which loses to the other classes
    return cast(argmax(expand_dims(cast(tensor, kind), 1) + noise, -1), dtype)


def binomial(
    shape: Sequence[int], counts: Any, probabilities: Any, dtype: npt.DTypeLike | None = None, seed: Seed = None
) -> Tensor:
    """Return the number of successes in independent trials.

    Args:
        shape: of the draw.
        counts: numbers of trials, broadcast; they must be known, which those computed in a step are not.
        probabilities: of success, broadcast.
        dtype: float32 by default.
        seed: see `Seed`.

    Source: L. Devroye, "Non-uniform random variate generation", 1986, X.4.3: many trials are halved at their median.
    """
    kind = np.dtype(dtype or floatx())
    trials, p = (cast(operand, _computing_dtype(kind)) for operand in as_tensors([counts, probabilities]))
    if trials.value is None:
        raise ConfigError("not supported: binomial: counts computed in a step; expected numbers or an array")
    draws: Seed = seed if isinstance(seed, SeedGenerator) or own_seed(seed) is None else SeedGenerator(seed)
    most, successes = float(trials.value.max(initial=0)), zeros(tuple(shape), _computing_dtype(kind))
    while most > _FEW_TRIALS:  # a beta draw is the median of uniform numbers
        middle = floor_divide(trials + 1.0, 2.0)
        at = beta(
            shape, maximum(middle, 1.0), maximum(trials + 1.0 - middle, 1.0), dtype=_computing_dtype(kind), seed=draws
        )
        below = logical_and(less(at, p), greater(trials, 0.0))
        successes = successes + where(below, middle, 0.0)
        p = clip(where(below, (p - at) / maximum(1.0 - at, 1e-30), p / maximum(at, 1e-30)), 0.0, 1.0)
        trials = where(below, trials - middle, maximum(middle - 1.0, 0.0))
        most = most // 2
    tried = uniform((*shape, max(int(most), 1)), dtype=_computing_dtype(kind), seed=draws)
    numbers = np.arange(max(int(most), 1), dtype=tried.dtype)
    wins = logical_and(less(tried, _last_axis(p)), less(numbers, _last_axis(trials)))
    return cast(successes + sum_over(cast(wins, tried.dtype), -1), kind)


# Up to this many trials are drawn individually.
_FEW_TRIALS = 16


def _last_axis(x: Tensor) -> Tensor:
    return expand_dims(x, -1) if x.ndim else x


def shuffle(x: Any, axis: int = 0, seed: Seed = None) -> Tensor:
    """Return the parts of x along an axis in a random order."""
    (tensor,) = as_tensors([x])
    (along,) = normalized_axes(axis, tensor.ndim)
    length = int(tensor.shape[along])
    keys = _bits_for_seed((length, 2), seed)
    wide = cast(keys[:, 0], np.int64) * 2**31 + cast(keys[:, 1] // 2, np.int64)
    order = in_one_call(lambda array: np.argsort(array, kind="stable"), wide)
    if order is None:  # each part's index is the number of smaller keys
        places = sum_over(cast(less(wide, expand_dims(wide, -1)), np.int64), 1)
        order = add_rows(as_tensors([np.arange(length)])[0], places, length=length)
    return take_at_axis(tensor, order, along)


# At least 19 of 20 draws are accepted: all miss in 1 of 60 million cases, which get the distribution's mode.
_ROUNDS = 6
_FRACTIONS_PER_DRAW = 3 * _ROUNDS + 1


def _first_accepted(accepted: Tensor) -> Tensor:
    """Mark the first accepted of `_ROUNDS` draws along the last axis."""
    return logical_and(accepted, equal(expand_dims(argmax(accepted, -1), -1), np.arange(_ROUNDS)))


def _log_gamma(fractions: Tensor, alpha: Any) -> Tensor:
    """Return logarithms of gamma-distributed numbers, of `_FRACTIONS_PER_DRAW` uniform numbers along the last axis."""
    # Small shapes give numbers that underflow. G. Marsaglia and W. Tsang, "A simple method for generating gamma
    # variables", ACM Trans. Math. Software 26 (2000), with the draw of alpha + 1 times U^(1 / alpha).
    shape = cast(alpha, fractions.dtype)
    middle = shape + 2 / 3
    spread = expand_dims(middle, -1) if middle.ndim else middle
    logs = log(1.0 - fractions)
    x = sqrt(-2.0 * logs[..., :_ROUNDS]) * cos(fractions[..., _ROUNDS : 2 * _ROUNDS] * (2 * math.pi))
    root = 1 + x / (3 * sqrt(spread))
    cube = 3 * log(where(root > 0, root, 1.0))
    limit = 0.5 * x * x + spread * (1 - exp(cube) + cube)
    accepted = logical_and(root > 0, logs[..., 2 * _ROUNDS : -1] < limit)
    return sum_over(where(_first_accepted(accepted), cube, 0.0), -1) + log(middle) + logs[..., -1] / shape


def dropout(inputs: Any, rate: float, noise_shape: Sequence[int | None] | None = None, seed: Seed = None) -> Tensor:
    """Set elements to 0 with probability `rate`, from 0 to 1, and divide the others by 1 - rate.

    `noise_shape` of the draw is broadcast to the inputs; None, in it or for it, stands for theirs.
    """
    (tensor,) = as_tensors([inputs])
    if not 0 <= rate <= 1:
        raise ConfigError(f"rate = {rate}: expected a number in [0, 1]")
    if rate in (0, 1):
        return tensor if rate == 0 else zeros_like(tensor)
    is_kept = keep_mask(tensor, rate, noise_shape, seed)
    return where(is_kept, tensor * (1 / (1 - rate)), 0)


def keep_mask(x: Tensor, rate: float, noise_shape: Sequence[int | None] | None, seed: Seed) -> Tensor:
    """Return a mask, false with probability `rate`, that broadcasts to x; see `dropout`."""
    shape = x.shape
    if noise_shape is not None:
        if len(noise_shape) != len(shape) or any(
            noise_length not in (None, 1) and differ(noise_length, n)
            for noise_length, n in zip(noise_shape, shape, strict=True)
        ):
            raise ConfigError(
                f"noise_shape = {tuple(noise_shape)}: expected for each axis of {without_rows(shape)} its length, 1 "
                "or None"
            )
        shape = tuple(1 if noise_length == 1 else n for noise_length, n in zip(noise_shape, shape, strict=True))
    return greater_equal(_bits_for_seed(shape, seed), np.uint32(rate * 2**32))
