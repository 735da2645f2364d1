"""Functions of `keras.ops` made of other ops."""

import builtins
import math
import string
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dptrain.errors import ConfigError
from dptrain.ops import manipulation
from dptrain.ops.common import limits
from dptrain.ops.elementwise import (
    absolute,
    all_floating,
    cast,
    cos,
    divide,
    equal,
    floating,
    log,
    logical_and,
    logical_not,
    logical_or,
    maximum,
    multiply,
    not_equal,
    sin,
    softplus,
    sqrt,
    where,
)
from dptrain.ops.indexing import divide_rows, take
from dptrain.ops.manipulation import broadcast_to, concatenate, expand_dims, ones, reshape, transpose
from dptrain.ops.math.cumulative import cumsum, cumulative
from dptrain.ops.math.rounding import isfinite, isinf, isnan, rint
from dptrain.ops.open_shapes import for_open_shapes, lengths_of
from dptrain.ops.operation_calls import operation
from dptrain.ops.products import batch_matmul
from dptrain.ops.reduction import argmax, max, mean, min, order_reversed, sum, summed_dtype
from dptrain.program.dims import Dim, is_number
from dptrain.program.operand import METHODS
from dptrain.program.shapes import Shape, differ, normalized_axes
from dptrain.program.tensor import Array, Tensor, Variable, as_tensors, constant, is_tracing
from dptrain.runtime.floatx import floatx
from dptrain.runtime.types import is_floating

abs = absolute


def _tensor(x: Any) -> Tensor:
    return as_tensors([x])[0]


# Tensors of values, and the other way round


@operation
def convert_to_tensor(
    x: Any, dtype: npt.DTypeLike | None = None, sparse: bool | None = None, ragged: bool | None = None
) -> Tensor:
    """Return a tensor of an array, number, variable or list; ConfigError for `sparse` and `ragged`."""
    if sparse or ragged:
        raise ConfigError("not supported: sparse and ragged tensors")
    return _tensor(x) if dtype is None else cast(x, dtype)


def convert_to_numpy(x: Any) -> Array:
    """Return the value as an array, like `Tensor.numpy`."""
    return np.array(_tensor(x).numpy())


def shape(x: Any) -> Shape:
    """Return the lengths of the axes; one that counts the batch's rows remembers it, an unknown one is no None."""
    return tuple(x.shape) if isinstance(x, Tensor | Variable) else np.shape(x)


def ndim(x: Any) -> int:
    """Return the number of axes."""
    return len(shape(x))


def size(x: Any) -> int:
    """Return the number of elements."""
    return math.prod(shape(x))


@operation
def arange(
    start: float, stop: float | None = None, step: float | None = None, dtype: npt.DTypeLike | None = None
) -> Tensor:
    """Return numbers from start (0 if only `stop` is passed) to before stop; int32 of integers, else float32."""
    first, end, by = (0, start, step) if stop is None else (start, stop, step)
    are_lengths = isinstance(first, int | Dim) and isinstance(end, int | Dim) and by in (None, 1)
    if are_lengths and not (is_number(first) and is_number(end)) and not is_tracing():
        length: Any = end - first  # of symbolic tensors: its number comes later
        numbered = cumsum(ones((length,), "int32"), 0, "int32") - 1
        return cast(numbered if is_number(first) and first == 0 else numbered + cast(first, "int32"), dtype or np.int32)
    numbers = (int(n) if isinstance(n, Dim) else n for n in (first, end, 1 if by is None else by))  # of the whole batch
    values = np.arange(*numbers)
    return constant(values.astype(dtype or (floatx() if is_floating(values.dtype) else np.int32)))


@operation
def linspace(
    start: Any,
    stop: Any,
    num: int = 50,
    endpoint: bool = True,
    retstep: bool = False,
    dtype: npt.DTypeLike | None = None,
    axis: int = 0,
) -> Any:
    """Return evenly spaced numbers from start to stop along a new axis; with `retstep` the step as well."""
    if builtins.any(isinstance(end, Tensor) and end.value is None for end in (start, stop)):
        return _linspace(start, stop, num, num - 1 if endpoint else num, retstep, dtype, axis)
    values, step = np.linspace(start, stop, num, endpoint=endpoint, retstep=True, axis=axis)
    tensor = constant(values.astype(dtype or floatx()))
    return (tensor, step) if retstep else tensor


