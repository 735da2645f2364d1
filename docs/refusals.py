"""Writes docs/not-supported.md: what Keras has and dptrain refuses, read from the sources of both.

    python docs/refusals.py

It needs Keras' sources (extra `test`), and imports none of them.
"""

import argparse
import ast
import importlib
import inspect
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "not-supported.md"
# Where users of Keras look for names; None is the top.
MODULES = (
    *(None, "layers", "models", "activations", "losses", "metrics", "optimizers", "optimizers.schedules", "callbacks"),
    *("initializers", "regularizers", "constraints", "ops", "ops.nn", "ops.numpy", "ops.image", "ops.linalg", "random"),
    *("utils", "saving", "datasets", "distillation", "distribution", "config", "dtype_policies", "mixed_precision"),
    *("tree", "backend", "applications", "preprocessing", "preprocessing.image", "preprocessing.sequence", "export"),
    *("quantizers", "visualization", "wrappers"),
)
# Rooms of dptrain that a Keras script does not enter by itself.
OWN_ROOMS = ("backend", "cli", "sweeps", "runtime", "comm")
INTRODUCTION = """\
# What dptrain refuses

What Keras {version} has and dptrain lacks. Using any of it raises an error.
[dptrain and Keras](keras.md) lists what is supported and what differs on purpose.

`python docs/refusals.py` generates this page from the sources of Keras and of dptrain.
"""


def page() -> str:
    """Return the whole page."""
    parts = [INTRODUCTION.format(version=keras_version())]
    rows = [(f"`keras.{module}`" if module else "`keras`", found) for module in MODULES if (found := missing(module))]
    parts.append("## Names\n\n" + _table(("module", "missing"), rows))
    parts.append("## Arguments\n\n" + _table(("of", "missing"), list(missing_arguments())))
    lines = []
    for room, said in sorted(refusals().items()):
        lines.append(f"### `{room}`\n\n" + "".join(f"- {text}\n" for text in sorted(said)))
    parts.append(
        "## Values and combinations\n\nThe messages, with placeholders in angle brackets:\n\n" + "\n".join(lines)
    )
    return "\n".join(parts)


def keras_version() -> str:
    """Return major and minor version of the Keras that is installed."""
    return ".".join(metadata.version("keras").split(".")[:2])


def missing(module: str | None) -> str:
    """Return the names of a module of Keras that dptrain's has not; "all of it" where there is no such module."""
    names = {name for name in keras_names(module) if not name.startswith("_")}
    ours = dptrain_module(module)
    if ours is None:
        parent = (module or "").rpartition(".")[0] or None
        return "" if dptrain_module(parent) is None else "all of it"
    return ", ".join(sorted((name for name in names if not _has(ours, name)), key=lambda name: (name.lower(), name)))


def missing_arguments() -> Iterator[tuple[str, str]]:
    """Yield classes and functions that both have, each with the arguments that Keras' alone takes."""
    seen = set()
    for module in MODULES:
        ours = dptrain_module(module)
        for name, source in sorted(keras_names(module).items()):
            if ours is None or not _has(ours, name) or source in seen:
                continue
            seen.add(source)
            wanted = keras_arguments(*source)
            found = getattr(ours, name)
            if not wanted or not callable(found):
                continue
            lacking = [each for each in wanted if each not in dptrain_arguments(found)]
            lacking += [each for each in _refused_at_once(found) if each in wanted]
            if lacking:
                yield f"`{'.'.join(filter(None, (module, name)))}`", ", ".join(f"`{each}`" for each in lacking)


def refusals() -> dict[str, set[str]]:
    """Return the messages of dptrain that say "not supported", by room."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in sorted((ROOT / "dptrain").rglob("*.py")):
        room = path.relative_to(ROOT / "dptrain").with_suffix("").parts[0]
        if room in OWN_ROOMS:
            continue
        for node in ast.walk(_parsed(path)):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
                text = _message(node.exc.args[0])
                if text is not None and "not supported" in text:
                    found[room].add(text.removeprefix("not supported: "))
    return found


# Keras' sources


def keras_names(module: str | None) -> dict[str, tuple[Path, str]]:
    """Return the names of a module of Keras', each with the file and the name of its definition."""
    folder = _keras().joinpath(*(module or "").split(".")) if module else _keras()
    if not (folder / "__init__.py").is_file():
        return {}
    found = {}
    for node in _parsed(folder / "__init__.py").body:
        if isinstance(node, ast.ImportFrom) and node.module:
            path = _keras().parent.joinpath(*node.module.split(".")).with_suffix(".py")
            found |= {one.asname or one.name: (path, one.name) for one in node.names}
    return found


