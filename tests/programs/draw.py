"""Programs drawn from a seed: `program(seed)` is the same one every time.

A program grows line by line. A line that the library refuses is left out, and so is one after which ranks could not
execute it; numbers that become too large are squashed. Every other program begins with a *situation*, a few lines that
random growth would seldom find; `SITUATIONS` has them by name. Lengths are those around which the generators of code
decide (`thresholds`), and small ones.

Shrinking works on the lines (`shrink.py`), not on the random choices as Hypothesis' does: leaving a line out changes no
other line, every attempt costs a compilation, and a line is what somebody reads.
"""

import ast
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np

import dptrain
import dptrain.ops.random
from dptrain.errors import ConfigError
from dptrain.program.dims import Dim, counts_rows
from dptrain.program.program import ROWS, Program
from dptrain.program.sharding.mesh import Axes
from dptrain.program.sharding.placement import place
from dptrain.program.tensor import Tensor, Variable, placeholder, tracing
from tests.programs.case import Case, environment
from tests.programs.draw_loops import aliases, branch, loop, mapped, several, while_loop
from tests.programs.exact import Exact
from tests.programs.memory import WAYS

PACKAGE = Path(__file__).resolve().parents[2] / "dptrain"  # also of programs that another version executes
# Where the generators of code, and what executes it, keep the lengths around which they decide.
GENERATORS = (
    *("backend/cpu/codegen.py", "backend/cuda/generate.py", "backend/cuda/products.py", "backend/cuda/executable.py"),
    *("backend/cuda/policy.py", "backend/cuda/expressions.py", "backend/cuda/compose.py", "backend/cuda/persistent.py"),
    *("backend/cuda/frames/columns.py", "backend/cuda/frames/elements.py", "backend/cuda/frames/products.py"),
    *(f"program/codegen/{name}.py" for name in ("fuse", "kernels", "merge", "views", "cpp")),
)
# The lengths in `kernels/`: a warp, blocks of rows (`dp_block`), tiles of products.
IN_HEADERS = (16, 32, 64, 1024)
# Of ranks among which programs are executed; the last axis counts fastest.
MESHES = (
    *({"batch": 2}, {"batch": 3}, {"batch": 2, "model": 1}, {"batch": 3, "model": 1}, {"batch": 2, "model": 2}),
    *({"batch": 1, "model": 3}, {"batch": 1, "model": 4}, {"batch": 2, "model": 3}, {"model": 2, "batch": 2}),
    {"batch": 2, "model": 2, "pipe": 2},
)
MOST = 40_000  # elements of a tensor; of a long sum or a large map as many as it takes
_TOO_LARGE = 1e4


def thresholds() -> list[int]:
    """Return the whole numbers that are constants of the generators, as far as tensors can be so long here."""
    lengths = set(IN_HEADERS)
    for path in GENERATORS:
        for statement in ast.parse((PACKAGE / path).read_text()).body:
            if not isinstance(statement, ast.Assign):
                continue
            names = [node.id for node in ast.walk(statement.targets[0]) if isinstance(node, ast.Name)]
            if all(name.isupper() for name in names):
                numbers = [node.value for node in ast.walk(statement.value) if isinstance(node, ast.Constant)]
                lengths |= {number for number in numbers if isinstance(number, int) and 8 <= number <= 4096}
    return sorted(lengths)


THRESHOLDS = thresholds()


@dataclass(frozen=True)
class _Known:
    """A tensor of a drawing."""

    name: str
    tensor: Tensor
    value: np.ndarray


class RefusedError(Exception):
    """The library refuses a line, or it is of no use here."""


class CrashedError(Exception):
    """The library fails at a line with no error of its own.

    Attributes:
        case: the program up to that line.
    """

    def __init__(self, case: Case) -> None:
        super().__init__(str(case))
        self.case = case


class Drawing:
    """A program that grows.

    Args:
        seed: of all choices.
        device: "cuda" keeps tensors smaller, since the emulator is slow; "mesh" does, too, shards variables over a
            mesh of ranks, and trains them.
    """

    def __init__(self, seed: int, device: str) -> None:
        self.rng = np.random.default_rng(seed)
        self.seed, self.device, self.small = seed, device, device != "cpu"
        self.most = MOST // 4 if self.small else MOST
        self.lengths: dict[str, int] = {}
        self.leaves: dict[str, str] = {}
        self.lines: list[str] = []
        self.pool: dict[str, _Known] = {}
        self.updates: dict[str, str] = {}
        self.steps, self.pack = 1, False
        self.shards: tuple[int, ...] = ()
        self.mesh: dict[str, int] = {}
        self.layouts: dict[str, Axes] = {}
        self.summed: tuple[str, ...] = ()
        self.bucket_bytes: int | None = None
        self.wide = False  # float32 is float64
        self.of_situation: tuple[str, ...] = ()  # its last tensor, however much grows behind
        self._values: dict[int, np.ndarray] = {}
        self._inputs: dict[str, Tensor] = {}
        self._state: dict[Variable, Tensor] = {}
        self._seeds = dptrain.ops.random.SeedGenerator(seed, "seeds")
        self._environment = environment(self._seeds)
        self._kept: list[Tensor] = []

    def begin(self) -> None:
        """Read the state of random numbers, inside of a trace."""
        count = self._seeds.count
        self._state[count] = count.value
        self._values[id(count.value)] = count.numpy() if not count._is_symbolic else np.array(0)

    # Choices

    def chance(self, share: float) -> bool:
        """Return True in that share of cases."""
        return bool(self.rng.random() < share)

    def choose(self, options):
        """Return one of a list."""
        return options[int(self.rng.integers(len(options)))]

    def length(self, most: int = 80) -> int:
        """Return a length: small, or one next to a threshold."""
        near = [threshold + d for threshold in THRESHOLDS for d in (-1, 0, 1) if threshold + d <= most]
        if near and self.chance(0.35):
            return self.choose(near)
        return int(self.choose([1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 24]))

    # Leaves

    def dim(self, value: int) -> str:
        """Return the name of a length."""
        for name, length in self.lengths.items():
            if length == value and name != "n":
                return name
        name = "abcdefghijklmpqrstuvwxyz"[len(self.lengths) - 1]
        self.lengths[name] = value
        return name

    def leaf(self, kind: str, dims, dtype: str, fill: str, name: str = "") -> str:
        """Add an input or a variable; dims are "n", "2n" or numbers."""
        dtype = "float64" if self.wide and dtype == "float32" else dtype
        name = name or f"{'x' if kind == 'input' else 'w'}{len(self.leaves)}"
        words = [dim if isinstance(dim, str) else self.dim(dim) for dim in dims]
        self.leaves[name] = " ".join([kind, *words, dtype, fill])
        case = self.case()
        shape, value = case.shape(name), case.value(name)
        if kind == "input":
            tensor = self._inputs[name] = placeholder(shape, dtype, name)
        else:
            variable = Variable(value, name, trainable=False)
            tensor = variable.value
            self._state[variable] = tensor
        if name == "rows":
            value = value[: case.rows]
        self._note(name, tensor, value)
        return name

    def _note(self, name: str, tensor: Tensor, value: np.ndarray) -> None:
        self._values[id(tensor)] = value
        self._environment[name] = tensor
        self.pool[name] = _Known(name, tensor, value)

    # Lines

    def line(self, text: str, names: tuple[str, ...] = ()) -> str:
        """Add a line that makes a tensor, or several of these names; return its name.

        Raises:
            RefusedError: the library refuses it, or what it makes is of no use.
        """
        names = names or (f"t{len(self.lines)}",)
        before = dict(self._environment)
        try:
            exec(f"{', '.join(names)} = {text}", self._environment)
            tensors = [self._environment[name] for name in names]
            if any(not isinstance(tensor, Tensor) or tensor.value is not None for tensor in tensors):
                raise RefusedError
            if any(tensor.value is None and np.prod([int(n) for n in tensor.shape]) > self.most for tensor in tensors):
                raise RefusedError
            if self.shards:
                place(Program(self._inputs, self._state, dict(zip(names, tensors, strict=True)), {}))
            values = self._computed(tensors)
        except (ConfigError, RefusedError) as error:
            self._environment.clear()
            self._environment |= before
            raise RefusedError(str(error)) from error
        except Exception as error:  # no user should see it: a finding
            self.lines.append(f"{', '.join(names)} = {text}")
            raise CrashedError(replace(self.case(), outputs=names)) from error
        self.lines.append(f"{', '.join(names)} = {text}")
        for name, tensor, value in zip(names, tensors, values, strict=True):
            self._note(name, tensor, value)
            if tensor.dtype.kind == "f" and np.abs(value, where=np.isfinite(value), out=np.zeros(value.shape)).max(
                initial=0
            ) > _TOO_LARGE * (1e27 if "special" in " ".join(self.leaves.values()) else 1):
                return self.line(f"ops.tanh({name})")
        return names[-1]

    def _computed(self, tensors: list[Tensor]) -> list[np.ndarray]:
        exact = Exact(self._values)
        values = [exact(tensor) for tensor in tensors]
        self._kept += [*tensors, *exact.steps]
        self._values = exact.by_id
        return values

    def pick(self, suits: Callable[[_Known], bool] = lambda candidate: True) -> _Known:
        """Return a tensor that there is, rather one of the last.

        Raises:
            RefusedError: there is none.
        """
        fitting = [candidate for candidate in self.pool.values() if suits(candidate)]
        if not fitting:
            raise RefusedError
        if self.chance(0.6):
            fitting = fitting[-4:]
        return self.choose(fitting)

    def float(self, *ranks: int) -> _Known:
        """Return a tensor of floating-point numbers."""
        return self.pick(
            lambda candidate: candidate.tensor.dtype.kind == "f" and (not ranks or candidate.tensor.ndim in ranks)
        )

    # Ends

    def case(self) -> Case:
        """Return the program as it is."""
        computed = [name for name in self.pool if name not in self.leaves]
        outputs = tuple(dict.fromkeys([*self.of_situation, *computed[-12:]]))
        return Case(
            dict(self.lengths),
            dict(self.leaves),
            tuple(self.lines),
            outputs,
            dict(self.updates),
            self.steps,
            self.shards,
            dict(self.mesh),
            dict(self.layouts),
            self.summed,
            self.bucket_bytes,
            self.pack,
            seed=self.seed,
        )


