"""Answer imports of `keras` with dptrain's names, so that Keras' own unit tests meet dptrain. See keras_tests.py.

Nothing of Keras' library is executed but what tests stand on: its test files, `keras.src.testing`, and the few modules
in `EXECUTED`, whose names nobody exports. Each other module of the installed package is read, not run: its syntax tree
says under which public path a name is exported (`@keras_export`) or where it is imported from, and dptrain is asked
for that path. A name that dptrain lacks becomes a class that raises `NotThere` once a test uses it.
"""

import ast
import functools
import importlib
import importlib.util
import sys
import types
import unittest
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

# Modules of Keras that tests stand on and that hold nothing which users import.
EXECUTED = (
    "keras.src.testing",
    "keras.src.testing.test_case",
    "keras.src.testing.test_utils",
    "keras.src.backend.common.dtypes",
    "keras.src.backend.common.variables",
    "keras.src.backend.common.backend_utils",
    "keras.src.utils.python_utils",
    "keras.src.ops.operation_utils",
)
# Libraries that some tests compare with or feed from; where one is not installed, its tests are skipped.
PEERS = ("tensorflow", "torch", "grain", "tf_keras", "openvino", "torchvision", "litert_torch", "flax")
# Names that Keras does not export, and what dptrain calls them.
RENAMED = {
    "keras.src.backend.KerasTensor": "KerasTensor",
    "keras.src.backend.random": "random",
    "keras.src.backend.nn": "ops.nn",
    "keras.src.backend.numpy": "ops.numpy",
    "keras.src.backend.math": "ops",
    "keras.src.backend.linalg": "ops.linalg",
    "keras.src.backend.image": "ops.image",
    "keras.src.backend.is_tensor": "ops.is_tensor",
    "keras.src.models.functional.Functional": "Model",
    "keras.src.backend.common.masking.get_keras_mask": "program.tensor.mask_of",
}
# What `keras.backend` takes from the backend that is chosen: functions of `keras.ops`.
BACKEND_OPS = ("convert_to_numpy", "convert_to_tensor", "cast", "shape", "scatter", "cond", "vectorized_map")
CONSTANTS: dict[str, Any] = {
    "keras.src.backend.SUPPORTS_SPARSE_TENSORS": False,
    "keras.src.backend.SUPPORTS_RAGGED_TENSORS": False,
    "keras.src.backend.SUPPORTS_COMPLEX_DTYPES": False,
    "keras.src.backend.IS_THREAD_SAFE": True,
    "keras.src.api_export.keras_export": lambda path: lambda symbol: symbol,
    "keras.src.backend.config.standardize_data_format": lambda data_format: data_format or "channels_last",
    "keras.src.backend.common.masking.set_keras_mask": lambda x, mask: setattr(x, "_keras_mask", mask),
}


class NotThere(Exception):  # noqa: N818
    """A test uses a name of Keras that dptrain lacks."""


class _Absent(type):
    """Of a class that stands for an absent name: it can be named and subclassed, not used."""

    path = ""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        cls._refuse("")

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls._refuse(f".{name}")

    def _refuse(cls, name: str) -> Any:
        if cls.path.split(".")[0] in PEERS:
            raise unittest.SkipTest(f"needs {cls.path.split('.')[0]}")
        raise NotThere(f"{cls.path}{name}")


def absent(path: str) -> Any:
    """Return a class that stands for a name that is not there."""
    return _Absent(path.rpartition(".")[2] or path, (), {"path": path})


class Source:
    """What the syntax tree of a module of Keras says of its names."""

    def __init__(self, path: Path) -> None:
        self.defined: dict[str, ast.AST] = {}
        self.exports: dict[str, list[str]] = {}
        self.imported: dict[str, tuple[str, str | None]] = {}
        self.stars: list[str] = []
        for statement in _statements(ast.parse(path.read_text())):
            self._read(statement)

    def _read(self, statement: ast.stmt) -> None:
        if isinstance(statement, ast.ClassDef | ast.FunctionDef):
            self.defined[statement.name] = statement
            self.exports[statement.name] = [path for one in statement.decorator_list for path in _exported(one)]
        elif isinstance(statement, ast.Assign):
            for target in statement.targets:
                if isinstance(target, ast.Name):
                    self.defined[target.id] = statement.value
        elif isinstance(statement, ast.ImportFrom):
            for alias in statement.names:
                if alias.name == "*":
                    self.stars.append(statement.module or "")
                else:
                    self.imported[alias.asname or alias.name] = (statement.module or "", alias.name)
        elif isinstance(statement, ast.Import):
            for alias in statement.names:
                self.imported[alias.asname or alias.name.split(".")[0]] = (alias.name, None)


