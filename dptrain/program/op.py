"""Ops: records of functions. Calling an op on tensors returns the resulting tensor.

Outside a trace an op is executed when it is called (*eager*). Inside, results that depend on a placeholder are only
recorded; see `program.tensor`.
"""

import re
import threading
from collections.abc import Callable, Mapping, Sequence
from contextvars import Context
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from dptrain.errors import ConfigError
from dptrain.program.context import SCOPE, TAPES, TRACE, WATCH
from dptrain.program.dims import Dim
from dptrain.program.lowering import Element, Gather, Insert, Join, LoopLowering, Lowering, UserKernel, ViewMap
from dptrain.program.operand import METHODS, OPERATORS, OPS, Operator
from dptrain.program.shapes import Shape, is_open, local, size
from dptrain.program.sharding.sharding_rule import RuleText, ShardingRule, parse_fixed_rule, parse_rule
from dptrain.program.tensor import (
    FLOATX,
    NOT_TRACKED,
    WATCHED,
    Array,
    DType,
    ShapeDtype,
    Tensor,
    as_tensors,
    of_value,
)
from dptrain.runtime.types import is_floating, is_narrow

# How an op depends on its inputs, which decides whether sums stay partial: "joint" for f(a + b, c + d) = f(a, c) +
# f(b, d), "each" for linear in one input while the others are fixed.
Linear = Literal["joint", "each"]

_VARIADIC = 0x04  # the flag of code that takes `*args`
_NONE: dict[str, Any] = {}  # attributes of a mere value
_KINDS = 1000  # how many shapes and types of results an op caches


class _Quiet(threading.local):
    """A context of each thread in which NumPy does not warn: infinities and NaNs are results, as on a GPU.

    Entering it costs a tenth of `np.errstate`. `run` calls a function there, which must not call `run` again.
    """

    def __init__(self) -> None:
        context = Context()
        context.run(np.seterr, all="ignore")
        self.run = context.run


_quiet = _Quiet()


def one_an_element(tensor: Tensor) -> int:
    """Count one floating-point operation for each element."""
    return size(tensor.shape)


def not_placed(*arguments: Any) -> str:
    """Refuse: an op of lowered programs has no sharding rule."""
    raise AssertionError("ops of a lowered program are not placed")


