"""Finds where dptrain waits for another thread or process, in its syntax trees."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import dptrain

PACKAGE = Path(dptrain.__file__).parent
_MAKERS = {"Lock", "RLock", "SharedLock", "Condition", "Semaphore", "Event", "FileLock", "SimpleQueue", "Queue"}
_WAITS = {"acquire", "wait", "get", "flock", "lockf"}


def _name(node: ast.expr) -> str:
    """Return the last name of an expression such as `self._lock`."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _waitable(trees: list[ast.Module]) -> set[str]:
    """Return names that somewhere stand for what a thread can wait for."""
    names = set()
    for tree in trees:
        for node in ast.walk(tree):
            value = getattr(node, "value", None)
            if not isinstance(node, ast.Assign | ast.AnnAssign) or not isinstance(value, ast.Call):
                continue
            if _name(value.func) in _MAKERS:
                names |= {_name(target) for target in (node.targets if isinstance(node, ast.Assign) else [node.target])}
    return names


def _blocks(node: ast.AST, names: set[str]) -> bool:
    if isinstance(node, ast.withitem):
        return _name(node.context_expr) in names
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return node.func.id in ("undisturbed", "acquire")  # of `runtime/undisturbed.py`
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.func.attr not in _WAITS:
        return False
    if any(keyword.arg == "blocking" for keyword in node.keywords):
        return False
    return node.func.attr in ("flock", "lockf", "acquire") or _name(node.func.value) in names


def _functions(node: ast.AST, outer: str = "") -> Iterator[tuple[str, ast.AST]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            name = f"{outer}.{child.name}" if outer else child.name
            if isinstance(child, ast.FunctionDef):
                yield name, child
            yield from _functions(child, name)
        else:
            yield from _functions(child, outer)


def sites() -> set[str]:
    """Return "module.py:Class.function" of all functions that wait."""
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))}
    makers = re.compile(rf"\b({'|'.join(_MAKERS)})\(")
    # Parsing takes longest: only what may have one.
    names = _waitable([ast.parse(text) for text in texts.values() if makers.search(text)])
    words = re.compile(rf"\b({'|'.join(map(re.escape, names))}|undisturbed|acquire|flock|lockf)\b")
    trees = {
        path.relative_to(PACKAGE).as_posix(): ast.parse(text) for path, text in texts.items() if words.search(text)
    }
    return {
        f"{path}:{name}"
        for path, tree in trees.items()
        for name, function in _functions(tree)
        if any(_blocks(node, names) for node in ast.walk(function))
    }
