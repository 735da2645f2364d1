"""A model's exported program as a function of arrays."""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dptrain.backend.base import Buffer, Executable
from dptrain.batches.sampling import EVALUATION_ROWS
from dptrain.comm.solo import SoloCommunicator
from dptrain.errors import ConfigError, DataError
from dptrain.models.generation.exporting import exported_of
from dptrain.models.generation.requests import Request, Sampling, prompts_of, stops_of
from dptrain.program import tree
from dptrain.program.program import Program
from dptrain.program.turns import MAKING
from dptrain.runtime.storage.files import open_regular
from dptrain.runtime.text import short
from dptrain.runtime.types import is_floating
from dptrain.saving import program as programs
from dptrain.saving.reading import reading
from dptrain.saving.state import read_packed
from dptrain.train.devices import open_backend

Array = npt.NDArray[Any]

# Limits of prepared row counts, and of idle executables for each.
_MOST_PREPARED, _MOST_FREE = 4, 8

_Ready = tuple[dict[str, Buffer], Executable]


@dataclass(frozen=True)
class _Prepared:
    """The program for a number of rows, and idle executables, each with its input buffers."""

    program: Program
    free: list[_Ready] = field(default_factory=list)


class ExportedProgram:
    """A model exported by `model.export`, as a function: `program(x)` returns what `model.predict(x)` does.

    It runs on this process's own device, and needs neither the model's classes nor its `custom_objects`. On a CPU any
    number of threads may call it at once.

    Args:
        filepath: of the file.
        device: "auto", "cpu" or "cuda".
        options: other options of `Model.compile` about the device, such as `precision`.

    Attributes:
        inputs: shape (None for the rows) and dtype of each input, nested like the model's.

    Raises:
        ConfigError: no such device or option.
        DataError: the file is missing or damaged, or has an op unknown to this version.
    """

    def __init__(self, filepath: str | Path, *, device: str = "auto", **options: Any) -> None:
        where = str(filepath)
        with reading(where), open_regular(Path(filepath)) as file:
            self._stored = programs.decode(read_packed(file), where)
            nodes = {node["input"]: node for node in self._stored.description["nodes"] if "input" in node}
            names = self._stored.description["inputs"]
            self.inputs = tree.map_leaves(
                lambda path, name: ((None, *map(int, nodes[name]["shape"][1:])), nodes[name]["dtype"]),
                names,
            )
            outputs = tree.leaves(self._stored.description["outputs"])
            if set(tree.leaves(names)) != set(nodes) or not self._stored.description["results"].keys() >= set(outputs):
                raise DataError(f"{where}: inputs {short(names)}, outputs {short(outputs)}: not nodes of its program")
            self._expected = {name: (tuple(nodes[name]["shape"][1:]), nodes[name]["dtype"]) for name in nodes}
        self._backend = open_backend(
            SoloCommunicator(), device=device, dtype=self._stored.description["dtype"], **options
        )
        self._lock = threading.Lock()
        self._ready: OrderedDict[int, _Prepared] = OrderedDict()

    def __call__(self, x: Any) -> Any:
        """Return the outputs for arrays (rows, ...), nested like the model's inputs; DataError for other arrays."""
        names = self._stored.description["inputs"]
        try:
            flat = tree.leaves(names)
            arrays = dict(zip(flat, map(np.asarray, tree.matched(x, names, flat, by_key=True)), strict=True))
        except ConfigError as error:
            raise DataError(str(error)) from error
        for name, array in arrays.items():
            shape, _ = self._expected[name]
            are_numbers = array.dtype.kind in "iub" or is_floating(array.dtype)
            if array.shape[1:] != shape or not array.ndim or not are_numbers:
                raise DataError(f"{name}: expected real numbers of shape {(None, *shape)}, found {array.shape}")
        if len({len(array) for array in arrays.values()}) > 1:
            raise DataError(
                f"inputs of different lengths: {', '.join(str(len(array)) for array in arrays.values())} rows"
            )
        rows = len(next(iter(arrays.values())))
        outputs = [
            self._run({name: array[start : start + EVALUATION_ROWS] for name, array in arrays.items()})
            for start in range(0, max(rows, 1), EVALUATION_ROWS)
        ]
        joined = {name: np.concatenate([batch[name] for batch in outputs]) for name in outputs[0]}
        return tree.map_leaves(lambda path, name: joined[name], self._stored.description["outputs"])

    def generate(
        self,
        prompt: Any,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        stop: int | Sequence[int] | None = None,
        seed: int = 0,
    ) -> Any:
        """Return prompts with the tokens that follow, as `Model.generate` does, of a file of format "generation".

        Raises:
            ConfigError, DataError: see `Model.generate`; or the file's program predicts.
        """
        exported = exported_of(self._stored.description, self._stored.where)
        prompts, is_single = prompts_of(prompt)
        request = Request(prompts, max_new_tokens, Sampling(temperature, top_k, top_p, stops_of(stop), seed))
        request.length(exported.length)
        request.check_vocabulary(exported.tokens)
        if len(request.sampling.stop) > exported.stops:
            raise ConfigError(f"generate: stop={short(stop)}; an exported program takes {exported.stops}")
        texts = request.texts(self(request.arrays(exported.length, self._expected["uniform"][1], draws=True)))
        return texts[0] if is_single else texts

    def _run(self, arrays: dict[str, Array]) -> dict[str, Array]:
        rows = len(next(iter(arrays.values())))
        buffers, executable = ready = self._take(rows)
        try:
            for name, array in arrays.items():
                self._backend.write(buffers[name], array.astype(self._expected[name][1]))
            executable.run()
            outputs = dict(executable.outputs)
            self._stored.require_ended(int(outputs.pop(programs.STEPS, 0)))
            return outputs
        finally:
            with self._lock:
                prepared = self._ready.get(rows)
                if prepared is not None and len(prepared.free) < _MOST_FREE:
                    prepared.free.append(ready)

    def _take(self, rows: int) -> _Ready:
        """Return an idle executable for this number of rows, or prepare one."""
        with self._lock:
            prepared = self._ready.get(rows)
            if prepared is not None:
                self._ready.move_to_end(rows)
                if prepared.free:
                    return prepared.free.pop()
        with MAKING:
            if prepared is None:
                prepared = self._ready.get(rows) or _Prepared(self._stored.program(rows))
            buffers = {
                name: self._backend.empty((rows, *shape), np.dtype(dtype), name)
                for name, (shape, dtype) in self._expected.items()
            }
            executable = self._backend.executable(prepared.program, buffers)
        with self._lock:
            self._ready.setdefault(rows, prepared)
            if len(self._ready) > _MOST_PREPARED:
                self._ready.popitem(last=False)
        return buffers, executable
