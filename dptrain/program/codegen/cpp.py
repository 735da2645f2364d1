"""The language of generated kernels: types, numbers, lengths and single elements, as C++ and CUDA C++ write them alike.

In the text: B the rank's rows, `first_row` the global number of the first of them, `global_B` the rows of all ranks.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from dptrain.errors import ConfigError
from dptrain.program.codegen.index_expr import FloorDiv, IndexExpr, Numel, numel
from dptrain.program.lowering import Element, lowering_of
from dptrain.program.tensor import DType, Tensor
from dptrain.program.types import promoted_in_kernels, type_of


class Ex(NamedTuple):
    """An expression.

    Attributes:
        text: C++, which a cast may stand before.
        depth: of the scope that knows all its operands.
        computed: in the same function, not read from memory.
    """

    text: str
    depth: int = 0
    computed: bool = False


# Returns the text of an attribute, by its name ("" for a constant), value and type.
Number = Callable[[str, Any, DType], str]


def ctype(dtype: DType) -> str:
    """Return C++'s name of a type.

    Raises:
        ConfigError: no kernel computes in it.
    """
    if (name := type_of(dtype).c) is None:
        raise ConfigError(f"not supported by kernels: tensors of {dtype.name}; cast to float32")
    return name


def has_types(tensor: Tensor) -> bool:
    """Whether kernels compute in the types of a tensor and its inputs."""
    return all(type_of(one.dtype).c is not None for one in (tensor, *tensor.inputs))


def literal(value: Any, dtype: DType) -> str:
    """Return a number as C++ writes it in a type."""
    number, kind, own = np.asarray(value).astype(dtype).reshape(())[()], ctype(dtype), type_of(dtype)
    if dtype.kind == "b":
        return "true" if number else "false"
    if own.is_float and not np.isfinite(number):
        found = "DP_NAN" if np.isnan(number) else "DP_INFINITY" if number > 0 else "-DP_INFINITY"
        return f"(({kind}){found})"
    if own.is_half:
        return f"(({kind}){float(number)!r}f)"
    text, suffix = str(number), own.suffix
    if own.is_float and not set(text) & set(".e"):
        text += ".0"
    if own.is_integer and number == np.iinfo(dtype).min and number < 0:
        text = f"{number + 1}{suffix} - 1"  # C++ has no negative literals
        return f"(({kind})({text}))"
    if own.is_integer and dtype.itemsize < 4:
        return f"(({kind}){text})"  # else an int, for which functions of two equal types are no match
    return f"({text}{suffix})" if text.startswith("-") else f"{text}{suffix}"


def length_text(one: Numel) -> str:
    """Return a product of lengths."""
    number, power = one
    return " * ".join(([str(int(number))] if number != 1 or not power else []) + ["B"] * power)


def numel_text(shape: Iterable[int]) -> str:
    """Return the number of elements of a shape."""
    return length_text(numel(shape))


def is_word(text: str) -> bool:
    """Whether a text is a name or a number, which stands for itself."""
    return re.fullmatch(r"\w+", text) is not None


def sum_text(terms: Iterable[tuple[Numel, str]], first: str = "") -> str:
    """Return a sum of names times lengths, of which "" stands for no name; behind a text, if one is given."""
    found = first
    for (count, power), name in sorted(terms, key=lambda one: (-one[0][1], -one[0][0], one[1])):
        factor = length_text((abs(count), power))
        term = factor if not name else name if factor == "1" else f"{name} * {factor}"
        found += (" - " if count < 0 else " + " if found else "") + term
    return found.strip() or "0"


def index_text(place: IndexExpr) -> str:
    """Return a place as one expression."""
    return sum_text(
        ((count, power), f"({index_text(index.dividend)}) / ({length_text(index.divisor)})")
        if isinstance(index, FloorDiv)
        else ((count, power), "" if index is None else str(index.name))
        for (index, power), count in place.terms.items()
    )


def known_number(tensor: Tensor, number: Number) -> str | None:
    """Return a single number that is known, or that of rows, as C++; None for other tensors.

    Args:
        tensor: any.
        number: writes it.
    """
    if tensor.op is not None or tensor.value is None or tensor.value.size != 1 or tensor.variable is not None:
        return None
    if tensor.counts_rows:
        rows, count = "B" if tensor.attributes.get("own") else "global_B", tensor.attributes["rows"]
        return f"({ctype(tensor.dtype)})({rows if count == 1 else f'{count} * {rows}'})"
    return number("", tensor.value.reshape(()), tensor.dtype)


def operand_dtypes(tensor: Tensor) -> list[DType]:
    """Return the types in which the inputs of an op of single elements enter its expression `Element.c`: NumPy's."""
    element, own = lowering_of(tensor), [one.dtype for one in tensor.inputs]
    if isinstance(element, Element):  # else a reduction over axes of length 1
        if not own or element.converts:
            return own
        if element.conditions:
            return [np.dtype(bool) if n in element.conditions else tensor.dtype for n in range(len(own))]
        if element.by_last:
            return [np.dtype(np.float64 if own[0].kind == "f" else np.int64)]
    return [promoted_in_kernels(tensor.dtype, *own)] * len(own)


def cast(value: Ex, found: DType, wanted: DType) -> str:
    """Return a value in another type."""
    if found == wanted:
        return value.text
    # Of a fraction that becomes a whole number and then a fraction again, GCC makes one truncation: -0 of -0.5.
    if value.computed and type_of(found).is_integer and type_of(wanted).is_float:
        return f"dp_number<{ctype(wanted)}>({value.text})"
    return f"({ctype(wanted)}){value.text}"


def element(tensor: Tensor, operands: Sequence[Ex], number: Number, last: str = "0") -> str:
    """Return what an op of single elements, or a reduction over axes of length 1, makes of its operands.

    Args:
        tensor: what it makes.
        operands: an element of each input.
        number: writes its attributes.
        last: the index along the last axis.
    """
    lowering, own, wanted = lowering_of(tensor), [one.dtype for one in tensor.inputs], operand_dtypes(tensor)
    if not isinstance(lowering, Element) or lowering.converts:
        return cast(operands[0], own[0], tensor.dtype)
    kind = wanted[0] if wanted else tensor.dtype
    if lowering.conditions:
        kind = tensor.dtype
    numbers = {name: number(name, value, kind) for name, value in _numbers_of(tensor).items()}
    inputs = [cast(one, found, to) for one, found, to in zip(operands, own, wanted, strict=True)]
    return lowering.c.format(*inputs, last=last, **numbers)


def _numbers_of(tensor: Tensor) -> dict[str, Any]:
    """Return the attributes that an op's expression may name, with the defaults of those that are not given."""
    assert tensor.op is not None
    defaults = getattr(tensor.op.compute, "__kwdefaults__", None) or {}
    known = {**defaults, **tensor.attributes}
    return {name: value for name, value in known.items() if isinstance(value, int | float | np.generic)}
