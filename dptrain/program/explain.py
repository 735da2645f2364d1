"""A program as text: its ops with shapes, placements, floating-point operations, bytes and messages."""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest

from dptrain.program.body import body_of, has_body
from dptrain.program.dims import Dim
from dptrain.program.gradient import topological
from dptrain.program.lowering import Element
from dptrain.program.program import Program
from dptrain.program.shapes import Shape, size
from dptrain.program.sharding.mesh import ALL_REDUCE, BATCH, PlacedProgram
from dptrain.program.sharding.messages import SENT, count, stages
from dptrain.program.tensor import Tensor, Variable

# The widest table: longer lines are wrapped at commas, and longer names cut.
COLUMNS = 100
_HEADER = ("", "op", "shape", "type", "placement", "operations", "bytes")
# The number of that column, and its largest width.
_PLACEMENT, _PLACED = 4, 24


def explain(program: Program, local: PlacedProgram | None = None) -> str:
    """Return tables with a line for each op: of the forward pass, the backward pass, the update and the messages.

    Numbers are those of the global batch: a rank computes its part of sharded tensors. A matrix product counts two
    operations for each multiplication, any other op one for each element of its output, a view none. Bytes are those of
    the output. Each table begins with its totals.

    Args:
        program: traced, or placed, which adds placements and messages.
        local: if variables are sharded, the program of a rank, whose messages are those that are sent.
    """
    tensors = program.tensors
    names, groups = names_of(program), grouped(program)
    lines = [_HEADER, *(_line(tensor, program, names) for tensor in tensors if tensor.op is not None)]
    widths_needed = [max(len(line[column]) for line in lines) for column in range(len(_HEADER))]
    widths = [*widths_needed[:1], 0, *widths_needed[2:]]
    widths[_PLACEMENT] = min(widths[_PLACEMENT], _PLACED)
    widths[1] = min(max(len(line[1]) for line in lines), COLUMNS - sum(widths) - 2 * (len(widths) - 1))
    lines_shown: list[str] = []
    for name, members in groups.items():
        heading = f"{name}: {_sums(members)}" if len(groups) > 1 else ""
        lines_shown += [*([heading] if heading else []), *_row(_HEADER, widths)]
        for tensor in members:
            lines_shown += _row(_line(tensor, program, names), widths)
        lines_shown += [""] if len(groups) > 1 else []
    results = {**program.outputs, **{variable._path: tensor for variable, tensor in program.updates.items()}}
    lines_shown += [cut(f"{name} = {names[tensor]}", COLUMNS) for name, tensor in results.items()]
    total = _sums([tensor for tensor in tensors if tensor.op is not None])
    if isinstance(program, PlacedProgram):
        all_reduces = [tensor for tensor in tensors if tensor.op is ALL_REDUCE]
        nbytes = sum(size(tensor.shape) * tensor.dtype.itemsize for tensor in all_reduces)
        messages = count(program if local is None else local)
        total += f", {len(all_reduces)} all-reduces in" if local is None else ","
        total += f" {messages} message{'' if messages == 1 else 's'}"
        total += f" of {nbytes:,} bytes" if nbytes and local is None else ""
        gathers = [tensor for tensor in all_reduces if tensor.attributes.get("gathers_rows")]
        if gathers:
            nbytes = sum(map(_whole_bytes, gathers))
            total += f", {len(gathers)} of the tensors with the rows of all ranks: {nbytes:,} bytes"
    return "\n".join([*lines_shown, *wrapped(total, COLUMNS)])