# Lines that random growth draws


def unary(d: Drawing) -> None:
    """An op of single elements, kept where its numbers are sane more often than not."""
    x = d.float().name
    sane = [
        *("ops.exp(-ops.absolute({}))", "ops.log(ops.square({}) + 1)", "ops.log1p(ops.absolute({}))", "ops.tanh({})"),
        *("ops.sqrt(ops.absolute({}) + 0.5)", "ops.sigmoid({})", "ops.softplus({})", "ops.relu({})", "ops.erf({})"),
        *("ops.sin({})", "ops.cos({})", "ops.arctan({})", "ops.arcsin(0.9 * ops.tanh({}))", "ops.square({})"),
        *("ops.arccos(0.9 * ops.sin({}))", "ops.leaky_relu({}, 0.3)", "ops.elu({}, 0.7)", "-{}", "ops.absolute({})"),
        *("ops.sign({})", "ops.stop_gradient({}) * {}", "ops.silu({})", "ops.gelu({})", "ops.cast({}, 'float64')"),
        *("ops.floor({} * 1.7)", "ops.ceil({} * 1.7)", "ops.round({} * 1.7)", "1.0 / (1.5 + ops.sin({}))"),
        *("ops.where({} > 0.3, {}, 0.3)", "ops.clip({}, -0.7, 0.9)", "{} * 0.5", "{} + 1", "ops.nan_to_num({})"),
        # Before infinity comes another number in float64, which the reference computes in.
        *("ops.erfc({})", "ops.nextafter(ops.clip({}, -9.0, 9.0), 0.0)"),
        *("ops.sinh(ops.tanh({}))", "ops.cosh(ops.sin({}))", "ops.arcsinh({})", "ops.arccosh(1.1 + ops.square({}))"),
        *("ops.expm1(-ops.absolute({}))", "ops.cbrt(1.5 + ops.sin({}))", "ops.sinc({})", "ops.relu6({})"),
        *("ops.arctan2({}, 1.5 + ops.cos({}))", "ops.hypot({}, 0.5)", "ops.fmod({}, 1.7)", "ops.std({}, -1)"),
        "ops.custom_gradient(lambda x: (ops.tanh(x), ops.sin))({})",
        "ops.where({} > 2, {} / ops.sum(ops.relu({} - 2)), 0)",
        "{} / ops.sum(ops.square({}))",
    ]
    wild = [
        "ops.log({})",
        "ops.sqrt({})",
        "ops.exp({})",
        "1 / {}",
        "ops.isnan({})",
        "ops.isinf({})",
        "ops.isfinite({})",
        "ops.where({} > 0, {}, np.nan)",
        "ops.maximum({}, -np.inf)",
        "ops.minimum({}, np.inf) * np.nan",
    ]
    d.line(d.choose(wild if d.chance(0.15) else sane).replace("{}", x))


def binary(d: Drawing) -> None:
    """An op of two tensors that broadcast, or of one and a sum of the other."""
    x = d.pick(lambda candidate: candidate.tensor.dtype.kind in "fiu")
    y = d.pick(
        lambda candidate: candidate.tensor.dtype.kind in "fiu" and _broadcasts(candidate.tensor.shape, x.tensor.shape)
    )
    forms = [
        *(
            "{} + {}",
            "{} - {}",
            "{} * {}",
            "ops.maximum({}, {})",
            "ops.minimum({}, {})",
            "ops.where({0} > {1}, {0}, {1})",
        ),
        *("{} / (1.5 + ops.absolute({}))", "ops.divide_no_nan({}, {})", "(ops.absolute({}) + 0.5) ** ops.tanh({})"),
        *("{0} * {1} + {0}", "ops.cast({} > {}, 'float32')", "ops.cast({} <= {}, 'int32')", "{} > {}", "{} == {}"),
        *("({0} < {1}) | ({0} != {1})", "({0} >= {1}) & ({0} > 0)", "~({} < {})", "ops.squareplus({}) - {}"),
        *("({}) // (1.5 + ops.absolute({}))", "ops.floor_divide({}, 2) + {}", "{} ** 2 + {}", "{} ** 3 - {}"),
    ]
    names = [x.name, y.name]
    d.rng.shuffle(names)
    d.line(d.choose(forms).format(*names))