def _linspace(
    start: Any, stop: Any, num: int, steps: int, retstep: bool, dtype: npt.DTypeLike | None, axis: int
) -> Any:
    """Return `linspace` of numbers that are not known while a step is traced."""
    first, last = as_tensors([start, stop])
    step = divide(last - first, builtins.max(steps, 1))
    axis += step.ndim + 1 if axis < 0 else 0
    indices = reshape(arange(num), [-1 if at == axis else 1 for at in range(step.ndim + 1)])
    values = cast(
        expand_dims(first + step * 0, axis) + expand_dims(step, axis) * cast(indices, step.dtype), dtype or floatx()
    )
    return (values, step) if retstep else values


def eye(N: int, M: int | None = None, k: int = 0, dtype: npt.DTypeLike | None = None) -> Tensor:
    """Return 1 on the k-th diagonal of (N, M), 0 elsewhere."""
    return constant(np.eye(N, M, k, dtype=np.dtype(dtype or floatx())))


def identity(n: int, dtype: npt.DTypeLike | None = None) -> Tensor:
    """Return the identity matrix of n rows."""
    return eye(n, dtype=dtype)


@operation
def full(shape: Sequence[int] | int, fill_value: Any, dtype: npt.DTypeLike | None = None) -> Tensor:
    """Return a tensor filled with one value; float32 for a Python number unless `dtype` is passed."""
    lengths = lengths_of(shape)
    if isinstance(fill_value, int | float):
        return manipulation.full(shape=lengths, value=fill_value, dtype=np.dtype(dtype or floatx()).name)
    return broadcast_to(convert_to_tensor(fill_value, dtype), lengths)


@operation
def full_like(x: Any, fill_value: Any, dtype: npt.DTypeLike | None = None) -> Tensor:
    """Return a tensor of x's shape and type filled with one value."""
    tensor = _tensor(x)
    return full(tensor.shape, fill_value, dtype or tensor.dtype)


def tri(N: int, M: int | None = None, k: int = 0, dtype: npt.DTypeLike | None = None) -> Tensor:
    """Return 1 at and below the k-th diagonal of (N, M), 0 elsewhere."""
    return constant(np.tri(N, M, k, dtype=np.dtype(dtype or floatx())))


def _below(x: Tensor, k: int) -> Array:
    return np.tri(int(x.shape[-2]), int(x.shape[-1]), k, dtype=np.bool_)


@operation
@for_open_shapes
def tril(x: Any, k: int = 0) -> Tensor:
    """Return x with 0 above the k-th diagonal of its last two axes."""
    tensor = _tensor(x)
    return cast(where(_below(tensor, k), tensor, 0), tensor.dtype)


@operation
@for_open_shapes
def triu(x: Any, k: int = 0) -> Tensor:
    """Return x with 0 below the k-th diagonal of its last two axes."""
    tensor = _tensor(x)
    return cast(where(_below(tensor, k - 1), 0, tensor), tensor.dtype)


# Of single elements


@operation
def round(x: Any, decimals: int = 0) -> Tensor:
    """Round to this many decimals, halves to even; the gradient is 0."""
    tensor = _tensor(x)
    if tensor.dtype.kind in "iu" and decimals >= 0:
        return tensor
    rounded = rint(tensor) if decimals == 0 else divide(rint(multiply(tensor, 10.0**decimals)), 10.0**decimals)
    return cast(rounded, tensor.dtype) if tensor.dtype.kind in "iu" else rounded


METHODS["round"], METHODS["+"] = round, _tensor


@operation
def tan(x: Any) -> Tensor:
    """Return the tangent of x radians."""
    return sin(x) / cos(x)


