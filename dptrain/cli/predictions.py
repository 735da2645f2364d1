"""Formats predictions: CSV for people and spreadsheets, NumPy's formats for programs."""

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from dptrain.data.texts import object_array
from dptrain.errors import ConfigError, printable
from dptrain.models import Model
from dptrain.program import tree
from dptrain.runtime.text import no_formula

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Meaning:
    """What a model's output means."""

    # class probabilities, that of the second class ("binary"), or "values"
    task: Literal["multiclass", "binary", "values"] = "values"
    names: Sequence[str] = ()  # of the classes; empty where they are numbers
    target: str = "output"  # name of the column of values


def meaning(model: Model) -> Meaning:
    """Return the meaning of a model's single output, from its preprocessing or its loss."""
    preprocessing = getattr(model, "_preprocessing", None)
    names = tuple(map(str, getattr(preprocessing, "class_names", None) or ()))
    target = str(getattr(preprocessing, "target", None) or "output")
    losses = model._expected_data.losses
    loss = None if losses is None or tree.is_nested(losses) else losses
    logits = getattr(loss, "from_logits", True)
    kind = type(loss).__name__
    if not logits and kind.endswith("CategoricalCrossentropy"):
        return Meaning("multiclass", names, target)
    if not logits and kind == "BinaryCrossentropy":
        return Meaning("binary", names, target)
    return Meaning(target=target)


def probabilities(model: Model, outputs: Array) -> npt.NDArray[np.float64] | None:
    """Return probabilities (rows, classes) of a classifier's single output, also of logits and of label 1 alone.

    None for outputs of another shape or meaning.
    """
    losses = model._expected_data.losses
    loss = None if losses is None or tree.is_nested(losses) else losses
    kind, logits = type(loss).__name__, bool(getattr(loss, "from_logits", False))
    values = outputs.astype(np.float64)
    if values.ndim == 2 and values.shape[1] > 1 and kind.endswith("CategoricalCrossentropy"):
        if not logits:
            return values
        powers = np.exp(values - values.max(axis=1, keepdims=True))
        normal: npt.NDArray[np.float64] = powers / powers.sum(axis=1, keepdims=True)
        return normal
    if values.ndim in (1, 2) and values.size == len(values) and kind == "BinaryCrossentropy":
        second = values.reshape(-1)
        second = (1 + np.tanh(second / 2)) / 2 if logits else second
        return np.stack([1 - second, second], axis=1)
    return None


def as_csv(outputs: Any, means: Meaning, files: Sequence[str] = ()) -> str:
    """Format predictions as CSV: row number from 0, file, predicted class if any, and every output."""
    columns: dict[str, Array] = {}
    named = list(tree.flatten(outputs))
    for path, output in named:
        if output.ndim > 2:
            shape = (None, *output.shape[1:])
            raise ConfigError(f"an output of shape {shape} does not fit into a table; use --out FILE.npy or FILE.npz")
        columns |= _columns(
            output if output.ndim == 2 else output[:, None], means if len(named) == 1 else Meaning(target=path)
        )
    rows = len(next(iter(columns.values())))
    if files:
        columns = {"file": object_array([no_formula(printable(name)) for name in files]), **columns}
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["index", *map(no_formula, columns)])
    # Strings of NumPy's: the shortest that read back as the same number of the outputs' type.
    cells = [column if column.dtype == object else column.astype(str) for column in columns.values()]
    writer.writerows(zip(map(str, range(rows)), *cells, strict=True))
    return text.getvalue()


def as_arrays(outputs: Any, ending: str) -> bytes:
    """Return predictions as the content of an .npy file, or of an .npz file with an array an output."""
    content = io.BytesIO()
    if ending == ".npz":
        np.savez(content, **{path or "output": output for path, output in tree.flatten(outputs)})
    elif tree.is_nested(outputs):
        raise ConfigError("the model has several outputs, an .npy file holds one; use --out FILE.npz")
    else:
        np.save(content, outputs)
    return content.getvalue()


def classes(means: Meaning, width: int) -> Sequence[str] | None:
    """Return the names of the classes of an output of this width, numbers as text; None of an output of values."""
    if means.task == "binary" and width == 1:
        return means.names if len(means.names) == 2 else ("0", "1")
    if means.task == "multiclass" and width > 1:
        return means.names if len(means.names) == width else tuple(map(str, range(width)))
    return None


def labels(output: Array) -> npt.NDArray[np.int64]:
    """Return the predicted class (rows,) of probabilities (rows, classes), or (rows, 1) of the second class."""
    return (output[:, 0] > 0.5).astype(np.int64) if output.shape[1] == 1 else output.argmax(axis=1)


def _columns(output: Array, means: Meaning) -> dict[str, Array]:
    width = output.shape[1]
    names = classes(means, width)
    if names is not None:
        shown = {f"p_{names[1]}": 0} if width == 1 else {f"p_{name}": label for label, name in enumerate(names)}
        return {"class": _named(labels(output), names)} | {name: output[:, index] for name, index in shown.items()}
    if width == 1:
        return {means.target: output[:, 0]}
    return {f"{means.target}_{index}": output[:, index] for index in range(width)}


def _named(numbers: npt.NDArray[np.int64], names: Sequence[str]) -> Array:
    return object_array([no_formula(name) for name in names])[numbers]
