"""`--model file.py:build_model`: a user's function that makes the model, run only from the command line."""

import argparse
import dataclasses
import hashlib
import inspect
import sys
import typing
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from dptrain.cli.options.config import Config, ModelConfig
from dptrain.cli.options.words import suggest
from dptrain.cli.user_code import describe_error, run
from dptrain.comm import Communicator
from dptrain.errors import ConfigError
from dptrain.models import Model
from dptrain.runtime.output import terminal
from dptrain.runtime.text import short
from dptrain.sweeps.arguments import Builder
from dptrain.sweeps.space import parse_grid

# Facts of the data and the run, passed to functions with these parameters.
OFFERED = ("input_shape", "num_classes", "task", "preprocessing", "seed")
# Types of a default that define an argument's values.
_PLAIN = (bool, int, float, str)
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclasses.dataclass(frozen=True)
class ModelFunction:
    """A function in a file that makes models."""

    spec: str  # as typed, "models.py:build_model"
    path: str
    digest: str  # SHA-256 of the file
    builder: Builder
    types: Mapping[str, Any]  # of its own parameters; Any where not annotated
    required: frozenset[str]  # own parameters without a default
    takes_others: bool  # it has **kwargs

    def arguments(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Convert values to the types of its signature; refuse unknown, misfitting and missing ones."""
        name = self.spec.rpartition(":")[2]
        typed = {}
        for key, value in values.items():
            if key in OFFERED:
                raise ConfigError(f"model.arguments.{key} = {short(value)}: {key} comes from the data and the run")
            if key not in self.types and not self.takes_others:
                raise ConfigError(f"{name} of {self.path} has no parameter {key!r}{suggest(key, self.types)}")
            typed[key] = self._typed(key, value)
        if missing := sorted(self.required - typed.keys()):
            raise ConfigError(f"{name} of {self.path} needs {', '.join(missing)}: add --model-arg {missing[0]}=VALUE")
        return typed

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
        except PydanticUserError:  # a type that Pydantic lacks
            return value

    def build(self, seed: int, values: Mapping[str, Any], offered: Mapping[str, Any]) -> Model:
        """Return a new model; the function gets `values` and those of `offered` (data facts) that it names."""
        arguments = self.arguments(values)
        try:
            model = self.builder.build(
                seed, **arguments, **{name: offered[name] for name in offered if name in self.builder.takes}
            )
            if not model.built:
                model.build((None, *offered["input_shape"]))
        except (Exception, SystemExit) as error:
            raise ConfigError(f"--model {self.spec}: {describe_error(error, self.path)}") from error
        return model


def loaded(config: Config, parsed: argparse.Namespace, comm: Communicator) -> Config:
    """Load the configured function on every rank; return the configuration with its file's digest. Collective."""
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
    """Refuse settings of the network that the function's model replaces."""
    for name in ("network", "augment", "hidden", "activation", "dropout"):
        if (value := getattr(config.model, name)) != getattr(ModelConfig(), name):
            advice = f"leave it out, or pass it to the function: --model-arg {name}=..."
            raise ConfigError(f"model.{name} = {short(value)}: {config.model.function} builds the model; {advice}")


@cache
def load_function(spec: str) -> ModelFunction:
    """Return the function "file.py:function" or "package.module:function"; its file runs once a process."""
    place, colon, name = spec.rpartition(":")
    if not colon or not place or not name.isidentifier():
        example = f"{spec.rstrip(':')}:build_model" if spec else "models.py:build_model"
        raise ConfigError(f"--model {spec}: expected a file or a module and its function, such as {example}")
    module, path, content = run(f"--model {spec}", place, "FILE.py:function")
    function = getattr(module, name, None)
    if not callable(function):
        names = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise ConfigError(f"--model {spec}: {path} has no function {name!r}{suggest(name, names)}")
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError) as error:
        raise ConfigError(f"--model {spec}: the signature of {name} cannot be read") from error
    for parameter in parameters.values():
        if parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
            raise ConfigError(f"--model {spec}: {name} takes {parameter.name!r} by position only; remove the '/'")
    own_parameters = {
        key: parameter for key, parameter in parameters.items() if parameter.kind in _BY_NAME and key not in OFFERED
    }
    hints = _hints(function)
    return ModelFunction(
        spec,
        path,
        hashlib.sha256(content).hexdigest(),
        Builder(function, compiled=False),
        {key: hints.get(key, _type_of(parameter.default)) for key, parameter in own_parameters.items()},
        frozenset(key for key, parameter in own_parameters.items() if parameter.default is inspect.Parameter.empty),
        any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()),
    )


def parse_argument(text: str) -> tuple[str, Any]:
    """Parse "units=64"; a list is "hidden=[256,128]", as in a grid."""
    try:
        name, values = parse_grid(text)
    except ConfigError as error:
        raise ConfigError(f"--model-arg {text}: {str(error).partition(': ')[2]}") from error
    if len(values) != 1:
        raise ConfigError(f"--model-arg {text}: expected one value; a list is {name}=[{text.partition('=')[2]}]")
    return name, values[0]


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    """Return a function's annotations; none if one of them cannot be resolved."""
    try:
        return typing.get_type_hints(function)
    except Exception:
        return {}


def _type_of(default: Any) -> Any:
    return type(default) if type(default) in _PLAIN else Any
