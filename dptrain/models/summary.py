"""A model as a table, as Keras prints it."""

import io
import itertools
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from dptrain.errors import ConfigError, printable
from dptrain.layers import Layer
from dptrain.layers.parts import name_layers
from dptrain.models.graph import name_of_maker
from dptrain.program import tree
from dptrain.program.dims import read
from dptrain.program.tensor import Tensor, Variable
from dptrain.runtime.launcher import detect_launch

_LINE, _LINE_CONNECTED, _TRAINABLE = 88, 108, 12  # columns by default, and what "Trainable" adds
_POSITIONS, _POSITIONS_CONNECTED = (0.45, 0.80, 1.0), (0.3, 0.56, 0.74, 1.0)
_LEAST_COLUMNS = 4


def summary(
    model: Any,
    line_length: int | None = None,
    positions: Sequence[float] | None = None,
    print_fn: Callable[[str], Any] | None = None,
    expand_nested: bool = False,
    show_trainable: bool = False,
    layer_range: Sequence[str] | None = None,
) -> None:
    """Print layers, output shapes and numbers of weights, on rank 0.

    Args:
        model: a `Model`, built or not.
        line_length: columns of the table; by default what the terminal has, 88 or so at most.
        positions: where its columns end, as parts of 1.
        print_fn: called once with the whole text in place of `print`.
        expand_nested: whether models in the model show their layers.
        show_trainable: whether a column says which layers are trained.
        layer_range: names, or regular expressions, of the first and the last layer to show.

    Raises:
        ConfigError: the line is too short, or no layer is in the range.
    """
    launch = detect_launch()  # not the communicator: looking at a model need not start MPI
    if launch is not None and launch.rank != 0:
        return
    plain = print_fn is None and "utf" not in (getattr(sys.stdout, "encoding", None) or "utf-8").lower()
    text = table(model, line_length, positions, expand_nested, show_trainable, layer_range, plain=plain)
    (print_fn or _print)(text)


def _print(text: str) -> None:
    print(text, end="")


def table(
    model: Any,
    line_length: int | None = None,
    positions: Sequence[float] | None = None,
    expand_nested: bool = False,
    show_trainable: bool = False,
    layer_range: Sequence[str] | None = None,
    *,
    plain: bool = False,
) -> str:
    """Return the table of a model as text; the arguments are those of `summary`.

    Args:
        model: see `summary`, as what follows.
        line_length: see `summary`.
        positions: see `summary`.
        expand_nested: see `summary`.
        show_trainable: see `summary`.
        layer_range: see `summary`.
        plain: whether lines are drawn with ASCII alone.
    """
    import rich.box
    import rich.table
    import rich.text
    from rich.console import Console

    connected = _is_connected(model)
    ends = list(positions or (_POSITIONS_CONNECTED if connected else _POSITIONS))
    header = ["Layer (type)", "Output Shape", "Param #", *(["Connected to"] if connected else [])]
    length = _LINE_CONNECTED if connected else _LINE
    if show_trainable:
        ends, length = [one * 0.9 for one in ends] + [1.0], length + _TRAINABLE
        header.append("Trainable")
    length = line_length or min(length, shutil.get_terminal_size().columns - 4)
    starts = [0, *(int(one * length) for one in ends)]
    widths = [end - start for start, end in itertools.pairwise(starts)]
    if min(widths) < _LEAST_COLUMNS or len(widths) != len(header):
        raise ConfigError("Insufficient console width to print summary.")
    justify = {"Param #": "right", "Trainable": "center"}
    columns: list[Any] = [
        rich.table.Column(rich.text.Text(name), width=width, justify=justify.get(name, "left"))  # type: ignore[arg-type]
        for name, width in zip(header, widths, strict=True)
    ]
    drawn = rich.table.Table(*columns, width=length, show_lines=True, box=rich.box.ASCII2 if plain else None)
    if not plain:
        drawn.box = rich.box.HEAVY_HEAD
    name_layers(model.layers)
    nodes = {id(one) for one in model._layer_calls}
    for layer, prefix in _rows(_in_range(model.layers, layer_range), expand_nested):
        cells = [f"{prefix}{layer.name} ({type(layer).__name__})", _output_shape(layer), _params(layer)]
        cells += [_connections(layer, nodes)] if connected else []
        cells += [("Y" if layer.trainable else "N") if layer.weights else "-"] if show_trainable else []
        drawn.add_row(*(rich.text.Text(printable(cell, "\n")) for cell in cells))
    page = io.StringIO()
    Console(file=page, width=length, highlight=False, color_system=None).print(drawn)
    return f'Model: "{printable(model.name)}"\n{page.getvalue()}{_totals(model)}'


