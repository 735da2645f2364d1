"""Tensors and variables.

Inside a trace (`tracing`) ops on placeholders are only recorded: the tensors that a function returns refer to their ops
and inputs, and these are a program.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import Token
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from dptrain.errors import ArgumentTypeError, ConfigError, DivergenceError
from dptrain.program.context import LENT, READ_IN, SCOPE, TAPES, TRACE, WATCH
from dptrain.program.dims import Dim, is_number, number_of
from dptrain.program.operand import METHODS, OPERATORS, is_plain
from dptrain.program.operand import OPS as OPS
from dptrain.program.operand import Operand as Operand
from dptrain.program.shapes import OpenShape, Shape, is_open
from dptrain.program.turns import MAKING, REPLACING, TURNS
from dptrain.program.types import promoted
from dptrain.runtime.floatx import floatx
from dptrain.runtime.types import FLOATX as FLOATX
from dptrain.runtime.types import DType as DType
from dptrain.runtime.types import is_floating

if TYPE_CHECKING:
    from dptrain.program.op import Op

Array = npt.NDArray[Any]
ShapeDtype = tuple[Shape, DType]
# Numbers for the results of ops, in the order in which they are made: see `Tensor.serial`.
SERIALS = count()
# Which results remember their ops, outside a trace: none; while a tape that watches a leaf of them is open; always, as
# a trainable variable is among their leaves.
NOT_TRACKED, WATCHED, TRAINABLE = range(3)


def native(array: Array) -> Array:
    """Return an array in native byte order, itself if it is."""
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


class Tensor(Operand):
    """The result of an op: a shape, a type, the op and its inputs; and a value, unless it depends on a placeholder.

    Attributes:
        op: that computes it; None for constants, placeholders and variables.
        inputs: of the op.
        attributes: of the op; tensors may share them, so nobody changes them.
        shape: lengths; those that count rows of the batch are `Dim`s.
        dtype: of the elements.
        value: the elements, or None inside a trace.
        name: of a placeholder or a variable, for messages.
        variable: whose value it is, or None.
        logits: the input of the softmax or sigmoid that computed it.
        squashed_by: which of these, "softmax" or "sigmoid".
        tracking: whether its results remember their ops: NOT_TRACKED, WATCHED or TRAINABLE.
        kind: shape and type of a value that does not depend on the number of rows, else None.
        history: the layer's call that returned this symbolic tensor.
        index: which value of its op it is, if there are several; see `node`.
        serial: larger than those of results made before it, which tells what a branch computes; -1 without an op.
        is_whole: its floating-point numbers are known to be integers, which half precision would lose; unset if
            unknown: see `is_whole`.
        _keras_mask: (rows, time), the time steps that count, under Keras' name; unset if all do: see `mask_of`.
        length: of which it is the number, a constant that differs by batch; unset for others.
        operation_call: the call of a Keras operation on symbolic tensors that returned it; unset otherwise.
        own_gradient: tensors that it depends on, and the rule of the gradient in these, in place of its op's; set only
            by `ops.custom_gradient`.
    """

    __slots__ = (
        "__weakref__",
        "_keras_mask",
        "attributes",
        "dtype",
        "history",
        "index",
        "inputs",
        "is_whole",
        "kind",
        "length",
        "logits",
        "name",
        "op",
        "operation_call",
        "own_gradient",
        "serial",
        "shape",
        "squashed_by",
        "tracking",
        "value",
        "variable",
    )

    # All tensors are dense; Keras' tensors have these attributes.
    sparse = ragged = False

    is_whole: bool
    _keras_mask: "Tensor | None"
    length: Any
    operation_call: Any
    own_gradient: tuple[Sequence["Tensor"], Callable[["Tensor"], tuple["Tensor | None", ...]]]

    def __init__(
        self,
        op: "Op | None",
        inputs: Sequence["Tensor"],
        attributes: dict[str, Any],
        shape: Shape,
        dtype: DType,
        value: Array | None = None,
        name: str = "",
        index: int = 0,
    ) -> None:
        self.op, self.inputs, self.attributes, self.index = op, tuple(inputs), attributes, index
        self.shape = OpenShape(shape) if value is None and is_open(shape) else shape
        self.dtype, self.value, self.name = dtype, value, name
        self.serial = -1 if op is None else next(SERIALS)
        self.tracking = NOT_TRACKED
        self.kind: ShapeDtype | None = None
        self.variable: Variable | None = None
        self.logits: Tensor | None = None
        self.squashed_by = ""
        self.history: Any = None

    def with_inputs(self, inputs: Sequence["Tensor"]) -> "Tensor":
        """Return its op on other inputs of the same shapes; itself for its own inputs."""
        if all(new is old for new, old in zip(inputs, self.inputs, strict=True)):
            return self
        return Tensor(self.op, inputs, self.attributes, self.shape, self.dtype, name=self.name, index=self.index)

    @property
    def node(self) -> "Node":
        """The node that computes it, shared with the op's other values."""
        return Node(self)

    @property
    def counts_rows(self) -> bool:
        """Whether it is the number of rows, a constant that differs by batch."""
        return self.op is None and "rows" in self.attributes

    @property
    def is_length(self) -> bool:
        """Whether it is an unknown length of symbolic tensors."""
        return self.op is None and "length" in self.attributes

    def __getitem__(self, key: Any) -> "Tensor":
        """Return a part; a view unless a gradient may be needed."""
        if self.is_bare and is_plain(key):
            try:
                assert self.value is not None
                return of_value(np.asarray(self.value[key]))
            except (IndexError, ValueError):
                pass  # the error below has the message
        return super().__getitem__(key)

    def __setitem__(self, key: Any, value: Any) -> None:
        raise ArgumentTypeError(
            "tensors do not change: instead of x[...] = y use ops.where, ops.slice_update or ops.scatter_update, which "
            "return new ones"
        )

    @property
    def is_bare(self) -> bool:
        """Whether it is a mere value: not traced, watched, or differentiated."""
        return self.kind is not None and self.tracking == NOT_TRACKED and WATCH.get() is None

    @property
    def grad(self) -> "Tensor | None":
        """Gradient of the variable whose value it is, see `backward`."""
        return None if self.variable is None else self.variable._gradient

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    def numpy(self) -> Array:
        """Return the value; ConfigError inside a trace."""
        if self.value is None and TRACE.get() is None:
            raise ConfigError(
                f"{self} has no value: it is symbolic (an Input, or computed from one), or belongs to a traced step or "
                "a loop that has ended (ops.scan, remat, an RNN's cell); return it from there, or pass data to a model"
            )
        if self.value is None:
            raise ConfigError(
                f"the value of {self} is not known while a step is traced, which happens once for all batches: compute "
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
            try:
                return format(repr(self), spec)
            except ValueError:
                self.numpy()  # a number's format: says why there is none
                raise
        return format(self.value if self.shape else self.value.item(), spec)

    @property
    def _is_symbolic(self) -> bool:
        return self.value is None

    def detached(self) -> "Tensor":
        """Return a constant with its value."""
        constant_tensor = Tensor(None, (), {}, self.shape, self.dtype, self.value)
        constant_tensor.kind = self.kind
        return constant_tensor

    def __repr__(self) -> str:
        source = self.name or (self.op.name if self.op else "constant")
        return f"<tensor {source} {self.shape} {self.dtype.name}>"

    __hash__ = object.__hash__

    def __eq__(self, other: Any) -> Any:  # elementwise, as in NumPy and Keras; use `is` for identity
        return NotImplemented if other is None else OPERATORS["=="](self, other)

    def __ne__(self, other: Any) -> Any:
        return NotImplemented if other is None else OPERATORS["!="](self, other)

    def backward(self, gradient: Any = None) -> None:
        """Add the gradient of this tensor's sum, weighted by `gradient`, to the `grad` of its variables."""
        METHODS["backward"](self, gradient)


class Node:
    """A use of an op, reached from one of its values.

    Values of a node share op, inputs and one record of attributes, whose identities distinguish nodes. So values that a
    pass rewrites one by one, to the same inputs, belong to one node again.
    """

    __slots__ = ("_key", "attributes", "inputs", "op")

    def __init__(self, value: Tensor) -> None:
        assert value.op is not None
        self.op, self.inputs, self.attributes = value.op, value.inputs, value.attributes
        self._key = id(self.op), tuple(map(id, self.inputs)), id(self.attributes)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Node) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def values(self) -> tuple[Tensor, ...]:
        """All values, as new tensors."""
        return self.op.values_of(self.inputs, self.attributes)


