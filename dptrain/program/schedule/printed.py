"""A schedule as text: its nests in order, with their statements."""

from collections.abc import Iterable, Mapping, Sequence

from dptrain.program.codegen.cpp import index_text, length_text
from dptrain.program.codegen.index_expr import Axis, IndexExpr
from dptrain.program.schedule.nest import Nest
from dptrain.program.schedule.schedule import Schedule
from dptrain.program.schedule.statements import (
    At,
    Case,
    Choose,
    Compute,
    Convert,
    Draw,
    For,
    Join,
    Known,
    Load,
    Multiply,
    Reduce,
    Row,
    Statement,
    Store,
    Tap,
    Total,
    Value,
    Whole,
    Within,
)
from dptrain.program.tensor import Tensor


def printed(schedule: Schedule, names: Mapping[Tensor, str]) -> str:
    """Return a schedule's nests as text, given the names of tensors."""
    nests = sorted(schedule.nests, key=lambda nest: (nest.stage, nest.level))
    return "\n\n".join("\n".join(_NestText(nest, names).lines()) for nest in nests)


class _NestText:
    """Text of a nest: values are v1, v2, ..., computed indices k3, k4, ..., and a joined reduction has its name."""

    def __init__(self, nest: Nest, names: Mapping[Tensor, str]) -> None:
        self._nest, self._names = nest, names

    def lines(self) -> list[str]:
        nest = self._nest
        members = ", ".join(f"{self._name(tensor)} ({role})" for tensor, role in nest.members.items())
        lines = [f"level {nest.level}, {nest.frame}: {members}"]
        if nest.operands:
            lines.append(f"    reads {', '.join(map(self._name, nest.operands))}")
        if nest.results:
            lines.append(f"    stores {', '.join(map(self._name, nest.results))}")
        lines += _indented(self._block(nest.body))
        return lines + (["    finally:", *_indented(_indented(self._block(nest.finals)))] if nest.finals else [])

    def _name(self, tensor: Tensor) -> str:
        return self._names.get(tensor) or tensor.name or (tensor.op.name if tensor.op is not None else "constant")

    def _block(self, statements: Sequence[Statement]) -> list[str]:
        return [line for statement in statements for line in self._lines(statement)]

    def _lines(self, statement: Statement) -> list[str]:
        match statement:
            case For(indices=indices, body=body):
                return [f"for {', '.join(map(_range, indices))}:", *_indented(self._block(body))]
            case Reduce(to=to, tensor=tensor, index=index, body=body, term=term):
                head = f"{_value(to)} = {_op(tensor)} of {_value(term)} for {_range(index)}:"
                return [head, *_indented(self._block(body))]
            case Choose(to=to, cases=cases):
                lines = (line for case in cases for line in self._case(case))
                return [f"{_value(to)} = the first of, else 0:", *_indented(lines)]
            case Join(tensor=tensor, term=term):
                return [f"{self._name(tensor)} joins {_value(term)}"]
            case Store(tensor=tensor, position=position, value=value):
                return [f"{self._name(tensor)}[{_position(position)}] = {_value(value)}"]
            case Row(index=index, tensor=tensor, of=of):
                return [f"{_index(index.name)} = row {_value(of)} of {self._name(tensor.inputs[0])}"]
            case Within(index=index, position=position, first=first, step=step):
                steps = f" / {step}" if step != 1 else ""
                return [f"{_index(index.name)} = ({_position(position - first)}){steps}"]
            case Tap(index=index, base=base, shift=shift, stride=stride):
                steps = f"({_position(base - shift)}) / {stride}" if stride else _position(base + shift)
                return [f"{_index(index.name)} = {steps}"]
        return [f"{_value(statement.to)} = {self._expression(statement)}"]

    def _case(self, case: Case) -> list[str]:
        tests = " and ".join(f"{_index(guard.index.name)} exists" for guard in case.guards if guard.is_test)
        return [f"{_value(case.value)}{f' if {tests}' if tests else ''}:", *_indented(self._block(case.body))]

    def _expression(self, statement: Known | Load | At | Compute | Convert | Multiply | Draw | Whole | Total) -> str:
        match statement:
            case Known(tensor=tensor):
                return self._name(tensor) if tensor.counts_rows else str(tensor.value)
            case Load(tensor=tensor, position=position):
                return f"{self._name(tensor)}[{_position(position)}]"
            case At(position=position):
                return _position(position)
            case Compute(tensor=tensor, operands=operands):
                return f"{_op(tensor)}({', '.join(map(_value, operands))})"
            case Convert(value=value, to_dtype=dtype):
                return f"{dtype.name}({_value(value)})"
            case Multiply(factors=factors):
                return " * ".join(map(_value, factors))
            case Draw(row=row, feature=feature, count=count):
                return f"random bits of {_value(row)}, {_value(feature)} after {_value(count)} draws"
            case Whole(tensor=tensor, positions=positions):
                whole = ", ".join(map(self._name, tensor.inputs))
                return f"{_op(tensor)}({whole}) at {', '.join(map(_position, positions))}"
            case Total(tensor=tensor):
                return self._name(tensor)


def _value(value: Value) -> str:
    return f"v{value.number}"


def _position(position: IndexExpr) -> str:
    return _index(index_text(position))


def _index(name: str | int) -> str:
    return str(name).replace("%", "k")


def _op(tensor: Tensor) -> str:
    assert tensor.op is not None
    return tensor.op.name


def _range(index: Axis) -> str:
    return f"{_index(index.name)} below {'?' if index.length is None else length_text(index.length)}"


def _indented(lines: Iterable[str]) -> list[str]:
    return [f"    {line}" for line in lines]
