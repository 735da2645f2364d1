"""What a layer is: weights, sublayers, and a `call` in ops."""

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from numbers import Integral
from typing import Any, Self, TypeVar

import numpy as np
import numpy.typing as npt

from dptrain import activations, initializers, regularizers
from dptrain.errors import ConfigError
from dptrain.layers.input_spec import check
from dptrain.layers.node import Node, is_symbolic
from dptrain.layers.weight import Weight
from dptrain.ops.elementwise import cast
from dptrain.ops.random import SeedGenerator
from dptrain.program.shapes import SYMBOLIC_ROWS, Rows
from dptrain.program.tensor import FLOATX, Tensor, Variable, constant, placeholder, scope, tracing
from dptrain.program.tree import leaves, map_leaves
from dptrain.random import Purpose, default_seed, next_position, own_seed
from dptrain.registry.names import snake_case
from dptrain.registry.serialization import Configurable

T = TypeVar("T")
InitializerArgument = str | dict[str, Any] | initializers.InitializerLike
RegularizerArgument = str | dict[str, Any] | regularizers.RegularizerLike | None
ActivationArgument = str | activations.Activation | None
BuildShape = tuple[int | None, ...]

# Whether the call at hand is one of training; None outside of calls.
_training: ContextVar[bool | None] = ContextVar("training", default=None)
# Whether weights that are built are for a model to draw anew: see `Weight`.
_provisional: ContextVar[bool] = ContextVar("provisional", default=False)
# Arguments of every layer, which `Layer.config` writes itself.
_COMMON = ("self", "name", "trainable", "dtype", "autocast", "activity_regularizer", "input_shape", "input_dim")


