"""Executes a program op by op with NumPy: the reference for compiled programs, and for machines without a compiler."""

import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np

from dptrain.comm.base import Communicator
from dptrain.errors import ConfigError, DataError
from dptrain.program.absent_rows import OUTSIDE, find_absent_row
from dptrain.program.body import has_body
from dptrain.program.codegen.memory import Arena, aligned, nbytes
from dptrain.program.context import WATCH
from dptrain.program.program import ROWS, Program
from dptrain.program.schedule.clock import Clock
from dptrain.program.schedule.description import KernelDescription, Layers
from dptrain.program.schedule.loops import repeat_of
from dptrain.program.shapes import local
from dptrain.program.sharding.mesh import ALL_REDUCE, OWN_PART, PlacedProgram, constant_of, own_part
from dptrain.program.sharding.messages import all_reduced, exchange, stages
from dptrain.program.steps import step_of
from dptrain.program.tensor import Array, Node, Tensor, Variable, watch
from dptrain.program.turns import REPLACING, TURNS
from dptrain.runtime.signals import EndlessStepError, in_step


def evaluate(
    program: Program,
    values: Mapping[str, Any],
    state: Mapping[Variable, Array] | None = None,
    *,
    rows: int | None = None,
    first_row: int = 0,
    comm: Communicator | None = None,
) -> tuple[dict[str, Array], dict[Variable, Array]]:
    """Return a program's outputs and the new values of its state. Collective if it is placed.

    Derived outputs are included unless ranks have summands of the state. `values` are inputs by name: this rank's rows
    of sharded ones. Variables that `state` lacks use their own value; other arguments as for `Backend.executable`.

    Raises:
        ConfigError: an input is missing or has another shape.
    """
    values_of_state = state or {}
    old = {
        variable: values_of_state[variable] if variable in values_of_state else variable.numpy()
        for variable in program.state
    }
    step = _Step(program, values, old, rows, first_row, comm)
    step.execute()
    outputs = {name: step.values[tensor] for name, tensor in program.outputs.items()}
    updates = {variable: step.values[tensor] for variable, tensor in program.updates.items()}
    if program.derived is not None and not (isinstance(program, PlacedProgram) and program.summed):
        outputs |= evaluate(program.derived, {}, {**values_of_state, **updates})[0]
    return outputs, updates


def _written(program: Program) -> list[Tensor]:
    """Return the tensors that have their own arrays."""
    return [
        tensor
        for tensor in program.tensors
        if tensor.op is not None and not tensor.op.is_view and tensor.op is not ALL_REDUCE
    ]


def bytes_of(program: Program, rows: int | None = None) -> int:
    """Return the bytes of arrays that ops write, for a rank with so many rows (None: all)."""
    return sum(nbytes(tensor, program.rows if rows is None else rows) for tensor in _written(program))


