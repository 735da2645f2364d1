"""What a model's step computes, as text, without data or device."""

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from dptrain import comm as comms
from dptrain.backend import describe
from dptrain.backend.cpu.parameters import parameter_count
from dptrain.distribution.placing import current_mesh, layout_of
from dptrain.errors import ConfigError
from dptrain.models.explaining_stages import explain_stages
from dptrain.program import tree
from dptrain.program.dims import Dim, bound
from dptrain.program.explain import COLUMNS, cut, messages_of, shown, table, wrapped, wrapped_code
from dptrain.program.explain import explain as tables
from dptrain.program.program import Program, trace
from dptrain.program.schedule.description import Description
from dptrain.program.shapes import Shape, is_open, size
from dptrain.program.sharding.local import MeshPosition, localized
from dptrain.program.sharding.mesh import BATCH, Axes, PlacedProgram
from dptrain.program.sharding.placement import place
from dptrain.program.tensor import Drawn, Tensor, Variable
from dptrain.runtime.types import is_floating
from dptrain.train.sharding import Sharded, layouts_of, slots_of

if TYPE_CHECKING:
    from dptrain.models.model import Model

# Options that change a GPU's kernels, and the widest column of layers.
_OF_GPU, _LAYERS = ("precision", "gemm", "conv"), 24
# What stands for lengths that are None, and another such length: primes, which no width is equal to.
_LENGTH, _OTHER_LENGTH = 97, 139
# A step's inputs by name: shape with rows, type.
_Data = dict[str, tuple[Shape, str]]


@dataclass(frozen=True, eq=False)
class Mesh:
    """The grid of ranks for which a program is explained."""

    lengths: Mapping[str, int]  # of the axes, by name, `BATCH` among them
    # Returns the layout of a variable, or of the second one's slot; None for no axis
    layout: Callable[[Variable, Variable | None], Axes | None] = layout_of


