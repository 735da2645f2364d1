"""Tensors and ops: an op is a record of functions, and calling one on tensors gives the tensor that it makes.

Outside a trace an op is executed when it is called (*eager*). Inside one (`tracing`), what depends on a placeholder is
only written down: the tensors that a function returns then know by which ops they are made, which is all that a program
is.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, Token
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from dptrain.errors import ConfigError, DivergenceError
from dptrain.program.operand import OPS as OPS
from dptrain.program.operand import Operand as Operand
from dptrain.program.shapes import Rows, Shape, local

Array = npt.NDArray[Any]
DType = np.dtype[Any]
# How an op depends on its inputs, which decides what becomes of partial sums: "joint" for f(a + b, c + d) = f(a, c) +
# f(b, d), "each" for linear in one input while the others stand still.
Linear = Literal["joint", "each"]

# Which results remember how they were made, outside of a trace: none; while a tape is open that watches a leaf of them;
# always, as a trainable variable is among their leaves.
NOT_TRACKED, WATCHED, TRAINABLE = range(3)
_VARIADIC = 0x04  # the flag of code that takes `*args`

# The floating-point type of Python's numbers and of what is not told (Keras' floatx).
FLOATX = np.dtype(np.float32)


@dataclass(frozen=True)
class Sharing:
    """Along which axis each input of an op must be sharded, None for whole, and what then comes out.

    Attributes:
        inputs: an axis or None for each input.
        output: the axis along which the output is sharded, None where it is whole, "sum" or "max" where each rank has
            a summand or a candidate.
    """

    inputs: tuple[int | None, ...]
    output: int | Literal["sum", "max"] | None


# Of the shapes of the inputs, the axes along which they are sharded, the output's shape and the op's attributes.
SharingRule = Callable[[Sequence[Shape], Sequence[int | None], Shape, Mapping[str, Any]], Sharing]


class Op:
    """One entry of the vocabulary. `dptrain.ops` has them by family; how to write one is in `docs/program.md`.

    Args:
        compute: the NumPy function of the inputs' arrays, and of the attributes by keyword. It writes the array `out`;
            that of a view returns it.
        shape: the output's shape, of the inputs' shapes and the attributes.
        sharing: how inputs that are sharded by rows make the output.
        dtype: the output's type, of the inputs' types and the attributes.
        linear: see `Linear`; None for an op that is not.
        linear_in: the inputs in which it is linear; by default all.
        is_view: the output shares the input's memory.
        in_place: the NumPy function may write over an input that has the output's shape and type.
        ends_gradients: it has no gradient in any input, by intent.
        by_row: the NumPy function takes `first_row` by keyword, the global number of the first row that it computes.
        c: of an op of single elements, the element as an expression of C++: of the inputs `{0}`, `{1}`, ... in the
            types of `program/kernels.py:operand_dtypes`, of attributes by name, and of `{last}`, the index along the
            last axis, which the inputs then do not have. Functions are those of `kernels/scalar.h`.
        onnx: the operator of ONNX that it is, for the same operands in one type; others have a `lowering`.

    Attributes:
        name: of the NumPy function.
        cuda: the kernel of an op that a user brings along (`backend.custom.OwnKernel`), or None.
        output: which of the kernel's outputs it is.
    """

    def __init__(
        self,
        compute: Callable[..., Any],
        shape: Callable[..., Shape],
        sharing: SharingRule,
        dtype: Callable[..., npt.DTypeLike],
        linear: Linear | None = None,
        linear_in: tuple[int, ...] | None = None,
        is_view: bool = False,
        in_place: bool = False,
        by_row: bool = False,
        ends_gradients: bool = False,
        c: str | None = None,
        onnx: str | None = None,
    ) -> None:
        self.name = compute.__name__
        self.compute, self.shape, self.sharing, self.dtype = compute, shape, sharing, dtype
        self.linear, self.linear_in = linear, linear_in
        self.is_view, self.in_place, self.by_row, self.c = is_view, in_place, by_row, c
        self.onnx, self.ends_gradients = onnx, ends_gradients
        self.gradient_rule: Callable[..., Any] | None = None
        self.onnx_rule: Callable[..., Any] | None = None
        self.cuda: Any = None
        self.output = 0
        # How many inputs it takes; None for any number, and for functions that do not say.
        code = getattr(compute, "__code__", None)
        self.operands: int | None = None if code is None or code.co_flags & _VARIADIC else code.co_argcount
        self.__doc__ = compute.__doc__

    def __repr__(self) -> str:
        return f"<op {self.name}>"

    def __deepcopy__(self, memo: Any) -> "Op":
        return self  # it is known by its identity, in copies of layers too

    def __call__(self, *inputs: Any, **attributes: Any) -> "Tensor":
        """Return the op's output for tensors, arrays and numbers.

        Raises:
            ConfigError: the inputs do not go together.
        """
        if len(inputs) != self.operands:
            inputs, attributes = self._bound(inputs, attributes)
        tensors = as_tensors(inputs)
        shape = self.shape(*[one.shape for one in tensors], **attributes)
        dtype = self.dtype(*[one.dtype for one in tensors], **attributes)
        if dtype.__class__ is type or not isinstance(dtype, np.dtype):
            dtype = np.dtype(dtype)
        trace, tracking, values = _trace.get(), NOT_TRACKED, []
        for one in tensors:
            if one.value is None:
                return Tensor(self, tensors, attributes, shape, dtype, name=_scope.get())
            values.append(one.value)
            tracking = max(tracking, one.tracking)
        if trace is not None and (any(isinstance(n, Rows) for n in shape) or any(one.counts_rows for one in tensors)):
            return Tensor(self, tensors, attributes, shape, dtype, name=_scope.get())
        own = attributes | {"first_row": 0} if self.by_row else attributes
        with np.errstate(all="ignore"):  # as in `execute`
            value = self._computed(values, own, shape, dtype)
        check = _watch.get()
        if check is not None:
            check(Tensor(self, tensors, attributes, shape, dtype, value, _scope.get()))
        # In a trace it is the same at every execution: a constant. Outside, what nobody can ask the gradient of forgets
        # how it was made, or a loop would keep all its values.
        forgets = tracking == NOT_TRACKED or (tracking == WATCHED and not _tapes.get())
        if trace is not None or forgets or self.ends_gradients or dtype.kind != "f":
            return Tensor(None, (), {}, shape, dtype, value)
        made = Tensor(self, tensors, attributes, shape, dtype, value, _scope.get())
        made.tracking = tracking
        return made

    def _bound(self, inputs: tuple[Any, ...], attributes: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a call as operands, which may have been named, and attributes, which may not.

        Raises:
            TypeError: there are more than it takes, or operands are missing.
        """
        if self.operands is None:
            return inputs, attributes
        code = self.compute.__code__
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        names = tuple(one for one in names if one not in ("out", "first_row"))
        if len(inputs) > len(names):
            raise TypeError(f"{self.name}() takes {len(names)} arguments: {', '.join(names)}; {len(inputs)} were given")
        given = dict(zip(names, inputs, strict=False))
        if twice := sorted(given.keys() & attributes.keys()):
            raise TypeError(f"{self.name}() got multiple values for argument {twice[0]!r}")
        given |= attributes
        if missing := [one for one in names[: self.operands] if one not in given]:
            raise TypeError(f"{self.name}() misses {', '.join(missing)}")
        return tuple(given.pop(one) for one in names[: self.operands]), given

    def _computed(self, arrays: Sequence[Any], attributes: Mapping[str, Any], shape: Shape, dtype: DType) -> Array:
        if self.is_view:
            return np.asarray(self.compute(*arrays, **attributes))
        out = np.empty(shape, dtype)
        self.compute(*arrays, **attributes, out=out)
        return out

    @np.errstate(all="ignore")  # infinities and NaNs are results, as on a GPU
    def execute(self, arrays: Sequence[Any], made: "Tensor", rows: int | None = None, first_row: int = 0) -> Array:
        """Return the output of these inputs.

        Args:
            arrays: the inputs, as a rank holds them.
            made: the tensor that is computed.
            rows: of the batch that the rank has; None for all.
            first_row: the global number of the first of them.
        """
        shape = made.shape if rows is None else local(made.shape, rows)
        return self._computed(arrays, self.local_attributes(made, rows, first_row), shape, made.dtype)

    def local_attributes(self, made: "Tensor", rows: int | None, first_row: int) -> dict[str, Any]:
        """Return the attributes of a tensor as a rank with these rows has them; as `execute`."""
        attributes = made.attributes
        if self.by_row:
            counted = next((n for n in made.shape if isinstance(n, Rows)), None)
            attributes = attributes | {"first_row": 0 if counted is None else first_row * counted.scale}
        return attributes if rows is None else {name: _local(value, rows) for name, value in attributes.items()}

    def gradient(self, rule: Callable[..., Any]) -> Callable[..., Any]:
        """Register the gradient: `rule(made, dy, *inputs)` returns a tensor or None for each input, written in ops."""
        self.gradient_rule = rule
        return rule

    def lowering(self, rule: Callable[..., Any]) -> Callable[..., Any]:
        """Register what it is in ONNX: `rule(graph, made, *inputs)` adds nodes to a `program.onnx_graph.OnnxGraph`.

        It takes and returns `Value`s; the result is cast to the type of `made`.
        """
        self.onnx_rule = rule
        return rule