def is_whole(value: Any) -> bool:
    """Whether a tensor's floating-point numbers are known to be integers, as ids of an input without a type."""
    return getattr(value, "is_whole", False)


def mask_of(value: Any) -> "Tensor | None":
    """Return the mask that a layer has attached, or None."""
    return getattr(value, "_keras_mask", None)


def with_mask(tensor: Tensor, mask: "Tensor | None") -> Tensor:
    """Attach a mask: to itself if it has it already, else to an alias."""
    if mask_of(tensor) is mask:
        return tensor
    alias: Tensor = OPERATORS["same"](tensor)
    if is_whole(tensor):
        alias.is_whole = True
    alias._keras_mask = mask
    return alias


def as_tensors(inputs: Sequence[Any]) -> Sequence[Tensor]:
    """Convert operands to tensors; Python numbers take the type of the others."""
    for value in inputs:
        if value.__class__ is not Tensor:
            break
    else:
        return inputs
    if len(inputs) == 2:  # a number beside a tensor, the commonest case
        value, second = inputs
        if value.__class__ is Tensor and second.__class__ is float and value.dtype.kind == "f":
            return value, of_value(np.array(second, value.dtype))
        if second.__class__ is Tensor and value.__class__ is float and second.dtype.kind == "f":
            return of_value(np.array(value, second.dtype)), second
    typed = [value.value if isinstance(value, Variable) else value for value in inputs]
    met = [value.dtype for value in typed if isinstance(value, _TYPED)]
    return [value if value.__class__ is Tensor else _converted(value, met) for value in typed]