def _statements(tree: ast.AST) -> Iterator[ast.stmt]:
    """Yield a module's statements, those under `if` and `try` too."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.If | ast.Try):
            yield from _statements(child)
        elif isinstance(child, ast.stmt):
            yield child


def _exported(decorator: ast.AST) -> list[str]:
    """Return the public paths that `keras_export(...)` names."""
    if not (isinstance(decorator, ast.Call) and getattr(decorator.func, "id", "") == "keras_export"):
        return []
    return [one.value for one in ast.walk(decorator) if isinstance(one, ast.Constant) and isinstance(one.value, str)]


@functools.cache
def source(module: str) -> Source:
    """Return what a module of Keras says of its names."""
    return Source(file_of(module))


@functools.cache
def root() -> Path:
    """Return the folder of the installed package."""
    for folder in sys.path:
        if (Path(folder) / "keras" / "src" / "version.py").is_file():
            return Path(folder) / "keras"
    raise SystemExit("keras is not installed: pip install keras jax")


@functools.cache
def file_of(module: str) -> Path:
    """Return the file of a module of Keras.

    Raises:
        FileNotFoundError: there is none.
    """
    path = root().joinpath(*module.split(".")[1:])
    for file in (path / "__init__.py", path.with_suffix(".py")):
        if file.is_file():
            return file
    raise FileNotFoundError(module)


def is_module(name: str) -> bool:
    """Whether Keras has a module of that name."""
    try:
        return bool(file_of(name))
    except FileNotFoundError:
        return False


def ours(path: str) -> Any:
    """Return what dptrain has under a path, without its first word.

    Raises:
        LookupError: nothing.
    """
    value: Any = importlib.import_module("dptrain")
    for word in path.split("."):
        try:
            value = getattr(value, word)
        except AttributeError as error:  # a module that does not import is a fault, not a lack
            raise LookupError(path) from error
    return value


def resolve(module: str, name: str) -> Any:
    """Return what a name of a module of Keras is in dptrain, or a class that stands for its absence.

    Raises:
        AttributeError: Keras has no such name.
    """
    path = f"{module}.{name}"
    if path in CONSTANTS:
        return CONSTANTS[path]
    if path in RENAMED:
        return ours(RENAMED[path])
    if module == "keras.src.backend":
        if name == "backend":
            return lambda: "dptrain"
        if name in BACKEND_OPS:
            return ours(f"ops.{name}")
    if name in source(module).defined:
        return _defined(module, name)
    if name in source(module).imported:
        return _imported(module, name)
    if is_module(path):
        return importlib.import_module(path)
    for star in source(module).stars:
        try:
            return resolve(star, name)
        except AttributeError:
            continue
    raise AttributeError(f"module {module!r} has no attribute {name!r}")


def _defined(module: str, name: str) -> Any:
    """Return what stands for a name that Keras defines in a module."""
    if (module, name) == ("keras.src.backend.config", "backend"):
        return lambda: "dptrain"
    for path in source(module).exports.get(name, ()):
        try:
            return ours(path.partition(".")[2])
        except LookupError:
            continue
    if module in EXECUTED:
        return getattr(executed(module), name)
    if module.startswith("keras.src.ops."):
        operation = _operation(module, name)
        if operation is not None:
            return operation
    rooms = [word for word in module.split(".")[2:] if not word.startswith("_")]
    for depth in range(len(rooms), 0, -1):
        try:
            value = ours(".".join([*rooms[:depth], name]))
        except LookupError:
            continue
        if not isinstance(value, types.ModuleType):
            return value
    return absent(f"{module}.{name}")


def _imported(module: str, name: str) -> Any:
    """Return what stands for a name that Keras imports into a module."""
    where, what = source(module).imported[name]
    if what is None:
        return importlib.import_module(where)
    if not where.startswith("keras"):
        return getattr(importlib.import_module(where), what)
    if where != module and f"{where}.{what}" != module and is_module(where):
        return resolve(where, what)
    if is_module(f"{where}.{what}"):
        return importlib.import_module(f"{where}.{what}")
    return absent(f"{where}.{what}")


@functools.cache
def executed(module: str) -> types.ModuleType:
    """Execute a module of Keras under another name; what it imports is answered by this shim."""
    spec = importlib.util.spec_from_file_location(f"executed.{module}", file_of(module))
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    if hasattr(loaded, "get_seed_generators"):
        loaded.get_seed_generators = seed_generators  # type: ignore[attr-defined]
    return loaded


# Operations: Keras has a class beside each function of `keras.ops`, which users do not import and its tests call.


def _parameters(function: ast.FunctionDef) -> list[str]:
    return [one.arg for one in [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]]


def _operation(module: str, name: str) -> Any:
    """Return a class whose calls are calls of the function that stands beside an operation's class."""
    definition = source(module).defined[name]
    if not isinstance(definition, ast.ClassDef):
        return None
    for beside in source(module).defined.values():
        if isinstance(beside, ast.FunctionDef) and name in _symbolic_calls(beside):
            function = resolve(module, beside.name)
            if isinstance(function, _Absent):
                return function
            methods = {one.name: one for one in definition.body if isinstance(one, ast.FunctionDef)}
            options = _parameters(methods["__init__"])[1:] if "__init__" in methods else []
            return _adapter(name, function, _parameters(beside), options, _parameters(methods["call"])[1:])
    return None


