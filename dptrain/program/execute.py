"""Executing a program op by op with NumPy: what compiled programs must compute, and machines without a compiler do.

Each op writes an array of its own, which is made once and written anew at each step.
"""

import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np

from dptrain.comm.base import Communicator
from dptrain.errors import ConfigError, DataError
from dptrain.program.absent_rows import OUTSIDE, find_absent_row
from dptrain.program.body import body_of, has_body
from dptrain.program.codegen.memory import Arena, aligned, nbytes
from dptrain.program.context import WATCH
from dptrain.program.program import ROWS, Program
from dptrain.program.shapes import local
from dptrain.program.sharding.mesh import ALL_REDUCE, OWN_PART, PlacedProgram, constant_of, own_part
from dptrain.program.sharding.messages import all_reduced, exchange, stages
from dptrain.program.steps import step_of
from dptrain.program.tensor import Array, Node, Tensor, Variable, watch
from dptrain.program.turns import REPLACING, TURNS


def evaluate(
    program: Program,
    values: Mapping[str, Any],
    state: Mapping[Variable, Array] | None = None,
    *,
    rows: int | None = None,
    first_row: int = 0,
    comm: Communicator | None = None,
) -> tuple[dict[str, Array], dict[Variable, Array]]:
    """Return what comes out of a program, and the new values of its state. Collective where it is a placed one.

    Derived outputs are among it unless ranks have summands of the state.

    Args:
        program: what is executed.
        values: of its inputs, by name: this rank's rows of what is sharded.
        state: values of variables; those that are not in it have their own.
        rows: of the global batch that this rank has; None for all.
        first_row: the global number of the first of them.
        comm: the ranks; None for one.

    Raises:
        ConfigError: an input is missing or has another shape.
    """
    given = state or {}
    old = {variable: given[variable] if variable in given else variable.numpy() for variable in program.state}
    step = _Step(program, values, old, rows, first_row, comm)
    step.execute()
    outputs = {name: step.values[one] for name, one in program.outputs.items()}
    updates = {variable: step.values[one] for variable, one in program.updates.items()}
    if program.derived is not None and not (isinstance(program, PlacedProgram) and program.summed):
        outputs |= evaluate(program.derived, {}, {**given, **updates})[0]
    return outputs, updates


def _written(program: Program) -> list[Tensor]:
    """Return the tensors that have arrays of their own."""
    return [one for one in program.tensors if one.op is not None and not one.op.is_view and one.op is not ALL_REDUCE]


def bytes_of(program: Program, rows: int | None = None) -> int:
    """Return the bytes of the arrays that ops write, for so many rows of a rank; None for all."""
    return sum(nbytes(one, program.rows if rows is None else rows) for one in _written(program))