def whole(d: Drawing) -> None:
    """Bits of whole numbers, and their divisors."""
    x = d.pick(lambda candidate: candidate.tensor.dtype.kind in "iu")
    y = d.pick(
        lambda candidate: candidate.tensor.dtype.kind in "iu" and _broadcasts(candidate.tensor.shape, x.tensor.shape)
    )
    forms = [
        *("ops.bitwise_and({}, {})", "ops.bitwise_or({}, {})", "ops.bitwise_xor({}, {})", "ops.gcd({}, {})"),
        *("ops.bitwise_left_shift({}, {} % 9)", "ops.bitwise_right_shift({}, {} % 9)", "ops.bitwise_invert({}) + {}"),
        "ops.signbit({}) & ({} > 0)",
    ]
    d.line(d.choose(forms).format(x.name, y.name))


def _broadcasts(a, b) -> bool:
    return all(
        (n == m and isinstance(n, Dim) == isinstance(m, Dim)) or 1 in (n, m)
        for n, m in zip(a[::-1], b[::-1], strict=False)
    )


def reduction(d: Drawing) -> None:
    """A sum, a maximum or what is made of them."""
    x = d.pick(lambda candidate: candidate.tensor.ndim > 0 and candidate.tensor.dtype.kind in "fiu")
    axes = tuple(axis for axis in range(x.tensor.ndim) if d.chance(0.5)) or (x.tensor.ndim - 1,)
    keep = d.chance(0.5)
    forms = [f"ops.sum({x.name}, {axes}, keepdims={keep})"] * 3 + [f"ops.max({x.name}, {axes}, keepdims={keep})"]
    if x.tensor.dtype.kind == "f":
        forms += [f"ops.mean({x.name}, {axes}, keepdims={keep})", f"ops.logsumexp({x.name}, {axes}, keepdims={keep})"]
        forms += [f"ops.softmax({x.name}, {axes[0]})", f"ops.log_softmax({x.name}, {axes[-1]})"]
        forms += [f"ops.var({x.name}, {axes})", f"ops.min({x.name}, {axes}, keepdims={keep})"]
    forms += [f"ops.argmax({x.name}, {axes[-1]})", f"ops.cumsum({x.name}, {axes[-1]})"]
    if not all(x.tensor.shape):  # of nothing there is no greatest
        forms = forms[:3]
    d.line(d.choose(forms))


def view(d: Drawing, x: str = "", kinds: str = "rtsm") -> str:
    """Another view of a tensor: reshaped, transposed, sliced, or one of several."""
    source = d.pool[x] if x else d.pick(lambda candidate: candidate.tensor.ndim > 0)
    x, shape, rank = source.name, source.tensor.shape, source.tensor.ndim
    kind, forms = d.choose(kinds), []
    if kind == "r":
        forms = [f"ops.reshape({x}, ({x}.shape[0], -1))"] if shape and int(shape[0]) else []
        if rank > 1:
            forms += [f"ops.reshape({x}, (*{x}.shape[:-2], {x}.shape[-2] * {x}.shape[-1]))"]
            if not any(isinstance(n, Dim) for n in shape[-2:]):
                forms += [f"ops.reshape({x}, (*{x}.shape[:-2], {x}.shape[-1], {x}.shape[-2]))"] * 2
        for axis, n in enumerate(shape):
            for by in (2, 3, 4, 5, 8):
                if int(n) and int(n) % by == 0 and not isinstance(n, Dim) and rank < 4:
                    split = f"{x}.shape[{axis}] // {by}, {by}" if d.chance(0.5) else f"{by}, {x}.shape[{axis}] // {by}"
                    forms.append(f"ops.reshape({x}, (*{x}.shape[:{axis}], {split}, *{x}.shape[{axis + 1} :]))")
        forms += [f"ops.expand_dims({x}, {int(d.rng.integers(rank + 1))})"] if rank < 4 else []
    elif kind == "t" and rank > 1:
        order = tuple(int(n) for n in d.rng.permutation(rank))
        last = (*range(rank - 2), rank - 1, rank - 2)
        forms = [f"ops.transpose({x}, {d.choose([order, last])})"]
    elif kind == "s" and rank:
        keys = [":"] * rank
        for axis, n in enumerate(shape):
            if isinstance(n, Dim) and not d.shards and n > 2 and d.chance(0.3):  # which ranks refuse
                keys[axis] = d.choose(["1:", ":-1", "::2", "::-1", "1", "-1"])
            if isinstance(n, Dim) or n < 2 or d.chance(0.4):
                continue
            slices = ["1:", ":-1", "::2", "1::2", "::-1", "-2:", "::-2", "1:-1:3" if n > 2 else "0:1"]
            keys[axis] = d.choose([*slices, str(int(d.rng.integers(-n, n)))])
        forms = [f"{x}[{', '.join(keys)}]"]
    elif kind == "m":
        axis = int(d.rng.integers(rank))
        forms = [
            f"ops.concatenate([{x}, {x} * 2], {axis})",
            f"ops.stack([{x}, -{x}], {axis})",
            f"ops.flip({x}, {axis})",
        ]
        forms += [f"ops.pad({x}, {[(0, 0) if isinstance(n, Dim) else d.choose([(1, 0), (0, 2)]) for n in shape]})"]
        forms += [f"ops.repeat({x}, 2, {axis})", f"ops.roll({x}, 1, {axis})", f"ops.stop_gradient({x})"]
        forms += [f"ops.broadcast_to({x}, (2, *{x}.shape))"] if rank < 4 else []
        forms += [] if any(isinstance(n, Dim) for n in shape) else [f"unshard({x})"] * 2
        if source.tensor.dtype.kind == "b":
            forms = forms[2:3]
    if not forms:
        raise RefusedError
    return d.line(d.choose(forms))


def product(d: Drawing) -> None:
    """A product with another tensor or new weights, between views."""
    x = d.float(2, 3, 4)
    a = x.name
    inner = x.tensor.shape[-1]
    if isinstance(inner, Dim) or d.chance(0.15):
        others = [
            candidate.name
            for candidate in d.pool.values()
            if candidate.tensor.dtype.kind == "f"
            and candidate.tensor.ndim == x.tensor.ndim
            and candidate.tensor.shape[:-1] == x.tensor.shape[:-1]
        ]
        order = (*range(x.tensor.ndim - 2), x.tensor.ndim - 1, x.tensor.ndim - 2)
        y = d.line(f"ops.transpose({a}, {order}) @ {d.choose(others)}")
    else:
        width = d.length(136)
        dtype = x.tensor.dtype.name if d.chance(0.9) else "float64"
        batch = list(map(int, x.tensor.shape[:-2])) if x.tensor.ndim == 3 and d.chance(0.3) else []
        if x.tensor.ndim == 3 and isinstance(x.tensor.shape[0], Dim):
            batch = []
        if d.chance(0.3) and inner > 1:
            w = d.leaf("variable", [*batch, width, int(inner)], dtype, "normal")
            rank = len(batch) + 2
            w = d.line(f"ops.transpose({w}, {(*range(rank - 2), rank - 1, rank - 2)})")
        else:
            w = d.leaf("variable", [*batch, int(inner), width], dtype, "normal")
        y = d.line(f"{a} @ {w}")
    if d.chance(0.5):
        d.line(d.choose(["ops.relu({} + 0.1)", "ops.tanh({} * 0.1)", "ops.softmax({})"]).format(y))


