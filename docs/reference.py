"""The reference pages of the site: the command line from `--help`, the API from docstrings.

`hooks.py` asks for them when the site is built. To read one as text: `python docs/reference.py layers`.
"""

import argparse
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import dptrain
from dptrain.cli import main as command_line_of
from dptrain.cli.commands import launch
from dptrain.program.op import Op

# Modules of the API, each a page, in the order of the navigation.
MODULES = (
    *("dptrain", "layers", "ops", "losses", "metrics", "optimizers", "optimizers.schedules", "callbacks"),
    *("initializers", "regularizers", "constraints", "activations", "random", "utils", "preprocessing", "datasets"),
    *("applications", "models", "saving", "mixed_precision", "dtype_policies", "config", "distribution"),
    *("distillation", "pruning", "testing", "tree", "errors"),
)
# What the base has, its subclasses' entries do not repeat.
BASES = ("Layer", "Loss", "Metric", "Optimizer", "Initializer", "Regularizer", "Model")
# Commands with the options of a training, which are listed once.
AS_TRAIN = ("sweep", "explain", "doctor")
# Begins a section of a docstring.
SECTION = re.compile(r"^(Args|Returns|Raises|Yields|Attributes):$")
# Whose entries have names.
NAMED = ("Args:", "Raises:", "Attributes:")
ENTRY = re.compile(r"^ {4}([*\w][^:\n]*?): +(.*)$")
CODE = re.compile(r"(`[^`]*`|https?://\S+)")


# The command line


def command_line() -> str:
    """Return the page of all commands and options."""
    parts = [
        "# Command line\n\nWhat `python -m dptrain COMMAND --help` prints. [Training from the command"
        " line](../docs/training.md) shows what people use most. An option that is set by its group's name in a file is"
        " also an option: `--optimizer.learning_rate`."
    ]
    trains: set[str] = set()
    for command in command_line_of.COMMANDS:
        parser = _parser(command)
        parts += [f"## {command}", _code(parser.format_usage()), _described(parser.description or "")]
        for group in parser._action_groups:
            actions = [action for action in group._group_actions if action.help is not argparse.SUPPRESS]
            names = [_names(action, parser)[-1] for action in actions]
            new = [action for action, name in zip(actions, names, strict=True) if name not in trains]
            if command not in AS_TRAIN:
                new = actions
            if new:
                parts.append(f"### {command}: {group.title}\n\n{group.description or ''}\n\n{_options(new, parser)}")
            elif actions:
                parts.append(f"As for `train`, {group.title}: {', '.join(f'`{name}`' for name in names)}.")
        if command == "train":
            trains = {name for action in parser._actions for name in _names(action, parser)}
    return "\n\n".join(parts) + "\n"


def _parser(command: str) -> argparse.ArgumentParser:
    return launch.build_parser() if command == "launch" else command_line_of._build_parser(command)


def _names(action: argparse.Action, parser: argparse.ArgumentParser) -> list[str]:
    shown = parser._get_formatter()._format_action_invocation(action)
    return [word.partition(" ")[0] for word in shown.split(", ")]


def _options(actions: list[argparse.Action], parser: argparse.ArgumentParser) -> str:
    formatter = parser._get_formatter()
    rows = ["| option | meaning |", "|---|---|"]
    for action in actions:
        name = formatter._format_action_invocation(action).replace("|", "\\|")
        rows.append(f"| `{name}` | {_escaped(formatter._expand_help(action)).replace('|', chr(92) + '|')} |")
    return "\n".join(rows)


def _described(text: str) -> str:
    """Return a description: its indented lines are commands."""
    return "\n\n".join(
        _code(part) if part.startswith("  ") else _escaped(part.strip()) for part in text.split("\n\n") if part.strip()
    )


def _code(text: str) -> str:
    return f"```text\n{inspect.cleandoc(text).strip()}\n```"


# The API