class _Step:
    """A program's ops, in order.

    Args:
        program: what is executed.
        arrays: of its inputs, by name.
        state: the arrays of its variables.
        rows: as `evaluate`.
        first_row: as `evaluate`.
        comm: as `evaluate`.

    Attributes:
        values: of its tensors, after `execute`.

    Raises:
        ConfigError: an input is missing or has another shape.
    """

    def __init__(
        self,
        program: Program,
        arrays: Mapping[str, Any],
        state: Mapping[Variable, Array],
        rows: int | None,
        first_row: int,
        comm: Communicator | None,
    ) -> None:
        self._program = program
        self._rows, self._first_row, self._comm = program.rows if rows is None else rows, first_row, comm
        self.values: dict[Tensor, Array] = {one: state[variable] for variable, one in program.state.items()}
        for name, one in program.inputs.items():
            if name not in arrays:
                raise ConfigError(f"input {name!r} is missing")
            array, expected = np.asarray(arrays[name], one.dtype), local(one.shape, self._rows)
            if array.shape != expected:
                raise ConfigError(f"input {name!r} has shape {array.shape}: expected {expected}")
            self.values[one] = array
        self._stages = stages(program)
        self._attributes: dict[Tensor, dict[str, Any]] = {}
        for one in program.tensors:
            if one.op is not None:
                self._attributes[one] = one.op.local_attributes(one, self._rows, first_row)
            elif one not in self.values:
                self.values[one] = constant_of(one, self._rows, program.rows)
        self._values: dict[Node, dict[int, Tensor]] = {}  # of ops that have several
        self._done: set[Node] = set()  # in the stage at hand
        for one in _written(program):
            self.values[one] = aligned(local(one.shape, self._rows), one.dtype)
            if one.op is not None and one.op.has_values:
                self._values.setdefault(one.node, {})[one.index] = one
        self._loops = {
            node: self._loop(made) for node, made in self._values.items() if has_body(next(iter(made.values())))
        }

    def _loop(self, made: Mapping[int, Tensor]) -> "_Loop":
        """Return what executes a loop, of whose values these are read."""
        one = next(iter(made.values()))
        place = (self._rows, self._first_row, self._comm)
        out = {number: self.values[value] for number, value in made.items()}
        return _Loop(one, out, self._program.rows, *place)

    def absent_row(self) -> DataError | None:
        """Return the error that names a row that a table does not have, after an execution that has met it."""
        program = self._program
        given = {one: self.values[one] for one in (*program.inputs.values(), *program.state.values())}
        return find_absent_row(program, given, self._rows, self._first_row)

    def _execute_node(self, one: Tensor, inputs: Sequence[Array]) -> None:
        """Compute all values of a node that are read, when the first of them is wanted."""
        node = one.node
        if node in self._done:
            return
        self._done.add(node)
        if node in self._loops:
            self._loops[node].execute(inputs)
            return
        assert one.op is not None
        made = self._values[node]
        out = [self.values[made[value.index]] if value.index in made else None for value in node.values]
        one.op.compute(*inputs, **self._attributes[one], out=out)

    @np.errstate(all="ignore")  # infinities and NaNs are results, as on a GPU
    def execute(self) -> None:
        """Compute all values. Collective where the program is a placed one."""
        values, is_watched = self.values, WATCH.get() is not None
        for stage in self._stages:
            for one in stage.tensors:
                op = one.op
                if op is None:
                    continue
                inputs = [values[read] for read in one.inputs]
                if op is OWN_PART:
                    values[one] = own_part(one, inputs[0], self._rows, self._first_row)
                elif op.has_values:
                    self._execute_node(one, inputs)
                elif op.is_view:
                    values[one] = np.asarray(op.compute(*inputs, **self._attributes[one]))
                else:
                    op.compute(*inputs, **self._attributes[one], out=values[one])
                if is_watched:
                    watch(one, values[one])
            self._done.clear()
            for message in stage.messages:
                parts, about = [values[one.inputs[0]] for one in message], message[0].attributes
                if message[0].op is ALL_REDUCE:
                    group = None if self._comm is None else self._comm.along(about["mesh"])
                    values |= zip(message, all_reduced(parts, group, about["over"]), strict=True)
                else:
                    assert self._comm is not None
                    parts = [np.ascontiguousarray(one) for one in parts]
                    exchange(message, parts, [values[one] for one in message], self._comm)


class _Loop:
    """A loop's steps, in order.

    Args:
        made: one of its values.
        out: arrays of the values that are read, by their numbers.
        batch_rows: of the global batch.
        rows: as `evaluate`.
        first_row: as `evaluate`.
        comm: as `evaluate`.
    """

    def __init__(
        self,
        made: Tensor,
        out: Mapping[int, Array],
        batch_rows: int,
        rows: int,
        first_row: int,
        comm: Communicator | None,
    ) -> None:
        self._body, self._out = body_of(made), out
        length = made.attributes["length"]
        self._order = range(length)[::-1] if made.attributes["reverse"] else range(length)
        program = step_of(self._body, batch_rows)
        arrays = {name: np.empty(local(one.shape, rows), one.dtype) for name, one in program.inputs.items()}
        self._step = _Step(program, arrays, {}, rows, first_row, comm)
        self._carries = [self._step.values[one] for one in self._body.carries]
        self._given = [self._step.values[one] for one in self._body.inputs]

    def execute(self, inputs: Sequence[Array]) -> None:
        """Compute all values."""
        body, values = self._body, self._step.values
        count, ends = len(body.begun), len(body.begun) + len(body.slices)
        for array in self._carries[count:]:
            array.fill(0)
        for number, array in enumerate(inputs):
            if not count <= number < ends:
                np.copyto(self._given[number], array)
        for number in self._order:
            for place in range(count, ends):
                np.copyto(self._given[place], inputs[place][number])
            self._step.execute()
            for place, one in enumerate(body.stacked, len(body.carries)):
                if place in self._out:
                    self._out[place][number] = values[one]
            following = [values[one].copy() for one in body.following]  # which may be other carries
            for array, new in zip(self._carries, following, strict=True):
                np.copyto(array, new)
        for place, array in enumerate(self._carries):
            if place in self._out:
                np.copyto(self._out[place], array)