def _local(value: Any, rows: int) -> Any:
    if isinstance(value, tuple):
        return tuple(_local(one, rows) for one in value)
    return value.scale * rows if isinstance(value, Rows) else value


def op(**record: Any) -> Callable[[Callable[..., Any]], Op]:
    """Return a decorator that makes a built-in op of its NumPy function; the arguments are those of `Op`."""

    def make(compute: Callable[..., Any]) -> Op:
        made = OPS[compute.__name__] = Op(compute, **record)
        return made

    return make


class Tensor(Operand):
    """What an op returns: a shape, a type, the op and its inputs; and a value, unless it waits for a placeholder.

    Attributes:
        op: what makes it; None for constants, placeholders and variables.
        inputs: of the op.
        attributes: of the op.
        shape: lengths; those that count rows of the batch are `Rows`.
        dtype: of the elements.
        value: the elements, or None inside a trace.
        name: of a placeholder or a variable, for messages.
        variable: whose value it is, or None.
        logits: of what softmax or sigmoid made: their input.
        squashed_by: which of these made it, "softmax" or "sigmoid".
        tracking: whether results of it remember how they were made: NOT_TRACKED, WATCHED or TRAINABLE.
        history: of what a layer made of symbolic tensors: that call.
    """

    __slots__ = (
        "__weakref__",
        "attributes",
        "dtype",
        "history",
        "inputs",
        "logits",
        "name",
        "op",
        "shape",
        "squashed_by",
        "tracking",
        "value",
        "variable",
    )

    def __init__(
        self,
        op: Op | None,
        inputs: Sequence["Tensor"],
        attributes: Mapping[str, Any],
        shape: Shape,
        dtype: DType,
        value: Array | None = None,
        name: str = "",
    ) -> None:
        self.op, self.inputs, self.attributes = op, tuple(inputs), dict(attributes)
        self.shape, self.dtype, self.value, self.name = shape, dtype, value, name
        self.tracking = NOT_TRACKED
        self.variable: Variable | None = None
        self.logits: Tensor | None = None
        self.squashed_by = ""
        self.history: Any = None

    def with_inputs(self, inputs: Sequence["Tensor"]) -> "Tensor":
        """Return what its op makes of other inputs of the same shapes; itself if they are its own."""
        if all(new is old for new, old in zip(inputs, self.inputs, strict=True)):
            return self
        return Tensor(self.op, inputs, self.attributes, self.shape, self.dtype, name=self.name)

    @property
    def counts_rows(self) -> bool:
        """Whether it is the number of rows of the batch, a constant that differs from batch to batch."""
        return self.op is None and "rows" in self.attributes

    @property
    def grad(self) -> "Tensor | None":
        """Of the variable whose value it is, see `Variable.grad`."""
        return None if self.variable is None else self.variable.grad

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    def numpy(self) -> Array:
        """Return the value.

        Raises:
            ConfigError: inside a trace there is none.
        """
        if self.value is None:
            raise ConfigError(
                f"the value of {self} is asked for while a step is traced, which runs once for all batches: compute "
                "with ops (where, maximum, ...) instead of Python's if, or compile with run_eagerly=True"
            )
        return self.value

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> Array:
        return np.array(self.numpy(), dtype) if copy else np.asarray(self.numpy(), dtype)

    def __dlpack__(self, **options: Any) -> Any:
        return self.numpy().__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.numpy().__dlpack_device__()

    def __float__(self) -> float:
        return float(self.numpy().item())

    def __int__(self) -> int:
        return int(self.numpy().item())

    def __index__(self) -> int:
        if self.dtype.kind not in "iu" or self.shape:
            raise TypeError(f"{self} cannot be an index: expected a single integer")
        return int(self.numpy())

    def __bool__(self) -> bool:
        return bool(self.numpy())

    def __format__(self, spec: str) -> str:
        if self.value is None or (self.shape and not spec):
            return format(repr(self), spec)
        return format(self.value if self.shape else self.value.item(), spec)

    @property
    def is_symbolic(self) -> bool:
        """Whether there is no value to look at, as inside a trace."""
        return self.value is None

    def detached(self) -> "Tensor":
        """Return a constant of its value, which does not know how it was made."""
        return Tensor(None, (), {}, self.shape, self.dtype, self.value)

    def __repr__(self) -> str:
        made = self.name or (self.op.name if self.op else "constant")
        return f"<tensor {made} {self.shape} {self.dtype.name}>"

    __hash__ = object.__hash__

    def __eq__(self, other: Any) -> Any:  # elementwise, as by NumPy and Keras; `is` tells tensors apart
        return NotImplemented if other is None else OPS["equal"](self, other)

    def __ne__(self, other: Any) -> Any:
        return NotImplemented if other is None else OPS["not_equal"](self, other)

    def backward(self, gradient: Any = None) -> None:
        """Add the gradient of this tensor (of its sum, if it is not a single number) to the `grad` of its variables.

        Args:
            gradient: of something in this tensor; ones by default.
        """
        from dptrain.program.gradient import backward

        backward(self, gradient)


