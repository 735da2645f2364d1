"""A mesh of ranks in one process: what each of them has of every tensor of a placed program, with NumPy."""

import itertools

import numpy as np

from dptrain.program.body import has_body
from dptrain.program.dims import Dim
from dptrain.program.execute import _Loop, evaluate
from dptrain.program.sharding.mesh import ALL_GATHER, ALL_REDUCE, BATCH, OWN_PART, REDUCE_SCATTER, constant_of
from dptrain.program.sharding.placement import place
from tests.unit.program.parts import computed

JOINS = {"sum": np.sum, "max": np.max}


class VirtualMesh:
    """Ranks as a grid.

    Args:
        shards: rows of the batch that each rank has, along the axis `BATCH`.
        others: lengths of the grid's other axes.
    """

    def __init__(self, shards, **others):
        self.shards, self.lengths = shards, {BATCH: len(shards)} | others
        self.ranks = [
            dict(zip(self.lengths, place, strict=True))
            for place in itertools.product(*map(range, self.lengths.values()))
        ]

    def bounds(self, mesh, number, length):
        """Return from where to where a rank has its part along an axis of this length: parts are nearly equal."""
        if isinstance(length, Dim):
            ends = np.cumsum([0, *self.shards]) * length.scale
        else:
            ends = np.cumsum([0, *map(len, np.array_split(range(length), self.lengths[mesh]))])
        return int(ends[number]), int(ends[number + 1])

    def shape(self, tensor, axes, rank):
        """Return the shape of a rank's part of a tensor."""
        lengths = [int(n) for n in tensor.shape]
        for axis, mesh in enumerate(axes):
            if mesh is not None:
                start, stop = self.bounds(mesh, rank[mesh], tensor.shape[axis])
                lengths[axis] = stop - start
        return tuple(lengths)

    def part(self, array, tensor, axes, rank):
        """Return a rank's part of a whole array."""
        for axis, mesh in enumerate(axes):
            if mesh is not None:
                array = array[(slice(None),) * axis + (slice(*self.bounds(mesh, rank[mesh], tensor.shape[axis])),)]
        return array

    def others(self, rank, mesh):
        """Return the ranks that differ from this one along an axis of the mesh alone, and it, in order."""
        return [number for number, coordinates in enumerate(self.ranks) if coordinates | {mesh: 0} == rank | {mesh: 0}]

    def execute(self, program, values):
        """Return what each rank has of the outputs by name, and of the new values of variables.

        Ranks that a placement says have the same are found to.
        """
        arrays = {}
        leaf_values = {id(tensor): values[name] for name, tensor in program.inputs.items()}
        leaf_values |= {id(tensor): variable.numpy() for variable, tensor in program.state.items()}
        for tensor in program.tensors:
            placement = program.placements[tensor]
            parts = [arrays[id(operand)] for operand in tensor.inputs]
            arrays[id(tensor)] = rank_parts = [
                self._value(tensor, placement, parts, number, leaf_values.get(id(tensor)))
                for number in range(len(self.ranks))
            ]
            mesh_axes = {mesh for mesh in (*placement.axes, *placement.partial) if mesh is not None}
            first = {}
            for rank, array in zip(self.ranks, rank_parts, strict=True):
                assert array.shape == self.shape(tensor, placement.axes, rank), f"{tensor} {placement}"
                expected = first.setdefault(tuple(rank[mesh] for mesh in sorted(mesh_axes)), array)
                np.testing.assert_array_equal(array, expected, err_msg=f"{tensor} {placement}")
        return [
            [
                {name: arrays[id(tensor)][number] for name, tensor in tensors.items()}
                for tensors in (program.outputs, program.updates)
            ]
            for number in range(len(self.ranks))
        ]

    def _value(self, tensor, placement, parts, number, whole_value):
        rank, operands = self.ranks[number], [operand[number] for operand in parts]
        if tensor.op is None:
            array = (
                constant_of(tensor, self.shards[rank[BATCH]], sum(self.shards)) if whole_value is None else whole_value
            )
            return self.part(array, tensor, placement.axes, rank)
        attributes = tensor.attributes
        if tensor.op in (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER):
            everyone = [parts[0][other] for other in self.others(rank, attributes["mesh"])]
            if tensor.op is ALL_GATHER:
                return np.concatenate(everyone, attributes["axis"])
            operands = [JOINS[attributes["over"]](everyone, axis=0)]
        if tensor.op in (OWN_PART, REDUCE_SCATTER):
            axis, mesh = attributes["axis"], attributes["mesh"]
            return self.part(operands[0], tensor, (*(None,) * axis, mesh), rank)
        if tensor.op is ALL_REDUCE:
            return operands[0]
        first, rows = sum(self.shards[: rank[BATCH]]), self.shards[rank[BATCH]]
        shape = self.shape(tensor, placement.axes, rank)
        if has_body(tensor):  # whose steps send nothing
            out = np.empty(shape, tensor.dtype)
            _Loop(tensor, {tensor.index: out}, sum(self.shards), rows, first, None).execute(operands)
            return out
        return computed(tensor, operands, shape, first, rows)


def spread(program):
    """Return layouts of a program's state, each another one, over the axes `BATCH` and "model" of a mesh."""
    turn = itertools.cycle([BATCH, "model", None, "model", None, BATCH, None])
    layouts = {}
    for variable in program.state:
        axes = [next(turn) for _ in variable.shape]
        layouts[variable] = tuple(None if mesh in axes[:axis] else mesh for axis, mesh in enumerate(axes))
    return layouts


def assert_same_on_mesh(program, values, layouts, mesh, rtol=1e-12, atol=1e-12):
    """Assert that ranks compute what one does, and keep their parts of the state; return the placed program."""
    outputs, updates = evaluate(program, values)
    placed = place(program, layouts=layouts)
    for rank, (own_outputs, own_updates) in zip(mesh.ranks, mesh.execute(placed, values), strict=True):
        for name, value in own_outputs.items():
            tensor = program.outputs[name]
            axes = tuple(BATCH if isinstance(n, Dim) else None for n in tensor.shape)
            expected = mesh.part(outputs[name], tensor, axes, rank)
            np.testing.assert_allclose(value, expected, rtol=rtol, atol=atol, err_msg=name)
        for variable, value in own_updates.items():
            expected = mesh.part(updates[variable], variable, layouts.get(variable, ()), rank)
            np.testing.assert_allclose(value, expected, rtol=rtol, atol=atol, err_msg=variable.path)
    return placed
