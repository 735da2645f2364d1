"""`--model file.py:build_model`: the user's own function makes the model.

The file is code that the user names on the command line, and it is run. A configuration file alone runs none: what
reads files runs no code, so the command line has to say `--model` as well.
"""

import argparse
import dataclasses
import hashlib
import inspect
import sys
import typing
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from dptrain.cli.config import Config, ModelConfig
from dptrain.cli.user_code import run, told
from dptrain.cli.words import suggest
from dptrain.comm import Communicator
from dptrain.errors import ConfigError
from dptrain.models import Model
from dptrain.runtime import terminal
from dptrain.runtime.text import short
from dptrain.sweeps.arguments import Builder
from dptrain.sweeps.space import parse_grid

# What the data and the run say: a function that names one of these gets it.
OFFERED = ("input_shape", "num_classes", "task", "preprocessing", "seed")
# Types of a default that say which values an argument takes.
_PLAIN = (bool, int, float, str)
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclasses.dataclass(frozen=True)
class ModelFunction:
    """A function that makes models, from a file.

    Attributes:
        spec: as the user wrote it, "models.py:build_model".
        path: of its file.
        digest: SHA-256 of the file.
        builder: calls the function.
        types: what the values of its own parameters are, by name; Any where the signature does not say.
        required: its own parameters without a default.
        takes_others: whether it takes arguments by any name.
    """

    spec: str
    path: str
    digest: str
    builder: Builder
    types: Mapping[str, Any]
    required: frozenset[str]
    takes_others: bool

    def arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return arguments as its signature types them.

        Args:
            given: values by name, as the command line or a sweep has them.

        Raises:
            ConfigError: it has no such parameter, a value does not fit, or one is missing.
        """
        name = self.spec.rpartition(":")[2]
        found = {}
        for key, value in given.items():
            if key in OFFERED:
                raise ConfigError(f"model.arguments.{key} = {short(value)}: {key} comes from the data and the run")
            if key not in self.types and not self.takes_others:
                raise ConfigError(f"{name} of {self.path} has no parameter {key!r}{suggest(key, self.types)}")
            found[key] = self._typed(key, value)
        if missing := sorted(self.required - found.keys()):
            raise ConfigError(f"{name} of {self.path} needs {', '.join(missing)}: add --model-arg {missing[0]}=VALUE")
        return found

    def _typed(self, key: str, value: Any) -> Any:
        from pydantic import TypeAdapter
        from pydantic.errors import PydanticUserError

        kind = self.types.get(key, Any)
        try:
            if isinstance(value, bool) and kind in (int, float):
                raise ValueError(f"expected {kind.__name__}")
            return TypeAdapter(kind).validate_python(value)
        except ValueError as error:  # Pydantic's ValidationError too
            expected = getattr(kind, "__name__", str(kind))
            raise ConfigError(f"model.arguments.{key} = {short(value)}: expected {expected}") from error
        except PydanticUserError:  # a type of which Pydantic knows nothing
            return value

    def build(self, seed: int, given: Mapping[str, Any], known: Mapping[str, Any]) -> Model:
        """Return a new model, with its weights.

        Args:
            seed: of the model, unless the function gives it another.
            given: as `arguments`.
            known: what the data say, "input_shape" among it, by name; it gets those that it names.

        Raises:
            ConfigError: as `arguments`; or the function fails, or returns no new model.
        """
        own = self.arguments(given)
        try:
            model = self.builder.build(
                seed, **own, **{name: known[name] for name in known if name in self.builder.takes}
            )
            if not model.built:
                model.build((None, *known["input_shape"]))
        except (Exception, SystemExit) as error:
            raise ConfigError(f"--model {self.spec}: {told(error, self.path)}") from error
        return model


def loaded(config: Config, parsed: argparse.Namespace, comm: Communicator) -> Config:
    """Load the configured function on every rank, and return the configuration with the digest of its file. Collective.

    Args:
        config: names the function.
        parsed: the command line.
        comm: the ranks.

    Raises:
        AgreedError: only a file names the function, its file fails, or ranks have different ones.
    """
    spec = str(config.model.function)

    def load() -> ModelFunction:
        if "model.function" not in vars(parsed):
            raise ConfigError(f"--config {parsed.config} names code, {short(spec)}: add --model {spec} to run it")
        function = load_function(spec)
        _check_replaced(config)
        if "sweep.grid" not in vars(parsed) and "sweep.random" not in vars(parsed):
            function.arguments(config.model.arguments)
        return function

    function = comm.agree("model", load)
    comm.require_same("the ranks have different model files", {f"{function.path} (SHA-256)": function.digest})
    before = config.model.digest
    if before not in (None, function.digest) and comm.rank == 0:
        text = f"{function.path} has changed since {parsed.config} was written: its SHA-256 was {before}"
        terminal.say(f"dptrain: warning: {text}, and is {function.digest}", file=sys.stderr)
    return dataclasses.replace(config, model=dataclasses.replace(config.model, digest=function.digest))


def _check_replaced(config: Config) -> None:
    """Refuse settings of the network that the function's model takes the place of.

    Raises:
        ConfigError: one is set.
    """
    for name in ("network", "augment", "hidden", "activation", "dropout"):
        if (value := getattr(config.model, name)) != getattr(ModelConfig(), name):
            advice = f"leave it out, or hand it over: --model-arg {name}=..."
            raise ConfigError(f"model.{name} = {short(value)}: {config.model.function} makes the model; {advice}")


@cache
def load_function(spec: str) -> ModelFunction:
    """Return the function that a text names; its file is run, once a process.

    Args:
        spec: "file.py:function" or "package.module:function".

    Raises:
        ConfigError: there is none, or its file fails.
    """
    place, colon, name = spec.rpartition(":")
    if not colon or not place or not name.isidentifier():
        example = f"{spec.rstrip(':')}:build_model" if spec else "models.py:build_model"
        raise ConfigError(f"--model {spec}: expected a file or a module and its function, such as {example}")
    module, path, content = run(f"--model {spec}", place, "FILE.py:function")
    function = getattr(module, name, None)
    if not callable(function):
        own = [key for key, one in vars(module).items() if callable(one) and not key.startswith("_")]
        raise ConfigError(f"--model {spec}: {path} has no function {name!r}{suggest(name, own)}")
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError) as error:
        raise ConfigError(f"--model {spec}: the signature of {name} cannot be read") from error
    for one in parameters.values():
        if one.kind is inspect.Parameter.POSITIONAL_ONLY:
            raise ConfigError(f"--model {spec}: {name} takes {one.name!r} by its position alone; drop the '/'")
    own_parameters = {key: one for key, one in parameters.items() if one.kind in _BY_NAME and key not in OFFERED}
    hints = _hints(function)
    return ModelFunction(
        spec,
        path,
        hashlib.sha256(content).hexdigest(),
        Builder(function, compiled=False),
        {key: hints.get(key, _type_of(one.default)) for key, one in own_parameters.items()},
        frozenset(key for key, one in own_parameters.items() if one.default is inspect.Parameter.empty),
        any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values()),
    )


def parse_argument(text: str) -> tuple[str, Any]:
    """Return the name and the value of "units=64"; a list is "hidden=[256,128]", as in a grid.

    Raises:
        ConfigError: it is neither.
    """
    try:
        name, values = parse_grid(text)
    except ConfigError as error:
        raise ConfigError(f"--model-arg {text}: {str(error).partition(': ')[2]}") from error
    if len(values) != 1:
        raise ConfigError(f"--model-arg {text}: expected one value; a list is {name}=[{text.partition('=')[2]}]")
    return name, values[0]


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    """Return its annotations; none where one of them cannot be read."""
    try:
        return typing.get_type_hints(function)
    except Exception:
        return {}


def _type_of(default: Any) -> Any:
    return type(default) if type(default) in _PLAIN else Any
