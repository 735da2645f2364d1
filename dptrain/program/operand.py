"""The operators of tensors and variables, as calls of ops."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal

from dptrain.errors import ConfigError
from dptrain.program.dims import counts_rows

if TYPE_CHECKING:
    from dptrain.program.op import Op
    from dptrain.program.tensor import Tensor

# All ops by name.
OPS: dict[str, "Op"] = {}
# Python's operators, and ops that the core itself adds to programs.
# fmt: off
Operator = Literal[
    "+", "-", "*", "/", "//", "**", "@", "neg", "abs", "&", "|", "~", "==", "!=", "<", "<=", ">", ">=",
    "broadcast", "fill", "identity", "join", "reshape", "same", "scatter", "select", "transpose",
]
# fmt: on
# Their ops, from the records.
OPERATORS: dict[Operator, "Op"] = {}
# Tensor methods that are written in ops, by the higher module that defines them.
METHODS: dict[Literal["%", "+", "@", "[]", "backward", "cast", "round", "transpose"], Callable[..., Any]] = {}


_BOUNDS = (int, type(None))
_PLAIN = (int, type(None), type(Ellipsis))


def is_plain(key: Any) -> bool:
    """Whether an index consists only of numbers (no row counts), slices, None and an ellipsis."""
    for part in key if key.__class__ is tuple else (key,):
        kind = part.__class__
        if kind is slice:
            bounds = part.start.__class__ in _BOUNDS and part.stop.__class__ in _BOUNDS
            if not bounds or part.step.__class__ not in _BOUNDS:
                return False
        elif kind not in _PLAIN:
            return False
    return True


class Operand:
    """An operand of expressions: a tensor, or a variable, which stands for its value."""

    __slots__ = ()
    __array_priority__ = 1000  # NumPy leaves `array * tensor` to the tensor

    def __add__(self, other: Any) -> "Tensor":
        return OPERATORS["+"](self, other)

    def __radd__(self, other: Any) -> "Tensor":
        return OPERATORS["+"](other, self)

    def __sub__(self, other: Any) -> "Tensor":
        return OPERATORS["-"](self, other)

    def __rsub__(self, other: Any) -> "Tensor":
        return OPERATORS["-"](other, self)

    def __mul__(self, other: Any) -> "Tensor":
        return OPERATORS["*"](self, other)

    def __rmul__(self, other: Any) -> "Tensor":
        return OPERATORS["*"](other, self)

    def __truediv__(self, other: Any) -> "Tensor":
        return OPERATORS["/"](self, other)

    def __rtruediv__(self, other: Any) -> "Tensor":
        return OPERATORS["/"](other, self)

    def __floordiv__(self, other: Any) -> "Tensor":
        return OPERATORS["//"](self, other)

    def __pow__(self, other: Any) -> "Tensor":
        return OPERATORS["**"](self, other)

    def __matmul__(self, other: Any) -> "Tensor":
        product: Tensor = METHODS["@"](self, other)
        return product

    def __rmatmul__(self, other: Any) -> "Tensor":
        product: Tensor = METHODS["@"](other, self)
        return product

    def __rpow__(self, other: Any) -> "Tensor":
        return OPERATORS["**"](other, self)

    def __mod__(self, other: Any) -> "Tensor":
        remainder: Tensor = METHODS["%"](self, other)
        return remainder

    def __rmod__(self, other: Any) -> "Tensor":
        remainder: Tensor = METHODS["%"](other, self)
        return remainder

    def __rfloordiv__(self, other: Any) -> "Tensor":
        return OPERATORS["//"](other, self)

    def __neg__(self) -> "Tensor":
        return OPERATORS["neg"](self)

    def __pos__(self) -> "Tensor":
        tensor: Tensor = METHODS["+"](self)
        return tensor

    def __abs__(self) -> "Tensor":
        return OPERATORS["abs"](self)

    def __round__(self, ndigits: int | None = None) -> "Tensor":
        rounded: Tensor = METHODS["round"](self, ndigits or 0)
        return rounded

    def __and__(self, other: Any) -> "Tensor":
        return OPERATORS["&"](self, other)

    def __rand__(self, other: Any) -> "Tensor":
        return OPERATORS["&"](other, self)

    def __ror__(self, other: Any) -> "Tensor":
        return OPERATORS["|"](other, self)

    def __xor__(self, other: Any) -> "Tensor":
        return OPERATORS["!="](OPERATORS["~"](self), OPERATORS["~"](other))

    __rxor__ = __xor__

    def __or__(self, other: Any) -> "Tensor":
        return OPERATORS["|"](self, other)

    def __invert__(self) -> "Tensor":
        return OPERATORS["~"](self)

    def __lt__(self, other: Any) -> "Tensor":
        return OPERATORS["<"](self, other)

    def __le__(self, other: Any) -> "Tensor":
        return OPERATORS["<="](self, other)

    def __gt__(self, other: Any) -> "Tensor":
        return OPERATORS[">"](self, other)

    def __ge__(self, other: Any) -> "Tensor":
        return OPERATORS[">="](self, other)

    def __eq__(self, other: Any) -> "Tensor":  # type: ignore[override]  # elements, as Keras' tensors
        return OPERATORS["=="](self, other)

    def __ne__(self, other: Any) -> "Tensor":  # type: ignore[override]
        return OPERATORS["!="](self, other)

    __hash__ = object.__hash__

    @property
    def T(self) -> "Tensor":  # noqa: N802  # Keras' and NumPy's name
        """The tensor with its axes in reverse order."""
        transposed: Tensor = METHODS["transpose"](self)
        return transposed

    def __getitem__(self, key: Any) -> "Tensor":
        part: Tensor = METHODS["[]"](self, key)
        return part

    def __iter__(self) -> Iterator["Tensor"]:
        """Yield the parts along the first axis."""
        number = len(self)
        return (self[place] for place in range(number))

    def __len__(self) -> int:
        """Return the length of the first axis; TypeError without axes, ConfigError if it counts rows of a batch."""
        tensor: Any = self  # a tensor or a variable
        if not tensor.shape:
            raise TypeError("a tensor without dimensions has no length")
        (length, *_) = tensor.shape
        if counts_rows(length) and tensor._is_symbolic:
            raise ConfigError(
                f"len() and iteration over the rows of a batch are not supported, as of {self}: their number changes "
                "from batch to batch; ops take all rows at once, and `x.shape[0]` is their number in a computation"
            )
        return int(length)