class Op:
    """An entry of the vocabulary. `dptrain.ops` has them by family; `docs/program.md` says how to write one.

    Args:
        compute: the NumPy function of the inputs' arrays, with attributes by keyword. It writes the array `out`; that
            of a view returns it.
        shape: the output's shape, from the inputs' shapes and the attributes.
        letters: axes along which ranks may divide it, see `program/sharding/sharding_rule.py`.
        dtype: the output's type, from the inputs' types and the attributes.
        linear: see `Linear`; None for an op that is not linear.
        linear_in: the inputs in which it is linear; by default all.
        partial_reduce: reduces the ranks' results if these have parts along a letter that the output lacks.
        ends_gradients: it has no gradient in any input, by intent.
        by_row: the NumPy function takes `first_row` by keyword, the global number of its first row.
        lowering: what generated code computes, see `program/lowering.py`; an op with a `ViewMap` is a view.
        expensive: store its result, such as a root or a gather, rather than recompute it at each use.
        quotient: its value of 0 / 0 if it is its first input over its second; None for other ops.
        operations: floating-point operations of its result; views have none.
        ufunc: of NumPy for two operands, with the bits of `compute` if it returns the op's type: eager calls then need
            neither an output array nor a function in Python.
        onnx: the ONNX operator for the same operands in one type; others have an `onnx_lowering`.
        has_values: it has several values and is called by `values`: `shape` and `dtype` return an entry for each,
            `letters` name them as `aB->aB,a`, and the NumPy function writes a list of arrays, None for unread values.
            Its gradient rule takes tuples, of all values and of their gradients, None for gradients nobody needs.

    Attributes:
        name: of the NumPy function.
        is_view: the output shares the input's memory.
    """

    def __init__(
        self,
        compute: Callable[..., Any],
        shape: Callable[..., Shape],
        letters: RuleText,
        dtype: Callable[..., npt.DTypeLike],
        linear: Linear | None = None,
        linear_in: tuple[int, ...] | None = None,
        partial_reduce: Literal["sum", "max"] = "sum",
        by_row: bool = False,
        ends_gradients: bool = False,
        lowering: Lowering | None = None,
        expensive: bool = False,
        quotient: float | None = None,
        operations: Callable[[Tensor], int] = one_an_element,
        ufunc: np.ufunc | None = None,
        onnx: str | None = None,
        has_values: bool = False,
    ) -> None:
        self.has_values = has_values
        self.name = compute.__name__
        self.compute, self.shape, self.dtype = compute, shape, dtype
        self.linear, self.linear_in, self.partial_reduce = linear, linear_in, partial_reduce
        self.lowering, self.is_view = lowering, isinstance(lowering, ViewMap)
        self.by_row, self.ends_gradients = by_row, ends_gradients
        self.expensive, self.quotient, self.operations = expensive, quotient, operations
        self.ufunc, self.onnx = ufunc, onnx
        self.gradient_rule: Callable[..., Any] | None = None
        self.onnx_rule: Callable[..., Any] | None = None
        # How many inputs it takes; None for any or an unknown number.
        code = getattr(compute, "__code__", None)
        self.operands: int | None = None if code is None or code.co_flags & _VARIADIC else code.co_argcount
        self.letters = letters
        self._named = None if callable(letters) else parse_fixed_rule(letters, self.name, self.operands)
        # It moves or converts elements, which needs no arithmetic in half precision.
        self.moves = isinstance(lowering, ViewMap | Gather | Insert | Join) or (
            isinstance(lowering, Element) and lowering.converts
        )
        self.takes_halves = self.moves  # other operands in half precision are converted to float32 and back
        # Results of calls without attributes for inputs of these `Tensor.kind`s, and whether the ufunc computes them.
        self._kinds: dict[tuple[ShapeDtype | None, ...], tuple[ShapeDtype, bool]] = {}
        self.__doc__ = compute.__doc__

    def __repr__(self) -> str:
        return f"<op {self.name}>"

    @property
    def label(self) -> str:
        """Name of the function that users call, without the "_to" or "_along" of a record."""
        return re.sub(r"_to$|_along$", "", self.name)

    def __deepcopy__(self, memo: Any) -> "Op":
        return self  # identity matters, in copies of layers too

    def __call__(self, *inputs: Any, **attributes: Any) -> Tensor:
        """Return the op's output for tensors, arrays and numbers; ConfigError if they do not match."""
        if len(inputs) != self.operands:
            inputs, attributes = self._bound(inputs, attributes)
        if self.ufunc is not None and not attributes:  # fast path: arithmetic of unwatched values
            kind: ShapeDtype | None
            a, b = inputs
            if a.__class__ is not Tensor or b.__class__ is not Tensor:
                a, b = inputs = tuple(as_tensors(inputs))
            cached = self._kinds.get((a.kind, b.kind))
            if cached is not None and cached[1] and a.tracking == b.tracking == NOT_TRACKED and WATCH.get() is None:
                kind = cached[0]
                result = Tensor(None, (), _NONE, *kind, _quiet.run(self.ufunc, a.value, b.value, order="C"))
                result.kind = kind
                return result
        tensors = as_tensors(inputs)
        # A single loop: half the time of a small eager op is spent in this function.
        listed, values, tracking = [], [], NOT_TRACKED
        for tensor in tensors:
            listed.append(tensor.kind)
            values.append(tensor.value)
            if tensor.tracking > tracking:
                tracking = tensor.tracking
        kinds = tuple(listed)
        entry = None if attributes else self._kinds.get(kinds)
        if entry is not None:
            kind, at_once = entry
            shape, dtype = kind
        else:
            at_once = False
            shape = self.shape(*[tensor.shape for tensor in tensors], **attributes)
            dtype = np.dtype(self.dtype(*[tensor.dtype for tensor in tensors], **attributes))
            if not self.takes_halves and (is_narrow(dtype) or any([is_narrow(tensor.dtype) for tensor in tensors])):
                return self._in_float32(tensors, attributes, dtype)
            if any([value is None for value in values]) or is_open(shape):
                return Tensor(self, tensors, attributes, shape, dtype, name=SCOPE.get())
            kind = None if _counts_rows(shape) else (shape, dtype)
            if TRACE.get() is not None and (kind is None or any(tensor.counts_rows for tensor in tensors)):
                return Tensor(self, tensors, attributes, shape, dtype, name=SCOPE.get())
            of_floatx = is_floating(dtype) and not any([is_floating(tensor.dtype) for tensor in tensors])
            if not (kind is None or attributes or of_floatx or None in kinds) and len(self._kinds) < _KINDS:
                self._kinds[kinds] = kind, self._is_made_at_once(tensors, shape, dtype)
        if at_once:
            value = _quiet.run(self.ufunc, *values, order="C")  # type: ignore[arg-type]
        elif self.is_view:
            value = np.asarray(self.compute(*values, **attributes))
        else:
            value = self._computed(values, attributes | {"first_row": 0} if self.by_row else attributes, shape, dtype)
        check = WATCH.get()
        if check is not None:
            check(Tensor(self, tensors, attributes, shape, dtype, value, SCOPE.get()))
        # In a trace it is a constant. Outside, results without a possible gradient forget their inputs; otherwise a
        # loop would keep all its values.
        forgets = tracking == NOT_TRACKED or (tracking == WATCHED and not TAPES.get()) or TRACE.get() is not None
        if forgets or self.ends_gradients or not is_floating(dtype):
            result = Tensor(None, (), {}, shape, dtype, value)
        else:
            result = Tensor(self, tensors, attributes, shape, dtype, value, SCOPE.get())
            result.tracking = tracking
        result.kind = kind
        return result

    def values(self, *inputs: Any, **attributes: Any) -> tuple[Tensor, ...]:
        """Return all values of an op that has several; arguments and errors as for a call."""
        tensors = tuple(as_tensors(inputs))
        outputs = self.values_of(tensors, attributes, SCOPE.get())
        depends = any(tensor.counts_rows or _counts_rows(tensor.shape) for tensor in (*tensors, *outputs))
        if (TRACE.get() is not None and (depends or isinstance(self.lowering, LoopLowering))) or (
            any(tensor.value is None for tensor in tensors) or any(is_open(output.shape) for output in outputs)
        ):
            return outputs
        out = [np.empty(output.shape, output.dtype) for output in outputs]
        call_attributes = attributes | {"first_row": 0} if self.by_row else attributes
        _quiet.run(self.compute, *[tensor.value for tensor in tensors], **call_attributes, out=out)
        tracking = max([tensor.tracking for tensor in tensors], default=NOT_TRACKED)
        forgets = tracking == NOT_TRACKED or (tracking == WATCHED and not TAPES.get()) or TRACE.get() is not None
        results = []
        for output, value in zip(outputs, out, strict=True):
            if (check := WATCH.get()) is not None:
                check(Tensor(self, tensors, attributes, output.shape, output.dtype, value, output.name, output.index))
            if forgets or self.ends_gradients or not is_floating(output.dtype):
                output = Tensor(None, (), {}, output.shape, output.dtype, value)
            else:
                output.value, output.tracking = value, tracking
            output.kind = None if _counts_rows(output.shape) else (output.shape, output.dtype)
            results.append(output)
        return tuple(results)

    def values_of(self, inputs: Sequence[Tensor], attributes: dict[str, Any], name: str = "") -> tuple[Tensor, ...]:
        """Return the values of a new node."""
        if not self.has_values:
            shapes: Any = [self.shape(*[tensor.shape for tensor in inputs], **attributes)]
            dtypes: Any = [self.dtype(*[tensor.dtype for tensor in inputs], **attributes)]
        else:
            shapes = self.shape(*[tensor.shape for tensor in inputs], **attributes)
            dtypes = self.dtype(*[tensor.dtype for tensor in inputs], **attributes)
        return tuple(
            Tensor(self, inputs, attributes, shape, np.dtype(dtype), name=name, index=index)
            for index, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))
        )

    def _is_made_at_once(self, inputs: Sequence[Tensor], shape: Shape, dtype: DType) -> bool:
        """Whether the ufunc returns an array of the op's type; for scalars it does not."""
        if self.ufunc is None or not shape:
            return False
        return self.ufunc.resolve_dtypes((*[tensor.dtype for tensor in inputs], None))[-1] == dtype

    def _in_float32(self, inputs: Sequence[Tensor], attributes: Mapping[str, Any], dtype: DType) -> Tensor:
        """Compute half-precision operands in float32, and round once."""
        cast = METHODS["cast"]
        only_whole = not any(is_floating(tensor.dtype) for tensor in inputs) and "dtype" not in attributes  # by floatx
        wide = [cast(tensor, FLOATX) if only_whole or is_narrow(tensor.dtype) else tensor for tensor in inputs]
        if "dtype" in attributes and is_narrow(np.dtype(attributes["dtype"])):
            attributes = {**attributes, "dtype": FLOATX.name}
        return cast(self(*wide, **attributes), dtype)  # type: ignore[no-any-return]

    def _bound(self, inputs: tuple[Any, ...], attributes: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Bind a call's arguments: operands, which may be named, and attributes, which must be; else TypeError."""
        if self.operands is None:
            return inputs, attributes
        code = self.compute.__code__
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        names = tuple(name for name in names if name not in ("out", "first_row"))
        if len(inputs) > len(names):
            raise TypeError(f"{self.name}() takes {len(names)} arguments: {', '.join(names)}; received {len(inputs)}")
        arguments = dict(zip(names, inputs, strict=False))
        if repeated := sorted(arguments.keys() & attributes.keys()):
            raise TypeError(f"{self.name}() got multiple values for argument {repeated[0]!r}")
        arguments |= attributes
        if missing := [name for name in names[: self.operands] if name not in arguments]:
            raise TypeError(f"{self.name}() is missing the arguments {', '.join(missing)}")
        return tuple(arguments.pop(name) for name in names[: self.operands]), arguments

    def _computed(self, arrays: Sequence[Any], attributes: Mapping[str, Any], shape: Shape, dtype: DType) -> Array:
        out = np.empty(shape, dtype)
        if isinstance(self.lowering, UserKernel):  # its function may call ops
            with np.errstate(all="ignore"):
                self.compute(*arrays, **attributes, out=out)
        else:
            _quiet.run(self.compute, *arrays, **attributes, out=out)
        return out

    def execute(self, arrays: Sequence[Any], tensor: Tensor, rows: int | None = None, first_row: int = 0) -> Array:
        """Return the output for a rank's input arrays; `rows` of the batch (None: all), from `first_row` on."""
        attributes = self.local_attributes(tensor, rows, first_row)
        if self.is_view:
            return np.asarray(self.compute(*arrays, **attributes))
        return self._computed(arrays, attributes, local(tensor.shape, rows), tensor.dtype)

    def local_attributes(self, tensor: Tensor, rows: int | None, first_row: int) -> dict[str, Any]:
        """Return a tensor's attributes on a rank with these rows; see `execute`."""
        attributes = tensor.attributes
        if self.by_row:
            counted = next((n for n in tensor.shape if isinstance(n, Dim)), None)
            attributes = attributes | {"first_row": 0 if counted is None else first_row * counted.scale}
        return {name: _local(value, rows) for name, value in attributes.items()}

    def sharding_rule(self, tensor: Tensor) -> ShardingRule:
        """Return the sharding rule of a tensor's op; ConfigError if it does not match the axes."""
        shapes = [operand.shape for operand in tensor.inputs]
        rule = self._named
        if rule is None:
            assert callable(self.letters)
            rule = parse_rule(self.letters(shapes, tensor.shape, tensor.attributes), self.name, len(shapes))
        rule = rule.of(tensor.index)
        if [*map(len, rule.inputs), len(rule.output)] != [*map(len, shapes), tensor.ndim]:
            found_shapes = ", ".join(str(tuple(map(int, operand))) for operand in (*shapes, tensor.shape))
            raise ConfigError(
                f"op {self.name!r}: letters = {str(rule)!r} for shapes {found_shapes}: expected one letter per axis"
            )
        return rule

    def gradient(self, rule: Callable[..., Any]) -> Callable[..., Any]:
        """Register the gradient: `rule(made, dy, *inputs)` returns a tensor or None for each input, written in ops."""
        self.gradient_rule = rule
        return rule

    def onnx_lowering(self, rule: Callable[..., Any]) -> Callable[..., Any]:
        """Register its ONNX form: `rule(graph, made, *inputs)` adds nodes to a `program.onnx_graph.OnnxGraph`.

        It takes and returns `Value`s; the result is cast to the type of `made`. An op of several values returns all.
        """
        self.onnx_rule = rule
        return rule


def in_one_call(compute: Callable[..., Array], *inputs: Tensor) -> Tensor | None:
    """Return a NumPy function's result that equals several ops; None if these are needed one by one, as in a trace."""
    for tensor in inputs:
        if not tensor.is_bare:
            return None
    return of_value(np.asarray(_quiet.run(compute, *[tensor.value for tensor in inputs])))


def _counts_rows(shape: Shape) -> bool:
    return Dim in [length.__class__ for length in shape]


def _local(value: Any, rows: int | None) -> Any:
    if isinstance(value, tuple):
        return tuple(_local(part, rows) for part in value)
    if not isinstance(value, Dim):
        return value
    return value.number if rows is None else value.scale * rows


def op(*, operator: Operator | None = None, **record: Any) -> Callable[[Callable[..., Any]], Op]:
    """Return a decorator that turns a NumPy function into a built-in op.

    Args:
        operator: the Python operator that it is for tensors, or the core's use of it in programs.
        record: arguments of `Op`.
    """

    def make(compute: Callable[..., Any]) -> Op:
        record_op = OPS[compute.__name__] = Op(compute, **record)
        if operator is not None:
            OPERATORS[operator] = record_op
        return record_op

    return make