def grouped(program: Program) -> dict[str, list[Tensor]]:
    """Partition a program's ops into forward pass, backward pass, update and messages, each in program order.

    The forward pass is all that outputs, and state other than trained variables, depend on. Of the rest, the update is
    the elementwise ops at the end, and the backward pass what comes before. A program that trains nothing is one group.
    """
    tensors = [tensor for tensor in program.tensors if tensor.op is not None]
    trained = {variable for variable in program.updates if variable.trainable}
    makers = {program.updates[variable] for variable in trained}
    if not trained:
        return {"forward": tensors}
    slots = _slots(program, tensors, trained)
    updated = {program.updates[variable] for variable in (*trained, *slots)}
    needed_later = [
        *program.outputs.values(),
        *(tensor for v, tensor in program.updates.items() if v not in trained | slots),
    ]
    forward = set(topological(needed_later)) - makers
    readers: dict[Tensor, list[Tensor]] = {}
    for tensor in tensors:
        for read in tensor.inputs:
            readers.setdefault(read, []).append(tensor)
    update: set[Tensor] = set()
    for tensor in reversed(tensors):
        assert tensor.op is not None
        by_element = (
            isinstance(tensor.op.lowering, Element) or tensor.op.is_view or tensor.op in SENT or tensor.shape == ()
        )
        ends = all(reader in update for reader in readers.get(tensor, ()))
        if tensor in updated or (tensor not in forward and by_element and ends):
            update.add(tensor)
    groups: dict[str, list[Tensor]] = {"forward": [], "backward": [], "update": [], "messages": []}
    for member in tensors:
        first = "update" if member in update else "forward" if member in forward else "backward"
        groups["messages" if member.op in SENT else first].append(member)
    return {name: members for name, members in groups.items() if members}


def _slots(program: Program, tensors: list[Tensor], trained: set[Variable]) -> set[Variable]:
    """Return the slots: variables that new values of trained ones depend on, and that change with them."""
    behind_updates = set(topological([program.updates[variable] for variable in trained]))
    logged = set(topological(list(program.outputs.values())))
    return {
        variable
        for variable, new in program.updates.items()
        if variable not in trained
        and (new in behind_updates or program.state[variable] in behind_updates)
        and program.state[variable] not in logged
    }


def _sums(tensors: Sequence[Tensor]) -> str:
    work = sum(map(flops, tensors))
    nbytes = sum(map(_written, tensors))
    return f"{len(tensors)} op{'' if len(tensors) == 1 else 's'}, {work:,} operations, {nbytes:,} bytes written"


def _written(tensor: Tensor) -> int:
    assert tensor.op is not None
    return 0 if tensor.op.is_view else size(tensor.shape) * tensor.dtype.itemsize


def _line(tensor: Tensor, program: Program, names: Mapping[Tensor, str]) -> tuple[str, ...]:
    assert tensor.op is not None
    name = "branch" if has_body(tensor) and body_of(tensor).guarded else _name_of(tensor)
    return (
        names[tensor],
        f"{name}({', '.join(names[operand] for operand in tensor.inputs)})",
        shown(tensor.shape),
        tensor.dtype.name,
        str(program.placements[tensor]) if isinstance(program, PlacedProgram) else "",
        f"{flops(tensor):,}",
        f"{_written(tensor):,}",
    )


def _name_of(tensor: Tensor) -> str:
    """Return the name of an op; all-reduces that gather rows are named after that."""
    assert tensor.op is not None
    return "all_rows" if tensor.attributes.get("gathers_rows") else tensor.op.name


