"""A model as a table, like Keras prints it."""

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
from dptrain.runtime.launch.launcher import detect_launch

_LINE, _LINE_CONNECTED, _TRAINABLE = 88, 108, 12  # columns by default, and added for "Trainable"
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
    """Print layers, output shapes and numbers of weights, on rank 0."""
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
    """Return a model's table as text; `plain` draws lines in ASCII. Other arguments are those of `summary`."""
    import rich.box
    import rich.table
    import rich.text
    from rich.console import Console

    connected = _is_connected(model)
    ends = list(positions or (_POSITIONS_CONNECTED if connected else _POSITIONS))
    header = ["Layer (type)", "Output Shape", "Param #", *(["Connected to"] if connected else [])]
    length = _LINE_CONNECTED if connected else _LINE
    if show_trainable:
        ends, length = [end * 0.9 for end in ends] + [1.0], length + _TRAINABLE
        header.append("Trainable")
    length = line_length or min(length, shutil.get_terminal_size().columns - 4)
    starts = [0, *(int(end * length) for end in ends)]
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
    nodes = {id(node) for node in model._layer_calls}
    for layer, prefix in _rows(_in_range(model.layers, layer_range), expand_nested):
        cells = [f"{prefix}{layer.name} ({type(layer).__name__})", _output_shape(layer), _params(layer)]
        cells += [_connections(layer, nodes)] if connected else []
        cells += [("Y" if layer.trainable else "N") if layer.weights else "-"] if show_trainable else []
        drawn.add_row(*(rich.text.Text(printable(cell, "\n")) for cell in cells))
    page = io.StringIO()
    Console(file=page, width=length, highlight=False, color_system=None).print(drawn)
    return f'Model: "{printable(model.name)}"\n{page.getvalue()}{_totals(model)}'


def _is_connected(model: Any) -> bool:
    """Return whether the layers of a model form more than a chain."""
    calls = [call for call in model._layer_calls if call.inputs]
    layers = [id(call.layer) for call in calls]
    return any(len(call.inputs) > 1 for call in calls) or len(layers) > len(set(layers)) or _branches(calls)


def _branches(calls: Iterable[Any]) -> bool:
    """Return whether a tensor is used twice."""
    used = [id(symbol) for call in calls for symbol in call.inputs]
    return len(used) > len(set(used))


def _in_range(layers: Sequence[Layer], names: Sequence[str] | None) -> Sequence[Layer]:
    if names is None:
        return layers
    if len(names) != 2 or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"layer_range must be a list or tuple of 2 names. Received: layer_range={names}")
    matches = [
        [place for place, layer in enumerate(layers) if re.match(name, str(layer.name))] for name in map(str, names)
    ]
    if not all(matches):
        raise ConfigError("Passed layer_names do not match the layer names in the model. Received: " + str(names))
    first, last = min(matches[0]), max(matches[1])
    return layers[min(first, last) : max(first, last) + 1]


def _rows(layers: Iterable[Any], expand: bool, level: int = 0) -> Iterable[tuple[Any, str]]:
    for layer in layers:
        yield layer, "   " * level + "└ " if level else ""
        if expand and hasattr(layer, "layers"):
            name_layers(layer.layers)
            yield from _rows(layer.layers, expand, level + 1)


def _output_shape(layer: Layer) -> str:
    shapes = tree.map_leaves(lambda path, symbol: _text(symbol.shape), layer._last_output)
    texts = tree.leaves(shapes)
    return "?" if not texts else texts[0] if len(texts) == 1 else str(shapes).replace("'", "")


def _text(shape: Sequence[int]) -> str:
    return f"({', '.join(map(str, read(shape)))})"


def _params(layer: Layer) -> str:
    return f"{_count(layer.weights):,}" if layer.built else "0 (unbuilt)"


def _connections(layer: Layer, nodes: set[int]) -> str:
    symbols = [symbol for node in layer._nodes if id(node) in nodes for symbol in node.inputs]
    return ", ".join(map(_place, symbols)) or "-"


def _place(tensor: Tensor) -> str:
    """Return the maker of a tensor: layer[call][output]."""
    if tensor.history is None:
        return f"{name_of_maker(tensor)}[0][0]"
    node = tensor.history
    number = [id(call) for call in node.layer._nodes].index(id(node)) if node in node.layer._nodes else 0
    return f"{node.layer.name}[{number}][{[id(output) for output in tree.leaves(node.outputs)].index(id(tensor))}]"


def _totals(model: Any) -> str:
    trained, untrained = model.trainable_weights, model.non_trainable_weights
    optimizer = model._compiled_optimizer.variables if model.compiled and model._compiled_optimizer.built else []
    lines = {"Total": [*trained, *untrained, *optimizer], "Trainable": trained, "Non-trainable": untrained}
    lines |= {"Optimizer": optimizer} if optimizer else {}
    return "".join(
        f" {name} params: {_count(variables):,} ({_memory(variables)})\n" for name, variables in lines.items()
    )


def _count(weights: Iterable[Variable]) -> int:
    return sum(int(np.prod(weight.shape, dtype=np.int64)) for weight in weights)


def _memory(weights: Iterable[Variable]) -> str:
    size = float(sum(int(np.prod(weight.shape, dtype=np.int64)) * weight.dtype.itemsize for weight in weights))
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if size < 1024 or unit == "TB":
            break
        size /= 1024
    return f"{size:.2f} {unit}"
