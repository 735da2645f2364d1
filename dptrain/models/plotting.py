"""Diagrams of models: boxes for layers, arrows for tensors, as SVG or in Graphviz' language."""

import html
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dptrain.errors import ConfigError
from dptrain.layers.node import maker_of
from dptrain.layers.parts import name_layers
from dptrain.models.graph import name_of_maker
from dptrain.ops.operation_calls import OperationCall
from dptrain.program import tree
from dptrain.program.dims import read
from dptrain.program.tensor import Tensor
from dptrain.runtime.failure import warn
from dptrain.runtime.launch.launcher import detect_launch
from dptrain.runtime.programs import run_program
from dptrain.runtime.storage.files import write_through_links

_CHARACTER, _LINE, _PADDING, _GAP = 7.5, 18, 10, 36  # pixels
_PATIENCE = 60.0  # seconds that Graphviz may take


class _Box:
    """A layer, or an op between layers; `inputs` are the indices of the boxes before it."""

    def __init__(self, lines: Sequence[str], inputs: Sequence[int]) -> None:
        self.lines, self.inputs = list(lines), list(dict.fromkeys(inputs))


def model_to_dot(
    model: Any,
    show_shapes: bool = False,
    show_dtype: bool = False,
    show_layer_names: bool = True,
    rankdir: str = "TB",
    *,
    dpi: int = 200,
    show_layer_activations: bool = False,
    show_trainable: bool = False,
) -> str:
    """Return a built model as text in Graphviz' language (Keras returns a pydot object).

    Args:
        model: the model.
        show_shapes, show_dtype: of what layers return.
        show_layer_names, show_layer_activations, show_trainable: of layers.
        rankdir: "TB" from top to bottom, "LR" from left to right.
        dpi: pixels per inch of images that Graphviz makes.

    Raises:
        ConfigError: the model is not built, or another direction.
    """
    shown = _shown(show_shapes, show_dtype, show_layer_names, show_layer_activations, show_trainable)
    boxes = _boxes(model, rankdir, shown)
    lines = ["digraph {", f"  graph [rankdir={rankdir}, dpi={dpi}]", "  node [shape=box]"]
    for number, box in enumerate(boxes):
        label = "\\n".join(line.replace("\\", "\\\\").replace('"', '\\"') for line in box.lines)
        lines.append(f'  {number} [label="{label}"]')
        lines += [f"  {before} -> {number}" for before in box.inputs]
    return "\n".join([*lines, "}"]) + "\n"


def plot_model(
    model: Any,
    to_file: str | Path = "model.svg",
    show_shapes: bool = False,
    show_dtype: bool = False,
    show_layer_names: bool = True,
    rankdir: str = "TB",
    *,
    show_layer_activations: bool = False,
    show_trainable: bool = False,
) -> str:
    """Draw a built model to a file, on rank 0; return the file's text.

    Args:
        to_file: ends in `.svg`, or in `.dot` for the text. Other formats need Graphviz' program `dot`; if it is not
            installed, an `.svg` is written instead, with a warning.
        model, show_shapes, show_dtype, show_layer_names, rankdir, show_layer_activations, show_trainable: see
            `model_to_dot`.

    Raises:
        ConfigError: see `model_to_dot`, or a format that Graphviz does not know.
        OutputError: the file cannot be written.
    """
    path = Path(to_file)
    shown = _shown(show_shapes, show_dtype, show_layer_names, show_layer_activations, show_trainable)
    launch = detect_launch()
    writes = launch is None or launch.rank == 0
    if path.suffix in (".dot", ".gv"):
        text = model_to_dot(model, rankdir=rankdir, **shown)
    elif path.suffix != ".svg" and (graphviz := shutil.which("dot")) is not None:
        text = model_to_dot(model, rankdir=rankdir, **shown)
        if writes:
            write_through_links(path, _rendered(graphviz, path.suffix.lstrip(".") or "png", text))
        return text
    else:
        text = _svg(_boxes(model, rankdir, shown), rankdir)
        if path.suffix != ".svg":
            warn(f"plot_model: no Graphviz (dot) to write {path}; wrote {path.with_suffix('.svg')}")
            path = path.with_suffix(".svg")
    if writes:
        write_through_links(path, text.encode())
    return text


def _rendered(graphviz: str, form: str, text: str) -> bytes:
    try:
        completed = run_program([graphviz, f"-T{form}"], _PATIENCE, text.encode())
    except subprocess.TimeoutExpired:
        why = f"has drawn nothing within {_PATIENCE:g} s"
        raise ConfigError(f"plot_model: {graphviz} {why}: write .svg or .dot") from None
    except OSError as error:
        raise ConfigError(f"plot_model: {graphviz}: {error.strerror}: write .svg or .dot") from error
    if completed.returncode:
        lines = completed.stderr.decode(errors="replace").splitlines() or [f"exit code {completed.returncode}"]
        raise ConfigError(f"plot_model: Graphviz: {lines[0]}")
    return completed.stdout


def _shown(shapes: bool, dtype: bool, names: bool, activations: bool, trainable: bool) -> dict[str, bool]:
    return {
        "show_shapes": shapes,
        "show_dtype": dtype,
        "show_layer_names": names,
        "show_layer_activations": activations,
        "show_trainable": trainable,
    }