def casts(d: Drawing) -> None:
    """Numbers in other types: fractions become whole numbers or flags, and these numbers again."""
    x = d.pick()
    if x.tensor.dtype.kind == "f" and d.chance(0.4):
        half = d.line(f"ops.cast({x.name}, '{d.choose(['bfloat16', 'float16'])}')")
        forms = ["{}", "{} * 1.5 + {}", "ops.relu({})", "ops.sum({})", "ops.tanh({})", "{} / 3", "{} > 0.5"]
        if x.tensor.shape:
            reductions = ("max", "argmax") if all(x.tensor.shape) else ()  # of nothing there is no greatest
            forms += [f"ops.{name}({{}}, -1)" for name in ("softmax", *reductions, "mean", "flip")]
            forms += ["ops.concatenate([{}, {}], -1)", "ops.expand_dims({}, -1) @ ops.ones((1, 3), {}.dtype)"]
        result = d.choose(forms).format(half, half)
        d.line(f"ops.cast({result}, 'float32')")
        return
    if x.tensor.dtype.kind == "f":
        kind = d.choose(["int32", "int64", "int8", "uint8", "bool", "float64", "float32"])
        sane = f"ops.where(ops.absolute({x.name}) < 100, {x.name} * 1.75, 2.5)"
        if d.mesh and "special" not in " ".join(d.leaves.values()) and kind not in ("int8", "uint8") and d.chance(0.4):
            sane = f"{x.name} * 1.75"
        sane = f"ops.absolute({sane})" if kind == "uint8" else sane if kind != "int8" else f"ops.clip({sane}, -90, 90)"
        result = d.line(f"ops.cast({sane if kind[:5] != 'float' and kind != 'bool' else x.name}, '{kind}')")
    else:
        result = d.line(f"ops.cast({x.name}, '{d.choose(['float32', 'float64', 'int32', 'int64', 'bool'])}')")
    if d.pool[result].tensor.dtype.kind != "f" and d.chance(0.6):
        d.line(f"ops.cast({result}, 'float32') * 0.5")


def taken(d: Drawing) -> None:
    """Rows of a table, by numbers that come in or are computed."""
    length, width = max(2, d.length(40)), d.length(40)
    table = d.leaf("variable", [length, width], "float32", "normal")
    if d.chance(0.7):
        places = d.leaf("input", ["n", *([d.choose([1, 2, 3])] if d.chance(0.4) else [])], "int64", f"below {length}")
    else:
        x = d.float(1, 2)
        places = d.line(f"ops.cast(ops.floor(ops.sigmoid(ops.nan_to_num({x.name})) * {length - 1}), 'int64')")
    d.line(f"take_rows({table}, {places})")


def taken_of_each(d: Drawing) -> None:
    """Rows of a table that each row of the batch has for itself."""
    length, width = max(2, d.length(20)), d.length(20)
    table = d.leaf("input", ["n", length, width], "float32", "normal")
    places = d.leaf("input", ["n", d.choose([1, 2, 5])], "int64", f"below {length}")
    d.line(f"take_each({table}, {places})")


def meeting(d: Drawing) -> None:
    """What needs all rows of the batch: pairs of rows, their order, their numbers, other rows beside them."""
    x = d.pick(
        lambda candidate: (
            candidate.tensor.dtype.kind == "f"
            and candidate.tensor.ndim == 2
            and counts_rows(candidate.tensor.shape[0])
            and not counts_rows(candidate.tensor.shape[1])
        )
    ).name
    forms = ["{0} @ ops.transpose({0})", "ops.softmax({0} @ ops.transpose({0}) * 0.1) @ {0}", "ops.cumsum({0}, 0)"]
    forms += ["ops.sum(ops.square(ops.expand_dims({0}, 0) - ops.expand_dims({0}, 1)), -1)", "{0}[::-1] * {0}"]
    forms += ["ops.roll({0}, 1, 0) * {0}", "{0} * ops.expand_dims(ops.arange(ops.shape({0})[0]) * 0.1, 1)"]
    forms += ["ops.repeat({0}, 2, 0) * ops.concatenate([{0}, {0} * 2], 0)", "ops.tile({0}, [1, 2]) * ops.sum({0})"]
    forms += ["ops.concatenate([{0}, {0} * 2], 0)[1:]", "ops.reshape(ops.concatenate([{0}, {0} * 2], 0), (2, -1))"]
    d.line(d.choose(forms).format(x))


def narrow(d: Drawing) -> None:
    """Whole numbers of few bytes as they are stored, and what is made of them."""
    dtype = d.choose(["uint8", "int8", "int16", "uint16", "uint32"])
    x = d.leaf("input", ["n", d.length(20)], dtype, "below 100")
    forms = ["ops.cast({}, 'float32') * 0.01", "ops.sum(ops.cast({}, 'int32'), -1)", "ops.argmax({}, -1)"]
    forms += ["ops.where({0} > 50, {0}, 50)", "ops.max({}, -1)", "ops.flip({}, 1)", "ops.cast({} > 30, 'float32')"]
    d.line(d.choose(forms).format(x))


def one_hot(d: Drawing) -> None:
    """Labels as vectors."""
    width = max(2, d.length(40))
    labels = d.leaf("input", ["n"], "int64", f"below {width}")
    d.line(f"ops.one_hot({labels}, {width})")


def images(d: Drawing, dilation: str = "", strides: str = "") -> None:
    """A convolution or pooling of images; a convolution if gaps or strides are given."""
    rank4 = [
        candidate.name
        for candidate in d.pool.values()
        if candidate.tensor.ndim == 4 and candidate.tensor.dtype.name == "float32"
    ]
    channels = d.choose([1, 2, 3, 5])
    x = d.choose(rank4) if rank4 and d.chance(0.6) else ""
    if not x:
        x = d.leaf("input", ["n", d.choose([5, 6, 7]), d.choose([5, 6, 8]), channels], "float32", "normal")
    shape = d.pool[x].tensor.shape
    if any(isinstance(n, Dim) for n in shape[1:]):
        raise RefusedError
    padding = d.choose(["same", "valid"])
    if d.chance(0.3) and not dilation and not strides:
        pool = (d.choose([1, 2, 3]), d.choose([1, 2, 3]))
        pooled = d.choose(["max_pool", "max_pool", "average_pool"])
        d.line(f"ops.{pooled}({x}, {pool}, {(d.choose([1, 2]), d.choose([1, 2, 3]))}, {padding!r})")
        return
    kernel = [d.choose([1, 2, 3]), d.choose([1, 2, 3]), int(shape[-1]), d.choose([1, 2, 3, 8])]
    options = [f"strides={(d.choose([1, 2, 3]), d.choose([1, 2]))}", ""]
    if strides:
        chosen = f"strides={strides}"
    else:
        dilation = dilation or d.choose(["(2, 1)", "(1, 2)", "(2, 3)", ""])
        chosen = f"dilation_rate={dilation}" if dilation and d.chance(0.9) else d.choose(options)
    w = d.leaf(
        "variable",
        [max(2, length) if dilation and n < 2 else length for n, length in enumerate(kernel)],
        "float32",
        "normal",
    )
    d.line(f"ops.conv({x}, {w}, padding={padding!r}{', ' + chosen if chosen else ''})")