class _Step:
    """A program's ops in order; arguments as for `evaluate`, with the arrays of inputs by name and of variables."""

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
        self.values: dict[Tensor, Array] = {tensor: state[variable] for variable, tensor in program.state.items()}
        for name, tensor in program.inputs.items():
            if name not in arrays:
                raise ConfigError(f"input {name!r} is missing")
            self.values[tensor] = np.asarray(arrays[name], tensor.dtype)
            program.check_input(name, self.values[tensor].shape, self._rows)
        self._stages = stages(program)
        self._attributes: dict[Tensor, dict[str, Any]] = {}
        for tensor in program.tensors:
            if tensor.op is not None:
                self._attributes[tensor] = tensor.op.local_attributes(tensor, self._rows, first_row)
            elif tensor not in self.values:
                self.values[tensor] = constant_of(tensor, self._rows, program.rows)
        self._numbers: dict[Tensor, int] = {}  # see `measured`
        self._values: dict[Node, dict[int, Tensor]] = {}  # values of ops with several
        self._done: set[Node] = set()  # in the current stage
        for tensor in _written(program):
            self.values[tensor] = aligned(local(tensor.shape, self._rows), tensor.dtype)
            if tensor.op is not None and tensor.op.has_values:
                self._values.setdefault(tensor.node, {})[tensor.index] = tensor
        self._loops = {
            node: self._loop(read_values)
            for node, read_values in self._values.items()
            if has_body(next(iter(read_values.values())))
        }

    def _loop(self, read_values: Mapping[int, Tensor]) -> "_Loop":
        first_value = next(iter(read_values.values()))
        place = (self._rows, self._first_row, self._comm)
        out = {number: self.values[value] for number, value in read_values.items()}
        return _Loop(first_value, out, self._program.rows, *place)

    def measured(self) -> list[KernelDescription]:
        """Note when each op has ended, for a profile; return the ops, messages and copies that `marks` number."""
        layers, kernels = Layers(self._program, self._rows), list[KernelDescription]()
        for stage in self._stages:
            for tensors in [*([tensor] for tensor in stage.tensors if tensor.op is not None), *stage.messages]:
                op = tensors[0].op
                assert op is not None
                sent = tensors[0] in {message[0] for message in stage.messages}
                self._numbers[tensors[0]] = len(kernels)
                read = sum(nbytes(operand, self._rows) for tensor in tensors for operand in tensor.inputs)
                written = 0 if op.is_view else sum(nbytes(tensor, self._rows) for tensor in tensors)
                kind = "message" if sent else "op"
                kernels.append(KernelDescription(kind, op.name, tensors, layers.of(tensors), read, written))
        self.marks: list[tuple[int, int]] = []
        return [*kernels, KernelDescription("copy", "new values over old ones", [], {"update": 0})]

    def _mark(self, tensor: Tensor) -> None:
        self.marks.append((self._numbers[tensor], time.monotonic_ns()))

    def absent_row(self, samples: Sequence[int] | Array | None) -> DataError | None:
        program = self._program
        leaf_values = {tensor: self.values[tensor] for tensor in (*program.inputs.values(), *program.state.values())}
        return find_absent_row(program, leaf_values, self._rows, self._first_row, samples)

    def _execute_node(self, tensor: Tensor, inputs: Sequence[Array]) -> None:
        """Compute all read values of a node, at the first of them."""
        node = tensor.node
        if node in self._done:
            return
        self._done.add(node)
        if node in self._loops:
            self._loops[node].execute(inputs)
            return
        assert tensor.op is not None
        read_values = self._values[node]
        out = [self.values[read_values[value.index]] if value.index in read_values else None for value in node.values]
        tensor.op.compute(*inputs, **self._attributes[tensor], out=out)

    @np.errstate(all="ignore")  # infinities and NaNs are results, as on a GPU
    def execute(self) -> None:
        """Compute all values. Collective if the program is placed."""
        values, is_watched, is_measured = self.values, WATCH.get() is not None, bool(self._numbers)
        for stage in self._stages:
            for tensor in stage.tensors:
                op = tensor.op
                if op is None:
                    continue
                inputs = [values[read] for read in tensor.inputs]
                before = [np.array(value) for value in inputs] if is_watched else []  # results may take their memory
                if op is OWN_PART:
                    values[tensor] = own_part(tensor, inputs[0], self._rows, self._first_row)
                elif op.has_values:
                    self._execute_node(tensor, inputs)
                elif op.is_view:
                    values[tensor] = np.asarray(op.compute(*inputs, **self._attributes[tensor]))
                else:
                    op.compute(*inputs, **self._attributes[tensor], out=values[tensor])
                if is_watched:
                    watch(tensor, values[tensor], before)
                if is_measured:
                    self._mark(tensor)
            self._done.clear()
            for message in stage.messages:
                parts, attributes = [values[tensor.inputs[0]] for tensor in message], message[0].attributes
                if message[0].op is ALL_REDUCE:
                    group = None if self._comm is None else self._comm.along(attributes["mesh"])
                    values |= zip(message, all_reduced(parts, group, attributes["over"]), strict=True)
                else:
                    assert self._comm is not None
                    parts = [np.ascontiguousarray(part) for part in parts]
                    exchange(message, parts, [values[tensor] for tensor in message], self._comm)
                if is_measured:
                    self._mark(message[0])


class _Loop:
    """A loop's steps in order; `out` are arrays of its read values by number, other arguments as for `evaluate`."""

    def __init__(
        self,
        tensor: Tensor,
        out: Mapping[int, Array],
        batch_rows: int,
        rows: int,
        first_row: int,
        comm: Communicator | None,
    ) -> None:
        repeat, self._out = repeat_of(tensor), out
        program = step_of(repeat.body, batch_rows)
        arrays = {
            name: np.empty(local(placeholder.shape, rows), placeholder.dtype)
            for name, placeholder in program.inputs.items()
        }
        self._repeat, self._step = repeat, _Step(program, arrays, {}, rows, first_row, comm)

    def execute(self, inputs: Sequence[Array]) -> None:
        repeat, values = self._repeat, self._step.values
        if repeat.guard is not None and not inputs[repeat.guard]:
            for array in self._out.values():
                array.fill(0)
            return
        for carry in repeat.carries:
            if carry.input is None:
                values[carry.leaf].fill(0)
            else:
                np.copyto(values[carry.leaf], inputs[carry.input])
        for capture in repeat.captures:
            np.copyto(values[capture.leaf], inputs[capture.input])
        for position in map(repeat.position, repeat.steps(lambda _: bool(values[repeat.condition.leaf]))):
            for part in repeat.slices:
                np.copyto(values[part.leaf], inputs[part.input][position])
            self._step.execute()
            for stack in repeat.stacks:
                if stack.value in self._out:
                    self._out[stack.value][position] = values[stack.result]
            results = [values[carry.result].copy() for carry in repeat.carries]  # they may be other carries
            for carry, result in zip(repeat.carries, results, strict=True):
                np.copyto(values[carry.leaf], result)
        for carry in repeat.carries:
            if carry.value in self._out:
                np.copyto(self._out[carry.value], values[carry.leaf])