def as_tensors(inputs: Sequence[Any]) -> list[Tensor]:
    """Return tensors of tensors, variables, arrays and numbers; Python's numbers take the type of what they meet."""
    typed = [one if isinstance(one, Tensor) else one.tensor if isinstance(one, Variable) else one for one in inputs]
    for one in typed:
        if not isinstance(one, Tensor):
            break
    else:
        return typed
    met = [one.dtype for one in typed if isinstance(one, Tensor | np.ndarray | np.generic)]
    found = []
    for one in typed:
        if isinstance(one, Tensor):
            found.append(one)
            continue
        dtype: Any = None
        if isinstance(one, float):
            dtype = max([kind for kind in met if kind.kind == "f"], default=FLOATX)
        elif isinstance(one, int) and not isinstance(one, bool) and met:
            common = met[0] if len(met) == 1 else np.result_type(*met)
            dtype = None if common.kind == "b" else common
        made = constant(one, dtype)
        if isinstance(one, Rows):
            made.attributes["rows"] = one.scale
        found.append(made)
    return found


def constant(value: Any, dtype: npt.DTypeLike | None = None) -> Tensor:
    """Return a tensor of a value that is known."""
    if isinstance(value, Tensor):
        return value
    array = np.asarray(value, dtype)
    if dtype is None and array.dtype == np.float64 and not isinstance(value, np.ndarray | np.generic):
        array = array.astype(FLOATX)
    if array.dtype.kind not in "fiub":
        raise ConfigError(f"a tensor of {array.dtype}: expected real numbers")
    return Tensor(None, (), {}, array.shape, array.dtype, array)