def drawn(d: Drawing) -> None:
    """Random numbers, of the rows or of anything."""
    x = d.float()
    width = d.length(20)
    forms = [f"dropout({x.name}, 0.3, seed=seeds)"] if x.tensor.ndim > 1 and isinstance(x.tensor.shape[0], Dim) else []
    if x.tensor.ndim > 1 and isinstance(x.tensor.shape[0], Dim):
        forms += [f"ops.cast(seeds.bits(({x.name}.shape[0], {width})), 'float64') * 2.0**-32"]
    forms += [f"ops.cast(seeds.bits((3, {width})), 'float64') * 2.0**-32 + ops.sum({x.name})"]
    d.line(d.choose(forms))


def differentiated(d: Drawing) -> None:
    """The gradient of a sum in what it was made of."""
    y = d.float()
    sources = [name for name in d.leaves if d.pool[name].tensor.dtype.kind == "f"]
    if not sources or y.name in sources:
        raise RefusedError
    weighted = d.choose(["ops.sum({0})", "ops.sum({0} * {0})", "ops.mean({0} * ops.sin({0}))"]).format(y.name)
    names: list[str] = []
    for name in d.rng.permutation(sources)[:3]:
        try:
            d.line(f"gradients({weighted}, [{name}])[0]", (f"d{len(d.lines)}_{name}",))
            names.append(str(name))
        except RefusedError:
            continue
    if not names:
        raise RefusedError


GROWTH = {
    unary: 5,
    binary: 5,
    reduction: 5,
    view: 5,
    product: 3,
    casts: 2,
    whole: 1,
    taken: 1,
    taken_of_each: 1,
    narrow: 1,
    one_hot: 1,
    images: 1,
    drawn: 1,
    differentiated: 2,
    loop: 2,
    several: 1,
    aliases: 1,
    branch: 1,
    while_loop: 0.5,
    mapped: 1,
    meeting: 1,
}


# Situations


def product_of_views(d: Drawing) -> None:
    """Views of views before and behind a product, in any order."""
    x = d.leaf("input", ["n", 6, 8], "float32", "normal")
    for kind in d.rng.permutation(list("rts"))[: d.choose([2, 3])]:
        x = _tried(lambda x=x, kind=kind: view(d, x, kind), x)
    while d.pool[x].tensor.ndim < 2:
        x = d.line(f"ops.expand_dims({x}, 0)")
    inner = d.pool[x].tensor.shape[-1]
    if isinstance(inner, Dim):
        order = (*range(d.pool[x].tensor.ndim - 2), -1, -2)
        y = d.line(f"{x} @ ops.transpose({x}, {order})")
    else:
        w = d.leaf("variable", [24, int(inner)], "float32", "normal")
        y = d.line(f"{x} @ ops.transpose({w}, (1, 0))")
    for kind in d.rng.permutation(list("rts"))[:2]:
        y = _tried(lambda y=y, kind=kind: view(d, y, kind), y)
    d.line(f"ops.tanh({y} * 0.1)")
    differentiated(d)


def _tried(work: Callable[[], str], otherwise: str) -> str:
    try:
        return work()
    except RefusedError:
        return otherwise


def strided_slices(d: Drawing) -> None:
    """Every second or third element, forwards and backwards."""
    x = d.leaf("input", ["n", d.choose([7, 8, 33]), 9], "float32", "normal")
    y = d.line(f"{x}[:, ::{d.choose([2, 3])}, {d.choose(['1::2', '::-2', '::-1'])}]")
    d.line(f"ops.sum({y}, {d.choose([1, 2])}) * 0.5")


def spread_out(d: Drawing) -> None:
    """A convolution with gaps along one axis or with strides, and its gradients."""
    steps = d.choose(["(2, 1)", "(1, 2)", "(1, 3)", "(3, 2)"])
    images(d, **{d.choose(["dilation", "strides"]): steps})
    differentiated(d)


def by_channel(d: Drawing) -> None:
    """A convolution of each channel by itself, and its gradients."""
    channels = d.choose([1, 2, 3, 8])
    x = d.leaf("input", ["n", d.choose([5, 6, 7]), d.choose([5, 6, 8]), channels], "float32", "normal")
    w = d.leaf(
        "variable", [d.choose([1, 2, 3]), d.choose([1, 2, 3]), channels, d.choose([1, 1, 2])], "float32", "normal"
    )
    steps = d.choose(["", "strides=2", "dilation_rate=(1, 2)"])
    d.line(f"ops.depthwise_conv({x}, {w}, {steps + ', ' if steps else ''}padding={d.choose(['same', 'valid'])!r})")
    differentiated(d)


def tiled(d: Drawing) -> None:
    """A convolution of many channels, where tiles save time or just do not, and its gradients."""
    channels, size = 16 if d.device == "cuda" else 48, d.choose([5, 6, 7, 8])
    x = d.leaf("input", ["n", size, size, channels], "float32", d.choose(["normal", "normal", "special"]))
    w = d.leaf("variable", [3, 3, channels, channels], "float32", d.choose(["normal", "whole"]))
    y = d.line(f"ops.conv({x} + 1, {w} * 0.05, padding={d.choose(['same', 'valid'])!r})")
    d.line(d.choose(["ops.relu({} + 0.5)", "ops.sum({}, (1, 2))"]).format(y))
    differentiated(d)


def pooled(d: Drawing) -> None:
    """The greatest of windows, its gradient, and the gradient of that."""
    x = d.leaf("input", ["n", d.choose([4, 5, 6]), d.choose([3, 5, 8]), 2], "float32", d.choose(["normal", "whole"]))
    y = d.line(f"ops.max_pool({x}, {(d.choose([2, 3]), d.choose([1, 2, 3]))}, {d.choose([1, 2])}, 'same')")
    g = d.line(f"gradients(ops.sum(ops.sin({y})), [{x}])[0]")
    d.line(f"gradients(ops.sum(ops.sin({g})), [{x}])[0]")


def batches_by_one_matrix(d: Drawing) -> None:
    """Products of a batch of matrices with one."""
    x = d.leaf("input", d.choose([["n", 4, 5], [3, "n", 5], [2, "n", 4, 5]]), "float32", "normal")
    w = d.leaf("variable", [5, d.choose([3, 8, 33])], "float32", "normal")
    y = d.line(f"{x} @ {w}")
    d.line(f"ops.relu({y} + ops.mean({y}, -1, keepdims=True))")


def wide_products(d: Drawing) -> None:
    """Widths that are multiples of 8, more than 64 rows with more than 32 columns."""
    rows, width = d.choose([65, 66, 72, 96, 130]), d.choose([40, 48, 64, 72, 128, 136])
    if d.chance(0.5):
        x = d.leaf("input", [rows, d.choose([5, 8, 16, 24, 33])], "float32", "normal")
    else:
        d.lengths["n"] = max(d.lengths["n"], rows) if not d.shards else d.lengths["n"]
        x = d.leaf("input", ["n", d.choose([8, 13, 16, 24])], "float32", "normal")
    w = d.leaf("variable", [int(d.pool[x].tensor.shape[-1]), width], "float32", "normal")
    y = d.line(f"{x} @ {w}")
    d.line(d.choose(["ops.relu({} + 0.5)", "ops.softmax({})", "ops.sum({}, 0)", "ops.log_softmax({})"]).format(y))


