"""C++ for a CPU from the kernels of a program.

One function a kernel; one native function calls those between two calls or messages, and a program without either is
one function that executes many steps. Loops that consume a product run as its epilogue: each thread executes them on
the rows that it has just computed and still has in its cache.

Nothing in the text depends on the batch size: rows, and where arrays lie, are read from the `Context` of
`kernels/native.h`.

In the text, beside the names of `program/cpp.py`: i0, i1, ... indices of a loop's outer axes, j of its last one, q of a
block of rows; a arrays, p sums of a block, b where a row of one begins, v what is read, t what is computed.
"""

from dataclasses import dataclass, field
from typing import Any

from dptrain.backend.cpu.calls import call_text
from dptrain.program.cpp import (
    Ex,
    ctype,
    element,
    index_text,
    known_number,
    length_text,
    literal,
    place_text,
)
from dptrain.program.dims import Dim
from dptrain.program.kernels import Call, Fused, Kernel, Loop, Member, Product
from dptrain.program.lowering import Element, Reduction, lowering_of
from dptrain.program.places import NOTHING, ONE, extent, times
from dptrain.program.program import ROWS
from dptrain.program.shapes import is_one
from dptrain.program.tensor import DType, Tensor
from dptrain.program.views import View, marked, matrix, space_of, whole

# Elements of a row that are computed before a reduction takes them up, where a row may be longer.
_BLOCK = 1024
# A sum over fewer elements takes them one after the other.
_LANES = 16
_LONG = 32
# A sum over rows of at most so many elements is made of the sums of blocks of rows (`dp_block` of native.h), which
# threads can share.
_SUMMED = 1 << 16
# Rows that are shorter go through a loop as one, which an epilogue cannot.
_WIDE = 64
_SIZES = "  const int64_t B = c.R, first_row = c.F, global_B = c.G;\n"


@dataclass
class NativeFunction:
    """Kernels that are executed without Python in between.

    Attributes:
        name: of the function.
    """

    name: str


@dataclass(eq=False)
class Code:
    """The C++ of a program.

    Attributes:
        source: its text, without the headers.
        roots: what the pointers of the context point to.
        tables: roots whose first lengths are in the context.
        parts: what is executed in this order: native functions, calls, and messages (parts and sums).
        stored: `id`s of tensors that have memory.
        epilogues: `id`s of the loops that are executed with the product before them.
    """

    source: str = ""
    roots: list[Tensor] = field(default_factory=list)
    tables: list[Tensor] = field(default_factory=list)
    parts: list[NativeFunction | Call | list[tuple[Tensor, Tensor]]] = field(default_factory=list)
    stored: set[int] = field(default_factory=set)
    epilogues: set[int] = field(default_factory=set)


def generate(fused: Fused) -> Code:
    """Return the C++ of a fused program."""
    return _Writer(fused).code


