"""Code of the user's own that the command line names: a file or a module, which is run.

Nothing else runs any: neither a configuration file nor a model's file.
"""

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
from dptrain.runtime.files import open_regular
from dptrain.runtime.text import one_line


def custom_objects(files: Sequence[str], comm: Communicator) -> dict[str, Any]:
    """Return classes and functions of files by their names, those of dptrain aside. Collective.

    Args:
        files: of `--custom-objects`: "layers.py" or "package.module"; each is run.
        comm: the ranks.

    Raises:
        AgreedError: a file fails, on any rank, or two files have different objects of one name.
    """
    digests: dict[str, str] = {}

    def load() -> dict[str, Any]:
        found: dict[str, Any] = {}
        for one in dict.fromkeys(files):
            module, path, content = run(f"--custom-objects {one}", one, "FILE.py")
            digests[f"{path} (SHA-256)"] = hashlib.sha256(content).hexdigest()
            for name, own in _own(vars(module)).items():
                if found.setdefault(name, own) is not own:
                    raise ConfigError(f"--custom-objects {one}: {path} has another {name!r} than a file before it")
        return found

    found = comm.agree("custom objects", load)
    comm.require_same("the ranks have different files of custom objects", digests)
    return found


def _own(names: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: one
        for name, one in names.items()
        if callable(one) and str(getattr(one, "__module__", "")).partition(".")[0] not in ("dptrain", "builtins")
    }


def run(option: str, place: str, example: str) -> tuple[types.ModuleType, str, bytes]:
    """Run a file, or import a module; return it, its path and the content.

    Args:
        option: that names it, with its value, for messages.
        place: "file.py" or "package.module".
        example: how the option names a file.

    Raises:
        ConfigError: there is none, or it fails.
    """
    if place.endswith(".py") or os.sep in place:
        return _run_file(option, Path(place))
    return _import_module(option, place, example)


def _run_file(option: str, path: Path) -> tuple[types.ModuleType, str, bytes]:
    """Run a file; modules beside it can be imported, after all that is installed. What is run is what was read."""
    try:
        with open_regular(path) as file:
            content = file.read()
    except OSError as error:
        raise ConfigError(f"{option}: {path}: {error.strerror or error}") from error
    whole = str(path.resolve())
    # Classes of the file are found by the name of its module, which must not hide another one.
    name = path.stem if path.stem.isidentifier() and not _is_taken(path.stem, whole) else f"_user_{path.stem}"
    module = types.ModuleType(name)
    module.__file__ = whole
    _search_last(os.path.dirname(whole))
    sys.modules[name] = module
    try:
        exec(compile(content, whole, "exec"), vars(module))
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ConfigError(f"{option}: {told(error, whole)}") from error
    return module, whole, content


def _is_taken(name: str, path: str) -> bool:
    """Whether a module of another file has a name, or would have it once it is imported."""
    if name in sys.modules:
        return True
    spec = importlib.util.find_spec(name)
    return spec is not None and (spec.origin is None or os.path.realpath(spec.origin) != path)


def _search_last(folder: str) -> None:
    """Let modules of a folder be imported whose names nothing else has: dptrain imports much only when it is needed."""
    if folder not in sys.path:
        sys.path.append(folder)


def _import_module(option: str, name: str, example: str) -> tuple[types.ModuleType, str, bytes]:
    if "" not in sys.path:
        _search_last(os.getcwd())
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise ConfigError(f"{option}: there is no module {error.name!r}; of a file: {example}") from error
        raise ConfigError(f"{option}: {told(error, None)}") from error
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{option}: {told(error, None)}") from error
    path = getattr(module, "__file__", None) or name
    try:
        content = Path(path).read_bytes()
    except OSError:  # built in, or in an archive
        content = b""
    return module, path, content


def told(error: BaseException, path: str | None) -> str:
    """Return "models.py, line 7: NameError: ..."; the line is the last one of the user's that was run."""
    text = one_line(error)
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f"{os.path.basename(error.filename)}, line {error.lineno}: SyntaxError: {error.msg}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<")]
    own = [frame for frame in frames if path in (None, frame.filename)]
    place = f"{os.path.basename(own[-1].filename)}, line {own[-1].lineno}: " if own else ""
    return place + (text if isinstance(error, DptrainError) else f"{type(error).__name__}: {text}")