class HostMemory:
    """Arrays of variables that executables use in place (a `Storage`), and the arena of intermediate results."""

    def __init__(self) -> None:
        self.arena = Arena()
        # By the variables' ids, so as not to keep variables alive.
        self._arrays: dict[int, tuple[Array, weakref.ref[Variable]]] = {}

    def adopt(self, variables: Iterable[Variable]) -> None:
        """Move variables here, unless they are here."""
        for variable in variables:
            if variable.storage is not self:
                array = aligned(variable.shape, variable.dtype)
                variable._at_hand()
                with REPLACING:  # so that another thread's assignment is not lost
                    np.copyto(array, variable.numpy())
                    self._arrays[id(variable)] = array, weakref.ref(variable, partial(self._forget, id(variable)))
                    variable._move(self)

    def release(self, variables: Iterable[Variable]) -> None:
        """Forget variables."""
        for variable in variables:
            self._forget(id(variable))

    def _forget(self, number: int, reference: "weakref.ref[Variable] | None" = None) -> None:
        self._arrays.pop(number, None)

    def array(self, variable: Variable) -> Array:
        """Return a variable's array."""
        return self._arrays[id(variable)][0]

    def read(self, variable: Variable) -> Array:
        """Return a copy of its value."""
        return self.array(variable).copy()

    def write(self, variable: Variable, value: Array) -> None:
        """Replace its value."""
        np.copyto(self.array(variable), value)


class ReferenceExecutable:
    """A program for one number of rows, executed many times.

    `memory` holds its state; other arguments as for `Backend.executable`, attributes as of `Executable`.

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
        clock: Clock | None = None,
    ) -> None:
        self._program, self._is_of_ranks = program, comm is not None and comm.size > 1  # ranks run concurrently
        self._order = self._window = np.empty(0, np.int64)
        if ROWS in program.inputs and ROWS in arrays:
            window_shape = local(program.inputs[ROWS].shape, program.rows if rows is None else rows)
            self._order, self._window = arrays[ROWS], np.zeros(window_shape, np.int64)
            arrays = {**arrays, ROWS: self._window}
        memory.adopt(program.state)
        self._state = {variable: memory.array(variable) for variable in program.state}
        self._step = _Step(program, arrays, self._state, rows, first_row, comm)
        self._clock = clock
        if clock is not None:
            kernels = self._step.measured()
            self._first_mark, self._copy = clock.measures(kernels), len(kernels) - 1
        self.nbytes = bytes_of(program, rows)
        self.outputs: Mapping[str, Array] = {}
        self.samples: Sequence[int] | Array | None = None

    def run(self, starts: Sequence[int] = (0,)) -> None:
        """Execute a step for each start of its rows in the array `ROWS`. Collective if the program is placed.

        Raises:
            DataError: a step reads a row that its table does not have.
        """
        values = self._step.values
        with nullcontext() if self._is_of_ranks else TURNS.of(self._program.reads, self._program.writes | {self}):
            for number, start in enumerate(starts, 1):
                self._window[...] = self._order[start : start + len(self._window)]
                if self._clock is not None:
                    self._step.marks = [(-1, time.monotonic_ns())]
                try:
                    with in_step():
                        self._step.execute()
                except EndlessStepError as error:
                    error.finished = number - 1
                    raise
                except IndexError:
                    raise self._step.absent_row(self.samples) or DataError(OUTSIDE) from None
                if number == len(starts):  # before the state changes: an output may be its old value
                    self.outputs = {name: values[tensor].copy() for name, tensor in self._program.outputs.items()}
                new = {variable: self._own(tensor) for variable, tensor in self._program.updates.items()}
                for variable, value in new.items():
                    np.copyto(self._state[variable], value)
                if self._clock is not None:
                    self._clock.add([*self._step.marks, (self._copy, time.monotonic_ns())], self._first_mark)

    def close(self) -> None:
        """Nothing to release."""

    def _own(self, tensor: Tensor) -> Array:
        # A value that a change of state does not affect.
        root = tensor
        while root.op is not None and (root.op.is_view or root.op is ALL_REDUCE):
            root = root.inputs[0]
        return self._step.values[tensor].copy() if root.op is None else self._step.values[tensor]