_TYPED = (Tensor, np.ndarray, np.generic)


def _of_integers(value: Any) -> DType | None:
    """Return int32, Keras' type of Python integers, if they fit; None for others."""
    if not _are_integers(value):
        return None
    array = np.asarray(value)
    fits_int32 = array.dtype == np.int64 and (not array.size or (abs(array.min() + 1) < 2**31 and array.max() < 2**31))
    return np.dtype(np.int32) if fits_int32 else None


def _are_integers(value: Any) -> bool:
    if isinstance(value, list | tuple | range):
        return len(value) > 0 and all(map(_are_integers, value))
    return type(value) is int


def in_double(value: Any) -> Any:
    """Return Python numbers with decimals, or nested lists of them, as an array that a cast rounds once.

    Others as they are, which become tensors of their own type.
    """
    has_decimals = isinstance(value, list | tuple) and _are_numbers(value) and not _are_integers(value)
    if value.__class__ is float or has_decimals:
        return np.asarray(value, np.float64)
    return value


def _are_numbers(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return len(value) > 0 and all(map(_are_numbers, value))
    return type(value) in (int, float)


def _converted(value: Any, met: Sequence[DType]) -> Tensor:
    """Convert an array or number beside operands of these types."""
    dtype: Any = None
    if isinstance(value, float):
        floats = [kind for kind in met if is_floating(kind)]
        dtype = promoted(*floats) if floats else floatx()
        return of_value(np.array(value, dtype))
    if isinstance(value, int | Dim) and not isinstance(value, bool) and met:
        common = met[0] if len(met) == 1 else promoted(*met)
        dtype = _of_integers(value) if common.kind == "b" else common
    elif not met:
        dtype = _of_integers(value)
    return counted(value, dtype) if isinstance(value, Dim) else constant(value, dtype)


def counted(length: Any, dtype: npt.DTypeLike | None = None) -> Tensor:
    """Return a length as a constant, which differs by batch if it counts rows or is unknown."""
    if is_number(length):
        number = constant(number_of(length), dtype)
        tensor = row_count(number, length.scale) if isinstance(length, Dim) else number
    else:
        tensor = Tensor(None, (), {"length": length, "dtype": dtype}, (), np.dtype(dtype or np.int64))
    tensor.length = length
    return tensor


Dim.to_tensor = staticmethod(counted)


def row_count(rows: Tensor, scale: int) -> Tensor:
    """Return a constant multiple of the number of rows."""
    return Tensor(None, (), {"rows": scale}, rows.shape, rows.dtype, rows.value)


def constant(value: Any, dtype: npt.DTypeLike | None = None) -> Tensor:
    """Return a constant tensor; ConfigError for other than real numbers."""
    if isinstance(value, Tensor):
        return value
    array = native(np.asarray(value, dtype))
    if dtype is None and array.dtype == np.float64 and not isinstance(value, np.ndarray | np.generic):
        array = array.astype(floatx())
    if array.dtype.kind not in "iub" and not is_floating(array.dtype):
        raise ConfigError(f"a tensor of {array.dtype}: expected real numbers")
    return of_value(array)


def of_value(value: Array) -> Tensor:
    """Return a constant of an array, unchecked."""
    shape, dtype = kind = value.shape, value.dtype
    tensor = Tensor(None, (), {}, shape, dtype, value)
    tensor.kind = kind
    return tensor


class Storage(Protocol):
    """A device's memory, as seen by the variables in it."""

    def read(self, variable: "Variable") -> Array:
        """Return a copy of a variable's value."""

    def write(self, variable: "Variable", value: Array) -> None:
        """Replace a variable's value, by one of its shape and dtype."""


@dataclass(frozen=True)
class Drawn:
    """A variable's initial value, drawn (equally at every call) on first use: a rank may need only a part."""

    shape: Shape
    dtype: npt.DTypeLike
    draw: Callable[[], Array]


class Variable(Operand):
    """A tensor that persists from step to step: a weight, a slot of an optimizer, a metric's total, a seed.

    Inside a trace `assign` is recorded; the program then has the new value among its updates.

    Args:
        value: initial value, or a `Drawn`.
        name: for messages and files.
        trainable: whether it has a gradient.
        dtype: to which the value is cast.
        regularizer: returns its penalty, called with the variable.
        constraint: returns its value after an optimizer's update, called with the variable.
        aggregation: "sum" if ranks may each keep a summand, such as of a metric's total; else "none".

    Attributes:
        _path: unique in a model and below it, "layer/name" of a weight; by default the name.
        _scope_path: see `path`; None for `_path`.
        pruning: how its elements become zero in training (`dptrain.pruning`); an optimizer keeps its mask.
        storage: the device that holds its value, or None for this object's memory.
        moves: counts the beginnings and ends of its moves: odd during a move.
        autocast: it is read in the compute type of the current layer.
        overwrite_with_gradient: an optimizer replaces it by its gradient, such as the scale of quantized numbers.
        of_data: a layer's `adapt` has computed it from data, which must be the same on all ranks.
        declared_trainable: the `trainable` that it was made with, by which a layer orders its weights, as in Keras.
        low_rank: the trained product that its layer adds to it (`layers.low_rank`); files of weights have the sum.
        if_missing: what reading a file of weights without it does: refuse it, set it to 0 or keep its value. Files are
            written without it unless this is "refuse".
        watched: the `Tensor.tracking` of its value if it is not trainable.
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
        self.name = self._path = name
        self._scope_path: str | None = None
        self.trainable, self.regularizer, self.constraint = trainable, regularizer, constraint
        self.declared_trainable = trainable
        self.aggregation: Literal["none", "sum"] = aggregation
        self.pruning: Any = None
        self.low_rank: Any = None
        self.if_missing: Literal["refuse", "zero", "keep"] = "refuse"
        self.storage: Storage | None = None
        self.moves = 0
        self._grad: Tensor | None = None
        self.watched = NOT_TRACKED
        self.autocast = self.overwrite_with_gradient = self.of_data = False
        self._draw: Callable[[], Array] | None = None
        if isinstance(value, Drawn):
            self._hold_later(value.draw, value.shape, np.dtype(dtype or value.dtype))
        else:
            self._held = self._own(constant(value, dtype).numpy())

    @property
    def path(self) -> str:
        """The names of the enclosing layers and its own, such as "block/dense/kernel"; as in Keras."""
        return self._scope_path or self._path

    @path.setter
    def path(self, path: str) -> None:
        self._path = path

    def _hold_later(self, draw: Callable[[], Array] | None, shape: Shape, dtype: DType) -> None:
        """Hold only shape and type, and draw the value on first use; None: never."""
        self._draw, self._held = draw, of_value(np.broadcast_to(np.zeros((), dtype), shape))

    def _at_hand(self) -> Tensor:
        """Return the value in this object's memory."""
        if self._draw is not None:
            with MAKING:
                draw = self._draw
                if draw is not None:  # unless another thread has drawn it meanwhile
                    value = self._own(draw().astype(self.dtype, copy=False))
                    with REPLACING:
                        if self._draw is draw:  # or assigned another value
                            self._held, self._draw = value, None
        return self._held

    def _now(self) -> Tensor:
        """Return a consistent value outside a trace, even if another thread assigns or moves it."""
        while True:
            moves = self.moves
            if self.storage is None and not TURNS.is_eager:
                tensor = self._at_hand()
            else:
                with TURNS.reading(self):
                    tensor = self._at_hand() if self.storage is None else self._own(self.storage.read(self))
            if moves == self.moves and not moves % 2:
                return tensor
            time.sleep(0)

    def _own(self, value: Array) -> Tensor:
        """Return a copy as this variable's value, without history."""
        tensor = of_value(np.array(value, order="C"))
        tensor.name, tensor.variable = self.name, self
        return tensor

    @property
    def value(self) -> Tensor:
        """Its value, or inside a trace the tensor for it."""
        trace = TRACE.get()
        if trace is not None:
            tensor = trace.value_of(self)
        elif self._is_lent:
            tensor = LENT.get()[self]  # type: ignore[index]
        else:
            tensor = self._now()
            tensor.tracking = TRAINABLE if self.trainable else self.watched
        read_in = READ_IN.get() if self.autocast else None
        return tensor if read_in is None else METHODS["cast"](tensor, read_in)

    @property
    def _is_lent(self) -> bool:
        """Whether it has another value for now, outside a trace."""
        lent = LENT.get()
        return lent is not None and self in lent

    @property
    def _is_symbolic(self) -> bool:
        return TRACE.get() is not None

    @property
    def _gradient(self) -> Tensor | None:
        """The sum of `backward` since it was last set to None; inside a trace, in that trace."""
        trace = TRACE.get()
        return self._grad if trace is None else trace.gradients.get(self)

    @_gradient.setter
    def _gradient(self, grad: Tensor | None) -> None:
        trace = TRACE.get()
        if trace is None:
            self._grad = grad
        elif grad is None:
            trace.gradients.pop(self, None)
        else:
            trace.gradients[self] = grad

    @property
    def shape(self) -> Shape:
        """Shape of the value."""
        return self._held.shape

    @property
    def dtype(self) -> DType:
        """Type of the value."""
        return self._held.dtype

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    def numpy(self) -> Array:
        """Return a copy of the value; see `Tensor.numpy`."""
        if self.storage is not None and TRACE.get() is None and not self._is_lent:
            return self._now().numpy()
        return np.array(self.value.numpy())

    def _snapshot(self) -> Drawn:
        """Return the present value, also inside a trace, as another variable's initial value.

        A value not yet drawn is drawn when that is read. A sharded value is gathered: all ranks must call this.
        """
        tensor = self._held if self.storage is None else self._now()
        return Drawn(self.shape, self.dtype, self._draw or tensor.numpy)

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> Array:
        return np.asarray(self.numpy(), dtype)

    def __float__(self) -> float:
        return float(self.value)

    def __int__(self) -> int:
        return int(self.value)

    def assign(self, value: Any) -> Tensor:
        """Assign a value of the same shape, cast to its dtype, and return it; ConfigError for another shape."""
        tensor = as_tensors([in_double(value)])[0]
        if tensor.shape != self.shape:
            raise ConfigError(f"variable {self._path!r} has shape {self.shape}; assigned shape {tensor.shape}")
        if tensor.dtype != self.dtype:
            tensor = METHODS["cast"](tensor, self.dtype)
        trace = TRACE.get()
        if trace is not None:
            trace.write(self, tensor)
            return tensor
        lent = LENT.get()
        if lent is None:
            self._store(tensor.numpy())
        else:
            lent[self] = tensor.detached()  # gradients end here, as at any assignment
        return tensor

    def _store(self, value: Array) -> None:
        with TURNS.writing(self), REPLACING:
            if self.storage is not None:
                self.storage.write(self, value)
            else:
                self._held, self._draw = self._own(value), None

    def assign_add(self, value: Any) -> Tensor:
        """Add a value; return the sum."""
        return self.assign(self + self._in_own_type(value))

    def assign_sub(self, value: Any) -> Tensor:
        """Subtract a value; return the difference."""
        return self.assign(self - self._in_own_type(value))

    def _in_own_type(self, value: Any) -> Any:
        """Return a list of numbers as a tensor of the variable's type, as a number is beside it; others as they are."""
        return METHODS["cast"](value, self.dtype) if isinstance(value, list | tuple) else value

    def _move(self, storage: Storage | None) -> None:
        """Move the value to a device that has it already, or (None) back."""
        tensor = self._own(self.storage.read(self)) if storage is None and self.storage is not None else None
        with REPLACING:
            self.moves += 1
            if tensor is not None:
                self._held = tensor
            elif storage is not None:  # it has shape and type, and takes no memory
                self._hold_later(None, self.shape, self.dtype)
            self.storage = storage
            self.moves += 1

    def __repr__(self) -> str:
        return f"<variable {self._path} {self.shape} {self.dtype.name}>"


class Trace:
    """Variables read (with placeholders) and written, gradients, and gradients given to optimizers during a trace."""

    def __init__(self) -> None:
        self.applied: list[Tensor] = []
        self.weight_gradients: dict[Tensor, Variable] = {}
        self.read: dict[Variable, Tensor] = {}
        self.written: dict[Variable, Tensor] = {}
        self.gradients: dict[Variable, Tensor] = {}

    def value_of(self, variable: Variable) -> Tensor:
        """Return a variable's current tensor: the last assigned, else its placeholder."""
        return self.written[variable] if variable in self.written else self.placeholder_of(variable)

    def placeholder_of(self, variable: Variable) -> Tensor:
        """Return the placeholder of a variable's value before the step."""
        if variable not in self.read:
            self.read[variable] = placeholder(variable.shape, variable.dtype, variable._path, variable)
        return self.read[variable]

    def write(self, variable: Variable, value: Tensor) -> None:
        """Record a new value; gradients end at it, as outside a trace."""
        leaf = Tensor(OPERATORS["identity"], (value,), {}, value.shape, value.dtype, name=variable._path)
        leaf.variable = variable
        self.written[variable] = leaf


@contextmanager
def reading_weights_in(dtype: DType | None) -> Iterator[None]:
    """Read autocast weights in another type in this context; None for their own."""
    token = READ_IN.set(dtype)
    try:
        yield
    finally:
        READ_IN.reset(token)


@contextmanager
def scope(name: str) -> Iterator[None]:
    """Name tensors made in this context after a layer, for messages and tables."""
    token = SCOPE.set(name)
    try:
        yield
    finally:
        SCOPE.reset(token)


@contextmanager
def watching(check: "Callable[[Tensor], None] | None" = None) -> Iterator[None]:
    """Show every computed value to `check` in this context; by default stop at the first NaN."""
    token = WATCH.set(check or _refuse_nan)
    try:
        yield
    finally:
        WATCH.reset(token)


def watch(tensor: Tensor, value: Array, inputs: Sequence[Array]) -> None:
    """Show a computed value, and those that it was computed from, to the watcher."""
    check = WATCH.get()
    if check is not None:
        parents = [_with_value(parent, read, parent.inputs) for parent, read in zip(tensor.inputs, inputs, strict=True)]
        check(_with_value(tensor, value, parents))


def _with_value(tensor: Tensor, value: Array, inputs: Sequence[Tensor]) -> Tensor:
    return Tensor(tensor.op, inputs, tensor.attributes, tensor.shape, tensor.dtype, value, tensor.name, tensor.index)


def _refuse_nan(tensor: Tensor) -> None:
    assert tensor.value is not None
    if is_floating(tensor.dtype) and np.isnan(tensor.value).any():
        place = [int(n) for n in np.argwhere(np.isnan(tensor.value))[0]]
        within = f" of layer {tensor.name!r}" if tensor.name else ""
        assert tensor.op is not None
        raise DivergenceError(
            f"op {tensor.op.name!r}{within} is the first to produce a NaN, at {place} of shape {tensor.value.shape}"
        )


def note_applied(gradients: Sequence[Tensor]) -> None:
    """Record gradients given to an optimizer, inside a trace."""
    trace = TRACE.get()
    if trace is not None:
        trace.applied += gradients


def note_weight_gradients(gradients: Mapping[Tensor, Variable]) -> None:
    """Record weight gradients, inside a trace."""
    trace = TRACE.get()
    if trace is not None:
        trace.weight_gradients |= gradients


def applied_gradients() -> list[Tensor]:
    """Return the gradients given to optimizers in this trace."""
    trace = TRACE.get()
    return [] if trace is None else list(trace.applied)


def update_if(condition: Tensor) -> None:
    """Make all assignments of this trace conditional: where a scalar is false, variables keep their old values."""
    trace = TRACE.get()
    assert trace is not None
    behind, stack = set(), [condition]
    while stack:
        tensor = stack.pop()
        if id(tensor) not in behind:
            behind.add(id(tensor))
            stack += tensor.inputs
    for variable, leaf in list(trace.written.items()):
        old = trace.placeholder_of(variable)
        if id(leaf) in behind:  # it was read for the decision
            trace.write(variable, OPERATORS["select"](condition, leaf, old))
        else:  # later reads, such as a metric's result, use the kept value
            leaf.inputs = (OPERATORS["select"](condition, leaf.inputs[0], old),)


@contextmanager
def unchanged(variables: "Iterable[Variable]") -> Iterator[None]:
    """Restore variables after this context."""
    trace = TRACE.get()
    if trace is not None:
        before = {variable: trace.written.get(variable) for variable in variables}
        yield
        for variable, leaf in before.items():
            trace.written.pop(variable, None)
            if leaf is not None:
                trace.written[variable] = leaf
        return
    values = {variable: variable.numpy() for variable in variables}
    yield
    for variable, value in values.items():
        variable.assign(value)


def watch_for_tape(watched: Tensor | Variable, tracking: int) -> int:
    """Track results of a tensor or variable (see `Tensor.tracking`); return the tracking before."""
    if isinstance(watched, Variable):
        before, watched.watched = watched.watched, tracking
    else:
        before, watched.tracking = watched.tracking, max(tracking, watched.tracking if tracking else NOT_TRACKED)
    return before


def open_tape() -> Token[int]:
    """Count one more open tape; see `close_tape`."""
    return TAPES.set(TAPES.get() + 1)


def close_tape(token: Token[int]) -> None:
    """Count one less."""
    TAPES.reset(token)


def is_tracing() -> bool:
    """Whether ops are recorded instead of executed."""
    return TRACE.get() is not None


@contextmanager
def tracing() -> Iterator[Trace]:
    """Record ops in this context that depend on placeholders or rows."""
    token = TRACE.set(Trace())
    try:
        trace = TRACE.get()
        assert trace is not None
        yield trace
    finally:
        TRACE.reset(token)


@contextmanager
def untraced() -> Iterator[None]:
    """Execute ops in this context as outside a trace."""
    token = TRACE.set(None)
    try:
        yield
    finally:
        TRACE.reset(token)


def differentiable(value: Any) -> Tensor:
    """Return a constant for which gradients can be computed."""
    leaf = constant(value).detached()
    leaf.tracking = TRAINABLE
    return leaf


def placeholder(shape: Shape, dtype: npt.DTypeLike, name: str, variable: Variable | None = None) -> Tensor:
    """Return a tensor whose value comes with each execution, under this name, or from a variable."""
    tensor = Tensor(None, (), {}, shape, np.dtype(dtype), None, name)
    tensor.variable = variable
    return tensor
