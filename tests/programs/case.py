"""A program as data: lines of Python over named tensors, which can be read, made smaller and pasted into a test."""

import zlib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

import numpy as np

import dptrain.ops.random
from dptrain import ops
from dptrain.ops.indexing import take_each, take_rows
from dptrain.ops.loops import remat
from dptrain.ops.manipulation import unshard
from dptrain.program.dims import Dim
from dptrain.program.gradient import gradients
from dptrain.program.program import ROWS, Program, trace
from dptrain.program.shapes import Shape
from dptrain.program.sharding.mesh import Axes
from dptrain.program.tensor import Tensor, Variable
from dptrain.random import Purpose
from tests.programs.memory import WAYS

# NumPy's numbers that are none, and what is near the ends of what float32 counts.
SPECIAL = (np.nan, np.inf, -np.inf, 0.0, 1e30, -1e30)


@dataclass(frozen=True)
class Case:
    """A training step, and how it is executed.

    Attributes:
        lengths: by name; "n" is the number of rows of the batch.
        leaves: by name, what the step reads: "input" or "variable", lengths ("2n" is two for each row), type, and how
            it is filled: "normal"; "whole", small whole numbers; "special", with NaN and infinities among them;
            "below K", whole numbers from 0 to K - 1. The input `rows` has those of many steps.
        lines: assignments, of which each may use `environment`, the leaves, and names before.
        outputs: names that come out.
        updates: new values of variables, as expressions.
        steps: how often it is executed in one call.
        shards: rows of each rank; none for one rank.
        mesh: lengths of a mesh's axes by name, "batch" among them; none for ranks without.
        layouts: of variables on it, by name: for each axis the axis of the mesh over which it is sharded, or None.
        summed: variables of which each rank is to keep a summand, see `placement.place`.
        bucket_bytes: of a message's sums at most; None for any number.
        pack: it is executed alone, in a pack, and alone again.
        memory: how leaves lie in memory, by name: one of `memory.WAYS`. That of variables' arrays is used again.
        seed: of the numbers.
    """

    lengths: Mapping[str, int]
    leaves: Mapping[str, str]
    lines: tuple[str, ...]
    outputs: tuple[str, ...]
    updates: Mapping[str, str] = field(default_factory=dict)
    steps: int = 1
    shards: tuple[int, ...] = ()
    mesh: Mapping[str, int] = field(default_factory=dict)
    layouts: Mapping[str, Axes] = field(default_factory=dict)
    summed: tuple[str, ...] = ()
    bucket_bytes: int | None = None
    pack: bool = False
    memory: Mapping[str, str] = field(default_factory=dict)
    seed: int = 0

    @property
    def is_trainable(self) -> bool:
        """Whether variables are, which an op by op execution asks for gradients."""
        return False

    @property
    def rows(self) -> int:
        """Those of the batch."""
        return self.lengths["n"]

    def __str__(self) -> str:
        """Return Python text, which makes the case."""
        arguments = []
        for attribute in fields(self):
            value = getattr(self, attribute.name)
            if attribute.name == "lines":
                arguments.append("lines=(\n" + "".join(f"        {line!r},\n" for line in value) + "    )")
            elif value != (attribute.default if attribute.default_factory is MISSING else attribute.default_factory()):
                arguments.append(f"{attribute.name}={value!r}")
        return "Case(\n" + "".join(f"    {argument},\n" for argument in arguments) + ")"

    def shape(self, name: str, rows: int | None = None) -> Shape:
        """Return the shape of a leaf, for so many rows: marked without."""
        words = self.leaves[name].split()
        words = words[1 : next(n for n, word in enumerate(words) if word in _TYPES)]
        return tuple(self._length(word, rows) for word in words)

    def _length(self, word: str, rows: int | None) -> int:
        if word in ("n", "2n"):
            scale = len(word)
            return Dim.rows(self.rows, scale) if rows is None else scale * rows
        return self.lengths[word] if word in self.lengths else int(word)

    def dtype(self, name: str) -> np.dtype[Any]:
        """Return the type of a leaf."""
        return np.dtype(next(word for word in self.leaves[name].split() if word in _TYPES))

    def named(self, kind: str) -> list[str]:
        """Return the names of inputs, or of variables."""
        return [name for name, text in self.leaves.items() if text.split()[0] == kind]

    def value(self, name: str, run: int = 0) -> np.ndarray:
        """Return what a leaf holds in one of several runs; of the input `rows`, that of all steps."""
        text, dtype = self.leaves[name].split(), self.dtype(name)
        shape = self.shape(name, self.rows)
        if name == ROWS:
            shape = (max(1, self.steps) * shape[0],)
        rng = np.random.default_rng((self.seed, run, zlib.crc32(name.encode())))
        fill = text[text.index(dtype.name) + 1 :]
        if fill[0] == "below":
            top = self.lengths[fill[1]] if fill[1] in self.lengths else int(fill[1])
            return rng.integers(0, top, shape).astype(dtype)
        if fill[0] == "values":
            return np.resize(np.array(fill[1:], np.float64), shape).astype(dtype)
        if dtype.kind == "b":
            return rng.random(shape) < 0.5
        if dtype.kind in "iu" or fill[0] == "whole":
            array = rng.integers(0 if dtype.kind == "u" else -3, 4, shape).astype(dtype)
        else:
            array = rng.normal(size=shape).astype(dtype)
        if fill[-1] == "special" and dtype.kind not in "iu" and array.size:
            places = rng.integers(0, array.size, 1 + array.size // 8)
            array.reshape(-1)[places] = rng.choice(SPECIAL, len(places))
        return array

    def values(self, run: int = 0) -> dict[str, np.ndarray]:
        """Return what inputs hold."""
        return {name: self.value(name, run) for name in self.named("input")}

    def in_memory(self, values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return what leaves hold as it lies in memory."""
        return {
            name: WAYS[self.memory[name]](value) if name in self.memory else value for name, value in values.items()
        }

    def _variable(self, name: str, run: int) -> Variable:
        """Return a variable, made of an array that is used again."""
        value = self.in_memory({name: self.value(name, run)})[name]
        variable = Variable(value, name, trainable=self.is_trainable)
        if value.flags.writeable:
            value[...] = 1
        return variable

    def variables(self, run: int = 0) -> dict[str, Variable]:
        """Return variables with their first values."""
        return {name: self._variable(name, run) for name in self.named("variable")}

    def seeds(self, run: int = 0) -> dptrain.ops.random.SeedGenerator:
        """Return what gives random numbers."""
        return dptrain.ops.random.SeedGenerator(self.seed + run, "seeds", purpose=Purpose.DROPOUT)

    def starts(self, rows: int | None = None) -> list[int]:
        """Return where in the input `rows` the rows of each step begin, of a rank that has so many."""
        return [number * (self.rows if rows is None else rows) for number in range(self.steps)]

    def of_rank(self, values: Mapping[str, np.ndarray], rank: int) -> dict[str, np.ndarray]:
        """Return what inputs hold on a rank."""
        first, rows = sum(self.shards[:rank]), self.shards[rank]
        parts = {}
        for name, value in values.items():
            axis = next((n for n, length in enumerate(self.shape(name)) if isinstance(length, Dim)), None)
            if name == ROWS:
                parts[name] = value.reshape(max(1, self.steps), self.rows)[:, first : first + rows].reshape(-1)
            elif axis is None:
                parts[name] = value
            else:
                scale = self.shape(name)[axis].scale  # type: ignore[attr-defined]
                parts[name] = np.take(value, range(scale * first, scale * (first + rows)), axis)
        return parts

    def trace(self, run: int = 0) -> Program:
        """Return the program, with variables of its own."""
        variables, seeds = self.variables(run), self.seeds(run)

        def step(*tensors: Tensor) -> dict[str, Any]:
            return self.computed(dict(zip(self.named("input"), tensors, strict=True)), variables, seeds)

        return trace(step, {name: (self.shape(name), self.dtype(name)) for name in self.named("input")})

    def computed(
        self, inputs: Mapping[str, Tensor], variables: Mapping[str, Variable], seeds: dptrain.ops.random.SeedGenerator
    ) -> dict[str, Any]:
        """Assign the variables' new values, and return the outputs."""
        namespace = environment(seeds) | dict(inputs)
        namespace |= {name: variable.value for name, variable in variables.items()}
        for line in self.lines:
            exec(line, namespace)
        updates = {name: eval(text, namespace) for name, text in self.updates.items()}
        for name, update in updates.items():
            variables[name].assign(update)
        return {name: namespace[name] for name in self.outputs}


_TYPES = (
    *("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64"),
    *("float8_e4m3fn", "float8_e5m2", "bfloat16", "float16", "float32", "float64"),
)


def environment(seeds: dptrain.ops.random.SeedGenerator) -> dict[str, Any]:
    """Return what lines may use beside tensors."""
    functions = {"take_rows": take_rows, "take_each": take_each, "unshard": unshard, "remat": remat}
    return {"ops": ops, "np": np, "gradients": gradients, "seeds": seeds, **functions} | {
        "dropout": dptrain.ops.random.dropout
    }
