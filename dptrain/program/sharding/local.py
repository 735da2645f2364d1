"""The program of one rank of a mesh, with the shapes of its parts.

`place` assigns placements and keeps the shapes of whole tensors. Here sharded lengths become those of the rank's parts,
nearly equal; rows of the batch stay dims. So backends execute programs of any mesh like any other. Sharded variables
are replaced by variables of the rank's parts.

A gather that depends on weights alone is repeated for later readers: a layer's weights are there while it needs them,
in the forward pass and again in the backward pass.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from dptrain.comm.mesh import BATCH
from dptrain.comm.parts import cut
from dptrain.errors import ConfigError
from dptrain.program.dims import Dim
from dptrain.program.lowering import Element, axes_of
from dptrain.program.operand import METHODS
from dptrain.program.passes import rewritten
from dptrain.program.shapes import Shape, size
from dptrain.program.sharding.mesh import (
    ALL_GATHER,
    ALL_REDUCE,
    OWN_PART,
    REDUCE_SCATTER,
    Axes,
    PlacedProgram,
    Placement,
)
from dptrain.program.sharding.messages import is_read_through, levels, replaced, scheduled
from dptrain.program.sharding.placement import laid_out
from dptrain.program.tensor import Tensor, Variable, placeholder


@dataclass(frozen=True)
class MeshPosition:
    """A rank's coordinates in a mesh, and the lengths of the mesh's axes."""

    lengths: Mapping[str, int]
    coordinates: Mapping[str, int]

    def check(self, variable: Variable, axes: Axes) -> None:
        """Raise a ConfigError for a layout that does not fit its variable, or leaves ranks without a part of it."""
        for axis, (n, mesh) in enumerate(zip(variable.shape, laid_out(variable, axes).axes, strict=True)):
            if mesh is not None and n < self.lengths[mesh]:
                raise ConfigError(
                    f"layout {axes} of {variable._path!r}, of shape {variable.shape}: axis {axis} of length {n} cannot "
                    f"be sharded over the {self.lengths[mesh]} ranks along {mesh!r}; choose a longer axis, or None"
                )

    def bounds(self, mesh: str, length: int) -> tuple[int, int]:
        """Return begin and end of the rank's part of so many elements along an axis of the mesh."""
        return cut(0, length, self.lengths[mesh])[self.coordinates[mesh]]

    def counts(self, mesh: str, length: int) -> tuple[int, ...]:
        """Return the length of each rank's part along an axis of the mesh."""
        return tuple(stop - start for start, stop in cut(0, length, self.lengths[mesh]))

    def key(self, shape: Shape, axes: Axes) -> tuple[slice, ...]:
        """Return the slices of the rank's part of an array without rows of the batch."""
        return tuple(
            slice(None) if mesh is None else slice(*self.bounds(mesh, int(n)))
            for n, mesh in zip(shape, axes, strict=True)
        )

    def shape(self, shape: Shape, axes: Axes) -> Shape:
        """Return the shape of the rank's part of a tensor."""
        lengths = []
        for n, mesh in zip(shape, axes, strict=True):
            if mesh is not None and not isinstance(n, Dim):
                start, stop = self.bounds(mesh, int(n))
                n = stop - start
            elif mesh not in (None, BATCH):
                raise ConfigError(f"not supported: rows of the batch sharded over {mesh!r}")
            lengths.append(n)
        return tuple(lengths)


def localized(placed: PlacedProgram, place: MeshPosition, parts: Mapping[Variable, Variable]) -> PlacedProgram:
    """Return the program of one rank with `parts` of sharded variables; ConfigError for unknown or empty parts."""
    for variable, placement in placed.layouts.items():
        place.check(variable, placement.axes)
    localized_of: dict[Tensor, Tensor] = {}
    state: dict[Variable, Tensor] = {}
    for variable, tensor in placed.state.items():
        if (part := parts.get(variable)) is not None:
            state[part] = localized_of[tensor] = placeholder(part.shape, part.dtype, part._path, part)
        else:
            state[variable] = tensor
    for tensor in placed.tensors:
        if tensor not in localized_of:
            localized_of[tensor] = _localized(
                tensor, placed.placements[tensor], place, [localized_of[read] for read in tensor.inputs]
            )
    localized_program = replace(
        placed,
        state=state,
        outputs={name: localized_of[tensor] for name, tensor in placed.outputs.items()},
        updates={parts.get(variable, variable): localized_of[tensor] for variable, tensor in placed.updates.items()},
        placements={
            localized_of[tensor]: placement for tensor, placement in placed.placements.items() if tensor in localized_of
        },
        layouts={},
    )
    in_order = rewritten(localized_program, gathered_in_order())
    assert isinstance(in_order, PlacedProgram)
    return scheduled(regathered(in_order))