class _Writer:
    """The work of `generate`."""

    def __init__(self, fused: Fused) -> None:
        self.fused, self.code = fused, Code(stored=fused.stored())
        for kernel in fused.kernels:
            if isinstance(kernel, Loop):
                self.code.stored |= _between_passes(kernel)
        self._slots: dict[int, int] = {}
        self._numbers: dict[int, int] = {}
        self._functions: list[str] = []
        for stage in fused.stages:
            calls: list[str] = []
            for number, kernel in enumerate(stage.kernels):
                follower = stage.kernels[number + 1] if number + 1 < len(stage.kernels) else None
                call = "" if id(kernel) in self.code.epilogues else self._call(kernel, follower)
                if call is not None:
                    calls += [f"  {call}"] if call else []
                    continue
                assert isinstance(kernel, Call)
                self._close(calls)
                calls = []
                self.code.parts.append(kernel)
            self._close(calls)
            self.code.parts += stage.messages
        self.code.source = "\n".join([*self._functions, self._run()])

    def _call(self, kernel: Kernel, follower: Kernel | None) -> str | None:
        """Write a kernel's function; return what calls it, None for a call that only NumPy can execute."""
        if isinstance(kernel, Loop):
            loop = _LoopText(self, kernel)
            name, ending = self._define_loop(loop)
            if ending is not None:
                called = f"dp_summed(c, {name}, {ending}, {loop.rows}, {loop.operations}, {loop.summed});"
            elif loop.shared_axis is not None:
                called = f"dp_rows(c, {name}, {loop.parts}, {loop.operations});"
            else:
                called = f"{name}(c);"
        elif isinstance(kernel, Product):
            epilogue = self._epilogue(kernel, follower) if isinstance(follower, Loop) else None
            called = f"{self._define(self._product(kernel, epilogue))}(c);"
        else:
            body = call_text(kernel, self._address)
            if body is None:
                return None
            called = f"{self._define(body)}(c);"
        return called if self._is_needed(kernel) else f"if (last) {called}"

    def _define_loop(self, loop: "_LoopText") -> tuple[str, str | None]:
        """Write the function of a loop, and of the end of its sums if it sums blocks of rows; return their names."""
        name = self._define(loop.text(), ", int64_t low, int64_t high" if loop.ranged else "")
        return name, self._define(loop.ending(), ", int64_t blocks") if loop.summed else None

    def _define(self, body: str, arguments: str = "") -> str:
        """Write a function of this body; return its name."""
        name = f"kernel{len(self._functions)}"
        head = f"static void {name}(Context &c{arguments}) {{\n{_SIZES}"
        self._functions.append(f"{head}{body}}}\n")
        return name

    def _is_needed(self, kernel: Kernel) -> bool:
        """Whether a kernel is executed in every step, not in the last alone."""
        return any(id(tensor) in self.fused.every_step for tensor in kernel.tensors)

    def _epilogue(self, product: Product, loop: Loop) -> tuple[str, str, str] | None:
        """Write the function of a loop that a product's threads can go on with.

        Returns:
            What computes the product and then the loop, its template arguments, and its last arguments; None where a
            part of the loop needs more than that part of the product.
        """
        tensor = product.tensor
        if tensor.ndim != 2 or space_of(loop.space) != marked(tensor.shape):
            return None
        reads = [one for one in loop.reads if self.fused.memory_of(one.root) is self.fused.memory_of(tensor)]
        own = whole(tensor).strides(2)
        if not reads or any(one.root is not tensor or one.start() or one.strides(2) != own for one in reads):
            return None
        text = _LoopText(self, loop, collapse=False)
        if text.shared_axis != 0 or tensor.shape[1] < _WIDE or self._is_needed(loop) != self._is_needed(product):
            return None
        self.code.epilogues.add(id(loop))
        name, ending = self._define_loop(text)
        if ending is not None:
            return "dp_product_summed", f"{name}, {ending}", f"{text.operations}, {text.summed}"
        return "dp_product_then", name, text.operations

    def _address(self, root: Tensor, written: bool) -> str:
        return f"({'' if written else 'const '}{ctype(root.dtype)} *)c.p[{self.slot(root)}]"

    def _close(self, calls: list[str]) -> None:
        if not calls:
            return
        name, body = f"native{len(self.code.parts)}", "\n".join(calls)
        self._functions.append(f'extern "C" void {name}(Context &c, int last) {{\n{_SIZES}{body}\n}}\n')
        self.code.parts.append(NativeFunction(name))

    def _run(self) -> str:
        """Return the function that executes many steps, where nothing else has to be done between them."""
        order = self.fused.program.inputs.get(ROWS)
        slot = None if order is None else self._slots.get(id(order))
        window = f"    c.p[{slot}] = order + 8 * starts[n];\n" if slot is not None else ""
        first = f"  char *order = c.p[{slot}];\n" if slot is not None else ""
        last = f"  c.p[{slot}] = order;\n" if slot is not None else ""
        calls = [f"    {one.name}(c, n == steps - 1);\n" for one in self.code.parts if isinstance(one, NativeFunction)]
        moves = []
        for variable, new in self.fused.updates.items():  # what does not lie in the state itself
            old = self.fused.program.state[variable]
            to, of, size = self.slot(old), self.slot(new), f"{length_text(extent(old.shape))} * {old.dtype.itemsize}"
            moves.append(f"  if (c.p[{to}] != c.p[{of}]) memcpy(c.p[{to}], c.p[{of}], {size});\n")
        return (
            f'extern "C" void moves(Context &c) {{\n{"".join(moves)}}}\n\n'
            'extern "C" void run(Context &c, const int64_t *starts, int64_t steps) {\n'
            f"{first}  for (int64_t n = 0; n < steps; ++n) {{\n{window}{''.join(calls)}    moves(c);\n  }}\n{last}}}\n"
        )

    def slot(self, root: Tensor) -> int:
        """Return the number of a root's pointer."""
        root = self.fused.memory_of(root)
        if id(root) not in self._slots:
            self._slots[id(root)] = len(self.code.roots)
            self.code.roots.append(root)
        return self._slots[id(root)]

    def table(self, root: Tensor) -> int:
        """Return the number of a table's length."""
        if not any(one is root for one in self.code.tables):
            self.code.tables.append(root)
        return next(n for n, one in enumerate(self.code.tables) if one is root)

    def number(self, tensor: Tensor) -> int:
        """Return what tells a tensor's names from others'."""
        return self._numbers.setdefault(id(tensor), len(self._numbers))

    def _product(self, product: Product, epilogue: tuple[str, str, str] | None) -> str:
        tensor, (x1, x2) = product.tensor, product.reads
        a, b = tensor.inputs
        rank, scalar = tensor.ndim, ctype(tensor.dtype)
        m, n, k = (extent(shape) for shape in (tensor.shape[-2:-1], tensor.shape[-1:], a.shape[-1:]))
        axes = [
            [
                axis + rank - one.ndim if axis >= one.ndim - 2 or not is_one(one.shape[axis]) else None
                for axis in range(one.ndim)
            ]
            for one in (a, b)
        ]
        of_a, of_b = matrix(x1, a.shape), matrix(x2, b.shape)
        assert of_a is not None
        assert of_b is not None
        reads = [x1.along(axes[0]), x2.along(axes[1])]
        strides = [one.strides(rank) for one in reads]
        outer = [axis for axis in range(rank - 2) if not is_one(tensor.shape[axis])]
        # Batches of rows that meet one matrix are rows of one batch.
        while outer and strides[1][outer[-1]] == NOTHING and not of_a[0]:
            if strides[0][outer[-1]] != times(of_a[1], m):
                break
            m = times(m, extent((tensor.shape[outer.pop()],)))
        lines, indent = [], "  "
        for axis in outer:
            length = length_text(extent((tensor.shape[axis],)))
            lines.append(f"{indent}for (int64_t i{axis} = 0; i{axis} < {length}; ++i{axis})\n")
            indent += "  "
        pointers = []
        for view, own in zip((*reads, whole(tensor)), (*strides, whole(tensor).strides(rank)), strict=True):
            pointers.append(f"{self._address(view.root, view.root is tensor)} + {place_text(view, own, outer)}")
        settings = ", ".join(
            (str(of_a[0]).lower(), str(of_b[0]).lower(), *map(length_text, (m, n, k))),
        )
        operands = f"{pointers[0]}, {length_text(of_a[1])}, {pointers[1]}, {length_text(of_b[1])}, {pointers[2]}"
        if epilogue is None:
            lines.append(f"{indent}dp_product<{scalar}>(c, {settings}, {operands});\n")
        else:
            function, loops, last = epilogue
            lines.append(f"{indent}{function}<{scalar}, {loops}>(c, {settings}, {operands}, {last});\n")
        return "".join(lines)