def explain(
    model: "Model",
    batch_size: int = 32,
    step: str = "train",
    *,
    kernels: bool = False,
    code: bool = False,
    dtype: str | None = None,
    mesh: Mesh | None = None,
) -> str:
    """Return a step's program as text, with totals, and the memory and kernels of a rank.

    The rank is alone, or the mesh's with the largest parts where variables are sharded. Memory and kernels are a GPU's
    if the model is compiled for "cuda" (none is needed), otherwise those of C++ on a CPU. For a GPU,
    `backend/cuda/cost/roofline.py` predicts each kernel's time on three GPUs; registers are shown if there is an nvcc.
    `kernels` lists each kernel's ops. With `code` the text is a source file of the generated code, which compiles with
    the folder `kernels/` among the includes, and all else is a comment. `dtype` is that of the samples, such as "uint8"
    for pixels. Lengths that are None, as those of sequences, are 97; the text says whether others share C++.
    """
    traced, totals = _traced(model, batch_size, step, dtype)
    shared = _shared(model, traced, mesh or _mesh_at_hand(model))
    layouts = {} if shared is None else shared.layouts
    slots = slots_of(model) if layouts else {}
    program = place(traced, totals, comm_dtype=_comm_dtype(model), layouts=layouts, slots=slots)
    local = None if shared is None else localized(program, shared.place, shared.parts)
    rows = batch_size if shared is None else -(-batch_size // shared.place.lengths[BATCH])
    weights, trained = (
        sum(size(variable.shape) for variable in some) for some in (model.weights, model.trainable_weights)
    )
    state = sum(size(variable.shape) * variable.dtype.itemsize for variable in program.state)
    result, count = _on_device(model, program if local is None else local, rows), len(program.updates)
    lines = [
        f"{step} step of {model.name!r}, batches of {batch_size}",
        tables(program, local),
        *([] if shared is None or local is None else shared.lines(program, local)),
        f"{weights:,} parameters, {trained:,} of them trained; {state:,} bytes of state",
        f"{result.memory.size:,} bytes of intermediate results at most, {result.memory.alone:,} if none shared memory",
        *([f"{result.in_place} of {count} new values are written over the old ones"] if count else []),
        f"{len(result.kernels)} kernels after fusion, on a {result.device}",
    ]
    if _has_open_inputs(model):
        lines.append(_of_other_lengths(model, batch_size, step, dtype, program, result.device))
    if result.on_host:
        lines.append(f"on the host, between two copies: {', '.join(result.on_host)}")
    if result.in_one_launch:
        loops = ", ".join(f"{count:,} of {length:,} steps" for length, count in result.in_one_launch.items())
        lines.append(f"loops in one launch: {loops}")
    if kernels:
        widest = max(len(kernel.kind) for kernel in result.kernels)
        layers = [cut(", ".join(kernel.layers), _LAYERS) for kernel in result.kernels]
        lines += ["", "kernels, with the layers of their ops:"]
        for number, kernel in enumerate(result.kernels):
            of = layers[number].ljust(max(map(len, layers)))
            margin = f"{number + 1:>4}  {kernel.kind.ljust(widest)}  {of}  "
            first, *more = wrapped(kernel.label, COLUMNS - len(margin))
            lines += [margin + first, *(" " * len(margin) + part for part in more)]
        lines += result.costs()
    arguments = model._compile_arguments
    if step == "train" and arguments["stages"] > 1:
        lines += explain_stages(model, program, arguments["stages"], arguments["microbatches"])
    if code:  # a source file, of which the rest is a comment
        report = "\n".join(lines).replace("*/", "* /")
        return f"/*\n{report}\n*/\n\n{wrapped_code(result.code.rstrip())}"
    return "\n".join(lines)


@dataclass(frozen=True, eq=False)
class _Shared:
    """How variables are divided among the ranks of a mesh."""

    place: MeshPosition  # of the rank with the largest parts
    layouts: Mapping[Variable, Axes]  # of sharded variables
    parts: Mapping[Variable, Variable]  # this rank's parts of them, without values

    def lines(self, program: PlacedProgram, local: PlacedProgram) -> list[str]:
        """Return the placement of variables, the messages, and a rank's state, as text."""
        lengths = self.place.lengths
        ranks, grid = math.prod(lengths.values()), ", ".join(f"{name}={length}" for name, length in lengths.items())
        rows = [("variable", "shape", "placement", "a rank's part", "its bytes")]
        for variable, part in self.parts.items():
            cells = shown(variable.shape), str(program.layouts[variable]), shown(part.shape)
            rows.append((variable._path, *cells, f"{_nbytes([part]):,}"))
        whole = [variable for variable in program.state if variable not in self.parts]
        nbytes = _nbytes(whole) + _nbytes(self.parts.values())
        return [
            "",
            f"variables on {ranks} ranks, mesh {grid}:",
            *table(rows),
            f"{len(whole)} more are replicated, {_nbytes(whole):,} bytes; a rank holds {nbytes:,} bytes of state",
            "",
            *messages_of(local, lengths),
            "",
        ]


def _nbytes(variables: Iterable[Variable]) -> int:
    return sum(size(variable.shape) * variable.dtype.itemsize for variable in variables)


def _mesh_at_hand(model: "Model") -> Mesh | None:
    """Return the mesh on which the model would train here; None if nothing would be sharded."""
    lengths = current_mesh()
    if lengths is None and _shards(model) is not None:
        lengths = {BATCH: max(comms.current().size, 2)}
    return None if lengths is None else Mesh(lengths)


def _shared(model: "Model", program: Program, mesh: Mesh | None) -> _Shared | None:
    """Return how a mesh's ranks divide a program's variables; None if each has all of them."""
    if mesh is None:
        return None
    rank = MeshPosition(mesh.lengths, {name: length - 1 for name, length in mesh.lengths.items()})
    layouts = layouts_of(model, program.state, rank, _shards(model), mesh.layout)
    parts = {}
    for variable, axes in layouts.items():
        shape = rank.shape(variable.shape, axes)
        parts[variable] = Variable(
            Drawn(shape, variable.dtype, partial(np.zeros, shape)), variable.name, variable.trainable
        )
        parts[variable]._path = variable._path
    return _Shared(rank, layouts, parts) if layouts else None


def _shards(model: "Model") -> Sharded | None:
    return None if model._compiled is None else model._compiled.shards


def _comm_dtype(model: "Model") -> str | None:
    dtype: str | None = model._compile_arguments.get("comm_dtype")
    return dtype


def _on_device(model: "Model", program: PlacedProgram, rows: int) -> Description:
    options = model._device_options
    if options.get("device") == "cuda":
        return describe("cuda", program, rows, **{name: options[name] for name in _OF_GPU if name in options})
    return describe("cpu", program, rows)


def program_of(model: "Model", batch_size: int = 32, step: str = "train", *, dtype: str | None = None) -> PlacedProgram:
    """Return a step's program on a whole batch, placed for data parallelism; arguments as in `explain`."""
    traced, totals = _traced(model, batch_size, step, dtype)
    return place(traced, totals, comm_dtype=_comm_dtype(model))


def traced_program(model: "Model", batch_size: int = 32, *, dtype: str | None = None) -> Program:
    """Return a training step's program on a whole batch, for any placement; arguments as in `explain`."""
    return _traced(model, batch_size, "train", dtype)[0]


def _has_open_inputs(model: "Model") -> bool:
    return any(is_open(symbol.shape[1:]) for symbol in tree.leaves(model._input_symbols))


def _of_other_lengths(
    model: "Model", batch_size: int, step: str, dtype: str | None, program: PlacedProgram, device: str
) -> str:
    """Return whether the code of a program, which is for some length, serves others, by that for another one."""
    text = f"lengths that are None are {_LENGTH} here"
    if device != "CPU":
        return f"{text}; each other length is compiled for itself"
    other = place(_traced(model, batch_size, step, dtype, _OTHER_LENGTH)[0], comm_dtype=_comm_dtype(model))
    count = parameter_count(*(describe("cpu", each, batch_size).code for each in (program, other)))
    if count is None:
        return f"{text}; for {_OTHER_LENGTH} other C++ is compiled"
    return f"{text}; C++ for others is compiled once, with {count} numbers as parameters"


def _traced(
    model: "Model", batch_size: int, step: str, dtype: str | None, length: int = _LENGTH
) -> tuple[Program, Collection[Variable]]:
    """Return a step's program on a whole batch, and the totals of which each rank may hold a part.

    `length` stands for lengths that are None.
    """
    if step not in ("train", "test", "predict"):
        raise ConfigError(f"step = {step!r}: expected 'train', 'test' or 'predict'")
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise ConfigError(f"batch_size = {batch_size!r}: expected an integer >= 1")
    if step != "predict" and not model.compiled:
        raise ConfigError(f"You must call `compile()` before explaining the {step} step.")
    if model._stack:  # its first layer has the shape
        model.build()
    data, inputs = _data(model, Dim.rows(batch_size), step, dtype, length)
    run = model._make_step(step)

    def traced(*tensors: Tensor) -> Any:
        by_name = dict(zip(inputs, tensors, strict=True))

        def filled(path: str, name: str) -> Tensor:
            return by_name[name]

        return run.function(tree.map_leaves(filled, data))

    return trace(traced, inputs), run.totals


def _data(model: "Model", rows: Dim, step: str, dtype: str | None, length: int) -> tuple[Any, _Data]:
    """Return a step's data, with names for arrays, and the arrays' shapes and dtypes; `length` as in `_traced`."""
    symbols = model._input_symbols
    if symbols is None:
        raise ConfigError(f"model {model.name!r} does not know the shapes of its inputs: build it, or call it on data")
    inputs: _Data = {}
    lengths: Mapping[str, Any] = defaultdict(lambda: length, rows=rows)

    def entered(path: str, symbol: Tensor) -> str:
        name = f"x/{path}" if path else "x"
        symbol_dtype = model._data_dtype if is_floating(symbol.dtype) else symbol.dtype.name
        inputs[name] = (rows, *map(int, bound(tuple(symbol.shape[1:]), lengths))), dtype or symbol_dtype
        return name

    x = tree.map_leaves(entered, symbols)
    losses = model._expected_data.losses
    if step == "predict" or losses is None:
        return x, inputs
    output_shapes = model._output_shape if isinstance(model._output_shape, list) else [model._output_shape]
    if _has_open_inputs(model):
        input_shapes = tree.map_leaves(lambda _, name: (None, *inputs[name][0][1:]), x)
        output_shapes = [shape for _, shape in tree.flat_shapes(model.compute_output_shape(input_shapes))]
    shapes = iter(output_shapes)

    def target(path: str, loss: Any) -> str:
        shape = next(shapes)[1:]
        name = f"y/{path}" if path else "y"
        labels = loss._takes_labels
        inputs[name] = ((rows, *shape[:-1]), "int64") if labels else ((rows, *shape), model._data_dtype)
        return name

    return (x, tree.map_leaves(target, losses)), inputs