class HostMemory:
    """The arrays of variables that executables read and write in place; a `Storage`.

    Attributes:
        arena: of the executables' intermediate results.
    """

    def __init__(self) -> None:
        self.arena = Arena()
        # By the variables' ids: those that nobody else has are not held.
        self._arrays: dict[int, tuple[Array, weakref.ref[Variable]]] = {}

    def adopt(self, variables: Iterable[Variable]) -> None:
        """Let variables live here; those that do already stay as they are."""
        for one in variables:
            if one.storage is not self:
                array = aligned(one.shape, one.dtype)
                one._at_hand()
                with REPLACING:  # what another thread assigns is not lost
                    np.copyto(array, one.numpy())
                    self._arrays[id(one)] = array, weakref.ref(one, partial(self._forget, id(one)))
                    one._move(self)

    def release(self, variables: Iterable[Variable]) -> None:
        """Forget variables."""
        for one in variables:
            self._forget(id(one))

    def _forget(self, number: int, gone: "weakref.ref[Variable] | None" = None) -> None:
        self._arrays.pop(number, None)

    def array(self, variable: Variable) -> Array:
        """Return a variable's own array."""
        return self._arrays[id(variable)][0]

    def read(self, variable: Variable) -> Array:
        """Return a copy of its value."""
        return self.array(variable).copy()

    def write(self, variable: Variable, value: Array) -> None:
        """Replace its value."""
        np.copyto(self.array(variable), value)


class ReferenceExecutable:
    """A program for one number of rows, executed many times.

    Args:
        program: what is executed.
        memory: where its state lives, and goes on to live.
        arrays: what its inputs read at every step, by name: this rank's rows of what is sharded. Of the input `ROWS`,
            the numbers of stored rows, it is those of many steps, of which each reads its own.
        rows: of the global batch that this rank has; None for all.
        first_row: the global number of the first of them.
        comm: the ranks; None for one.

    Attributes:
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
        self._program, self._is_of_ranks = program, comm is not None and comm.size > 1  # which run side by side
        self._order = self._window = np.empty(0, np.int64)
        if ROWS in program.inputs and ROWS in arrays:
            own = local(program.inputs[ROWS].shape, program.rows if rows is None else rows)
            self._order, self._window = arrays[ROWS], np.zeros(own, np.int64)
            arrays = {**arrays, ROWS: self._window}
        memory.adopt(program.state)
        self._state = {variable: memory.array(variable) for variable in program.state}
        self._step = _Step(program, arrays, self._state, rows, first_row, comm)
        self.nbytes = bytes_of(program, rows)
        self.outputs: Mapping[str, Array] = {}

    def run(self, starts: Sequence[int] = (0,)) -> None:
        """Execute it as often as there are starts. Collective where the program is a placed one.

        Args:
            starts: where in the array `ROWS` each step's rows begin.

        Raises:
            DataError: a step asks for rows that a table does not have.
        """
        values = self._step.values
        with nullcontext() if self._is_of_ranks else TURNS.of(self._program.reads, self._program.writes | {self}):
            for number, start in enumerate(starts, 1):
                self._window[...] = self._order[start : start + len(self._window)]
                try:
                    self._step.execute()
                except IndexError:
                    raise self._step.absent_row() or DataError(OUTSIDE) from None
                if number == len(starts):  # before the state changes, whose old value an output may be
                    self.outputs = {name: values[one].copy() for name, one in self._program.outputs.items()}
                new = {variable: self._own(one) for variable, one in self._program.updates.items()}
                for variable, value in new.items():
                    np.copyto(self._state[variable], value)

    def close(self) -> None:
        """Nothing is held."""

    def _own(self, tensor: Tensor) -> Array:
        """Return a value that stays when the state changes."""
        root = tensor
        while root.op is not None and (root.op.is_view or root.op is ALL_REDUCE):
            root = root.inputs[0]
        return self._step.values[tensor].copy() if root.op is None else self._step.values[tensor]
