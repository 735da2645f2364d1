"""Types, numbers, lengths and elementwise expressions as C++ and CUDA C++ both write them.

In the text, B is the rank's rows, `first_row` the global number of its first row, `global_B` the rows of all ranks.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from dptrain.errors import ConfigError
from dptrain.program.codegen.index_expr import FloorDiv, IndexExpr, Numel, numel
from dptrain.program.lowering import Element, lowering_of
from dptrain.program.tensor import DType, Tensor
from dptrain.program.types import promoted_in_kernels
from dptrain.runtime.types import is_floating, type_of


class Ex(NamedTuple):
    """A C++ expression that may follow a cast, and its operands' scope; `computed`: not loaded from memory."""

    text: str
    depth: int = 0
    computed: bool = False


# Returns the text of an attribute, by its name ("" for a constant), value and type.
Number = Callable[[str, Any, DType], str]


def ctype(dtype: DType) -> str:
    """Return the C++ name of a type; ConfigError if kernels do not support it."""
    if (name := type_of(dtype).c) is None:
        raise ConfigError(f"not supported by kernels: tensors of {dtype.name}; cast to float32")
    return name


def has_types(tensor: Tensor) -> bool:
    """Whether kernels support the types of a tensor and of its inputs."""
    return all(type_of(operand.dtype).c is not None for operand in (tensor, *tensor.inputs))


def literal(value: Any, dtype: DType) -> str:
    """Format a number as a C++ literal of a type."""
    number, kind, number_type = np.asarray(value).astype(dtype).reshape(())[()], ctype(dtype), type_of(dtype)
    if dtype.kind == "b":
        return "true" if number else "false"
    if number_type.is_float and not np.isfinite(number):
        constant = "DP_NAN" if np.isnan(number) else "DP_INFINITY" if number > 0 else "-DP_INFINITY"
        return f"(({kind}){constant})"
    if number_type.is_narrow:
        return f"(({kind}){float(number)!r}f)"
    text, suffix = str(number), number_type.suffix
    if number_type.is_float and not set(text) & set(".e"):
        text += ".0"
    if number_type.is_integer and number == np.iinfo(dtype).min and number < 0:
        text = f"{number + 1}{suffix} - 1"  # C++ has no negative literals
        return f"(({kind})({text}))"
    if number_type.is_integer and dtype.itemsize < 4:
        return f"(({kind}){text})"  # an int would not match functions of two equal types
    return f"({text}{suffix})" if text.startswith("-") else f"{text}{suffix}"


def length_text(length: Numel) -> str:
    """Format a product of lengths."""
    number, power = length
    return " * ".join(([str(int(number))] if number != 1 or not power else []) + ["B"] * power)


def numel_text(shape: Iterable[int]) -> str:
    """Format the number of elements of a shape."""
    return length_text(numel(shape))


def is_word(text: str) -> bool:
    """Whether a text is a single name or number, which needs no parentheses."""
    return re.fullmatch(r"\w+", text) is not None


def sum_text(terms: Iterable[tuple[Numel, str]], first: str = "") -> str:
    """Format a sum of names times lengths ("" is the factor 1), added to `first`."""
    sum_so_far = first
    for (count, power), name in sorted(terms, key=lambda term: (-term[0][1], -term[0][0], term[1])):
        factor = length_text((abs(count), power))
        term = factor if not name else name if factor == "1" else f"{name} * {factor}"
        sum_so_far += (" - " if count < 0 else " + " if sum_so_far else "") + term
    return sum_so_far.strip() or "0"


def index_text(place: IndexExpr) -> str:
    """Format an index expression."""
    return sum_text(
        ((count, power), f"({index_text(index.dividend)}) / ({length_text(index.divisor)})")
        if isinstance(index, FloorDiv)
        else ((count, power), "" if index is None else str(index.name))
        for (index, power), count in place.terms.items()
    )


def known_number(tensor: Tensor, number: Number) -> str | None:
    """Format a scalar constant, or a count of rows, by `number`; None for other tensors."""
    if tensor.op is not None or tensor.value is None or tensor.value.size != 1 or tensor.variable is not None:
        return None
    if tensor.counts_rows:
        rows, count = "B" if tensor.attributes.get("own") else "global_B", tensor.attributes["rows"]
        return f"({ctype(tensor.dtype)})({rows if count == 1 else f'{count} * {rows}'})"
    return number("", tensor.value.reshape(()), tensor.dtype)


def operand_dtypes(tensor: Tensor) -> list[DType]:
    """Return the types that the operands of an elementwise op have in `Element.c`: NumPy's promotion."""
    element, dtypes = lowering_of(tensor), [operand.dtype for operand in tensor.inputs]
    if isinstance(element, Element):  # else a reduction over axes of length 1
        if not dtypes or element.converts:
            return dtypes
        if element.conditions:
            return [np.dtype(bool) if n in element.conditions else tensor.dtype for n in range(len(dtypes))]
        if element.by_last:
            return [np.dtype(np.float64 if is_floating(dtypes[0]) else np.int64)]
    return [promoted_in_kernels(tensor.dtype, *dtypes)] * len(dtypes)


def cast(value: Ex, dtype: DType, to: DType) -> str:
    """Convert a value to another type."""
    if dtype == to:
        return value.text
    # GCC turns a conversion to an integer and back into a truncation, which makes -0 of -0.5.
    if value.computed and type_of(dtype).is_integer and type_of(to).is_float:
        return f"dp_number<{ctype(to)}>({value.text})"
    return f"({ctype(to)}){value.text}"


def element(tensor: Tensor, operands: Sequence[Ex], number: Number, last: str = "0") -> str:
    """Return C++ of an elementwise op, or of a reduction of length 1, given elements and the last index."""
    lowering, dtypes, wanted_dtypes = (
        lowering_of(tensor),
        [operand.dtype for operand in tensor.inputs],
        operand_dtypes(tensor),
    )
    if not isinstance(lowering, Element) or lowering.converts:
        return cast(operands[0], dtypes[0], tensor.dtype)
    kind = wanted_dtypes[0] if wanted_dtypes else tensor.dtype
    if lowering.conditions:
        kind = tensor.dtype
    numbers = {name: number(name, value, kind) for name, value in _numbers_of(tensor).items()}
    inputs = [cast(value, dtype, to) for value, dtype, to in zip(operands, dtypes, wanted_dtypes, strict=True)]
    return lowering.c.format(*inputs, last=last, **numbers)


def _numbers_of(tensor: Tensor) -> dict[str, Any]:
    """Return the numeric attributes of an op, defaults included."""
    assert tensor.op is not None
    defaults = getattr(tensor.op.compute, "__kwdefaults__", None) or {}
    attributes = {**defaults, **tensor.attributes}
    return {name: value for name, value in attributes.items() if isinstance(value, int | float | np.generic)}