class Home(Protocol):
    """A device's memory, as the variables see it that live there."""

    def read(self, variable: "Variable") -> Array:
        """Return a copy of a variable's value."""

    def write(self, variable: "Variable", value: Array) -> None:
        """Replace a variable's value, by one of its shape and dtype."""


class Variable(Operand):
    """A tensor that stays from step to step: a weight, a slot of an optimizer, a metric's total, a seed.

    Inside a trace `assign` is written down; the program then has the new value among its updates.

    Args:
        value: the first.
        name: for messages and files.
        trainable: whether it has a gradient.
        dtype: of the value, which is cast to it.
        regularizer: what computes its penalty, called with the variable.
        constraint: what it becomes after an optimizer's update, called with the variable.
        aggregation: "sum" where ranks may each keep a summand of it, as of a metric's total; else "none".

    Attributes:
        name: as above.
        path: unique in a model, "layer/name" of a weight; by default the name.
        trainable: as above.
        regularizer: as above.
        constraint: as above.
        aggregation: as above.
        home: the device that its value lives on, or None for this object's own memory.
        watched: the `Tensor.tracking` of its value where it is not trainable.
    """

    def __init__(
        self,
        value: Any,
        name: str = "variable",
        trainable: bool = True,
        *,
        dtype: npt.DTypeLike | None = None,
        regularizer: Callable[["Variable"], Any] | None = None,
        constraint: Callable[["Variable"], Any] | None = None,
        aggregation: Literal["none", "sum"] = "none",
    ) -> None:
        self.name = self.path = name
        self.trainable, self.regularizer, self.constraint = trainable, regularizer, constraint
        self.aggregation: Literal["none", "sum"] = aggregation
        self.home: Home | None = None
        self._grad: Tensor | None = None
        self.watched = NOT_TRACKED
        self._held = self._own(constant(value, dtype).numpy())

    def _own(self, value: Array) -> Tensor:
        """Return a value as this variable's: a copy that does not know how it was made, or steps would pile up."""
        tensor = Tensor(None, (), {}, value.shape, value.dtype, np.array(value, order="C"), self.name)
        tensor.variable = self
        return tensor

    @property
    def tensor(self) -> Tensor:
        """What reading it gives: its value, or inside a trace what stands for it."""
        trace = _trace.get()
        if trace is not None:
            return trace.value_of(self)
        found = self._held if self.home is None else self._own(self.home.read(self))
        found.tracking = TRAINABLE if self.trainable else self.watched
        return found

    value = tensor

    @property
    def is_symbolic(self) -> bool:
        """Whether there is no value to look at, as inside a trace."""
        return _trace.get() is not None

    @property
    def grad(self) -> Tensor | None:
        """What `backward` has added up since it was last set to None; inside a trace, in that trace."""
        trace = _trace.get()
        return self._grad if trace is None else trace.gradients.get(self)

    @grad.setter
    def grad(self, grad: Tensor | None) -> None:
        trace = _trace.get()
        if trace is None:
            self._grad = grad
        elif grad is None:
            trace.gradients.pop(self, None)
        else:
            trace.gradients[self] = grad

    @property
    def shape(self) -> Shape:
        """Of the value."""
        return self._held.shape

    @property
    def dtype(self) -> DType:
        """Of the value."""
        return self._held.dtype

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    def numpy(self) -> Array:
        """Return a copy of the value; as `Tensor.numpy`."""
        if self.home is not None and _trace.get() is None:
            return self.home.read(self)
        return np.array(self.tensor.numpy())

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> Array:
        return np.asarray(self.numpy(), dtype)

    def __float__(self) -> float:
        return float(self.tensor)

    def __int__(self) -> int:
        return int(self.tensor)

    def assign(self, value: Any) -> None:
        """Give it a new value of the same shape, which is cast to its dtype.

        Raises:
            ConfigError: the shape is another.
        """
        found = as_tensors([value])[0]
        if found.shape != self.shape:
            raise ConfigError(f"variable {self.path!r} has shape {self.shape}; assigned shape {found.shape}")
        if found.dtype != self.dtype:
            found = OPS["cast_to"](found, dtype=self.dtype.name)
        trace = _trace.get()
        if trace is not None:
            trace.write(self, found)
        elif self.home is not None:
            self.home.write(self, found.numpy())
        else:
            self._held = self._own(found.numpy())

    def assign_add(self, value: Any) -> None:
        """Add to it."""
        self.assign(self + value)

    def assign_sub(self, value: Any) -> None:
        """Subtract from it."""
        self.assign(self - value)

    def move(self, home: Home | None) -> None:
        """Let the value live on a device, which has it already, or (None) come back from there."""
        if home is None and self.home is not None:
            self._held = self._own(self.home.read(self))
        self.home = home

    def __repr__(self) -> str:
        return f"<variable {self.path} {self.shape} {self.dtype.name}>"