def _boxes(model: Any, rankdir: str, shown: dict[str, bool]) -> list[_Box]:
    if rankdir not in ("TB", "LR"):
        raise ConfigError(f"rankdir = {rankdir!r}: expected 'TB' or 'LR'")
    if not model.built:
        raise ConfigError(
            "This model has not yet been built. Build the model first by calling `build()` or by calling the model on "
            "a batch of data."
        )
    name_layers(model.layers)
    makers = model._makers
    if not makers:  # the layers' connections in a subclass are unknown
        return [
            _Box(_lines(layer, shown, layer._last_output), [number - 1] if number else [])
            for number, layer in enumerate(model.layers)
        ]
    places = {id(maker): number for number, maker in enumerate(makers)}

    def box(maker: Any) -> _Box:
        inputs = [tensor for tensor in maker.inputs if isinstance(tensor, Tensor) and tensor.value is None]
        before = [places[id(maker_of(tensor))] for tensor in inputs]
        if isinstance(maker, Tensor):
            return _Box([name_of_maker(maker), *_facts(shown, maker)], before)
        if isinstance(maker, OperationCall):
            return _Box([maker.function.__name__, *_facts(shown, maker.outputs)], before)
        return _Box(_lines(maker.layer, shown, maker.outputs), before)

    return [box(maker) for maker in makers]


def _lines(layer: Any, shown: dict[str, bool], outputs: Any) -> list[str]:
    kind = type(layer).__name__
    lines = [f"{layer.name} ({kind})" if shown["show_layer_names"] else kind]
    activation = getattr(layer, "activation", None)
    if shown["show_layer_activations"] and activation is not None:
        lines.append(f"Activation: {getattr(activation, 'name', None) or getattr(activation, '__name__', '?')}")
    lines += _facts(shown, outputs)
    if shown["show_trainable"] and layer.weights:
        lines.append("Trainable" if layer.trainable else "Non-trainable")
    return lines


def _facts(shown: dict[str, bool], outputs: Any) -> list[str]:
    tensors = [tensor for tensor in tree.leaves(outputs) if isinstance(tensor, Tensor)]
    shapes = ", ".join(f"({', '.join(map(str, read(tensor.shape)))})" for tensor in tensors)
    dtypes = ", ".join(tensor.dtype.name for tensor in tensors)
    facts = {"Output shape": shapes if shown["show_shapes"] else "", "dtype": dtypes if shown["show_dtype"] else ""}
    return [f"{name}: {value}" for name, value in facts.items() if value]


def _svg(boxes: Sequence[_Box], rankdir: str) -> str:
    """Arrange boxes in rows by their distance from the inputs, and draw lines between them."""
    depths: list[int] = []
    for box in boxes:
        depths.append(max((depths[before] + 1 for before in box.inputs), default=0))
    sizes = [(max(map(len, box.lines)) * _CHARACTER + 2 * _PADDING, len(box.lines) * _LINE + _PADDING) for box in boxes]
    along, across = (1, 0) if rankdir == "TB" else (0, 1)
    rows = [[n for n, box_depth in enumerate(depths) if box_depth == depth] for depth in range(max(depths) + 1)]
    breadths = [sum(sizes[n][across] for n in row) + _GAP * (len(row) - 1) for row in rows]
    places: dict[int, tuple[float, float]] = {}
    reached = float(_PADDING)
    for row, breadth in zip(rows, breadths, strict=True):
        at = _PADDING + (max(breadths) - breadth) / 2
        for n in row:
            places[n] = (at, reached) if rankdir == "TB" else (reached, at)
            at += sizes[n][across] + _GAP
        reached += max(sizes[n][along] for n in row) + _GAP
    end, broad = reached - _GAP + _PADDING, max(breadths) + 2 * _PADDING
    width, height = (broad, end) if rankdir == "TB" else (end, broad)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        'font-family="monospace" font-size="12">',
        '<defs><marker id="tip" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto">'
        '<path d="M0,0 L8,4 L0,8 z"/></marker></defs>',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for n, box in enumerate(boxes):
        for before in box.inputs:
            start, stop = _end(places[before], sizes[before], along, 1.0), _end(places[n], sizes[n], along, 0.0)
            parts.append(
                f'<line x1="{start[0]:.1f}" y1="{start[1]:.1f}" x2="{stop[0]:.1f}" y2="{stop[1]:.1f}" '
                'stroke="black" marker-end="url(#tip)"/>'
            )
    for n, box in enumerate(boxes):
        (x, y), (wide, high) = places[n], sizes[n]
        parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{high:.1f}" rx="3" fill="#eef3fb" '
            'stroke="#34495e"/>'
        )
        for number, line in enumerate(box.lines):
            place = f'x="{x + wide / 2:.1f}" y="{y + (number + 1) * _LINE:.1f}"'
            parts.append(f'<text {place} text-anchor="middle">{html.escape(line)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _end(place: tuple[float, float], size: tuple[float, float], along: int, part: float) -> tuple[float, float]:
    """Return the middle of the side of a box where lines begin (1) or end (0)."""
    parts = [0.5, 0.5]
    parts[along] = part
    return place[0] + size[0] * parts[0], place[1] + size[1] * parts[1]