def _row(cells: Sequence[str], widths: Sequence[int]) -> list[str]:
    """Return the lines of a row, with op and placement wrapped."""
    ops, placements = wrapped(cells[1], widths[1]), wrapped(cells[_PLACEMENT], widths[_PLACEMENT])
    lines = []
    for number, (op, placed) in enumerate(zip_longest(ops, placements, fillvalue="")):
        line = [*cells] if number == 0 else [""] * len(cells)
        line[1], line[_PLACEMENT] = op, placed
        lines.append("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    return lines


def messages_of(local: PlacedProgram, lengths: Mapping[str, int]) -> list[str]:
    """Return a table of a step's messages by kind and mesh axis, from a rank's program; bytes of whole tensors."""
    rows: list[Sequence[str]] = [("message", "over", "ranks", "messages", "tensors", "bytes")]
    sums: dict[tuple[str, str], list[int]] = {}
    for message in (message for stage in stages(local) for message in stage.messages):
        op, axis = message[0].op, message[0].attributes.get("mesh", BATCH)
        assert op is not None
        counts = sums.setdefault((_name_of(message[0]), axis), [0, 0, 0])
        nbytes = sum(_whole_bytes(tensor) for tensor in message)
        counts[:] = [total + amount for total, amount in zip(counts, (1, len(message), nbytes), strict=True)]
    rows += [(name, axis, str(lengths[axis]), *(f"{n:,}" for n in counts)) for (name, axis), counts in sums.items()]
    return table(rows)


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Align columns; the first may be cut to fit."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    widths[0] = min(widths[0], COLUMNS - sum(widths[1:]) - 2 * (len(widths) - 1))
    return [
        "  ".join(cell.ljust(n) for cell, n in zip((cut(row[0], widths[0]), *row[1:]), widths, strict=True)).rstrip()
        for row in rows
    ]


def _whole_bytes(tensor: Tensor) -> int:
    elements: int = tensor.attributes.get("whole") or size(tensor.shape)
    return elements * tensor.dtype.itemsize


def wrapped(text: str, width: int) -> list[str]:
    """Wrap text after commas; longer parts are cut."""
    lines = [""]
    *parts, last = text.split(", ")
    for part in (*(f"{part_text}," for part_text in parts), last):
        if lines[-1] and len(lines[-1]) + 1 + len(part) > width:
            lines.append("  " + cut(part, width - 2))
        else:
            lines[-1] += f" {part}" if lines[-1] else cut(part, width)
    return lines


def wrapped_code(text: str) -> str:
    """Wrap C++ between tokens, after a comma or semicolon if possible; trailing comments move before long code."""
    return "\n".join(part for line in text.splitlines() for part in _wrapped_code(line))


# A string with its quotes, or anything else without spaces.
_WORDS = re.compile(r'(?:"(?:\\.|[^"\\])*"|[^\s"])+')


def _wrapped_code(line: str) -> list[str]:
    if len(line) <= COLUMNS:
        return [line]
    code = line.lstrip()
    indent = line[: len(line) - len(code)]
    if code.startswith("//"):
        return _filled(code.split()[1:], f"{indent}// ", f"{indent}// ")
    if code.startswith("#"):
        return _filled(_WORDS.findall(code), indent, f"{indent}    ", " \\")
    words = _WORDS.findall(code)
    behind = next((place for place, word in enumerate(words) if word.startswith("//")), len(words))
    comment = _filled(words[behind + 1 :], f"{indent}// ", f"{indent}// ") if behind < len(words) else []
    return [*comment, *_filled(words[:behind], indent, f"{indent}    ")]


def _filled(words: Sequence[str], first: str, next_margin: str, end: str = "") -> list[str]:
    """Fill lines with words: `first` or `next_margin`, words, and `end` but for the last; long words stand alone."""
    lines, remaining, margin = [], list(words), first
    while remaining:
        count = length = 0
        while count < len(remaining) and (
            not count or length + len(remaining[count]) <= COLUMNS - len(margin) - len(end)
        ):
            length += len(remaining[count]) + 1
            count += 1
        if count < len(remaining):
            good = [place for place in range(count // 2 + 1, count + 1) if remaining[place - 1].endswith((",", ";"))]
            count = good[-1] if good else count
        lines.append(margin + " ".join(remaining[:count]) + (end if count < len(remaining) else ""))
        remaining, margin = remaining[count:], next_margin
    return lines


def cut(text: str, width: int) -> str:
    """Leave out the middle of a text that is too long."""
    return text if len(text) <= width else f"{text[: width // 2 - 2]}...{text[len(text) - (width - width // 2 - 1) :]}"


def flops(tensor: Tensor) -> int:
    """Return the floating-point operations of a tensor's op over the global batch."""
    if tensor.op is None or tensor.op.is_view:
        return 0
    return tensor.op.operations(tensor)


def shown(shape: Shape) -> str:
    """Format a shape, with B for the rows of the batch."""
    return f"({', '.join(_length(n) for n in shape)})"


def _length(n: int | Dim) -> str:
    if not isinstance(n, Dim):
        return str(n)
    return "B" if n.scale == 1 else f"{n.scale} B"


def names_of(program: Program) -> dict[Tensor, str]:
    """Name tensors: inputs by name, constants by value, others by number."""
    tensors = program.tensors

    def pairs() -> Iterator[tuple[Tensor, str]]:
        number = 0
        for tensor in tensors:
            if tensor.op is not None:
                number += 1
                yield tensor, f"%{number}"
            elif tensor.counts_rows:
                yield tensor, _length(Dim.rows(1, tensor.attributes["rows"]))
            elif tensor.value is not None and tensor.value.size == 1:
                yield tensor, f"{tensor.value.item():.6g}"
            else:
                yield tensor, tensor.name or f"constant {shown(tensor.shape)}"

    return dict(pairs())
