"""Where tensors lie on the ranks: a program of the whole batch becomes one that each rank executes on its own rows.

A tensor is *replicated* (every rank has it), *sharded* (a rank has its rows, along one axis) or *partial* (a rank has a
summand; the value is the sum over the ranks). The batch comes in sharded, the state replicated. Each op says along
which axes it can be divided (`Op.letters`) and in what it is linear (`Op.linear`); the rest follows:

- sums over the sharded axis are partial;
- what is linear in a partial tensor, with all else replicated, is partial again;
- any other use of a partial tensor needs its sum: an all-reduce goes in there, as late as linearity allows;
- a replicated tensor that meets rows is cut to the rank's own rows.

A division by a partial number (a sum of sample weights) waits as long: the quotient goes on as its numerator, and the
divisor is summed together with whatever needs the quotient. So sums of gradients and of weights can travel in one
message.

Source of the rules: Y. Xu et al., "GSPMD: General and scalable parallelization for ML computation graphs",
arXiv:2105.04663, and DTensor of PyTorch.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from dptrain.errors import ConfigError
from dptrain.program.letters import Named
from dptrain.program.lowering import Element, ViewMap
from dptrain.program.op import Op
from dptrain.program.operand import OPERATORS
from dptrain.program.program import Program
from dptrain.program.shapes import Rows, Shape, row_axis, size
from dptrain.program.tensor import Array, Tensor, Variable
from dptrain.program.views import IndexMap, Offset


@dataclass(frozen=True)
class Placement:
    """Where a tensor lies.

    Attributes:
        axis: along which it is sharded, or None.
        partial: how the ranks' parts make the value, or None where they do not have to.
    """

    axis: int | None = None
    partial: Literal["sum", "max"] | None = None

    def __str__(self) -> str:
        if self.partial:
            return "partial" if self.partial == "sum" else f"partial {self.partial}"
        return "replicated" if self.axis is None else f"sharded {self.axis}"


REPLICATED = Placement()
PARTIAL = Placement(partial="sum")


def _keep_shape(shape: Shape, **attributes: Any) -> Shape:
    return shape


def _keep_dtype(dtype: np.dtype[Any], **attributes: Any) -> np.dtype[Any]:
    return dtype


def _not_placed(*arguments: Any) -> str:
    raise AssertionError("ops of a placed program are not placed again")


def _on_one_rank(x: Any, **attributes: Any) -> Any:
    return x


def _own_maps(made: Tensor) -> list[IndexMap]:
    axis, length = made.attributes["axis"], made.shape[made.attributes["axis"]]
    scale = length.scale if isinstance(length, Rows) else 0
    return [IndexMap(n, Offset(first=scale if n == axis else 0)) for n in range(made.ndim)]


# The two ops that a placed program has besides those of its source; `evaluate` carries them out.
ALL_REDUCE = Op(_on_one_rank, _keep_shape, _not_placed, _keep_dtype)
ALL_REDUCE.name = "all_reduce"
OWN_ROWS = Op(_on_one_rank, _keep_shape, _not_placed, _keep_dtype, lowering=ViewMap(_own_maps))
OWN_ROWS.name = "own_rows"


@dataclass(frozen=True, eq=False)
class PlacedProgram(Program):
    """A program for one of several ranks.

    Attributes:
        placements: of every tensor, by its `id`.
        summed: variables of which each rank has a summand.
        bucket_bytes: of sums that travel as one message at most; None for any number.
    """

    placements: Mapping[int, Placement] = field(default_factory=dict)
    summed: frozenset[Variable] = frozenset()
    bucket_bytes: int | None = None


@dataclass(frozen=True, eq=False)
class _Part:
    """What a rank has of a tensor.

    Attributes:
        tensor: of the placed program.
        placement: of `tensor`.
        divisor: by which `tensor` is still to be divided, or None.
    """

    tensor: Tensor
    placement: Placement
    divisor: "_Divisor | None" = None


@dataclass(frozen=True, eq=False)
class _Divisor:
    """What a quotient still waits for.

    Attributes:
        tensor: a partial number.
        op: that divides by its sum.
    """

    tensor: Tensor
    op: Op


def place(program: Program, summed: Collection[Variable] = (), *, bucket_bytes: int | None = None) -> PlacedProgram:
    """Return the program of one rank.

    Args:
        program: inputs whose shape counts rows come in sharded, the others replicated. What comes out is replicated,
            but for outputs whose shape counts rows, of which each rank has its own.
        summed: variables of which each rank is to keep a summand (totals of metrics, to be summed when they are read),
            where their updates allow it; `PlacedProgram.summed` says of which it does.
        bucket_bytes: of sums that travel as one message at most; None for any number.

    Raises:
        ConfigError: an op needs the rows of all ranks at once.
    """
    chosen = set(summed)
    while True:
        placing = _Placing(chosen)
        for tensor in program.tensors:
            placing.add(tensor)
        refused = {one for one in chosen if not placing.stays_partial(program.updates.get(one))}
        if not refused:
            break
        chosen -= refused  # their values must be whole: placed again, as all that has been made of them
    outputs = {name: placing.finished(one) for name, one in program.outputs.items()}
    updates = {
        variable: placing.parts[id(one)].tensor if variable in chosen else placing.finished(one)
        for variable, one in program.updates.items()
    }
    placed = (program.inputs, program.state, outputs, updates, program.derived)
    return PlacedProgram(*placed, placing.placements, frozenset(chosen), bucket_bytes)


class _Placing:
    """The work of `place`."""

    def __init__(self, summed: Collection[Variable]) -> None:
        self._summed = summed
        self.parts: dict[int, _Part] = {}
        self.placements: dict[int, Placement] = {}
        self._reduced: dict[int, Tensor] = {}
        self._kept: list[Tensor] = []  # so that no two tensors of this work can have the same id

    def add(self, tensor: Tensor) -> None:
        """Place a tensor, whose inputs have been placed."""
        if tensor.op is None:
            axis = row_axis(tensor.shape) if tensor.value is None else None
            partial = PARTIAL if tensor.variable in self._summed else None
            self.parts[id(tensor)] = self._note(tensor, partial or Placement(axis))
        else:
            self.parts[id(tensor)] = self._place(tensor.op, tensor, [self.parts[id(one)] for one in tensor.inputs])

    def stays_partial(self, tensor: Tensor | None) -> bool:
        """Whether a new value of a variable is a summand as the old one was."""
        part = None if tensor is None else self.parts[id(tensor)]
        return part is None or (part.placement == PARTIAL and part.divisor is None)

    def finished(self, tensor: Tensor) -> Tensor:
        """Return a result as it is handed out: summed and divided."""
        return self._whole(self.parts[id(tensor)]).tensor

    def _place(self, op: Op, tensor: Tensor, parts: list[_Part]) -> _Part:
        converts = isinstance(op.lowering, Element) and op.lowering.converts
        if converts and not self._summed and parts[0].tensor.dtype.itemsize < tensor.dtype.itemsize:
            parts = [self._whole(parts[0])]  # the narrower type makes the smaller message
        if op.quotient and self._can_wait(tensor, *parts):
            return self._note(parts[0].tensor, parts[0].placement, _Divisor(self._number(parts[1]), op))
        parts = [self._whole(one) if one.placement.partial == "max" else one for one in parts]
        divisor = self._common_divisor(op, parts)
        parts = [_Part(one.tensor, one.placement) if divisor is not None else self._divided(one) for one in parts]
        named = op.named(tensor)
        letter = self._letter(named, tensor, parts)
        if letter is None and all(one.placement.axis is None for one in parts):
            parts, placement = self._linear(op, parts)
        else:
            axes = [None if letter is None or letter not in one else one.index(letter) for one in named.inputs]
            rows = next(n for one in (tensor, *tensor.inputs) for n in one.shape if isinstance(n, Rows))
            parts = [self._sharded(op, self._whole(one), axis, rows) for one, axis in zip(parts, axes, strict=True)]
            if letter is None or letter in named.output:
                placement = Placement(None if letter is None else named.output.index(letter))
            else:
                placement = Placement(partial=op.joins)
        return self._note(tensor.with_inputs([one.tensor for one in parts]), placement, divisor)

    def _letter(self, named: Named, tensor: Tensor, parts: list[_Part]) -> str | None:
        """Return the letter along which ranks divide an op; None where each computes the whole."""
        sharded = [
            (one, names[one.placement.axis])
            for one, names in zip(parts, named.inputs, strict=True)
            if one.placement.axis is not None
        ]
        if sharded:
            most = max(sharded, key=lambda one: (one[1].islower(), size(one[0].tensor.shape)))
            return most[1] if most[1].islower() else None
        made = [letter for letter, n in zip(named.output, tensor.shape, strict=True) if isinstance(n, Rows)]
        return made[0] if made and made[0].islower() else None

    def _own_count(self, tensor: Tensor) -> Tensor | None:
        """Return this rank's summand of a number that counts rows: how many of them it has; None for other numbers."""
        if tensor.counts_rows:
            own = Tensor(None, (), tensor.attributes | {"own": True}, tensor.shape, tensor.dtype, tensor.value)
            return self._note(own, PARTIAL).tensor
        if tensor.op is None or tensor.op.linear is None:
            return None
        found = [self._own_count(one) for one in tensor.inputs]
        counted = [number for number, one in enumerate(found) if one is not None]
        others_known = all(
            one.op is None and one.value is not None
            for one, own in zip(tensor.inputs, found, strict=True)
            if own is None
        )
        if len(counted) != 1 or not others_known or tensor.op.linear != "each":
            return None
        if tensor.op.linear_in is not None and counted[0] not in tensor.op.linear_in:
            return None
        inputs = [one if own is None else own for one, own in zip(tensor.inputs, found, strict=True)]
        return self._note(Tensor(tensor.op, inputs, tensor.attributes, tensor.shape, tensor.dtype), PARTIAL).tensor

    def _with_own_counts(self, op: Op, parts: list[_Part]) -> list[_Part]:
        """Return the inputs of a sum in which, beside partial ones, numbers of rows are those of each rank."""
        if not self._summed or op.linear != "joint" or not any(one.placement == PARTIAL for one in parts):
            return parts
        found = []
        for one in parts:
            own = self._own_count(one.tensor) if one.placement == REPLICATED and one.divisor is None else None
            found.append(one if own is None else _Part(own, PARTIAL))
        return found

    def _linear(self, op: Op, parts: list[_Part]) -> tuple[list[_Part], Placement]:
        """Return the inputs of an op of whole tensors, and where its output lies: partial where it is linear in one."""
        parts = self._with_own_counts(op, parts)
        partial = [number for number, one in enumerate(parts) if one.placement == PARTIAL]
        tensors = {id(parts[number].tensor) for number in partial}
        if tensors and (tensors <= self._reduced.keys() or (op.linear == "each" and len(tensors) < len(partial))):
            # The sums are there already, or are those of a square, which needs them: linearity would send others.
            parts = [self._whole(one) for one in parts]
        partial = [number for number, one in enumerate(parts) if one.placement == PARTIAL]
        if partial and op.linear is not None:
            linear_in = range(len(parts)) if op.linear_in is None else op.linear_in
            if op.linear == "joint" and partial == _not_zero(parts, linear_in):
                return parts, PARTIAL
            candidates = [number for number in partial if number in linear_in]
            if op.linear == "each" and candidates:
                keep = max(candidates, key=lambda number: size(parts[number].tensor.shape))
                others = [one if number == keep else self._whole(one) for number, one in enumerate(parts)]
                if id(parts[keep].tensor) not in self._reduced:  # or it is summed already, as of a square
                    return others, PARTIAL
        return [self._whole(one) for one in parts], REPLICATED

    def _can_wait(self, tensor: Tensor, numerator: _Part, denominator: _Part) -> bool:
        """Whether a division can wait for its divisor's sum: by a number, of something that is not yet divided."""
        return (
            denominator.placement == PARTIAL
            and denominator.divisor is None
            and size(denominator.tensor.shape) == 1
            and numerator.divisor is None
            and numerator.tensor.shape == tensor.shape
        )

    def _number(self, part: _Part) -> Tensor:
        """Return a partial number without dimensions, so that it can divide whatever becomes of the quotient."""
        if part.tensor.shape == ():
            return part.tensor
        made = Tensor(OPERATORS["reshape"], (part.tensor,), {"shape": ()}, (), part.tensor.dtype)
        return self._note(made, PARTIAL).tensor

    def _common_divisor(self, op: Op, parts: list[_Part]) -> _Divisor | None:
        """Return the divisor that an op's output can take over from its inputs, or None."""
        divisors = [one.divisor for one in parts]
        known = [number for number, one in enumerate(divisors) if one is not None]
        linear_in = range(len(parts)) if op.linear_in is None else op.linear_in
        if op.linear == "each" and len(known) == 1 and known[0] in linear_in:
            return divisors[known[0]]
        if (
            op.linear == "joint"
            and known
            and known == _not_zero(parts, linear_in)
            and len({one for one in divisors if one is not None}) == 1
        ):
            return divisors[known[0]]
        return None

    def _divided(self, part: _Part) -> _Part:
        """Return a part without a divisor that waits."""
        if part.divisor is None:
            return part
        whole = part if part.placement.partial is None else self._reduce(part)
        by = self._reduce(_Part(part.divisor.tensor, PARTIAL))
        made = Tensor(part.divisor.op, (whole.tensor, by.tensor), {}, whole.tensor.shape, whole.tensor.dtype)
        return self._note(made, whole.placement)

    def _whole(self, part: _Part) -> _Part:
        """Return a part that is not partial, and not to be divided."""
        part = self._divided(part)
        return part if part.placement.partial is None else self._reduce(part)

    def _reduce(self, part: _Part) -> _Part:
        """Return the sum of a partial tensor; made once, however often it is used."""
        made = self._reduced.get(id(part.tensor))
        if made is None:
            attributes = {"over": part.placement.partial}
            made = Tensor(ALL_REDUCE, (part.tensor,), attributes, part.tensor.shape, part.tensor.dtype)
            self._reduced[id(part.tensor)] = made
        return self._note(made, REPLICATED)

    def _sharded(self, op: Op, part: _Part, axis: int | None, rows: Rows) -> _Part:
        """Return a part sharded along an axis, or whole for None.

        Raises:
            ConfigError: it is sharded otherwise.
        """
        if part.placement.axis == axis:
            return part
        if part.placement.axis is not None or axis is None:
            raise ConfigError(
                f"op {op.name!r} needs the rows of all ranks at once, of a tensor that is {part.placement} in shape "
                f"{tuple(map(int, part.tensor.shape))}: not supported"
            )
        shape = list(part.tensor.shape)
        shape[axis] = Rows(rows.rows, shape[axis] // rows.rows) if rows.rows else rows
        made = Tensor(OWN_ROWS, (part.tensor,), {"axis": axis}, tuple(shape), part.tensor.dtype)
        return self._note(made, Placement(axis))

    def _note(self, tensor: Tensor, placement: Placement, divisor: _Divisor | None = None) -> _Part:
        self.placements[id(tensor)] = placement
        self._kept.append(tensor)
        return _Part(tensor, placement, divisor)


def _not_zero(parts: Sequence[_Part], numbers: Iterable[int]) -> list[int]:
    """Return which parts are not the constant 0, which is its own summand and quotient."""

    def is_zero(tensor: Tensor) -> bool:
        known = tensor.value if tensor.op is None and not tensor.counts_rows else None
        return known is not None and known.size == 1 and not known.any()

    return [number for number in numbers if not is_zero(parts[number].tensor)]


def own_rows(tensor: Tensor, array: Array, rows: int | None, first_row: int) -> Array:
    """Return what `OWN_ROWS` makes of a whole array: the view of the rank's rows."""
    axis, length = tensor.attributes["axis"], tensor.shape[tensor.attributes["axis"]]
    if rows is None:
        return array
    assert isinstance(length, Rows)
    own = slice(first_row * length.scale, (first_row + rows) * length.scale)
    found: Array = array[(slice(None),) * axis + (own,)]
    return found


def constant_of(tensor: Tensor, rows: int | None) -> Array:
    """Return the value of a constant as a rank has it: of a number of rows that is its own summand, its rows."""
    value = tensor.numpy()
    if rows is None or not tensor.attributes.get("own"):
        return value
    return np.full(value.shape, rows * tensor.attributes["rows"], value.dtype)
