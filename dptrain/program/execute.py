"""Executing a program many times with NumPy: calls on views that are cut once, in memory that is planned once.

What does not change from step to step is done when an `Executable` is made: shapes for a rank's rows, views, the arrays
that ops write, and which of them share memory. A step is then a list of calls.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from dptrain.comm.base import Communicator
from dptrain.errors import ConfigError
from dptrain.program.memory import Plan, aligned, plan
from dptrain.program.mesh import OWN_PART, constant_of, own_part
from dptrain.program.messages import all_reduce, stages
from dptrain.program.passes import without_ranks
from dptrain.program.program import ROWS, Program
from dptrain.program.shapes import local
from dptrain.program.tensor import Array, Tensor, Variable

Call = Callable[[], Any]


class HostMemory:
    """The arrays of variables that executables read and write in place; a `Storage`."""

    def __init__(self) -> None:
        self._arrays: dict[Variable, Array] = {}

    def adopt(self, variables: Iterable[Variable]) -> None:
        """Let variables live here; those that do already stay as they are."""
        for one in variables:
            if one.storage is not self:
                self._arrays[one] = aligned(one.shape, one.dtype)
                np.copyto(self._arrays[one], one.numpy())
                one.move(self)

    def release(self, variables: Iterable[Variable]) -> None:
        """Forget variables."""
        for one in variables:
            self._arrays.pop(one, None)

    def array(self, variable: Variable) -> Array:
        """Return a variable's own array."""
        return self._arrays[variable]

    def read(self, variable: Variable) -> Array:
        """Return a copy of its value."""
        return self._arrays[variable].copy()

    def write(self, variable: Variable, value: Array) -> None:
        """Replace its value."""
        np.copyto(self._arrays[variable], value)