class Layer(Configurable):
    """A function of tensors with weights.

    A subclass makes weights in `build` (`add_weight`) and computes in `call`, in `dptrain.ops`; layers that it has as
    attributes, also in lists and dictionaries, are its sublayers. Arguments of its constructor that are attributes of
    the same name make up its configuration; others need a `get_config`.

    Args:
        activity_regularizer: penalty on what the layer returns.
        trainable: False keeps the weights as they are in training.
        dtype: "float32" or "float64"; by default the model's.
        autocast: whether floating-point inputs are cast to that type.
        name: unique in the model; by default the class's name in snake case, numbered, once a model has the layer.
        input_shape: shape of one sample, for the first layer of a `Sequential`.
        input_dim: the same for flat samples, their number of features.

    Attributes:
        built: whether the weights are there.
        input_spec: an `InputSpec`, or one for each input, that inputs are checked against.
        input_shape: as above.
        name: as above; None until a model has the layer.

    Raises:
        ConfigError: an argument that there is not, that is not supported, or a shape that is none.
    """

    # Arguments that Keras does not write to files.
    _unwritten: tuple[str, ...] = ()
    # Whether the name is one that a model may count up.
    has_default_name = False
    # The layers of a model that lists them, which files number by class.
    _stack: Sequence["Layer"] = ()

    def __init__(
        self,
        *,
        activity_regularizer: RegularizerArgument = None,
        trainable: bool = True,
        dtype: str | None = None,
        autocast: bool = True,
        name: str | None = None,
        input_shape: Sequence[int] | None = None,
        input_dim: int | None = None,
        **unknown: Any,
    ) -> None:
        if unknown:
            raise ConfigError(f"Unrecognized keyword arguments passed to {type(self).__name__}: {unknown}")
        if dtype not in (None, "float32", "float64"):
            raise ConfigError(f"not supported: dtype = {dtype!r} of layer {type(self).__name__}")
        self._weights: list[Variable] = []
        self._frozen: list[Variable] = []  # of them, those that `trainable` has turned off
        self._generators: list[tuple[SeedGenerator, int | None]] = []
        self._losses: list[Tensor] = []
        self._nodes: list[Node] = []
        self._own_dtype, self._dtype = dtype is not None, np.dtype(dtype or FLOATX)
        self._trainable, self.autocast, self.built = bool(trainable), bool(autocast), False
        self.activity_regularizer = regularizers.get(activity_regularizer)
        self.input_spec: Any = None
        if input_dim is not None:
            input_shape = (input_dim,)
        self.input_shape = None if input_shape is None else sizes(input_shape)
        self.name = name

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "build" in vars(cls):
            cls.build = _noting_built(cls.build)  # type: ignore[method-assign]

    # What a subclass writes

    def build(self, input_shape: Any) -> None:
        """Make the weights.

        Args:
            input_shape: with None for the rows of the batch; nested as the inputs are. A layer that is called with
                several tensors may take an argument for each, `x_shape` of `call`'s `x`.
        """
        self.built = True

    def call(self, *arguments: Any, **keywords: Any) -> Any:
        """Return the outputs for the inputs, tensors both; `training` is passed where it is an argument."""
        raise NotImplementedError(f"Layer {type(self).__name__} does not have a `call()` method implemented.")

    def compute_output_shape(self, input_shape: Any) -> Any:
        """Return the shape of the outputs, None for the rows of the batch; `call` is run without values to see it.

        Args:
            input_shape: as `build`.

        Raises:
            ConfigError: the layer cannot take that input, or a length other than the first is None.
        """
        inputs = _map_shapes(lambda shape: placeholder(_known(shape), self._dtype, "input"), input_shape)
        with tracing():
            results = self(inputs, training=False)
        self._clear_losses()
        return map_leaves(lambda _, one: tuple(None if _symbolic_length(n) else int(n) for n in one.shape), results)

    # What a subclass calls

    def add_weight(
        self,
        shape: int | Sequence[int] | None = None,
        initializer: InitializerArgument | None = None,
        dtype: str | None = None,
        trainable: bool = True,
        autocast: bool = True,
        regularizer: RegularizerArgument = None,
        constraint: None = None,
        aggregation: str | None = "none",
        name: str | None = None,
    ) -> Variable:
        """Return a new weight.

        Args:
            shape: its dimensions; none by default.
            initializer: of its value; by default "glorot_uniform", "zeros" of integers.
            dtype: by default the layer's.
            trainable: False for what no gradient changes, such as moving averages.
            autocast: without effect, since weights have the type in which the layer computes.
            regularizer: of its penalty.
            constraint: only None.
            aggregation: "sum" where ranks may each keep a summand of it.
            name: within the layer.

        Raises:
            ConfigError: an argument is unknown or not supported.
        """
        if constraint is not None:
            raise ConfigError(f"not supported: constraint = {constraint!r} of layer {type(self).__name__}")
        kind = np.dtype(dtype or self._dtype)
        made = Weight(
            (shape,) if isinstance(shape, int) else tuple(int(n) for n in shape or ()),
            initializers.get(initializer or ("glorot_uniform" if kind.kind == "f" else "zeros")),
            default_seed(),
            next_position(),
            _provisional.get(),
            kind,
            name or "variable",
            trainable and self._trainable,
            regularizers.get(regularizer),
            "sum" if aggregation == "sum" else "none",
        )
        self._weights.append(made)
        if trainable and not self._trainable:
            self._frozen.append(made)
        return made

    def add_seed_generator(self, purpose: Purpose = Purpose.NOISE, seed: int | None = None) -> SeedGenerator:
        """Return the state of random numbers of a layer.

        Args:
            purpose: what they are for.
            seed: by default the model's.
        """
        own = own_seed(seed)
        made = SeedGenerator(default_seed() if own is None else own, purpose=purpose, number=next_position())
        self._generators.append((made, own))
        return made

    def add_loss(self, loss: Any) -> None:
        """Add a number, or several, to the loss of the step at hand; for use in `call`."""
        self._losses += leaves(loss)

    def refuse(self, **arguments: Any) -> None:
        """Raise for arguments that Keras has and dptrain has not; keep them, None, as attributes.

        Raises:
            ConfigError: one of them is not None.
        """
        for name, value in arguments.items():
            if value is not None:
                raise ConfigError(f"not supported: {name} = {value!r} of layer {type(self).__name__}")
            setattr(self, name, None)

    # Calling it

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Return the outputs for tensors or arrays; for symbolic tensors, symbolic ones.

        Args:
            arguments: those of `call`. Floating-point numbers are cast to the layer's type.
            keywords: those of `call`. `training` is by default that of the call that this one is a part of, or False.

        Raises:
            ConfigError: the layer cannot take that input.
        """
        if "_weights" not in vars(self):
            raise ConfigError(
                f"In layer {type(self).__name__}, you forgot to call `super().__init__()` as the first statement in "
                "the `__init__()` method."
            )
        accepted = self._signature.parameters
        training = keywords.get("training")
        if not any(one.kind is inspect.Parameter.VAR_KEYWORD for one in accepted.values()):
            keywords = {key: one for key, one in keywords.items() if key not in ("training", "mask") or key in accepted}
        bound = self._signature.bind(*arguments, **keywords)
        training = bound.arguments.get("training", training)
        outer = _training.get()
        if training is None:
            training = outer
        if training is None:
            default = accepted["training"].default if "training" in accepted else None
            training = bool(default) if isinstance(default, bool) else False
        if "training" in accepted:
            bound.arguments["training"] = training
        symbolic = any(is_symbolic(one) for one in leaves([arguments, keywords]))
        with scope(self.label), _calling(training), tracing() if symbolic else _as_it_is():
            if outer is None:
                self._clear_losses()
            outputs = self._called(bound)
        if not symbolic:
            return outputs
        self._clear_losses()
        node = Node(self, arguments, keywords)
        self._nodes.append(node)
        return node.finish(outputs)

    def _called(self, bound: inspect.BoundArguments) -> Any:
        """Return the outputs for bound arguments, which become tensors; build the layer before, if it is not."""
        for number, (name, value) in enumerate(bound.arguments.items()):
            if not number and _is_number_list(value):
                value = np.asarray(value)
            bound.arguments[name] = map_leaves(lambda _, one: self._as_tensor(one), value)
        first = next(iter(bound.arguments.values()), None)
        if self.input_spec is not None:
            check(self.input_spec, first, self.label)
        if not self.built:
            self._build_for(bound.arguments)
            if self.input_spec is not None:
                check(self.input_spec, first, self.label)
        outputs = self.call(*bound.args, **bound.kwargs)
        if self.activity_regularizer is not None:
            self.add_loss([self.activity_regularizer(one) for one in leaves(outputs)])
        return outputs

    def _as_tensor(self, value: Any) -> Any:
        """Return a tensor of a tensor, a variable or an array, of the layer's type where it has decimals."""
        if isinstance(value, Variable):
            value = value.tensor
        elif not isinstance(value, Tensor) and hasattr(value, "__array__"):
            array = np.asarray(value)
            value = constant(array, FLOATX if array.dtype.kind == "f" and not self.autocast else None)
        if self.autocast and isinstance(value, Tensor) and value.dtype.kind == "f" and value.dtype != self._dtype:
            return cast(value, self._dtype)
        return value

    def _build_for(self, arguments: Mapping[str, Any]) -> None:
        """Build the layer for the shapes of what it is called with."""
        tensors = {
            name: one for name, one in arguments.items() if any(isinstance(leaf, Tensor) for leaf in leaves(one))
        }
        shapes = {f"{name}_shape": map_leaves(lambda _, leaf: build_shape(leaf), one) for name, one in tensors.items()}
        wanted = inspect.signature(self.build).parameters
        known = any(leaf.value is not None for leaf in leaves(list(tensors.values())) if isinstance(leaf, Tensor))
        token = _provisional.set(_provisional.get() or not known)
        try:
            if len(wanted) == 1 or not set(wanted) <= set(shapes):
                self.build(next(iter(shapes.values()), None))
            else:
                self.build(**{name: shapes[name] for name in wanted})
        finally:
            _provisional.reset(token)
        self.built = True

    @functools.cached_property
    def _signature(self) -> inspect.Signature:
        return inspect.signature(self.call)

    @property
    def default_name(self) -> str:
        """What names are counted up from: the class's in snake case."""
        return snake_case(type(self).__name__)

    @property
    def label(self) -> str:
        """The name, or before there is one the default; for messages."""
        return self.name or self.default_name

    @property
    def input(self) -> Any:
        """The symbolic tensors that the layer was called on first.

        Raises:
            AttributeError: on none.
        """
        arguments = self._first_node("inputs").arguments
        return arguments[0] if len(arguments) == 1 else list(arguments)

    @property
    def output(self) -> Any:
        """What the layer made of the symbolic tensors that it was called on first.

        Raises:
            AttributeError: it was called on none.
        """
        return self._first_node("output").outputs

    def _first_node(self, what: str) -> Node:
        if not self._nodes:
            raise AttributeError(f"The layer {self.label} has never been called and thus has no defined {what}.")
        return self._nodes[0]

    # What it is made of

    def _attributes(self, kind: type[T]) -> list[T]:
        """Return the attributes of a kind, also those in lists, tuples and dictionaries, in the order of assignment."""
        found: dict[int, T] = {}

        def visit(value: Any) -> None:
            if isinstance(value, kind):
                found.setdefault(id(value), value)
            elif isinstance(value, list | tuple):
                for one in value:
                    visit(one)
            elif isinstance(value, dict):
                for one in value.values():
                    visit(one)

        for value in vars(self).values():
            visit(value)
        return list(found.values())

    @property
    def sublayers(self) -> list["Layer"]:
        """The layers that this one is made of, without theirs."""
        return self._attributes(Layer)

    def flat_layers(self) -> list["Layer"]:
        """Return this layer, its sublayers and theirs, each before its own and once."""
        found: dict[int, Layer] = {id(self): self}
        for one in self.sublayers:
            if id(one) not in found:
                found |= {id(layer): layer for layer in one.flat_layers() if id(layer) not in found}
        return list(found.values())

    @property
    def _own(self) -> list[Variable]:
        """The layer's own weights: those to be trained, then the others."""
        found = self._attributes(Variable)
        frozen = {id(one) for one in self._frozen}
        return sorted(found, key=lambda one: not (one.trainable or id(one) in frozen))

    @property
    def weights(self) -> list[Variable]:
        """All weights, sublayers' included, in Keras' order: own ones first, of these the trainable ones first."""
        return _once([*self._own, *(weight for layer in self.sublayers for weight in layer.weights)])

    @property
    def variables(self) -> list[Variable]:
        """All weights, and the states of random numbers."""
        own = [*self._own, *(one.count for one in self._attributes(SeedGenerator))]
        return _once([*own, *(variable for layer in self.sublayers for variable in layer.variables)])

    @property
    def trainable_weights(self) -> list[Variable]:
        """Those of the weights that are to be trained."""
        if not self._trainable:
            return []
        own = [one for one in self._own if one.trainable]
        return _once([*own, *(weight for layer in self.sublayers for weight in layer.trainable_weights)])

    trainable_variables = trainable_weights

    @property
    def non_trainable_weights(self) -> list[Variable]:
        """Those of the weights that are not to be trained."""
        trained = {id(one) for one in self.trainable_weights}
        return [one for one in self.weights if id(one) not in trained]

    @property
    def non_trainable_variables(self) -> list[Variable]:
        """Those of the variables that are not to be trained."""
        trained = {id(one) for one in self.trainable_weights}
        return [one for one in self.variables if id(one) not in trained]

    @property
    def trainable(self) -> bool:
        """Whether the weights are to be trained; setting it reaches the sublayers."""
        return self._trainable

    @trainable.setter
    def trainable(self, value: bool) -> None:
        self._trainable = bool(value)
        if value:
            for one in self._frozen:
                one.trainable = True
            self._frozen = []
        else:
            self._frozen += [one for one in self._own if one.trainable]
            for one in self._frozen:
                one.trainable = False
        for layer in self.sublayers:
            layer.trainable = value

    @property
    def losses(self) -> list[Any]:
        """Penalties of the weights that are to be trained, and what `add_loss` got in the last call."""
        added = [loss for layer in self.flat_layers() for loss in layer._losses]
        return added + [one.regularizer(one) for one in self.trainable_weights if one.regularizer is not None]

    def _clear_losses(self) -> None:
        for layer in self.flat_layers():
            layer._losses = []

    def get_weights(self) -> list[npt.NDArray[Any]]:
        """Return copies of the values of `weights`."""
        return [one.numpy() for one in self.weights]

    def set_weights(self, weights: Sequence[Any]) -> None:
        """Give `weights` new values.

        Raises:
            ConfigError: another number of them, or another shape.
        """
        own = self.weights
        if len(own) != len(weights):
            raise ConfigError(
                f"You called `set_weights(weights)` on layer '{self.label}' with a weight list of length "
                f"{len(weights)}, but the layer was expecting {len(own)} weights."
            )
        for one, value in zip(own, weights, strict=True):
            if tuple(np.shape(value)) != one.shape:
                raise ConfigError(
                    f"Layer {self.label} weight shape {one.shape} is not compatible with provided weight shape "
                    f"{tuple(np.shape(value))}."
                )
        for one, value in zip(own, weights, strict=True):
            one.assign(np.asarray(value))

    def count_params(self) -> int:
        """Return the number of elements of all weights.

        Raises:
            ConfigError: the layer is not built.
        """
        if not self.built:
            raise ConfigError(
                f"You tried to call `count_params` on layer '{self.label}', but the layer isn't built. You can build "
                "it manually via: `layer.build(input_shape)`."
            )
        return sum(int(np.prod(one.shape, dtype=np.int64)) for one in self.weights)

    # In a model

    @property
    def dtype(self) -> str:
        """The floating-point type of weights, and of what is computed."""
        return self._dtype.name

    variable_dtype = compute_dtype = dtype

    def set_dtype(self, dtype: str) -> None:
        """Let the layer and its sublayers compute in another floating-point type, but those that were given one."""
        for layer in self.flat_layers():
            if not layer._own_dtype:
                layer._dtype = np.dtype(dtype)
                for one in layer._own:
                    if isinstance(one, Weight) and one.dtype.kind == "f":
                        one.set_dtype(dtype)

    def adopt(self, seed: int) -> None:
        """Make one model of the sublayers: unique names, paths of weights, random numbers, initial values.

        Weights that were built on symbolic tensors, or in a trace, get their initial values here, and keep them when it
        is called again.

        Args:
            seed: of the model.

        Raises:
            ConfigError: two sublayers of a layer have the same name.
        """
        for path, one in self._paths():
            one.path = path
        generators = [one for layer in self.flat_layers() for one in layer._generators]
        for number, (generator, own) in enumerate(generators):
            generator.seed, generator.number = seed if own is None else own, number
        for position, weight in enumerate(self.weights):
            if isinstance(weight, Weight) and weight.provisional:
                weight.provisional = False
                weight.initialize(seed, position)

    def initialize(self, seed: int) -> None:
        """Draw all weights anew, as a model of that seed would; count random draws from 0."""
        for position, weight in enumerate(self.weights):
            if isinstance(weight, Weight):
                weight.initialize(seed, position)
        for layer in self.flat_layers():
            for generator, own in layer._generators:
                generator.seed = seed if own is None else own
                generator.count.assign(0)

    def _paths(self, prefix: str = "", done: set[int] | None = None) -> Iterator[tuple[str, Variable]]:
        """Yield all variables with paths that are unique below this layer; layers without a name get one."""
        done = set() if done is None else done
        done.add(id(self))
        taken: Counter[str] = Counter()
        for one in [*self._own, *(generator.count for generator in self._attributes(SeedGenerator))]:
            number = taken[one.name]
            taken[one.name] += 1
            yield f"{prefix}{one.name}_{number}" if number else f"{prefix}{one.name}", one
        name_layers(self.sublayers)
        for layer in self.sublayers:
            if id(layer) not in done:
                yield from layer._paths(f"{prefix}{layer.name}/", done)

    def weights_by_path(self) -> dict[str, Variable]:
        """Return `weights` by paths from here, "dense/kernel"; their own are from the outermost layer."""
        paths = {id(one): path for path, one in self._paths()}
        return {paths[id(one)]: one for one in self.weights}

    # As JSON

    def own_config(self) -> dict[str, Any]:
        """Return the constructor's own arguments as Keras' `get_config` names them, in types that JSON has."""
        strict = type(self).get_config is Configurable.get_config
        found = {}
        for name, parameter in inspect.signature(type(self).__init__).parameters.items():
            if name in (*_COMMON, *self._unwritten) or parameter.kind in (
                parameter.VAR_KEYWORD,
                parameter.VAR_POSITIONAL,
            ):
                continue
            if name in vars(self) or hasattr(type(self), name):
                found[name] = _described(getattr(self, name), strict)
            elif strict:
                raise ConfigError(
                    f"layer {type(self).__name__}: argument {name!r} is no attribute of the layer: override "
                    "`get_config()` to write it to a file"
                )
        return found

    def config(self) -> dict[str, Any]:
        """Return all of the constructor's arguments as Keras' `get_config` names them, in types that JSON has."""
        config: dict[str, Any] = {"name": self.name, "trainable": self._trainable}
        if self._own_dtype:
            config["dtype"] = self.dtype
        if self.activity_regularizer is not None:
            config["activity_regularizer"] = regularizers.serialize(self.activity_regularizer)
        return config | self.own_config()

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Return the layer that `config` described, Keras' own configurations included; their policy is left out.

        Raises:
            ConfigError: an argument is unknown, out of range or not supported.
        """
        try:
            return cls(**{key: one for key, one in config.items() if key != "dtype" or isinstance(one, str)})
        except TypeError as error:
            raise ConfigError(f"layer {cls.__name__}: {error}") from error

    def __repr__(self) -> str:
        return f"<{type(self).__name__} name={self.name}, built={self.built}>"


def name_layers(layers: Sequence[Layer]) -> None:
    """Give layers without a name that of their class, "dense"; the second of a kind gets "_1", as in Keras.

    Default names, which models have from the beginning, give way to others.

    Raises:
        ConfigError: two have the same name.
    """
    taken = Counter(layer.name for layer in layers if layer.name is not None and not layer.has_default_name)
    repeated = [name for name, times in taken.items() if times > 1]
    if repeated:
        raise ConfigError(f"layer names must be unique, found {repeated[0]!r} {taken[repeated[0]]} times")
    for layer in layers:
        if layer.name is None or (layer.has_default_name and layer.name in taken):
            kind = layer.default_name
            names = (kind if number == 0 else f"{kind}_{number}" for number in range(len(layers) + 1))
            layer.name = next(name for name in names if name not in taken)
            taken[layer.name] += 1
        elif layer.has_default_name:
            taken[layer.name] += 1


def sizes(shape: Any) -> tuple[int, ...]:
    """Return the shape of one sample after checking it.

    Raises:
        ConfigError: it is no list of positive integers.
    """
    if not isinstance(shape, Sequence) or any(
        isinstance(n, bool) or not isinstance(n, Integral) or int(n) < 1 for n in shape
    ):
        raise ConfigError(f"Input shape: expected positive integers. Received: shape={shape}")
    return tuple(int(n) for n in shape)


def build_shape(value: Any) -> BuildShape | None:
    """Return the shape of a tensor as `build` gets it: None for the first length, the rows of the batch."""
    if not isinstance(value, Tensor):
        return None
    return tuple(None if not axis or isinstance(n, Rows) else int(n) for axis, n in enumerate(value.shape))


@contextmanager
def _calling(training: bool) -> Iterator[None]:
    token = _training.set(training)
    try:
        yield
    finally:
        _training.reset(token)


@contextmanager
def _as_it_is() -> Iterator[None]:
    yield


def _noting_built(build: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(build)
    def noting(self: Layer, *arguments: Any, **keywords: Any) -> None:
        build(self, *arguments, **keywords)
        self.built = True

    return noting


def _once(found: Sequence[Variable]) -> list[Variable]:
    return list({id(one): one for one in found}.values())


def _is_number_list(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(one, int | float) for one in leaves(value))


def _symbolic_length(length: int) -> bool:
    return isinstance(length, Rows) and length.rows == SYMBOLIC_ROWS


def _map_shapes(function: Callable[[Sequence[Any]], Any], shapes: Any) -> Any:
    """Return nested shapes with a function of each in its place."""
    if isinstance(shapes, Mapping):
        return {key: _map_shapes(function, one) for key, one in shapes.items()}
    if all(one is None or isinstance(one, Integral) for one in shapes):
        return function(shapes)
    return [_map_shapes(function, one) for one in shapes]


def _known(shape: Sequence[int | None]) -> tuple[int, ...]:
    lengths = [SYMBOLIC_ROWS if not axis and n is None else n for axis, n in enumerate(shape)]
    if None in lengths:
        raise ConfigError(f"not supported: unknown lengths in shape {tuple(shape)}")
    return tuple(n if isinstance(n, Rows) else int(n) for n in lengths if n is not None)


def _described(value: Any, strict: bool) -> Any:
    """Return an argument in types that JSON has."""
    if isinstance(value, initializers.Initializer):
        return initializers.serialize(value)
    if isinstance(value, regularizers.Regularizer):
        return regularizers.serialize(value)
    if callable(value) and (strict or value in activations.BY_NAME.values()):
        return activations.serialize(value)
    return list(value) if isinstance(value, tuple) else value