class Trace:
    """What a function has read and written while it was traced.

    Attributes:
        read: placeholders of the variables that were read.
        written: new values of those that were assigned.
        gradients: `Variable.grad` of those that have one.
        applied: gradients that optimizers were given.
    """

    def __init__(self) -> None:
        self.applied: list[Tensor] = []
        self.read: dict[Variable, Tensor] = {}
        self.written: dict[Variable, Tensor] = {}
        self.gradients: dict[Variable, Tensor] = {}

    def value_of(self, variable: Variable) -> Tensor:
        """Return what stands for a variable: what was assigned last, else its placeholder."""
        return self.written[variable] if variable in self.written else self.placeholder_of(variable)

    def placeholder_of(self, variable: Variable) -> Tensor:
        """Return what stands for a variable's value before the step."""
        if variable not in self.read:
            self.read[variable] = placeholder(variable.shape, variable.dtype, variable.path, variable)
        return self.read[variable]

    def write(self, variable: Variable, value: Tensor) -> None:
        """Note a new value; gradients end at it, as they do outside of a trace."""
        leaf = Tensor(OPS["stop_gradient"], (value,), {}, value.shape, value.dtype, name=variable.path)
        leaf.variable = variable
        self.written[variable] = leaf


_trace: ContextVar[Trace | None] = ContextVar("trace", default=None)
# How many gradient tapes are open.
_tapes: ContextVar[int] = ContextVar("tapes", default=0)
# What looks at every value that is computed outside of a trace.
_watch: ContextVar[Callable[[Tensor], None] | None] = ContextVar("watch", default=None)
# The layer that ops are called in, which their tensors are named after.
_scope: ContextVar[str] = ContextVar("scope", default="")