def long_products(d: Drawing) -> None:
    """Sums of more terms than go uncut."""
    terms = d.choose([511, 512, 513, 520, 700, 1024])
    x = d.leaf("input", [d.choose([3, 7, 33]) if d.chance(0.5) else "n", terms], "float32", "normal")
    w = d.leaf("variable", [terms, d.choose([3, 8, 9])], "float32", "normal")
    d.line(f"ops.tanh({x} @ {w} * 0.05)")


def many_rows(d: Drawing) -> None:
    """More rows than blocks and chunks take at once."""
    x = d.leaf("input", ["n", d.choose([1, 2, 3])], "float32", "normal")
    y = d.line(f"ops.sum({x} * {x}, 0)")
    d.line(f"ops.mean({x}) * {y}")
    d.line(f"ops.max({x}, 0) + ops.tanh({y})")


def long_rows(d: Drawing) -> None:
    """Rows of lengths around which loops, warps and blocks take turns."""
    near = [threshold + offset for threshold in THRESHOLDS if threshold >= 1024 for offset in (-1, 0, 1, 9)]
    x = d.leaf("input", [d.choose([1, 2, 3, 5]), d.choose(near)], "float32", d.choose(["normal", "special"]))
    y = d.line(d.choose(["ops.softmax({})", "ops.log_softmax({})", "ops.sum({}, -1)", "ops.argmax({}, -1)"]).format(x))
    d.line(f"{y} + ops.max({x}, -1, keepdims={d.pool[y].tensor.ndim == 2})")


def sums_over_any_axes(d: Drawing) -> None:
    """Sums over axes that lie apart or between others, and what is made of them at each element."""
    shape: list[str | int] = [d.choose([2, 3, 4, 8]) for _ in range(d.choose([1, 2, 3]))]
    shape.insert(int(d.rng.integers(len(shape) + 1)), d.choose([7, 31, 32, 33, 65]))
    shape.insert(int(d.rng.integers(len(shape) + 1)), "n")
    x = d.leaf("input", shape, "float32", d.choose(["normal", "whole"]))
    for _ in range(2):
        axes = tuple(axis for axis in range(len(shape)) if d.chance(0.5)) or (len(shape) - 2,)
        y = d.line(f"ops.{d.choose(['mean', 'sum', 'max'])}({x}, {axes}, keepdims=True)")
        z = d.line(f"{x} - {y}")
        d.line(f"{z} * ops.sqrt(ops.mean(ops.square({z}), {axes}, keepdims=True) + 1e-3)")
    if int(d.lengths["n"]):
        d.line(f"ops.argmax({x}, {int(d.rng.integers(len(shape)))})")


def several_rows_each(d: Drawing) -> None:
    """Tensors with several rows for each of the batch."""
    x = d.leaf("input", ["n", 2, 3], "float32", "normal")
    y = d.line(f"ops.reshape({x}, (2 * {x}.shape[0], 3))")
    z = d.leaf("input", ["2n", 3], "float32", "normal")
    y = d.line(f"{y} * {z}")
    d.line(d.choose(["ops.sum({}, 0)", "ops.softmax({})", "ops.mean({})"]).format(y))


def cast_fractions(d: Drawing) -> None:
    """Fractions as flags and whole numbers, flags as numbers."""
    x = d.leaf("input", ["n", 5], "float32", d.choose(["normal", "whole"]))
    flags = d.leaf("input", ["n", 5], "bool", "any")
    integer = d.line(f"ops.cast({x} * 0.75, '{d.choose(['int32', 'int64', 'int8'])}')")
    number = d.line(f"ops.cast({x} * 0.5, 'bool')")
    d.line(f"ops.where({flags}, ops.cast({integer}, 'float32'), ops.cast({number}, 'float32'))")
    d.line(f"ops.sum(ops.cast({flags}, '{d.choose(['int32', 'float32', 'float64'])}'), 0)")


def no_numbers(d: Drawing) -> None:
    """NaN and infinities anywhere."""
    x = d.leaf("input", ["n", d.choose([3, 33, 40])], "float32", "special")
    forms = ["ops.max({}, -1)", "ops.argmax({}, -1)", "ops.relu({})", "ops.sum({}, 0)", "ops.maximum({}, 0.5)"]
    forms += ["ops.min({}, 0)", "ops.sign({})", "ops.isfinite({})", "ops.cast({}, 'bool')", "ops.softmax({})"]
    for form in d.rng.permutation(forms)[:4]:
        _tried(lambda form=form: d.line(form.format(x)), "")
    w = d.leaf("variable", [int(d.pool[x].tensor.shape[-1]), 5], "float32", d.choose(["normal", "special"]))
    d.line(f"{x} @ {w}")


def sums_of_doubles(d: Drawing) -> None:
    """Several sums in float64, which travel as one message."""
    x = d.leaf("input", ["n", 3], "float64", "normal")
    a = d.line(f"ops.sum({x} * {x}, 0)")
    b = d.line(f"ops.sum(ops.cast({x} > 0, 'float64'))")
    c = d.line(f"ops.sum(ops.absolute({x}))")
    for number, total in enumerate((a, b, c)):
        w = d.leaf("variable", [3] if number == 0 else [], "float64", "normal")
        d.updates[w] = f"{w} * 0.5 + {total}"


def several_tables(d: Drawing) -> None:
    """Rows of several variables, and gradients of these."""
    tables = []
    for _ in range(2):
        table = d.leaf("variable", [d.choose([3, 9, 40]), d.choose([1, 5, 8])], "float32", "normal")
        places = d.leaf("input", ["n"], "int64", f"below {int(d.pool[table].tensor.shape[0])}")
        tables.append((table, d.line(f"take_rows({table}, {places})")))
    y = d.line(f"ops.sum({tables[0][1]}, -1) * ops.sum({tables[1][1]}, -1)")
    for table, _ in tables:
        try:
            g = d.line(f"gradients(ops.sum(ops.sin({y})), [{table}])[0]", (f"d{len(d.lines)}_{table}",))
            d.updates[table] = f"{table} - 0.1 * {g}"
        except RefusedError:
            continue


def many_steps(d: Drawing) -> None:
    """More steps in one call than the device keeps starts of."""
    d.steps = d.choose([2, 5] if d.mesh else [1023, 1024, 1025, 1030])  # threads are slow
    table = d.leaf("input", [7, 2], "float32", "normal")
    rows = d.leaf("input", ["n"], "int64", "below 7", "rows")
    total = d.leaf("variable", [2], "float64", "normal")
    y = d.line(f"take_rows({table}, {rows})")
    s = d.line(f"ops.sum({y}, 0)")
    d.updates[total] = f"{total} * 0.75 + {s}"