@functools.cache
def _symbolic_calls(function: ast.FunctionDef) -> set[str]:
    """Return the classes of which a function makes symbolic calls, `Abs().symbolic_call(x)` or `Abs()(x)`."""
    calls = [one.func for one in ast.walk(function) if isinstance(one, ast.Call)]
    owners = [one.value if isinstance(one, ast.Attribute) and one.attr == "symbolic_call" else one for one in calls]
    return {one.func.id for one in owners if isinstance(one, ast.Call) and isinstance(one.func, ast.Name)}


def _adapter(
    name: str, function: Callable[..., Any], order: Sequence[str], options: Sequence[str], tensors: Sequence[str]
) -> type:
    """Return a class of operations.

    Args:
        name: of the class.
        function: that computes.
        order: of the function's parameters.
        options: names of the constructor's parameters.
        tensors: names of the call's parameters.
    """

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        self.options = dict(zip(options, args, strict=False)) | {k: v for k, v in kwargs.items() if k != "name"}

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) > len(tensors):
            return function(*args, **self.options, **kwargs)
        arguments = self.options | dict(zip(tensors, args, strict=False)) | kwargs
        leading = []
        for parameter in order:
            if parameter not in arguments:
                break
            leading.append(arguments.pop(parameter))
        return function(*leading, **arguments)

    body = {"__init__": init, "__call__": call, "call": call, "symbolic_call": call, "compute_output_spec": call}
    return type(name, (), body)


# Imports


class _Module(types.ModuleType):
    """A module of Keras whose names are dptrain's."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return resolve(self.__name__, name)

    def __dir__(self) -> list[str]:
        known = source(self.__name__)
        return sorted({*known.defined, *known.imported})


class _Peer(types.ModuleType):
    """A library that is not installed."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return absent(f"{self.__name__}.{name}")


class Finder:
    """Finds modules of Keras, and peers that Keras' files import."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return how to load a module; None leaves it to the other finders."""
        first = name.split(".")[0]
        if first == "keras":
            if not is_module(name):
                return None
            if name.endswith("_test"):
                return importlib.util.spec_from_file_location(name, file_of(name))
            spec = ModuleSpec(name, self, origin=str(file_of(name)), is_package=True)
            spec.has_location = True
            return spec
        if first in PEERS and _asked_by_keras():
            return ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        """Return an empty module."""
        return _Module(spec.name) if spec.name.split(".")[0] == "keras" else _Peer(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Let packages say where they lie."""
        if isinstance(module, _Module) and file_of(module.__name__).name == "__init__.py":
            module.__path__ = [str(file_of(module.__name__).parent)]


def _asked_by_keras() -> bool:
    """Whether a file of Keras imports."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file != __file__ and "importlib" not in file:
            return file.startswith(str(root()))
        frame = frame.f_back
    return False


def _conftest() -> types.ModuleType:
    """Return what tests import from Keras' conftest, which no wheel has."""
    import pytest

    module = types.ModuleType("conftest")
    module.skip_if_backend = lambda backend, reason: pytest.mark.skipif(False, reason=reason)  # type: ignore[attr-defined]
    return module


def seed_generators(layer: Any) -> list[Any]:
    """Return the seed generators among a layer's attributes and those of layers in it."""
    from dptrain.layers import Layer
    from dptrain.random import SeedGenerator

    seen: dict[int, Any] = {}
    stack = [layer]
    while stack:
        value = stack.pop()
        if id(value) in seen:
            continue
        if isinstance(value, Layer):
            stack += vars(value).values()
        elif isinstance(value, list | tuple):
            stack += value
        if isinstance(value, Layer | SeedGenerator):
            seen[id(value)] = value
    return [one for one in seen.values() if isinstance(one, SeedGenerator)]


def install() -> None:
    """Answer imports of Keras from now on."""
    for name in [one for one in sys.modules if one.split(".")[0] == "keras"]:
        raise SystemExit(f"{name} has been imported before the shim")
    sys.meta_path.insert(0, Finder())
    sys.modules["conftest"] = _conftest()
