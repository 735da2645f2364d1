"""Making a wrong case small: as long as it stays wrong, leave things out and make lengths shorter."""

import ast
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace

from dptrain.comm.mesh import BATCH
from tests.programs.case import Case

# What is wrong with a case, or an empty string.
Wrong = Callable[[Case], str]


def shrunk(case: Case, wrong: Wrong, attempts: int = 200) -> Case:
    """Return a small case that is wrong in the same way, as far as so many attempts lead.

    Args:
        case: a wrong one.
        wrong: says what is wrong; the way it is wrong is what stands before the first colon, and the error's name.
        attempts: cases that are tried at most.
    """
    way = _way(wrong(case))
    smallest, left = case, attempts
    while left > 0:
        before = smallest
        for other in _smaller(smallest):
            if left <= 0:
                break
            left -= 1
            try:
                problem = wrong(other)
            except Exception:  # no program any more: a length that does not fit, a name that is not there
                continue
            if _way(problem) == way:
                smallest = other
                break
        if smallest is before:
            break
    return smallest


def _way(problem: str) -> tuple[str, str]:
    parts = [*problem.split(": "), ""]
    return parts[0], parts[1] if parts[1].endswith("Error") else ""


def _smaller(case: Case) -> Iterator[Case]:
    """Yield cases that have less of something, those first that have much less."""
    if len(case.outputs) > 1:
        for half in (case.outputs[: len(case.outputs) // 2], case.outputs[len(case.outputs) // 2 :]):
            yield _used(replace(case, outputs=half, updates={}))
            if case.updates:
                yield _used(replace(case, outputs=half))
    if case.updates:
        yield _used(replace(case, updates={}))
        for name in case.updates:
            yield _used(
                replace(case, updates={variable: text for variable, text in case.updates.items() if variable != name})
            )
    for output in case.outputs if len(case.outputs) + len(case.updates) > 1 else ():
        yield _used(replace(case, outputs=tuple(other for other in case.outputs if other != output)))
    if case.steps > 1:
        yield replace(case, steps=1)
        yield replace(case, steps=case.steps // 2)
    if case.pack:
        yield replace(case, pack=False)
    if case.mesh:
        yield from _on_smaller_meshes(case)
    elif case.shards:
        yield replace(case, shards=())
        if len(case.shards) > 2:
            yield replace(case, shards=(case.shards[0] + case.shards[1], *case.shards[2:]))
    for number in reversed(range(len(case.lines))):  # what a line makes is one of the things that it was made of
        targets, _, text = case.lines[number].partition(" = ")
        for name in dict.fromkeys(node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)):
            before = name in case.leaves or any(
                name in line.partition(" = ")[0].split(", ") for line in case.lines[:number]
            )
            if before and text != name:
                yield _used(_renamed(case, number, targets.split(", "), name))
    for name, length in case.lengths.items():
        shards = case.shards
        for shorter in dict.fromkeys((0, 1, 2, 3, length // 2, length - 1)):
            if shorter < length and shorter >= (name != "n"):
                if name == "n" and shards:
                    first = min(shards[0], shorter)
                    shards = (
                        (first, *([0] * (len(case.shards) - 2)), shorter - first) if len(shards) > 1 else (shorter,)
                    )
                yield replace(case, lengths={**case.lengths, name: shorter}, shards=shards)
    for name in case.memory:
        yield replace(case, memory={leaf: way for leaf, way in case.memory.items() if leaf != name})
    for name, text in case.leaves.items():
        if "special" in text:
            yield replace(case, leaves={**case.leaves, name: text.replace("special", "normal")})
        elif "normal" in text:
            yield replace(case, leaves={**case.leaves, name: text.replace("normal", "whole")})


def _on_smaller_meshes(case: Case) -> Iterator[Case]:
    """Yield cases on meshes of fewer ranks, or with less that is sharded."""
    if case.bucket_bytes is not None:
        yield replace(case, bucket_bytes=None)
    for mesh, length in case.mesh.items():
        if mesh != BATCH:
            rest = {mesh_axis: other for mesh_axis, other in case.mesh.items() if mesh_axis != mesh}
            layouts = {
                name: tuple([None if mesh_axis == mesh else mesh_axis for mesh_axis in axes])
                for name, axes in case.layouts.items()
            }
            yield replace(case, mesh=rest, layouts=layouts)
        if length > 1:
            shards = (case.shards[0] + case.shards[1], *case.shards[2:]) if mesh == BATCH else case.shards
            yield replace(case, mesh={**case.mesh, mesh: length - 1}, shards=shards)
    for name in case.summed:
        yield replace(case, summed=tuple(variable for variable in case.summed if variable != name))
    for name, axes in case.layouts.items():
        for axis in (axis for axis, mesh in enumerate(axes) if mesh is not None):
            yield replace(case, layouts={**case.layouts, name: (*axes[:axis], None, *axes[axis + 1 :])})


def _renamed(case: Case, number: int, targets: Collection[str], name: str) -> Case:
    """Return a case without a line, whose results are another's."""

    def changed(text: str) -> str:
        tree = ast.parse(text)
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and node.id in targets:
                node.id = name
        return ast.unparse(tree)

    lines = (*case.lines[:number], *(changed(line) for line in case.lines[number + 1 :]))
    outputs = tuple(dict.fromkeys(name if output in targets else output for output in case.outputs))
    return replace(
        case, lines=lines, outputs=outputs, updates={key: changed(text) for key, text in case.updates.items()}
    )


def _used(case: Case) -> Case:
    """Return a case without lines, leaves and lengths that nothing reads."""
    needed = set(case.outputs) | set(case.updates)
    for text in case.updates.values():
        needed |= _names(text)
    lines: list[str] = []
    for line in reversed(case.lines):
        targets, _, text = line.partition(" = ")
        if not needed.isdisjoint(targets.split(", ")):
            needed |= _names(text)
            lines.insert(0, line)
    leaves = {name: text for name, text in case.leaves.items() if name in needed}
    words = {word for text in leaves.values() for word in text.split()} | {"n"}
    lengths = {name: length for name, length in case.lengths.items() if name in words}
    layouts = {name: axes for name, axes in case.layouts.items() if name in leaves and any(axes)}
    summed = tuple(name for name in case.summed if name in leaves)
    memory = {name: way for name, way in case.memory.items() if name in leaves}
    return replace(
        case, lines=tuple(lines), leaves=leaves, lengths=lengths, layouts=layouts, summed=summed, memory=memory
    )


def _names(text: str) -> set[str]:
    return {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