@contextmanager
def scope(name: str) -> Iterator[None]:
    """Name tensors that ops make in this context after a layer, for messages and tables."""
    token = _scope.set(name)
    try:
        yield
    finally:
        _scope.reset(token)


@contextmanager
def watching(check: "Callable[[Tensor], None] | None" = None) -> Iterator[None]:
    """Show every value that an op makes in this context to `check`; by default stop at the first NaN."""
    token = _watch.set(check or _refuse_nan)
    try:
        yield
    finally:
        _watch.reset(token)


def watch(made: Tensor, value: Array) -> None:
    """Show a value that has been computed to whoever is watching."""
    check = _watch.get()
    if check is not None:
        check(Tensor(made.op, made.inputs, made.attributes, made.shape, made.dtype, value, made.name))


def _refuse_nan(made: Tensor) -> None:
    assert made.value is not None
    if made.dtype.kind == "f" and np.isnan(made.value).any():
        place = [int(n) for n in np.argwhere(np.isnan(made.value))[0]]
        within = f" of layer {made.name!r}" if made.name else ""
        assert made.op is not None
        raise DivergenceError(
            f"op {made.op.name!r}{within} is the first to make a NaN, at {place} of shape {made.value.shape}"
        )


def note_applied(gradients: Sequence[Tensor]) -> None:
    """Note gradients that an optimizer is given; outside of a trace nothing."""
    trace = _trace.get()
    if trace is not None:
        trace.applied += gradients