def parts(d: Drawing) -> None:
    """Zeros around tensors and between their elements, along axes of length 1, too, and what is reduced of these."""
    lengths = [d.choose([1, 2, 3, 5]) for _ in range(d.choose([1, 2]))]
    shape: list[str | int] = [*lengths, d.choose([1, 1, 4])] if d.chance(0.7) else ["n", *lengths]
    x = y = d.leaf("input", shape, d.choose(["float32", "float32", "float64"]), "normal")
    for _ in range(d.choose([1, 1, 2])):
        widths = [(0, 0) if isinstance(n, Dim) else d.choose([(1, 0), (0, 2), (2, 1), (15, 0)]) for n in _shape(d, y)]
        keys = [":" if isinstance(n, Dim) else d.choose(["1:", "::2", "0", "-1"]) for n in _shape(d, x)]
        sliced = f"gradients(ops.sum(ops.sin({x}[{', '.join(keys)}])), [{x}])[0]"
        y = d.line(d.choose([f"ops.pad({y}, {widths})"] * 3 + [sliced]))
    for _ in range(2):
        axes = tuple(axis for axis in range(len(shape)) if d.chance(0.4)) or (len(shape) - 1,)
        forms = [f"ops.sum({y}, {axes})", f"ops.sum({y} * {y}, {axes}, keepdims=True)"]
        forms += [f"ops.softmax({y}, {axes[-1]})", f"ops.max({y}, {axes})"] if all(_shape(d, y)) else []
        d.line(d.choose(forms))


def _shape(d: Drawing, name: str) -> tuple[int, ...]:
    return d.pool[name].tensor.shape


def loops(d: Drawing) -> None:
    """A loop over steps of a batch, and what is made of it."""
    d.leaf("input", [d.choose([2, 3, 4]), "n", d.choose([1, 3, 8, 16])], "float32", "normal")
    for kind in (
        d.choose([loop, loop, several, aliases, mapped]),
        d.choose([loop, aliases, branch, while_loop, mapped]),
    ):
        _tried(lambda kind=kind: kind(d), "")
    differentiated(d)


def recurrent(d: Drawing) -> None:
    """A cell with weights over steps of a batch, and its gradients: on a GPU one launch for a few rows each."""
    width = d.choose([1, 3, 4, 8, 33])
    x = d.leaf("input", [d.choose([2, 3, 4]), "n", width], "float32", "normal")
    h = d.leaf("input", ["n", width], "float32", "normal")
    u, gain = (d.leaf("variable", dims, "float32", "normal") for dims in ([width, width], [width]))
    cells = [f"ops.tanh(x + c @ {u})", f"ops.sigmoid(c @ {u}) * x + 0.5 * c", f"ops.tanh(x @ {u} + (c @ {u}) * {gain})"]
    cells += [f"ops.where(x > 0, ops.tanh(c @ {u} + {gain}), c)", f"ops.tanh((c @ {u})[:, ::-1] + x)"]
    value = d.choose(["c", "x * c", f"c[:, :1] * {gain}", "ops.sum(c, -1)"])
    names = (f"t{len(d.lines)}", f"u{len(d.lines)}")
    d.line(f"ops.scan(lambda c, x: ({d.choose(cells)}, {value}), {h}, {x}, reverse={d.chance(0.4)})", names)
    differentiated(d)


def halves(d: Drawing) -> None:
    """Products of rounded factors, stored as they are rounded."""
    terms, dtype = d.choose([8, 16, 24, 40, 65]), d.choose(["bfloat16", "float16"])
    x = d.leaf("input", [d.choose(["n", 33, 70]), terms], "float32", "normal")
    w = d.leaf("variable", [terms, d.choose([3, 8, 40, 72])], "float32", "normal")
    y = d.line(f"ops.cast(ops.cast({x}, '{dtype}') @ ops.cast({w}, '{dtype}'), 'float32')")
    d.line(d.choose(["ops.relu({} + 0.5)", "ops.sum({}, 0)", "{} * 0.1"]).format(y))
    differentiated(d)


def attention(d: Drawing) -> None:
    """Attention over lengths around its blocks', with and without a mask, and its gradients."""
    targets, sources = (d.choose([1, 2, 5] if d.mesh else [1, 2, 5, 27, 28, 29, 57]) for _ in range(2))
    heads, features = d.choose([2, 3] if d.mesh else [1, 2]), d.choose([1, 3, 8, 17])
    widths = {"query": (targets, features), "key": (sources, features), "value": (sources, d.choose([features, 1, 4]))}
    query, key, value = (d.leaf("input", ["n", n, heads, width], "float32", "normal") for n, width in widths.values())
    if d.mesh:  # ranks divide the heads where they divide these variables so
        biases = [d.leaf("variable", [heads, width], "float32", "normal") for _, width in widths.values()]
        query, key, value = (d.line(f"{x} + {bias}") for x, bias in zip((query, key, value), biases, strict=True))
    if d.chance(0.3):
        rows = d.choose(["n", 1])
        mask = d.leaf("input", [rows, d.choose([1, heads]), targets, sources], "int64", "below 2")
        d.line(f"ops.dot_product_attention({query}, {key}, {value}, mask={mask} > 0)")
    else:
        d.line(f"ops.dot_product_attention({query}, {key}, {value}, is_causal={d.chance(0.5)})")
    differentiated(d)


SITUATIONS = {
    situation.__name__: situation
    for situation in (
        *(
            product_of_views,
            strided_slices,
            spread_out,
            pooled,
            by_channel,
            tiled,
            batches_by_one_matrix,
            wide_products,
            long_products,
            many_rows,
        ),
        *(
            sums_over_any_axes,
            long_rows,
            several_rows_each,
            cast_fractions,
            no_numbers,
            sums_of_doubles,
            several_tables,
            many_steps,
            parts,
            loops,
            recurrent,
            halves,
            attention,
        ),
    )
}


_NAMES = [*SITUATIONS, *[product_of_views.__name__] * 3]  # which has more to draw than others


def seeds_of(situation: str, count: int) -> range:
    """Return so many seeds whose programs have a situation."""
    period = 2 * len(_NAMES)
    return range(2 * _NAMES.index(situation), period * count, period)


def program(seed: int, device: str = "cpu") -> Case:
    """Return the program of a seed; one that cannot be traced or placed ends at the line where that fails."""
    try:
        return _in_memory(_program(Drawing(seed, device), seed, device == "mesh"), seed)
    except CrashedError as crash:
        return crash.case


def _in_memory(case: Case, seed: int) -> Case:
    """Return a case of which some arrays lie in memory as users have them."""
    rng, ways = np.random.default_rng((seed, 38)), list(WAYS)
    memory = {name: str(rng.choice(ways)) for name in case.leaves if rng.random() < 0.4 and name != ROWS}
    return replace(case, memory=memory)