def module_page(name: str) -> str:
    """Return the page of a module: each public name with its signature and docstring."""
    path = "dptrain" if name == "dptrain" else f"dptrain.{name}"
    module = importlib.import_module(path)
    parts = [f"# {path}", _markdown(inspect.getdoc(module) or "")]
    shown: dict[int, str] = {}
    described: dict[Any, str] = {}
    for entry in sorted(_public(module), key=lambda each: (each.lower(), each)):
        value = getattr(module, entry)
        if not callable(value) or type(value).__module__ == "typing":
            continue
        if id(value) in shown:
            parts.append(f"## {entry}\n\nAnother name of [`{shown[id(value)]}`](#{shown[id(value)].lower()}).")
            continue
        shown[id(value)] = entry
        parts.append(f"## {entry}\n\n```python\n{path}.{entry}{_signature(value)}\n```")
        parts.append(_markdown(inspect.getdoc(value) or ""))
        if inspect.isclass(value):
            parts += _described_methods(value, entry, described)
    return "\n\n".join(part for part in parts if part) + "\n"


def _public(module: Any) -> list[str]:
    """Return the public names of a module; of one without a list, the classes that it defines."""
    names = getattr(module, "__all__", None) or getattr(module, "_OPS", None)
    if names is None:
        names = [name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
    return [name for name in names if not name.startswith("_")]


def _methods(cls: type) -> Iterator[str]:
    """Yield the public methods of a class that its base has not, and that say what they do."""
    bases = [getattr(dptrain, base) for base in BASES] + [dptrain.callbacks.Callback]
    inherited = {name for base in bases if issubclass(cls, base) and cls is not base for name in dir(base)}
    for name in sorted(dir(cls)):
        value = inspect.getattr_static(cls, name)
        said = getattr(value, "__doc__", None)
        own = (getattr(value, "__module__", None) or "").startswith("dptrain") or isinstance(value, classmethod)
        if name.startswith("_") or name in inherited or not said or not own:
            continue
        if isinstance(value, (staticmethod, classmethod)) or inspect.isfunction(value):
            yield name


def _described_methods(cls: type, entry: str, described: dict[Any, str]) -> Iterator[str]:
    """Yield the methods of a class; those that an earlier class of the page has from the same base are only named."""
    known: dict[str, list[str]] = {}
    for name in _methods(cls):
        method = getattr(cls, name)
        function = getattr(method, "__func__", method)
        first = described.setdefault(function, entry)
        if first != entry:
            known.setdefault(first, []).append(f"`{name}`")
            continue
        text = _markdown(inspect.getdoc(method) or "")
        yield f"### {entry}.{name}\n\n```python\n{name}{_signature(method)}\n```\n\n{text}"
    for first, names in known.items():
        yield f"As in [`{first}`](#{first.lower()}): {', '.join(names)}."


def _signature(value: Callable[..., Any]) -> str:
    """Return the arguments with their defaults, without annotations: docstrings say what they mean."""
    try:
        signature = inspect.signature(value.compute if isinstance(value, Op) else value)
    except (TypeError, ValueError):
        return "(...)"
    hidden = ("self", "out", "first_row") if isinstance(value, Op) else ("self",)
    kept = [
        parameter.replace(annotation=parameter.empty)
        for parameter in signature.parameters.values()
        if parameter.name not in hidden
    ]
    text = str(signature.replace(parameters=kept, return_annotation=signature.empty))
    return re.sub(r"<(?:function|class|object|op) '?([\w.]+)'?[^>]*>", r"\1", text)


# Docstrings as Markdown


def _markdown(docstring: str) -> str:
    """Return a docstring as Markdown: sections as lists, everything else as it stands."""
    lines: list[str] = []
    section, listed = "", False
    for line in docstring.splitlines():
        if SECTION.match(line):
            section, listed = line, False
            lines += ["", f"**{line.rstrip(':')}**", ""]
        elif section in NAMED and (entry := ENTRY.match(line)):
            listed = True
            lines.append(f"- `{entry[1]}`: {_escaped(entry[2])}")
        elif section and line.startswith(" "):
            lines.append(f"{'    ' if listed else ''}{_escaped(line.strip())}")
        elif line.startswith("    "):
            lines.append(line)  # code
        else:
            section = section if not line.strip() else ""
            lines.append(_escaped(line))
    return "\n".join(lines).strip()


def _escaped(text: str) -> str:
    """Return a text in which Markdown finds no markup but code and addresses."""
    parts = CODE.split(text)
    return "".join(
        part if index % 2 else re.sub(r"([*_\[\]])", r"\\\1", part).replace("<", "&lt;")
        for index, part in enumerate(parts)
    )


if __name__ == "__main__":
    print(command_line() if sys.argv[1] == "command-line" else module_page(sys.argv[1]))