def applied_gradients() -> list[Tensor]:
    """Return the gradients that optimizers were given in this trace."""
    trace = _trace.get()
    return [] if trace is None else list(trace.applied)


def hold(unless: Tensor) -> None:
    """Let all variables that this trace has assigned keep the values that they had before the step.

    Args:
        unless: a number; where it is true, they get what they were assigned.
    """
    trace = _trace.get()
    assert trace is not None
    behind, stack = set(), [unless]
    while stack:
        one = stack.pop()
        if id(one) not in behind:
            behind.add(id(one))
            stack += one.inputs
    for variable, leaf in list(trace.written.items()):
        old = trace.placeholder_of(variable)
        if id(leaf) in behind:  # it has been read on the way to the decision
            trace.write(variable, OPS["where"](unless, leaf, old))
        else:  # what has been read of it since, such as a metric's result, is that of what is kept
            leaf.inputs = (OPS["where"](unless, leaf.inputs[0], old),)


@contextmanager
def unchanged(variables: "Iterable[Variable]") -> Iterator[None]:
    """Let variables have the values after this context that they had before it."""
    trace = _trace.get()
    if trace is not None:
        before = {one: trace.written.get(one) for one in variables}
        yield
        for variable, leaf in before.items():
            trace.written.pop(variable, None)
            if leaf is not None:
                trace.written[variable] = leaf
        return
    values = {one: one.numpy() for one in variables}
    yield
    for variable, value in values.items():
        variable.assign(value)


def watch_for_tape(watched: Tensor | Variable, tracking: int) -> int:
    """Let what is made of a tensor or a variable remember how it was made (see `Tensor.tracking`); return what was."""
    if isinstance(watched, Variable):
        before, watched.watched = watched.watched, tracking
    else:
        before, watched.tracking = watched.tracking, max(tracking, watched.tracking if tracking else NOT_TRACKED)
    return before


def open_tape() -> Token[int]:
    """Note that one more tape is open; see `close_tape`."""
    return _tapes.set(_tapes.get() + 1)


def close_tape(token: Token[int]) -> None:
    """Note that a tape is open no longer."""
    _tapes.reset(token)


def is_tracing() -> bool:
    """Whether ops are written down instead of executed."""
    return _trace.get() is not None


@contextmanager
def tracing() -> Iterator[Trace]:
    """Write down the ops that are called in this context, where they depend on placeholders or on the rows."""
    token = _trace.set(Trace())
    try:
        found = _trace.get()
        assert found is not None
        yield found
    finally:
        _trace.reset(token)


@contextmanager
def untraced() -> Iterator[None]:
    """Execute ops in this context as outside of a trace: what is built in the middle of a step is not of the step."""
    token = _trace.set(None)
    try:
        yield
    finally:
        _trace.reset(token)


def differentiable(value: Any) -> Tensor:
    """Return a constant of which `program.gradient.gradients` can be asked, as of a trainable variable."""
    made = constant(value).detached()
    made.tracking = TRAINABLE
    return made


def placeholder(shape: Shape, dtype: npt.DTypeLike, name: str, variable: Variable | None = None) -> Tensor:
    """Return a tensor whose value comes with each execution.

    Args:
        shape: lengths, those that count rows as `Rows`.
        dtype: of its elements.
        name: under which the value comes.
        variable: whose value it is.
    """
    made = Tensor(None, (), {}, shape, np.dtype(dtype), None, name)
    made.variable = variable
    return made