@operation
def isclose(x1: Any, x2: Any, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> Tensor:
    """Return whether |x1 - x2| <= atol + rtol |x2|; equal infinities are close, NaNs with `equal_nan`."""
    a, b = (floating(x) for x in as_tensors([x1, x2]))
    is_near = logical_and(absolute(a - b) <= absolute(b) * rtol + atol, isfinite(b))
    close = logical_or(is_near, equal(a, b))
    return logical_or(close, logical_and(isnan(a), isnan(b))) if equal_nan else close


@operation
def rsqrt(x: Any) -> Tensor:
    """Return 1 / sqrt(x)."""
    return divide(1.0, sqrt(x))


@operation
def reciprocal(x: Any) -> Tensor:
    """Return 1 / x."""
    return divide(1.0, x)


@operation
def log2(x: Any) -> Tensor:
    """Return the logarithm to base 2."""
    return log(x) * (1 / math.log(2))


@operation
def log10(x: Any) -> Tensor:
    """Return the logarithm to base 10."""
    return log(x) * (1 / math.log(10))


@operation
def logaddexp(x1: Any, x2: Any) -> Tensor:
    """Return log(e^x1 + e^x2), without overflow."""
    a, b = all_floating(x1, x2)
    both_infinite = logical_and(equal(a, b), logical_not(isfinite(a)))  # their difference is NaN
    difference = where(both_infinite, 0.0, a - b)
    increment = where(both_infinite, cast(where(a > 0, 0.0, math.log(2)), a.dtype), softplus(-absolute(difference)))
    return maximum(a, b) + increment


@operation
def logical_xor(x1: Any, x2: Any) -> Tensor:
    """Return whether exactly one of x1 and x2 is true."""
    return not_equal(cast(x1, "bool"), cast(x2, "bool"))


@operation
def nan_to_num(x: Any, nan: float = 0.0, posinf: float | None = None, neginf: float | None = None) -> Tensor:
    """Replace NaN and infinities, by default by 0 and the type's greatest and least numbers."""
    tensor = _tensor(x)
    if not is_floating(tensor.dtype):
        return tensor
    dtype_limits = limits(tensor.dtype)
    ends = [dtype_limits.max if posinf is None else posinf, dtype_limits.min if neginf is None else neginf]
    greatest, least = (np.asarray(bound, tensor.dtype) for bound in ends)
    finite = where(isinf(tensor), where(tensor > 0, greatest, least), tensor)
    return where(isnan(tensor), nan, finite)


# Over axes


@operation
def all(x: Any, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> Tensor:
    """Return whether all elements over axes are true (not 0); true for no elements."""
    return not_equal(min(cast(not_equal(x, 0), "int32"), axis, keepdims, initial=1), 0)


@operation
def any(x: Any, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> Tensor:
    """Return whether any element over axes is true (not 0)."""
    return not_equal(max(cast(not_equal(x, 0), "int32"), axis, keepdims, initial=0), 0)


@operation
def count_nonzero(x: Any, axis: int | Sequence[int] | None = None) -> Tensor:
    """Count the elements over axes that are not 0 (int64)."""
    return sum(not_equal(x, 0), axis)


@operation
@for_open_shapes
def cumprod(x: Any, axis: int | None = None, dtype: npt.DTypeLike | None = None) -> Tensor:
    """Return cumulative products along an axis, like `cumsum`."""
    return cumulative(x, axis, dtype, lambda blocks: prod(blocks, -1), 1)


@operation
@for_open_shapes
def prod(
    x: Any, axis: int | Sequence[int] | None = None, keepdims: bool = False, dtype: npt.DTypeLike | None = None
) -> Tensor:
    """Return the product over axes, which must not count the batch's rows; the default type is that of a sum."""
    tensor = _tensor(x)
    tensor = cast(tensor, dtype or summed_dtype(tensor.dtype))
    axes = normalized_axes(axis, tensor.ndim)
    kept_axes = [position for position in range(tensor.ndim) if position not in axes]
    lengths = [tensor.shape[kept_axis] for kept_axis in kept_axes]
    result = reshape(
        transpose(tensor, [*kept_axes, *axes]), (*lengths, math.prod(int(tensor.shape[reduced]) for reduced in axes))
    )
    while (length := int(result.shape[-1])) > 1:  # multiply halves
        half = length // 2
        product = result[..., :half] * result[..., half : 2 * half]
        result = concatenate([product, result[..., 2 * half :]], -1) if length % 2 else product
    if not result.shape[-1]:
        result = ones((*lengths, 1), tensor.dtype)
    return reshape(
        result, [1 if position in axes else n for position, n in enumerate(tensor.shape)] if keepdims else lengths
    )


@operation
def argmin(x: Any, axis: int | None = None, keepdims: bool = False) -> Tensor:
    """Return the index of the least element along an axis, like `argmax`."""
    return argmax(order_reversed(_tensor(x)), axis, keepdims)


@operation
def average(x: Any, axis: int | Sequence[int] | None = None, weights: Any = None) -> Tensor:
    """Return the mean over axes, weighted if `weights` are passed: of x's shape, or a vector along one axis."""
    if weights is None:
        return mean(x, axis)
    tensor, weight = all_floating(x, weights)
    if weight.shape != tensor.shape:
        axes = normalized_axes(axis, tensor.ndim)
        if weight.ndim != 1 or len(axes) != 1 or axis is None or weight.shape[0] != tensor.shape[axes[0]]:
            raise ConfigError(
                f"average: weights of shape {tuple(weight.shape)} for a tensor of shape {tuple(tensor.shape)}, "
                f"axis={axis}; expected the tensor's shape, or a vector with as many elements as the axis"
            )
        weight = broadcast_to(reshape(weight, (-1, *(1,) * (tensor.ndim - 1 - axes[0]))), tensor.shape)
    return sum(multiply(tensor, weight), axis) / sum(weight, axis)


# The same elements in another order


@operation
def ravel(x: Any) -> Tensor:
    """Return the elements as a vector."""
    return reshape(x, (-1,))


@operation
@for_open_shapes
def flip(x: Any, axis: int | Sequence[int] | None = None) -> Tensor:
    """Reverse axes, by default all."""
    tensor = _tensor(x)
    for flip_axis in normalized_axes(axis, tensor.ndim):
        flipped = take(tensor, np.arange(int(tensor.shape[flip_axis]))[::-1], flip_axis)
        tensor = divide_rows(flipped, tensor.shape)
    return tensor


@operation
def swapaxes(x: Any, axis1: int, axis2: int) -> Tensor:
    """Exchange two axes."""
    tensor = _tensor(x)
    for axis in (axis1, axis2):
        normalized_axes(axis, tensor.ndim)
    order = list(range(tensor.ndim))
    order[axis1], order[axis2] = order[axis2], order[axis1]
    return transpose(tensor, order)


@operation
def moveaxis(x: Any, source: int | Sequence[int], destination: int | Sequence[int]) -> Tensor:
    """Move axes to other positions; the others keep their order."""
    tensor = _tensor(x)
    pairs = [[argument] if isinstance(argument, int) else list(argument) for argument in (source, destination)]
    for axes in pairs:
        normalized_axes(axes, tensor.ndim)  # refuses repeated axes
    if len(pairs[0]) != len(pairs[1]):
        raise ConfigError(
            f"moveaxis: source={source}, destination={destination}; expected one destination for each source"
        )
    old, new = ([axis % tensor.ndim for axis in axes] for axes in pairs)
    order = [axis for axis in range(tensor.ndim) if axis not in old]
    for place, axis in sorted(zip(new, old, strict=True)):
        order.insert(place, axis)
    return transpose(tensor, order)


@operation
@for_open_shapes
def split(x: Any, indices_or_sections: int | Sequence[int], axis: int = 0) -> list[Tensor]:
    """Return equal parts of x along an axis (ConfigError if it is not divisible), or the parts between indices."""
    tensor = _tensor(x)
    (place,) = normalized_axes(axis, tensor.ndim)
    length = tensor.shape[place]
    if isinstance(indices_or_sections, int):
        if length % indices_or_sections:
            raise ConfigError(
                f"split: a length of {int(length)} cannot be split into {indices_or_sections} equal parts"
            )
        part = length // indices_or_sections
        ends = [part * number for number in range(1, indices_or_sections)]
    else:
        ends = list(indices_or_sections)
    leading = (slice(None),) * place
    return [tensor[(*leading, slice(a, b))] for a, b in zip([None, *ends], [*ends, None], strict=True)]


@operation
@for_open_shapes
def unstack(x: Any, num: int | None = None, axis: int = 0) -> list[Tensor]:
    """Return the parts of x along an axis, without that axis: `num`, which an unknown length needs."""
    tensor = _tensor(x)
    (place,) = normalized_axes(axis, tensor.ndim)
    length = tensor.shape[place]
    if num is not None and differ(num, length):
        raise ConfigError(f"unstack: num={num}, but axis {axis} of shape {tuple(tensor.shape)} has length {length}")
    indices = range(int(length) if num is None else num)
    return [tensor[(*(slice(None),) * place, index)] for index in indices]


@operation
def repeat(x: Any, repeats: int | Sequence[int], axis: int | None = None) -> Tensor:
    """Repeat each part along an axis (x as a vector by default) a known number of times: one for all, or one each."""
    tensor, place = (ravel(x), 0) if axis is None else (_tensor(x), normalized_axes(axis, _tensor(x).ndim)[0])
    lengths = tensor.shape
    if isinstance(repeats, Tensor):
        known = lengths_of(repeats)
        repeats = known[0] if len(known) == 1 else known
    times = np.asarray(1 if isinstance(repeats, Dim) else repeats)
    if times.size == 1:
        number = repeats if isinstance(repeats, int | Dim) else int(times.reshape(()))
        spread = broadcast_to(expand_dims(tensor, place + 1), (*lengths[: place + 1], number, *lengths[place + 1 :]))
        return reshape(spread, (*lengths[:place], lengths[place] * number, *lengths[place + 1 :]))
    if times.shape != (int(lengths[place]),) or (times < 0).any():
        raise ConfigError(
            f"repeat: repeats={repeats} for a length of {int(lengths[place])}; expected an integer of at least 0, or "
            "one for each element"
        )
    return take(tensor, np.repeat(np.arange(int(lengths[place])), times), place)


@operation
def tile(x: Any, repeats: int | Sequence[int]) -> Tensor:
    """Repeat x as a whole along each axis."""
    tensor = _tensor(x)
    times = lengths_of(repeats)
    times = (1,) * (tensor.ndim - len(times)) + times
    tensor = reshape(tensor, (*(1,) * (len(times) - tensor.ndim), *tensor.shape))
    for axis, number in enumerate(times):
        if isinstance(number, Dim):
            tensor = _tiled_by_rows(tensor, number, axis)
        elif number == 0:
            tensor = tensor[(*(slice(None),) * axis, slice(0, 0))]
        elif number != 1:
            tensor = concatenate([tensor] * number, axis)
    return tensor


def _tiled_by_rows(x: Tensor, rows: Any, axis: int) -> Tensor:
    """Repeat x along an axis as often as the batch has rows: each rank for its own."""
    before, n, behind = x.shape[:axis], x.shape[axis], x.shape[axis + 1 :]
    return reshape(broadcast_to(expand_dims(x, axis), (*before, rows, n, *behind)), (*before, rows * n, *behind))


@operation
def hstack(xs: Sequence[Any]) -> Tensor:
    """Concatenate along the second axis; vectors and numbers along the first."""
    tensors = [tensor if tensor.ndim else reshape(tensor, (1,)) for tensor in as_tensors(list(xs))]
    return concatenate(tensors, 0 if tensors[0].ndim == 1 else 1)


@operation
def vstack(xs: Sequence[Any]) -> Tensor:
    """Concatenate along the first axis; vectors and numbers count as rows."""
    tensors = [tensor if tensor.ndim > 1 else reshape(tensor, (1, -1)) for tensor in as_tensors(list(xs))]
    return concatenate(tensors, 0)


@operation
@for_open_shapes
def diagonal(x: Any, offset: int = 0, axis1: int = 0, axis2: int = 1) -> Tensor:
    """Return the diagonals of the matrices over two axes, along the last axis."""
    tensor = _tensor(x)
    first, second = (axis % tensor.ndim for axis in (axis1, axis2))
    batch_axes = [axis for axis in range(tensor.ndim) if axis not in (first, second)]
    rows, columns = int(tensor.shape[first]), int(tensor.shape[second])
    number = np.arange(builtins.max(0, builtins.min(rows + builtins.min(offset, 0), columns - builtins.max(offset, 0))))
    flat = reshape(
        transpose(tensor, [*batch_axes, first, second]), (*(tensor.shape[axis] for axis in batch_axes), rows * columns)
    )
    return take(flat, (number + builtins.max(-offset, 0)) * columns + number + builtins.max(offset, 0), -1)


# Products


@operation
def einsum(subscripts: str, *operands: Any) -> Tensor:
    """Return the sum of products of tensors.

    `subscripts` are like "bij,bjk->bik" or "...ij,jk->...ik"; without an arrow the result has the letters that occur
    once, in order. A letter twice in one operand is its diagonal: "ii->i", summed in "ii". Products are computed from
    left to right. ConfigError for a letter twice in the result, or of two lengths.
    """
    tensors = list(as_tensors(operands))
    inputs, arrow, result = _expand_ellipsis(subscripts.replace(" ", ""), tensors).partition("->")
    names = inputs.split(",")
    if not arrow:
        result = _letters_once(inputs)
    bad = "." in inputs + result or not tensors or len(names) != len(tensors) or set(result) - set(inputs)
    if bad or [len(name) for name in names] != [x.ndim for x in tensors] or len(set(result)) != len(result):
        shapes = ", ".join(str(tuple(map(int, x.shape))) for x in tensors)
        raise ConfigError(f"not supported: einsum({subscripts!r}) of shapes {shapes}")
    pairs = [_diagonals(name, x) for name, x in zip(names, tensors, strict=True)]
    while len(pairs) > 1:
        first, second, *others = _only_needed(pairs, result)
        needed = "".join([result, *(name for name, _ in others)])
        letters = "".join(letter for letter in dict.fromkeys(first[0] + second[0]) if letter in needed)
        if not others:
            return _product([first[0], second[0]], [first[1], second[1]], result)
        pairs = [(letters, _product([first[0], second[0]], [first[1], second[1]], letters)), *others]
    ((name, tensor),) = _only_needed(pairs, result)
    return transpose(tensor, [name.index(letter) for letter in result])


def _diagonals(name: str, x: Tensor) -> tuple[str, Tensor]:
    """Return the letters once each, last those that an operand has several times, and its diagonals over these."""
    for letter in dict.fromkeys(name):
        while name.count(letter) > 1:
            first = name.index(letter)
            second = name.index(letter, first + 1)
            if differ(x.shape[first], x.shape[second]):
                raise ConfigError(
                    f"einsum: letter {letter!r} has the lengths {x.shape[first]} and {x.shape[second]} in one operand"
                )
            x = diagonal(x, 0, first, second)
            name = "".join(other for axis, other in enumerate(name) if axis not in (first, second)) + letter
    return name, x


def _only_needed(pairs: list[tuple[str, Tensor]], result: str) -> list[tuple[str, Tensor]]:
    """Sum letters that only one operand has, and not the result."""
    summed = []
    for index, (name, tensor) in enumerate(pairs):
        elsewhere = "".join([*(other for other, _ in pairs[:index] + pairs[index + 1 :]), result])
        alone = [axis for axis, letter in enumerate(name) if letter not in elsewhere]
        name = "".join(letter for letter in name if letter in elsewhere)
        summed.append((name, sum(tensor, alone) if alone else tensor))
    return summed


def _expand_ellipsis(subscripts: str, tensors: Sequence[Tensor]) -> str:
    """Replace an ellipsis by letters; the last of them stand for the last axes."""
    if "..." not in subscripts:
        return subscripts
    inputs, arrow, result = subscripts.partition("->")
    free = [letter for letter in string.ascii_letters if letter not in subscripts]
    counts = [x.ndim - len(name) + 3 for name, x in zip(inputs.split(","), tensors, strict=False) if "..." in name]
    most = builtins.max(counts, default=0)
    letters = "".join(free[:most])
    names = [
        name.replace("...", letters[most - builtins.max(x.ndim - len(name) + 3, 0) :])
        for name, x in zip(inputs.split(","), tensors, strict=False)
    ]
    result = result.replace("...", letters) if arrow else letters + _letters_once(inputs)
    return f"{','.join(names)}->{result}"


def _letters_once(inputs: str) -> str:
    return "".join(sorted(letter for letter in set(inputs) - set(",.") if inputs.count(letter) == 1))


def _product(names: list[str], tensors: list[Tensor], result: str) -> Tensor:
    """Compute the product of two tensors as one (batched) matrix product."""
    first, second = names
    batch = [letter for letter in first if letter in second and letter in result]
    inner = [letter for letter in first if letter in second and letter not in result]
    left = [letter for letter in first if letter not in second]
    right = [letter for letter in second if letter not in first]
    length = dict(zip(second, tensors[1].shape, strict=True)) | dict(zip(first, tensors[0].shape, strict=True))

    def matrices(x: Tensor, name: str, *groups: list[str]) -> Tensor:
        order = [name.index(letter) for group in groups for letter in group]
        sizes = [math.prod(length[letter] for letter in group) for group in groups[1:]]
        return reshape(transpose(x, order), (*(length[letter] for letter in batch), *sizes))

    product = batch_matmul(
        matrices(tensors[0], first, batch, left, inner), matrices(tensors[1], second, batch, inner, right)
    )
    letters = [*batch, *left, *right]
    return transpose(
        reshape(product, [length[letter] for letter in letters]), [letters.index(letter) for letter in result]
    )


@operation
def tensordot(x1: Any, x2: Any, axes: int | Sequence[Any] = 2) -> Tensor:
    """Return the sum of products over the last axes of x1 and the first of x2, or over the axes named for each."""
    a, b = as_tensors([x1, x2])
    ours, theirs = (range(a.ndim - axes, a.ndim), range(axes)) if isinstance(axes, int) else axes
    pairs = [[argument] if isinstance(argument, int) else list(argument) for argument in (ours, theirs)]
    first, second = _letters(a.ndim), _letters(b.ndim, a.ndim)
    for mine, yours in zip(*pairs, strict=True):
        second[yours] = first[mine]
    summed = {first[position] for position in pairs[0]}
    result = "".join(letter for letter in (*first, *second) if letter not in summed)
    return einsum(f"{''.join(first)},{''.join(second)}->{result}", a, b)


def _letters(number: int, start: int = 0) -> list[str]:
    return [chr(ord("a") + place) for place in range(start, start + number)]


@operation
def dot(x1: Any, x2: Any) -> Tensor:
    """Return the product over the last axis of x1 and the second to last of x2, by NumPy's rules."""
    a, b = as_tensors([x1, x2])
    if not a.ndim or not b.ndim:
        return multiply(a, b)
    return tensordot(a, b, [[a.ndim - 1], [b.ndim - 2 if b.ndim > 1 else 0]])


@operation
@for_open_shapes
def outer(x1: Any, x2: Any) -> Tensor:
    """Return all products of an element of x1 and an element of x2, (size of x1, size of x2)."""
    return expand_dims(ravel(x1), 1) * expand_dims(ravel(x2), 0)


@operation
def vdot(x1: Any, x2: Any) -> Tensor:
    """Return the sum of products of all elements."""
    return sum(multiply(ravel(x1), ravel(x2)))


__all__ = [
    "abs",
    "all",
    "any",
    "arange",
    "argmin",
    "average",
    "convert_to_numpy",
    "convert_to_tensor",
    "count_nonzero",
    "cumprod",
    "dot",
    "einsum",
    "eye",
    "flip",
    "full",
    "full_like",
    "hstack",
    "identity",
    "isclose",
    "linspace",
    "log2",
    "log10",
    "logaddexp",
    "logical_xor",
    "moveaxis",
    "nan_to_num",
    "ndim",
    "outer",
    "prod",
    "ravel",
    "reciprocal",
    "repeat",
    "round",
    "rsqrt",
    "shape",
    "size",
    "split",
    "swapaxes",
    "tan",
    "tensordot",
    "tile",
    "tri",
    "tril",
    "triu",
    "unstack",
    "vdot",
    "vstack",
]