def _program(d: Drawing, seed: int, on_mesh: bool) -> Case:
    situation = _NAMES[seed // 2 % len(_NAMES)] if seed % 2 == 0 else ""
    d.lengths["n"] = d.choose([0, 1, 2, 3, 5, 7, 8, 16, 33, 65, 130])
    if situation == "many_rows":
        d.lengths["n"] = d.choose([0, 1, 1023, 1024, 1025, 1100, 4097] + ([] if d.small else [16385]))
    if situation in ("many_steps", "tiled"):
        d.lengths["n"] = d.choose([0, 1, 2, 3])
    d.steps = d.choose([1, 1, 2, 3, 0 if situation == "" else 1])
    if on_mesh:
        d.mesh = dict(d.choose(MESHES))
        d.wide = d.chance(0.6)
        d.bucket_bytes = d.choose([None, None, 8, 50, 100, 200, 400, 1000, 3000])
    if d.mesh or d.chance(0.5):
        ranks = d.mesh["batch"] if d.mesh else d.choose([2, 3])
        cuts = np.sort(d.rng.integers(0, d.lengths["n"] + 1, ranks - 1)).tolist()
        d.shards = tuple(int(n) for n in np.diff([0, *cuts, d.lengths["n"]]))
    d.pack = d.small and not d.mesh and d.chance(0.4)
    with ExitStack() as stack:
        stack.enter_context(tracing())
        d.begin()
        if situation:
            _tried(lambda: SITUATIONS[situation](d), "")
            d.of_situation = tuple(name for name in d.pool if name not in d.leaves)[-1:]
        if not situation or d.chance(0.5):
            dims: list[str | int] = ["n", *([d.length(60)] if d.chance(0.9) else [])]
            dims += [d.length(12)] if d.chance(0.3) else []
            d.leaf(
                "input",
                dims,
                "float32" if d.chance(0.85) else "float64",
                d.choose(["normal"] * 5 + ["whole", "special"]),
            )
        if d.mesh:
            d.leaf("variable", [d.length(60)], "float32", "normal")
            if d.chance(0.6):
                _tried(lambda: dense(d), "")
        elif d.chance(0.6):
            d.leaf("variable", [d.length(60)] if d.chance(0.5) else [], "float32", "normal")
        kinds, shares = list(GROWTH), np.array(list(GROWTH.values()), float)
        remaining = 3 if situation == "many_steps" else int(d.rng.integers(4, 9 if situation else 16)) * (1 + d.small)
        tries = 0
        while remaining and situation != "many_steps" and tries < 80:
            tries += 1
            try:
                kinds[int(d.rng.choice(len(kinds), p=shares / shares.sum()))](d)
                remaining -= 1
            except RefusedError:
                continue
        if d.mesh:
            slots = trained(d)
            lay_out(d, slots if slots and d.chance(0.3) else list(d.leaves))
            totals(d)
        for name in d.leaves:
            if d.leaves[name].startswith("variable") and name not in d.updates and d.chance(0.5):
                _update(d, name)
    return d.case()


def dense(d: Drawing) -> str:
    """Two layers, and perhaps a residual connection."""
    widths = [d.length(24) for _ in range(3)]
    x = first = d.leaf("input", ["n", widths[0]], "float32", "normal")
    for width, following in pairwise(widths):
        w = d.leaf("variable", [width, following], "float32", "normal")
        b = d.leaf("variable", [following], "float32", "normal")
        x = d.line(f"ops.{d.choose(['tanh', 'relu', 'softmax'])}({x} @ {w} + {b})")
    return d.line(f"{x} + {first}") if widths[0] == widths[2] else x


def trained(d: Drawing) -> list[str]:
    """Gradients of a loss, and new values of variables made of them and of slots; return the slots."""
    computed = [
        candidate
        for candidate in d.pool.values()
        if candidate.tensor.dtype.kind == "f" and candidate.name not in d.leaves
    ]
    if not computed:
        return []
    of_rows = [
        candidate for candidate in computed if any(isinstance(n, Dim) for n in candidate.tensor.shape)
    ] or computed
    terms = [f"ops.mean(ops.sin({d.choose(choices).name}))" for choices in (computed, of_rows, of_rows)]
    if d.chance(0.5):  # a mean weighted by what ranks have summands of, numbers: NaN is divided by as late as can be
        losses, weights = (d.choose(of_rows).name for _ in range(2))
        weights = f"ops.sum(ops.exp(-ops.square(ops.nan_to_num({weights}))))"
        terms = [f"ops.divide_no_nan(ops.sum(ops.sin({losses})), {weights})"]
    slots = []
    for name in [name for name, text in d.leaves.items() if text.startswith("variable")]:
        tensor = d.pool[name].tensor
        if tensor.dtype.kind != "f" or d.chance(0.2):
            continue
        try:
            g = d.line(f"gradients({' + '.join(terms)}, [{name}])[0]", (f"d{len(d.lines)}_{name}",))
            gradient = d.pool[g].tensor
            if gradient.dtype != tensor.dtype or any(isinstance(n, Dim) for n in gradient.shape):
                continue
            if d.chance(0.3):
                norm = d.line(f"ops.sqrt(ops.sum(ops.square({g})) + 1)")
                g = d.line(f"{g} / ops.cast({norm}, '{tensor.dtype.name}')")
            slot = d.leaf("variable", list(map(int, tensor.shape)), tensor.dtype.name, "normal")
            new = d.line(f"{slot} * 0.5 + {g}")
        except RefusedError:
            continue
        slots.append(slot)
        d.updates[slot] = new
        d.updates[name] = d.choose(
            [f"{name} - 0.25 * {new}", f"{name} - 0.25 * {new} / (1 + ops.square({new}))", f"{name} * 0.5 + {g}"]
        )
    return slots


def lay_out(d: Drawing, names: list[str]) -> None:
    """Shard variables among these leaves over any axes of the mesh."""
    for name, text in ((name, d.leaves[name]) for name in names):
        shape = d.pool[name].tensor.shape
        if not text.startswith("variable") or not shape:
            continue
        axes: list[str | None] = [None] * len(shape)
        for mesh in d.rng.permutation(list(d.mesh)):
            free = [axis for axis, n in enumerate(shape) if axes[axis] is None and n >= d.mesh[mesh]]
            if free and d.chance(0.7):
                axes[d.choose(free)] = str(mesh)
        if any(axes):
            d.layouts[name] = tuple(axes)


def totals(d: Drawing) -> None:
    """Sums over the rows of all steps, as those of metrics, of which ranks may keep summands."""
    of_rows = [
        candidate
        for candidate in d.pool.values()
        if candidate.tensor.ndim and isinstance(candidate.tensor.shape[0], Dim)
    ]
    of_rows = [
        candidate for candidate in of_rows if candidate.tensor.dtype.kind == "f" and candidate.name not in d.leaves
    ]
    for _ in range(d.choose([0, 0, 1, 2]) if of_rows else 0):
        source = d.choose(of_rows)
        shape = source.tensor.shape[1:]
        if not any(isinstance(n, Dim) for n in shape):
            total = d.leaf("variable", list(map(int, shape)), source.tensor.dtype.name, "normal")
            d.updates[total] = f"{total} + ops.sum({source.name}, 0)"
            d.summed += (total,)


def _update(d: Drawing, name: str) -> None:
    """Let a variable become something of its shape and type."""
    tensor = d.pool[name].tensor
    fitting = [
        other.name
        for other in d.pool.values()
        if other.tensor.dtype == tensor.dtype and other.name != name and _reduces(other.tensor.shape, tensor.shape)
    ]
    if not fitting:
        return
    other = d.choose(fitting)
    if d.pool[other].tensor.shape != tensor.shape:
        lead = d.pool[other].tensor.ndim - tensor.ndim
        other = f"ops.sum({other}, {tuple(range(lead))})"
    d.updates[name] = d.choose([f"{name} * 0.5 + ops.tanh({other})", f"ops.tanh({other})"])


def _reduces(shape, target) -> bool:
    lead = len(shape) - len(target)
    return lead >= 0 and tuple(shape[lead:]) == tuple(target) and not any(isinstance(n, Dim) for n in shape[lead:])