def keras_arguments(path: Path, name: str) -> list[str]:
    """Return the names of the arguments of a class or function, by its source; none where it is a module."""
    if not path.is_file():
        return []
    for node in _parsed(path).body:
        if getattr(node, "name", None) != name:
            continue
        if isinstance(node, ast.ClassDef):
            made = [one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"]
            return _names(made[0])[1:] if made else []
        if isinstance(node, ast.FunctionDef):
            return _names(node)
    return []


def _names(node: ast.FunctionDef) -> list[str]:
    return [one.arg for one in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]


def _keras() -> Path:
    spec = find_spec("keras")
    assert spec is not None, "docs/refusals.py needs Keras: pip install keras"
    assert spec.origin is not None
    return Path(spec.origin).parent


@cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


# dptrain


def dptrain_module(module: str | None) -> ModuleType | None:
    """Return dptrain's module of a name, as attributes lead to it; None where there is none."""
    found: Any = importlib.import_module("dptrain")
    for part in module.split(".") if module else ():
        if not _has(found, part):
            return None
        found = getattr(found, part)
    return found if isinstance(found, ModuleType) else None


def _has(module: Any, name: str) -> bool:
    # A submodule is an attribute only once somebody has imported it.
    if hasattr(module, "__path__") and find_spec(f"{module.__name__}.{name}") is not None:
        importlib.import_module(f"{module.__name__}.{name}")
    try:
        getattr(module, name)
    except AttributeError:
        return False
    return True


def dptrain_arguments(found: Any) -> set[str]:
    """Return the names that a class, whose bases take what it passes on, or a function takes."""
    if type(found).__name__ == "Op":  # its calls bind the names of the function that computes it
        found = found.compute
    bases = found.__mro__[:-1] if isinstance(found, type) else ()
    functions = [one.__new__ if "__new__" in vars(one) else one.__init__ for one in bases] or [found]
    taken: set[str] = set()
    for function in functions:
        try:
            taken |= set(inspect.signature(function).parameters)
        except (TypeError, ValueError):  # of C
            continue
    return taken


def _refused_at_once(found: Any) -> list[str]:
    """Return the arguments of a class that may only be None: those that its constructor hands to `Layer._refuse`."""
    if not isinstance(found, type):
        return []
    names = []
    for base in found.__mro__[:-1]:
        if not base.__module__.startswith("dptrain"):
            continue
        (own,) = [one for one in _parsed(Path(inspect.getfile(base))).body if getattr(one, "name", "") == base.__name__]
        for node in ast.walk(own):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "_refuse":
                names += [one.arg for one in node.keywords if one.arg]
    return names


def _message(node: ast.expr) -> str | None:
    """Return a text or an f-string, with a word for each value; None for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if not isinstance(node, ast.JoinedStr):
        return None
    words = []
    for part in node.values:
        if isinstance(part, ast.Constant):
            words.append(str(part.value))
        elif isinstance(part, ast.FormattedValue):
            words.append(f"<{_word(part.value)}>" if _word(part.value) else "...")
    return "".join(words)


def _word(node: ast.expr) -> str:
    if isinstance(node, ast.Subscript | ast.Await | ast.Starred):
        return _word(node.value)
    if isinstance(node, ast.Call):
        return _word(node.args[0]) if node.args else ""
    if isinstance(node, ast.Attribute):
        return node.attr.strip("_")
    return node.id if isinstance(node, ast.Name) else ""


def _table(header: tuple[str, str], rows: list[tuple[str, str]]) -> str:
    lines = [f"| {' | '.join(header)} |", "|---|---|", *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    PAGE.write_text(page(), encoding="utf-8")
    print(f"{PAGE.relative_to(ROOT)}: written from Keras {keras_version()}")
