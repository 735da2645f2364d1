"""Runs user code that the command line names, a file or a module; no configuration or model's file runs any."""

import hashlib
import importlib
import importlib.util
import os
import sys
import traceback
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dptrain.comm import Communicator
from dptrain.errors import ConfigError, DptrainError
from dptrain.runtime.storage.files import open_regular
from dptrain.runtime.text import one_line


def custom_objects(files: Sequence[str], comm: Communicator) -> dict[str, Any]:
    """Return the classes and functions of `--custom-objects` files by name, except dptrain's. Collective."""
    digests: dict[str, str] = {}

    def load() -> dict[str, Any]:
        objects: dict[str, Any] = {}
        for place in dict.fromkeys(files):
            module, path, content = run(f"--custom-objects {place}", place, "FILE.py")
            digests[f"{path} (SHA-256)"] = hashlib.sha256(content).hexdigest()
            for name, value in _user_objects(vars(module)).items():
                if objects.setdefault(name, value) is not value:
                    raise ConfigError(
                        f"--custom-objects {place}: {path} defines {name!r}, and so does an earlier file; rename one "
                        "of them"
                    )
        return objects

    objects = comm.agree("custom objects", load)
    comm.require_same("the ranks have different files of custom objects", digests)
    return objects


def _user_objects(names: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in names.items()
        if callable(value) and str(getattr(value, "__module__", "")).partition(".")[0] not in ("dptrain", "builtins")
    }


def run(option: str, place: str, example: str) -> tuple[types.ModuleType, str, bytes]:
    """Run a file, or import a module; return it, its path and its content. `example` shows the option's form."""
    if place.endswith(".py") or os.sep in place:
        return _run_file(option, Path(place))
    return _import_module(option, place, example)


def _run_file(option: str, path: Path) -> tuple[types.ModuleType, str, bytes]:
    """Run exactly the file content that was read; modules beside it can be imported, after all installed ones."""
    try:
        with open_regular(path) as file:
            content = file.read()
    except OSError as error:
        raise ConfigError(f"{option}: {path}: {error.strerror or error}") from error
    whole = str(path.resolve())
    # Classes of the file are found by the name of its module, which must not hide another one.
    name = path.stem if path.stem.isidentifier() and not _is_used(path.stem, whole) else f"_user_{path.stem}"
    module = types.ModuleType(name)
    module.__file__ = whole
    _search_last(os.path.dirname(whole))
    sys.modules[name] = module
    try:
        exec(compile(content, whole, "exec"), vars(module))
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ConfigError(f"{option}: {describe_error(error, whole)}") from error
    return module, whole, content


def _is_used(name: str, path: str) -> bool:
    """Whether another file's module has this name, or would if imported."""
    if name in sys.modules:
        return True
    spec = importlib.util.find_spec(name)
    return spec is not None and (spec.origin is None or os.path.realpath(spec.origin) != path)


def _search_last(folder: str) -> None:
    """Make a folder's modules importable after all others: dptrain imports much lazily."""
    if folder not in sys.path:
        sys.path.append(folder)


def _import_module(option: str, name: str, example: str) -> tuple[types.ModuleType, str, bytes]:
    if "" not in sys.path:
        _search_last(os.getcwd())
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise ConfigError(f"{option}: there is no module {error.name!r}; for a file write {example}") from error
        raise ConfigError(f"{option}: {describe_error(error, None)}") from error
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{option}: {describe_error(error, None)}") from error
    path = getattr(module, "__file__", None) or name
    try:
        content = Path(path).read_bytes()
    except OSError:  # built in, or in an archive
        content = b""
    return module, path, content


def describe_error(error: BaseException, path: str | None) -> str:
    """Return "models.py, line 7: NameError: ...", with the last line of user code that ran."""
    text = one_line(error)
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f"{os.path.basename(error.filename)}, line {error.lineno}: SyntaxError: {error.msg}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<")]
    user_frames = [frame for frame in frames if path in (None, frame.filename)]
    place = f"{os.path.basename(user_frames[-1].filename)}, line {user_frames[-1].lineno}: " if user_frames else ""
    return place + (text if isinstance(error, DptrainError) else f"{type(error).__name__}: {text}")