class _LoopText:
    """The text of a loop.

    A row of it (all of its last axis) is `head`, then for each pass `before`, along the row `loads` and `body`, what a
    reduction takes up (`taken`), and `after`. Where sums over the first axis are made of those of blocks of rows, each
    block is `begin`, its rows, and `end`; what blocks have summed is added up in `ending`.

    Attributes:
        summed: bytes of a block's sums, 0 where there are none.
    """

    def __init__(self, writer: _Writer, loop: Loop, *, collapse: bool = True) -> None:
        self._writer, self._loop = writer, loop
        self._rank, self._row = len(loop.space), len(loop.space) - 1
        self._lengths = [extent((n,)) for n in loop.space]
        self._outer = list(range(self._rank - 1))
        self._passes = loop.passes()
        self._blocked = _is_blocked(loop)
        self._lines: dict[tuple[str, int], list[str]] = {}
        self._known: dict[Any, str] = {}
        self._buffers = self._buffered()
        self._offsets: dict[Member, int] = {}
        self.summed = 0
        for member in loop.members:
            if self._is_summed(member):
                self._offsets[member] = self.summed
                self.summed += -(-extent(member.tensor.shape)[0] * member.tensor.dtype.itemsize // 64) * 64
        if collapse and all(one.kind == "map" and not _is_by_last(one) for one in loop.members):
            self._collapse()

    def text(self) -> str:
        """Return the body of its function."""
        for member in self._loop.members:
            self._add(member)
        lines, indent = self._part("top", "  "), "  "
        if self.summed:
            lines.append(f"  for (int64_t q = low / dp_block({self.rows}); q * dp_block({self.rows}) < high; ++q) {{\n")
            lines += self._part("begin", "    ")
            indent = "    "
        for axis in self._outer:
            first, end = "0", length_text(self._lengths[axis])
            if axis == 0 and self.summed:
                first, end = (f"(q + {n}) * dp_block({self.rows})" for n in range(2))
                end = f"dp_least({end}, high)"
            elif axis == self.shared_axis:
                first, end = "low", "high"
            lines.append(f"{indent}for (int64_t i{axis} = {first}; i{axis} < {end}; ++i{axis}) {{\n")
            indent += "  "
        lines += self._part("head", indent) + self._part("after", indent, -1)
        for number in range(max(self._passes.values(), default=0) + 1):
            lines += self._part("before", indent, number) + self._inner(number, indent)
            lines += self._part("after", indent, number)
        for _ in self._outer:
            indent = indent[2:]
            lines.append(f"{indent}}}\n")
        lines += [*self._part("end", indent), "  }\n"] if self.summed else []
        return "".join(lines + self._part("bottom", "  "))

    def ending(self) -> str:
        """Return the body of the function that adds up what blocks have summed, in their order."""
        lines = []
        for member, place in self._offsets.items():
            tensor, scalar = member.tensor, ctype(member.tensor.dtype)
            size, start = extent(tensor.shape)[0], self._start(member)
            lines.append(f"  {scalar} *w{place} = ({scalar} *)c.p[{self._writer.slot(tensor)}];\n")
            lines.append(f"  dp_fill<{scalar}>(w{place}, {size}, {start});\n")
            lines.append("  for (int64_t q = 0; q < blocks; ++q) {\n")
            lines.append(f"    const {scalar} *b = (const {scalar} *)(c.sums + q * {self.summed} + {place});\n")
            joined = self._joined(member, f"w{place}[j]", "b[j]")
            lines.append(f"    DP_LOOP\n    for (int64_t j = 0; j < {size}; ++j) w{place}[j] = {joined};\n  }}\n")
        return "".join(lines)

    @property
    def rows(self) -> str:
        """The length of its first axis."""
        return length_text(extent(self._loop.space[:1]))

    @property
    def ranged(self) -> bool:
        """Whether its function is told which part it executes."""
        return self.summed > 0 or self.shared_axis is not None

    def _is_summed(self, member: Member) -> bool:
        """Whether a member is a sum that is made of those of blocks of rows, which other members do not change."""
        number, power = extent(member.tensor.shape)
        return self._rank > 1 and member.kind == "sum" and 0 not in member.axes and not power and 0 < number <= _SUMMED

    @property
    def shared_axis(self) -> int | None:
        """The axis whose parts different threads can compute, None where each needs the others' elements.

        Every sum is one thread's, or made of blocks, so that its bits do not depend on their number.
        """
        members, rank = self._loop.members, self._rank
        if rank and all(one.kind in ("map", "gather") for one in members):
            return [*self._outer, self._row][0]
        if self._outer and all(one in self._offsets for one in members if one.kind == "sum"):
            return self._outer[0]
        return None

    @property
    def parts(self) -> str:
        """How many parts the shared axis has at most."""
        assert self.shared_axis is not None
        return length_text(self._lengths[self.shared_axis])

    @property
    def operations(self) -> str:
        """Those of all parts together on single elements; 0 where they are not shared."""
        if self.shared_axis is None:
            return "0"
        elements = " * ".join(f"({length_text(self._lengths[one])})" for one in (*self._outer, self._row))
        return f"{elements} * {len(self._loop.members)}"

    def _note(self, part: str, line: str, number: int = 0) -> None:
        self._lines.setdefault((part, number), []).append(line)

    def _part(self, part: str, indent: str, number: int = 0) -> list[str]:
        return [f"{indent}{line}\n" for line in self._lines.get((part, number), [])]

    def _inner(self, number: int, indent: str) -> list[str]:
        """Return the loop along the last axis in one pass."""
        body = [(part, number) for part in ("loads", "body") if (part, number) in self._lines]
        taken = ("taken", number) in self._lines
        if self._rank == 0:
            return [line for part, _ in body for line in self._part(part, indent, number)]
        length, blocked = length_text(self._lengths[self._row]), self._blocked and taken
        lines, own = [f"{indent}{{\n"], f"{indent}  "
        if self._row == self.shared_axis:
            lines.append(f"{own}const int64_t jb = low, m = high - low;\n")
        elif blocked:
            lines.append(f"{indent}for (int64_t jb = 0; jb < {length}; jb += {_BLOCK}) {{\n")
            lines.append(f"{own}const int64_t m = {length} - jb < {_BLOCK} ? {length} - jb : {_BLOCK};\n")
        else:
            lines.append(f"{own}const int64_t jb = 0, m = {length};\n")
        if body:
            lines.append(f"{own}DP_LOOP\n{own}for (int64_t j = jb; j < jb + m; ++j) {{\n")
            lines += [line for part, _ in body for line in self._part(part, f"{own}  ", number)]
            lines.append(f"{own}}}\n")
        lines += self._part("taken", own, number)
        return [*lines, f"{indent}{'}' if blocked else ''}}}\n"]

    def _buffered(self) -> set[int]:
        """Return the members whose row is kept: for a later pass, or for a reduction."""
        found = set()
        for member in self._loop.members:
            for view in member.reads:
                read = self._loop.member(view.root)
                if read is None or not read.inner or read.kind in ("reduce", "sum"):
                    continue
                later = self._passes[read] < self._passes[member] and id(read.tensor) not in self._writer.code.stored
                if later or (self._takes(member) and self._direct(member, read) is None):
                    found.add(id(read.tensor))
        return found

    def _takes(self, member: Member) -> bool:
        """Whether a member reduces along a row."""
        return member.inner and (member.kind == "reduce" or (member.kind == "sum" and self._row not in member.axes))

    def _direct(self, member: Member, read: Member) -> str | None:
        """Return where a reduction finds a row of another member in memory, or None."""
        lies = id(read.tensor) in self._writer.code.stored and _accumulated(member) == read.tensor.dtype
        beside = whole(read.tensor).along(read.axes).strides(self._rank)[self._row] == ONE
        return f"o{self._number(read)} + jb" if lies and beside else None

    def _collapse(self) -> None:
        """Let axes be one that lie one behind the other in all arrays."""
        arrays = [view.strides(self._rank) for view in self._loop.reads]
        arrays += [whole(one.tensor).along(one.axes).strides(self._rank) for one in self._loop.members]
        for axis in reversed(range(self._rank - 1)):
            inner = axis + 1
            if all(one[axis] == times(one[inner], extent(self._loop.space[inner : inner + 1])) for one in arrays):
                last = next(n for n in (*self._outer, self._row) if n >= inner)
                self._lengths[last] = times(self._lengths[last], self._lengths[axis])
                self._outer.remove(axis)

    # What is read

    def _number(self, member: Member) -> int:
        return self._writer.number(member.tensor)

    def _index(self, view: View) -> str:
        return place_text(view, view.strides(self._rank), self._outer)

    def _array(self, root: Tensor, *, written: bool = False) -> str:
        slot, scalar = self._writer.slot(root), ctype(root.dtype)
        name = f"{'w' if written else 'a'}{slot}"
        if name not in self._known:
            self._known[name] = name
            const = "" if written else "const "
            self._note("top", f"{const}{scalar} *{name} = ({const}{scalar} *)c.p[{slot}];")
        return name

    def _value(self, view: View, number: int, *, inner: bool) -> str:
        """Return what stands for an element of a view in a pass, for each element of a row or for a whole row."""
        root = view.root
        if (known := known_number(root, _number)) is not None:
            return known
        read = self._loop.member(root)
        if read is not None:
            name = f"t{self._number(read)}"
            if not read.inner or read.kind == "reduce" or self._passes[read] == number:
                return name
            if id(root) in self._buffers:
                return f"r{self._number(read)}[j]"
        stride = view.strides(self._rank)[self._row] if self._rank else NOTHING
        scalar, key = ctype(root.dtype), (id(root), view.maps)
        if not inner or stride == NOTHING:
            if key not in self._known:
                self._known[key] = f"v{len(self._known)}"
                where = "head" if self._rank else "loads"
                self._note(where, f"const {scalar} {self._known[key]} = {self._array(root)}[{self._index(view)}];")
            return self._known[key]
        base = self._base(view)
        if (key, number) not in self._known:
            self._known[key, number] = name = f"v{len(self._known)}"
            self._note("loads", f"const {scalar} {name} = {base}[{index_text('j', stride)}];", number)
        return self._known[key, number]

    def _base(self, view: View) -> str:
        """Return the name of where a row of a view begins."""
        key = (id(view.root), view.maps, "base")
        if key not in self._known:
            self._known[key] = name = f"b{len(self._known)}"
            scalar = ctype(view.root.dtype)
            self._note("head", f"const {scalar} *{name} = {self._array(view.root)} + {self._index(view)};")
        return self._known[key]

    # What is computed

    def _add(self, member: Member) -> None:
        number, part = self._passes[member], "body" if member.inner else "after"
        if member.kind in ("reduce", "sum"):
            self._reduce(member, number)
            return
        tensor, name = member.tensor, f"t{self._number(member)}"
        scalar = ctype(tensor.dtype)
        value = self._gathered(member, number) if member.kind == "gather" else self._mapped(member, number)
        self._note(part, f"const {scalar} {name} = {value};", number)
        self._store(member, name, part, number)
        if id(tensor) in self._buffers:
            length = self._lengths[self._row]
            size = length[0] if not self._blocked else _BLOCK
            self._note("top", f"{scalar} r{self._number(member)}[{size}];")
            self._note(part, f"r{self._number(member)}[j - jb] = {name};", number)

    def _mapped(self, member: Member, number: int) -> str:
        operands = [
            Ex(self._value(view, number, inner=member.inner), computed=self._loop.member(view.root) is not None)
            for view in member.reads
        ]
        last = "0" if not member.axes or member.axes[-1] is None else f"i{member.axes[-1]}"
        if member.inner and member.axes and member.axes[-1] == self._row:
            last = "j"
        return element(member.tensor, operands, _number, last)

    def _gathered(self, member: Member, number: int) -> str:
        table, places = member.reads
        length = f"c.n[{self._writer.table(table.root)}]"
        row = f"dp_row({self._value(places, number, inner=member.inner)}, {length}, c.outside)"
        step = length_text(extent(table.root.shape[1:]))
        array, stride = self._array(table.root), table.strides(self._rank)[self._row] if self._rank else NOTHING
        read = self._loop.member(places.root)
        of_row = self._rank > 0 and places.strides(self._rank)[self._row] == NOTHING
        if member.inner and of_row and (read is None or not read.inner or read.kind == "reduce"):
            name = f"g{self._number(member)}"
            scalar = ctype(table.root.dtype)
            self._note("before", f"const {scalar} *{name} = {array} + {row} * {step} + {self._index(table)};", number)
            if read is None and self._outer and places.strides(self._rank)[self._outer[-1]] == ONE:
                axis = self._outer[-1]
                more = f"i{axis} + 1 < {length_text(self._lengths[axis])}"
                coming = f"dp_row({self._base(places)}[1], {length}, c.outside)"
                self._note("before", f"if ({more}) dp_prefetch({array} + {coming} * {step}, {step});", number)
            return f"{name}[{index_text('j', stride)}]"
        along = f" + {index_text('j', stride)}" if member.inner and stride != NOTHING else ""
        return f"{array}[{row} * {step} + {self._index(table)}{along}]"

    def _store(self, member: Member, name: str, part: str, number: int) -> None:
        """Write what a member is into memory, if it has any."""
        tensor = member.tensor
        if id(tensor) not in self._writer.code.stored:
            return
        view = whole(tensor).along(member.axes)
        array, stride = (
            self._array(tensor, written=True),
            view.strides(self._rank)[self._row] if self._rank else NOTHING,
        )
        if part == "body" and stride != NOTHING:
            scalar, own = ctype(tensor.dtype), f"o{self._number(member)}"
            self._note("head", f"{scalar} *{own} = {array} + {self._index(view)};")
            self._note(part, f"{own}[{index_text('j', stride)}] = {name};", number)
        else:
            self._note(part, f"{array}[{self._index(view)}] = {name};", number)

    def _reduce(self, member: Member, number: int) -> None:
        tensor, own, join = member.tensor, self._number(member), _join(member)
        dtype, scalar = _accumulated(member), ctype(tensor.dtype)
        if not self._takes(member):
            value = f"({scalar})({self._value(member.reads[0], number, inner=member.inner)})"
            self._accumulate(member, value, "body" if member.inner else "after", number)
            return
        length = self._lengths[self._row]
        lanes = 1 if not length[1] and length[0] < _LONG else _LANES
        kind = {"sum": "dp_Sum", "max": "dp_Max", "argmax": "dp_Argmax"}[join]
        settings = ctype(dtype) if join == "argmax" else f"{ctype(dtype)}, {lanes}"
        declared = f"{kind}<{settings}> s{own}"
        if self._rank == 1 and length[1] and join == "sum":  # in the order of a sum in a loop over rows
            declared = f"dp_RowSum<{ctype(dtype)}> s{own}({self.rows})"
        self._note("before", f"{declared};", number)
        self._note("taken", f"s{own}.add({self._vector(member, dtype, number)}, m);", number)
        if member.kind == "sum":
            self._accumulate(member, f"s{own}.total()", "after", number)
        else:
            self._note("after", f"const {scalar} t{own} = ({scalar})s{own}.total();", number)
            self._store(member, f"t{own}", "after", number)

    def _vector(self, member: Member, dtype: DType, number: int) -> str:
        """Return where the elements of a row lie side by side that a reduction takes up."""
        view = member.reads[0]
        read = self._loop.member(view.root)
        if read is not None and read.inner and read.kind != "reduce" and read.tensor.dtype == dtype:
            return self._direct(member, read) or f"r{self._number(read)}"
        beside = view.strides(self._rank)[self._row] == ONE and known_number(view.root, _number) is None
        if read is None and beside and view.root.dtype == dtype:
            return f"{self._base(view)} + jb"
        own, scalar = f"q{self._number(member)}", ctype(dtype)
        self._note("top", f"{scalar} {own}[{_BLOCK if self._blocked else self._lengths[self._row][0]}];")
        self._note("body", f"{own}[j - jb] = ({scalar})({self._value(view, number, inner=True)});", number)
        return own

    def _accumulate(self, member: Member, value: str, part: str, number: int) -> None:
        """Take a value up in a sum that is complete after the loop."""
        tensor, op = member.tensor, member.tensor.op
        assert op is not None
        view, scalar = whole(tensor).along(member.axes), ctype(tensor.dtype)
        start, first, last = self._start(member), "top", "bottom"
        if member in self._offsets:
            array, first, last = f"p{self._number(member)}", "begin", "end"
            self._note(
                first, f"{scalar} *{array} = ({scalar} *)(c.sums + q * {self.summed} + {self._offsets[member]});"
            )
        else:
            array = self._array(tensor, written=True)
        if all(axis is None for axis in member.axes):
            target = f"x{self._number(member)}"
            self._note(first, f"{scalar} {target} = {start};")
            self._note(last, f"*{array} = {target};")
        else:
            self._note(first, f"dp_fill<{scalar}>({array}, {length_text(extent(tensor.shape))}, {start});")
            target = f"{array}[{self._index(view)}]"
            if part == "body":
                name = f"o{self._number(member)}"
                self._note("head", f"{scalar} *{name} = {array} + {self._index(view)};")
                target = f"{name}[{index_text('j', view.strides(self._rank)[self._row])}]"
        self._note(part, f"{target} = {self._joined(member, target, value)};", number)

    def _start(self, member: Member) -> str:
        """Return what a reduction begins with."""
        return "0" if _join(member) == "sum" else f"dp_lowest<{ctype(member.tensor.dtype)}>()"

    def _joined(self, member: Member, one: str, other: str) -> str:
        """Return what a reduction makes of two values."""
        scalar = ctype(member.tensor.dtype)
        return f"{one} + {other}" if _join(member) == "sum" else f"dp_maximum<{scalar}>({one}, {other})"


def _is_by_last(member: Member) -> bool:
    lowering = lowering_of(member.tensor)
    return isinstance(lowering, Element) and lowering.by_last


def _join(member: Member) -> str:
    """Return how a reduction joins what it reads."""
    reduction = lowering_of(member.tensor)
    assert isinstance(reduction, Reduction)
    return reduction.join


def _accumulated(member: Member) -> DType:
    """Return the type in which a reduction takes up what it reads."""
    return member.tensor.dtype if _join(member) == "sum" else member.tensor.inputs[0].dtype


def _is_blocked(loop: Loop) -> bool:
    """Whether rows are too long, or of a length that is not known, to be kept whole for a reduction."""
    row = len(loop.space) - 1
    takes = any(
        one.inner and (one.kind == "reduce" or (one.kind == "sum" and row not in one.axes)) for one in loop.members
    )
    return takes and (isinstance(loop.space[row], Dim) or loop.space[row] > _BLOCK)


def _between_passes(loop: Loop) -> set[int]:
    """Return the tensors that must lie in memory because a row of them is too long to be kept from pass to pass."""
    passes, found = loop.passes(), set()
    for member in loop.members if _is_blocked(loop) else []:
        for view in member.reads:
            read = loop.member(view.root)
            if read is not None and read.inner and read.kind != "reduce" and passes[read] < passes[member]:
                found.add(id(read.tensor))
    return found


def _number(attribute: str, value: Any, dtype: DType) -> str:
    return literal(value, dtype)