class Executable:
    """A program for one number of rows.

    Args:
        program: what is executed.
        memory: where its state lives, and goes on to live.
        arrays: what its inputs read at every step, by name: this rank's rows of what is sharded. Of the input `ROWS`,
            the numbers of stored rows, it is those of many steps, of which each reads its own.
        rows: of the global batch that this rank has; None for all.
        first_row: the global number of the first of them.
        comm: the ranks; None for one.

    Attributes:
        plan: where in memory its tensors are.
        outputs: what the last step made, by name.
        nbytes: of its memory, state and inputs aside.

    Raises:
        ConfigError: an array is missing or has another shape.
    """

    def __init__(
        self,
        program: Program,
        memory: HostMemory,
        arrays: Mapping[str, Array],
        *,
        rows: int | None = None,
        first_row: int = 0,
        comm: Communicator | None = None,
    ) -> None:
        if comm is None or comm.size == 1:
            program = without_ranks(program)
        self._program, self._first_row, self._comm = program, first_row, comm
        self._rows = program.rows if rows is None else rows
        self.plan: Plan = plan(program, rows)
        self._arena = aligned((self.plan.size,), np.uint8)
        self.nbytes = self.plan.size
        self._arrays: dict[int, Array] = {}
        self._calls: list[Call] = []
        self._moves: list[Call] = []
        self.outputs: Mapping[str, Array] = {}
        self._order = self._window = np.empty(0, np.int64)
        for name, one in program.inputs.items():
            if name not in arrays:
                raise ConfigError(f"input {name!r} is missing")
            if name == ROWS:
                self._order, self._window = arrays[name], np.empty(self._shape(one), one.dtype)
                self._arrays[id(one)] = self._window
            else:
                self._arrays[id(one)] = _checked(name, arrays[name], self._shape(one))
        memory.adopt(program.state)
        self.state = {variable: memory.array(variable) for variable in program.state}
        self._arrays |= {id(one): self.state[variable] for variable, one in program.state.items()}
        for stage in stages(program):
            for tensor in stage.tensors:
                if id(tensor) not in self._arrays:
                    self._prepare(tensor)
            for message in stage.messages:
                self._prepare_message(message)
        self._prepare_updates()
        self._results = {name: self._arrays[id(one)] for name, one in program.outputs.items()}

    @np.errstate(all="ignore")  # infinities and NaNs are results, as on a GPU
    def run(self, starts: Sequence[int] = (0,)) -> None:
        """Execute it as often as there are starts. Collective where the program is a placed one.

        Args:
            starts: where in the array `ROWS` each step's rows begin.
        """
        for number, start in enumerate(starts, 1):
            self._window[...] = self._order[start : start + len(self._window)]
            for call in self._calls:
                call()
            if number == len(starts):  # before the moves: outputs may be of the old state
                self.outputs = {name: array.copy() for name, array in self._results.items()}
            for call in self._moves:
                call()

    def close(self) -> None:
        """Nothing is held."""

    def _shape(self, tensor: Tensor) -> tuple[int, ...]:
        return local(tensor.shape, self._rows)

    def _prepare(self, tensor: Tensor) -> None:
        """Give a tensor its array, and note the call that computes it, if there is anything to compute."""
        op, inputs = tensor.op, [self._arrays[id(one)] for one in tensor.inputs]
        if op is None:
            array = constant_of(tensor, self._rows, self._program.rows)
        elif op is OWN_PART:
            array = own_part(tensor, inputs[0], self._rows, self._first_row)
        elif op.is_view:
            array = op.execute(inputs, tensor, self._rows)
            if array.size and not np.may_share_memory(array, inputs[0]):  # strides cannot say this reshape: a copy
                array = self._place(tensor)
                self._calls.append(partial(_copy_of, op, inputs, tensor, self._rows, array))
        else:
            array = self._place(tensor)
            attributes = op.local_attributes(tensor, self._rows, self._first_row)
            self._calls.append(partial(op.compute, *inputs, **attributes, out=array))
        self._arrays[id(tensor)] = array

    def _prepare_message(self, message: list[Tensor]) -> None:
        """Give sums their arrays, one behind the other, and note the calls that fill and sum them."""
        assert self._comm is not None
        over, parts = message[0].attributes["over"], [self._arrays[id(one.inputs[0])] for one in message]
        flat = np.empty(sum(part.size for part in parts), parts[0].dtype)
        places = np.split(flat, np.cumsum([part.size for part in parts])[:-1])
        for one, part, place in zip(message, parts, places, strict=True):
            self._arrays[id(one)] = place.reshape(part.shape)
            self._calls.append(partial(np.copyto, self._arrays[id(one)], part))
        self._calls.append(partial(all_reduce, flat, over, self._comm))

    def _prepare_updates(self) -> None:
        """Note the calls that give the state the new values which were not written over it."""
        moves = [(self._arrays[id(one)], self.state[variable]) for variable, one in self._program.updates.items()]
        moves = [(new, old) for new, old in moves if new is not old]
        for number, (new, old) in enumerate(moves):
            if any(np.may_share_memory(new, state) for state in self.state.values()):  # which may be replaced before
                moves[number] = np.empty_like(old), old
                self._moves.append(partial(np.copyto, moves[number][0], new))
        self._moves += [partial(np.copyto, old, new) for new, old in moves]

    def _place(self, tensor: Tensor) -> Array:
        """Return the array that an op is to write: the state that it replaces, or a place in the arena."""
        replaced = self.plan.in_place.get(id(tensor))
        if replaced is not None:
            return self._arrays[id(replaced)]
        start, shape = self.plan.offsets[id(tensor)], self._shape(tensor)
        size = int(np.prod(shape, dtype=np.int64)) * tensor.dtype.itemsize
        return self._arena[start : start + size].view(tensor.dtype).reshape(shape)


def _copy_of(op: Any, inputs: list[Array], tensor: Tensor, rows: int, out: Array) -> None:
    np.copyto(out, op.execute(inputs, tensor, rows))


def _checked(name: str, value: Any, shape: tuple[int, ...]) -> Array:
    array = np.asarray(value)
    if array.shape != shape:
        raise ConfigError(f"input {name!r} has shape {array.shape}: expected {shape}")
    return array