def _localized(tensor: Tensor, placement: Placement, place: MeshPosition, inputs: list[Tensor]) -> Tensor:
    if tensor.op is None:
        return tensor
    shape = place.shape(tensor.shape, placement.axes)
    attributes = tensor.attributes
    mesh = attributes.get("mesh") if tensor.op in (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, OWN_PART) else None
    if mesh is not None and tensor.op is not OWN_PART:
        if place.lengths[mesh] == 1:
            return inputs[0]
        attributes = {**attributes, "whole": size(tensor.shape)}
        if tensor.op is not ALL_REDUCE:
            attributes["counts"] = place.counts(mesh, int(tensor.shape[attributes["axis"]]))
    elif mesh is not None and not isinstance(tensor.shape[attributes["axis"]], Dim):
        start, stop = place.bounds(mesh, int(tensor.shape[attributes["axis"]]))
        part: Tensor = METHODS["[]"](inputs[0], (*(slice(None),) * attributes["axis"], slice(start, stop)))
        return part
    elif mesh is None:
        attributes = attributes_of_part(tensor, [operand.shape for operand in inputs], shape)
    if attributes == tensor.attributes:
        attributes = tensor.attributes  # the same for all values of a node
        if shape == tensor.shape:
            return tensor.with_inputs(inputs)
    return Tensor(tensor.op, inputs, attributes, shape, tensor.dtype, name=tensor.name, index=tensor.index)


def attributes_of_part(tensor: Tensor, shapes: list[Shape], out: Shape) -> dict[str, Any]:
    """Return the attributes of an op on parts, given the shapes of the parts of its operands and of its result."""
    attributes = dict(tensor.attributes)
    if "key" in attributes:  # the part taken from the operand, or put into zeros
        old, new = (tensor.shape, out) if "shape" in attributes else (tensor.inputs[0].shape, shapes[0])
        attributes["key"] = tuple(
            (0, n, 1) if selection == (0, before, 1) else selection
            for selection, before, n in zip(attributes["key"], old, new, strict=True)
        )
    return attributes | ({"shape": out} if "shape" in attributes else {})


def gathered_in_order() -> Callable[[Tensor], Tensor]:
    """Return a pass that gathers operands instead of their transposes and widening conversions, each once.

    A rank sends its part as stored, and if that is along the first axis, it arrives in place; readers of the transpose
    read another order. Before a conversion fewer bytes travel, and products read factors in half precision.
    """
    gathers: dict[tuple[int, str, int], Tensor] = {}

    def change(tensor: Tensor) -> Tensor:
        if tensor.op is not ALL_GATHER:
            return tensor
        operand, attributes, shape = tensor.inputs[0], dict(tensor.attributes), tensor.shape
        axes = None if operand.op is None else axes_of(operand)
        if axes is None and not _widens(operand):
            return gathers.setdefault((id(operand), attributes["mesh"], attributes["axis"]), tensor)
        if axes is not None:
            attributes["axis"], shape = axes.index(attributes["axis"]), tuple(shape[axis] for axis in axes)
        (beneath,) = operand.inputs
        gathered = change(Tensor(ALL_GATHER, (beneath,), attributes, shape, beneath.dtype, name=beneath.name))
        part_attributes = attributes_of_part(operand, [shape], tensor.shape)
        return Tensor(operand.op, (gathered,), part_attributes, tensor.shape, tensor.dtype, name=tensor.name)

    return change


def _widens(tensor: Tensor) -> bool:
    lowering = None if tensor.op is None else tensor.op.lowering
    converts = isinstance(lowering, Element) and lowering.converts
    return converts and tensor.inputs[0].dtype.itemsize < tensor.dtype.itemsize


def regathered(program: PlacedProgram) -> PlacedProgram:
    """Gather weights anew for later readers instead of keeping them."""
    from_weights: set[Tensor] = set()
    for tensor in program.tensors:
        if tensor.variable is not None or (
            tensor.op is not None and tensor.inputs and from_weights.issuperset(tensor.inputs)
        ):
            from_weights.add(tensor)
    level, sent_at = levels(program)
    new: dict[Tensor, Tensor] = {}
    copies: dict[tuple[Tensor, int], Tensor] = {}

    def is_late(tensor: Tensor, reader_level: int) -> bool:
        if tensor.op is ALL_GATHER:
            return tensor in from_weights and reader_level > sent_at[tensor] + 1
        return is_read_through(tensor) and is_late(tensor.inputs[0], reader_level)

    def at(tensor: Tensor, reader_level: int) -> Tensor:
        if not is_late(tensor, reader_level):
            return new[tensor]
        key = tensor, reader_level
        if key not in copies:
            inputs = [at(operand, reader_level) for operand in tensor.inputs]
            copies[key] = Tensor(tensor.op, inputs, tensor.attributes, tensor.shape, tensor.dtype, name=tensor.name)
        return copies[key]

    for tensor in program.tensors:
        is_alias = is_read_through(tensor)
        new[tensor] = tensor.with_inputs([new[read] if is_alias else at(read, level[tensor]) for read in tensor.inputs])
    return replaced(program, new) if copies else program