def _is_connected(model: Any) -> bool:
    """Whether the layers of a model are more than a row."""
    calls = [one for one in model._layer_calls if one.inputs]
    layers = [id(one.layer) for one in calls]
    return any(len(one.inputs) > 1 for one in calls) or len(layers) > len(set(layers)) or _branches(calls)


def _branches(calls: Iterable[Any]) -> bool:
    """Whether something is used twice."""
    used = [id(one) for call in calls for one in call.inputs]
    return len(used) > len(set(used))


def _in_range(layers: Sequence[Layer], names: Sequence[str] | None) -> Sequence[Layer]:
    if names is None:
        return layers
    if len(names) != 2 or not all(isinstance(one, str) for one in names):
        raise ConfigError(f"layer_range must be a list or tuple of 2 names. Received: layer_range={names}")
    found = [
        [place for place, layer in enumerate(layers) if re.match(name, str(layer.name))] for name in map(str, names)
    ]
    if not all(found):
        raise ConfigError("Passed layer_names do not match the layer names in the model. Received: " + str(names))
    first, last = min(found[0]), max(found[1])
    return layers[min(first, last) : max(first, last) + 1]


def _rows(layers: Iterable[Any], expand: bool, level: int = 0) -> Iterable[tuple[Any, str]]:
    for layer in layers:
        yield layer, "   " * level + "└ " if level else ""
        if expand and hasattr(layer, "layers"):
            name_layers(layer.layers)
            yield from _rows(layer.layers, expand, level + 1)


def _output_shape(layer: Layer) -> str:
    shapes = tree.map_leaves(lambda path, one: _text(one.shape), layer._last_output)
    found = tree.leaves(shapes)
    return "?" if not found else found[0] if len(found) == 1 else str(shapes).replace("'", "")


def _text(shape: Sequence[int]) -> str:
    return f"({', '.join(map(str, read(shape)))})"


def _params(layer: Layer) -> str:
    return f"{_count(layer.weights):,}" if layer.built else "0 (unbuilt)"


def _connections(layer: Layer, nodes: set[int]) -> str:
    made = [one for node in layer._nodes if id(node) in nodes for one in node.inputs]
    return ", ".join(map(_place, made)) or "-"


def _place(tensor: Tensor) -> str:
    """Return what makes a tensor: layer[call][output]."""
    if tensor.history is None:
        return f"{name_of_maker(tensor)}[0][0]"
    node = tensor.history
    number = [id(one) for one in node.layer._nodes].index(id(node)) if node in node.layer._nodes else 0
    return f"{node.layer.name}[{number}][{[id(one) for one in tree.leaves(node.outputs)].index(id(tensor))}]"


def _totals(model: Any) -> str:
    trained, kept = model.trainable_weights, model.non_trainable_weights
    optimizer = model._compiled_optimizer.variables if model.compiled and model._compiled_optimizer.built else []
    lines = {"Total": [*trained, *kept, *optimizer], "Trainable": trained, "Non-trainable": kept}
    lines |= {"Optimizer": optimizer} if optimizer else {}
    return "".join(f" {name} params: {_count(one):,} ({_memory(one)})\n" for name, one in lines.items())


def _count(weights: Iterable[Variable]) -> int:
    return sum(int(np.prod(one.shape, dtype=np.int64)) for one in weights)


def _memory(weights: Iterable[Variable]) -> str:
    size = float(sum(int(np.prod(one.shape, dtype=np.int64)) * one.dtype.itemsize for one in weights))
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if size < 1024 or unit == "TB":
            break
        size /= 1024
    return f"{size:.2f} {unit}"
