"""The contents of a layer: weights, random streams, sublayers; their names, types and initial values in a model."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

from dptrain.errors import ConfigError
from dptrain.layers.weight import BatchState, Weight
from dptrain.metrics.base import Metric
from dptrain.mixed_precision import DTypePolicy, policy_of
from dptrain.ops.random import SeedGenerator
from dptrain.program import tree
from dptrain.program.tensor import Tensor, Variable, is_tracing
from dptrain.program.turns import TURNS, OfThread
from dptrain.registry.names import numbered, snake_case
from dptrain.registry.serialization import Configurable
from dptrain.runtime.types import type_of

if TYPE_CHECKING:
    from dptrain.layers.base import Layer

T = TypeVar("T")

# Names of the layers whose `build` or `call` is running, each followed by a slash.
_outer_paths: ContextVar[str] = ContextVar("outer_paths", default="")
# Whether a layer has added losses in this thread.
_adding = OfThread()


class Parts(Configurable):
    """The half of `Layer` that holds weights, sublayers and metrics; `Layer` adds the calls."""

    _name: str | None
    built: bool
    _trainable: bool
    _own_policy: bool
    _policy: DTypePolicy
    _changes: int
    _weights: list[Variable]
    _frozen: list[Variable]  # own weights frozen by `trainable`
    _generators: list[tuple[SeedGenerator, int | None]]
    _of_thread: OfThread

    # Names of the enclosing layers, each followed by a slash; None before it is built or called.
    _outer_path: str | None = None
    # Whether the name is a default that a model may number.
    _has_default_name = False
    # Whether the enclosing model logs the layer's metrics; those of inner models are not shared.
    _shares_metrics = True
    # Whether inputs are ids, so that integers stay integers whatever `Input` says.
    _takes_ids = False
    # Whether inputs are cast to the layer's type; a graph leaves that to its layers.
    _casts_inputs = True
    # Whether it takes texts, on the host, before the program of its model.
    _works_on_host = False
    # Whether it splits a text into several tokens.
    _splits_texts = False
    # Whether `call` only moves numbers, so that integers stay integers.
    _moves_values = False

    @property
    def name(self) -> Any:
        """The name in the model; before a model has the layer, the class's in snake case, without a number."""
        return self._name or self._default_name

    @name.setter
    def name(self, name: str | None) -> None:
        self._name = name

    @property
    def _default_name(self) -> str:
        """The class name in snake case, which models number."""
        return snake_case(type(self).__name__)

    @property
    def path(self) -> str | None:
        """The names of the enclosing layers and its own, "model/block/dense"; None before it is built."""
        return f"{self._outer_path or ''}{self._display_name}" if self.built or self._outer_path is not None else None

    @contextmanager
    def _in_scope(self) -> Iterator[None]:
        """Put this layer into the paths of layers and weights built in the context."""
        if self._outer_path is None:
            self._outer_path = _outer_paths.get()
        token = _outer_paths.set(f"{self.path}/")
        try:
            yield
        finally:
            _outer_paths.reset(token)

    def _rename_paths(self) -> None:
        """Refresh the paths of weights and inner layers after the layer was renamed."""
        if self._outer_path is not None:
            for variable in self._own_weights:
                variable._scope_path = f"{self.path}/{variable.name}"
            for layer in self._sublayers:
                if layer._outer_path:
                    layer._outer_path = f"{self.path}/"

    @property
    def _display_name(self) -> str:
        """The name; for messages."""
        return str(self.name)

    def _attributes(self, kind: type[T]) -> list[T]:
        """Return the attributes of a kind, also in lists, tuples and dictionaries, in the order of assignment."""
        return tree.attributes(self, kind)

    @property
    def _sublayers(self) -> list["Layer"]:
        """The layers directly in this one."""
        return cast("list[Layer]", self._attributes(Parts))

    def _flatten_layers(self) -> list["Layer"]:
        """Return this layer and all sublayers, depth first, each once."""
        layers_by_id: dict[int, Layer] = {id(self): cast("Layer", self)}
        for sublayer in self._sublayers:
            if id(sublayer) not in layers_by_id:
                layers_by_id |= {
                    id(layer): layer for layer in sublayer._flatten_layers() if id(layer) not in layers_by_id
                }
        return list(layers_by_id.values())

    @property
    def _own_weights(self) -> list[Variable]:
        """The layer's own weights, trainable ones first."""
        return sorted(self._attributes(Variable), key=lambda variable: not variable.declared_trainable)

    @property
    def _stored_weights(self) -> list[Variable]:
        """The own weights that files of weights have."""
        return [weight for weight in self._own_weights if weight.if_missing == "refuse"]

    @property
    def _states(self) -> list[Variable]:
        """The layer's own variables that are not weights: random states and batch states."""
        batch_states = [variable for state in self._attributes(BatchState) for variable in state.variables]
        return [*(generator.count for generator in self._attributes(SeedGenerator)), *batch_states]

    def save_own_variables(self, store: Any) -> None:
        """Put the layer's own weights, without its sublayers', into `store` as "0", "1", ...

        LoRA is merged. `store` takes arrays, or variables, by name, like a dictionary; a subclass may put other arrays
        there.
        """
        for number, variable in enumerate(self._stored_weights):
            store[str(number)] = variable if variable.low_rank is None else variable.low_rank.merged(variable)

    def load_own_variables(self, store: Any) -> None:
        """Read what `save_own_variables` wrote; ConfigError for other arrays than the layer's weights."""
        variables = self._stored_weights
        if [*store.keys()] != [str(number) for number in range(len(variables))]:
            raise ConfigError(
                f"Layer '{self._display_name}' expected {len(variables)} variables, but received {len(store)} "
                f"variables during loading. Expected: {[variable.name for variable in variables]}"
            )
        for number, variable in enumerate(variables):
            variable.assign(store[str(number)])
        for variable in self._own_weights:
            if variable.if_missing == "zero":
                variable.assign(np.zeros(variable.shape, variable.dtype))

    @property
    def weights(self) -> list[Variable]:
        """All weights, including sublayers', in Keras' order: own ones first, of these the trainable ones first."""
        return _unique([*self._own_weights, *(weight for layer in self._sublayers for weight in layer.weights)])

    @property
    def variables(self) -> list[Variable]:
        """All weights, random states, and batch states."""
        own_variables = [*self._own_weights, *self._states]
        return _unique([*own_variables, *(variable for layer in self._sublayers for variable in layer.variables)])

    @property
    def trainable_weights(self) -> list[Variable]:
        """The weights to train; a sublayer may turn its own on again, as in Keras."""
        return [weight for weight in self.weights if weight.trainable] if self._trainable else []

    trainable_variables = trainable_weights

    @property
    def non_trainable_weights(self) -> list[Variable]:
        """The weights that are not trained."""
        trained = {id(weight) for weight in self.trainable_weights}
        return [weight for weight in self.weights if id(weight) not in trained]

    @property
    def non_trainable_variables(self) -> list[Variable]:
        """The variables that are not trained."""
        trained = {id(weight) for weight in self.trainable_weights}
        return [variable for variable in self.variables if id(variable) not in trained]

    @property
    def trainable(self) -> bool:
        """Whether the weights are trained; setting it reaches the sublayers."""
        return self._trainable

    @trainable.setter
    def trainable(self, value: bool) -> None:
        self._trainable = bool(value)
        if value:
            for variable in self._frozen:
                variable.trainable = True
            self._frozen = []
        else:
            self._frozen += [variable for variable in self._own_weights if variable.trainable]
            for variable in self._frozen:
                variable.trainable = False
        for layer in self._sublayers:
            layer.trainable = value

    @property
    def metrics(self) -> list[Metric]:
        """The metrics in attributes of the layer and its sublayers; a model's logs have their results."""
        parts = [self, *(layer for layer in self._flatten_layers()[1:] if layer._shares_metrics)]
        metrics: list[Metric] = [metric for part in parts for metric in part._attributes(Metric)]  # type: ignore[type-abstract]
        return list({id(metric): metric for metric in metrics}.values())

    @property
    def metrics_variables(self) -> list[Variable]:
        """The totals of `metrics`."""
        return [variable for metric in self.metrics for variable in metric.variables]

    @property
    def _losses(self) -> list[Tensor]:
        """Arguments of `add_loss` in this thread's last call."""
        return getattr(self._of_thread, "losses", [])

    @_losses.setter
    def _losses(self, losses: list[Tensor]) -> None:
        self._of_thread.losses = losses
        _adding.losses = True

    @property
    def losses(self) -> list[Any]:
        """Penalties of the trained weights, and the arguments of `add_loss` in the last call."""
        added = [loss for layer in self._flatten_layers() for loss in layer._losses]
        for layer in self._flatten_layers() if added and is_tracing() else ():
            if getattr(layer._of_thread, "adds_in_loop", False):
                raise ConfigError(
                    f"layer {layer._display_name!r} calls add_loss, or has an activity_regularizer, inside a loop (an "
                    "RNN's cell, ops.scan, remat) or a branch (ops.cond, switch), whose tensors do not exist outside; "
                    "compute it outside, from what is returned, or compile with run_eagerly=True"
                )
        return added + [
            weight.regularizer(weight) for weight in self.trainable_weights if weight.regularizer is not None
        ]

    def _clear_losses(self) -> None:
        if not getattr(_adding, "losses", False):  # the walk would be a tenth of a call on one row
            return
        for layer in self._flatten_layers():
            layer._of_thread.losses, layer._of_thread.adds_in_loop = [], False

    @contextmanager
    def _separate_losses(self) -> Iterator[None]:
        """Collect the losses of calls in this context apart from those before, which are back after it."""
        states = [layer._of_thread for layer in self._flatten_layers()]
        before = [(getattr(state, "losses", []), getattr(state, "adds_in_loop", False)) for state in states]
        for state in states:
            state.losses, state.adds_in_loop = [], False
        try:
            yield
        finally:
            for state, (losses, adds_in_loop) in zip(states, before, strict=True):
                state.losses, state.adds_in_loop = losses, adds_in_loop

    def get_weights(self) -> list[npt.NDArray[Any]]:
        """Return copies of the values of `weights`."""
        weights = self.weights
        with TURNS.of(reads=frozenset(weights)):
            return [weight.numpy() for weight in weights]

    def set_weights(self, weights: Sequence[Any]) -> None:
        """Set the values of `weights`; ConfigError for another number of arrays, or another shape."""
        variables = self.weights
        if len(variables) != len(weights):
            raise ConfigError(
                f"You called `set_weights(weights)` on layer '{self._display_name}' with a weight list of length "
                f"{len(weights)}, but the layer was expecting {len(variables)} weights."
            )
        for variable, value in zip(variables, weights, strict=True):
            if tuple(np.shape(value)) != variable.shape:
                raise ConfigError(
                    f"Layer {self._display_name} weight shape {variable.shape} is not compatible with provided weight "
                    f"shape {tuple(np.shape(value))}."
                )
        values = [np.asarray(value) for value in weights]
        with TURNS.of(writes=frozenset(variables)):
            for variable, value in zip(variables, values, strict=True):
                variable.assign(value)

    def count_params(self) -> int:
        """Return the number of elements of all weights; ConfigError if the layer is not built."""
        if not self.built:
            raise ConfigError(
                f"You tried to call `count_params` on layer '{self._display_name}', but the layer isn't "
                "built. You can build it manually via: `layer.build(input_shape)`."
            )
        return sum(int(np.prod(weight.shape, dtype=np.int64)) for weight in self.weights)

    # In a model

    @property
    def dtype(self) -> str:
        """The floating-point type of weights."""
        return self._policy.variable_dtype

    variable_dtype = dtype

    @property
    def compute_dtype(self) -> str:
        """The floating-point type of computations."""
        return self._policy.compute_dtype

    @property
    def dtype_policy(self) -> DTypePolicy:
        """The types of the layer's computations and weights; it can be set, for the layer alone."""
        return self._policy

    @dtype_policy.setter
    def dtype_policy(self, value: Any) -> None:
        policy = policy_of(value)
        if policy is None:
            raise ConfigError(
                f"dtype_policy of layer {self._display_name!r}: expected a policy or its name, found None"
            )
        self._own_policy = True
        self._take_policy(policy)

    def _take_policy(self, policy: DTypePolicy) -> None:
        if self._policy != policy:
            self._changes += 1  # other models may share the layer
        self._policy = policy
        for variable in self._own_weights:
            if isinstance(variable, Weight) and type_of(variable.dtype).is_policy:
                variable.set_dtype(policy.variable_dtype)

    @property
    def _data_dtype(self) -> str:
        """The floating-point type of inputs, targets, losses and metrics."""
        return self._policy._data_dtype

    def _set_dtype(self, dtype: str | DTypePolicy) -> None:
        """Set the policy of the layer and of sublayers without their own."""
        policy = dtype if isinstance(dtype, DTypePolicy) else DTypePolicy(dtype)
        for layer in self._flatten_layers():
            if not layer._own_policy:
                layer._take_policy(policy)

    def _keep_dtype(self, dtype: str | DTypePolicy) -> None:
        """Give the layer a policy that it keeps, whatever its model's is."""
        self._set_dtype(dtype)
        self._own_policy = True

    def _adopt(self, seed: int) -> None:
        """Give the sublayers unique names, paths, random streams and initial values, so that no two start alike."""
        for path, variable in self._paths():
            variable._path = path
        for layer in self._flatten_layers():
            layer._rename_paths()
        generators = [entry for layer in self._flatten_layers() for entry in layer._generators]
        for number, (generator, layer_seed) in enumerate(generators):
            generator.seed, generator.number = seed if layer_seed is None else layer_seed, number
        weights = self.weights
        used: set[tuple[int, int]] = set()
        undrawn: list[tuple[int, Weight]] = []
        for position, weight in enumerate(weights):
            if isinstance(weight, Weight) and (weight.provisional or weight.is_initial):
                if weight.provisional or weight.drawn_with in used:
                    undrawn.append((position, weight))
                else:
                    used.add(weight.drawn_with)
        for position, weight in undrawn:
            while (seed, position) in used:
                position += len(weights)
            weight.provisional = False
            weight.initialize(seed, position)
            used.add(weight.drawn_with)

    def _paths(
        self, prefix: str = "", visited: set[int] | None = None, used_names: dict[str, int] | None = None
    ) -> Iterator[tuple[str, Variable]]:
        """Yield all variables with paths that are unique below this layer; layers without a name get one."""
        visited, used_names = set() if visited is None else visited, {} if used_names is None else used_names
        visited.add(id(self))
        for variable in [*self._own_weights, *self._states]:
            yield numbered(f"{prefix}{variable.name}", used_names), variable
        name_layers(self._sublayers)
        for layer in self._sublayers:
            if id(layer) not in visited:
                yield from layer._paths(f"{prefix}{layer.name}/", visited, used_names)

    def _weights_by_path(self) -> dict[str, Variable]:
        """Return `weights` by paths from here, "dense/kernel"; their own are from the outermost layer."""
        weights = self.weights  # which may make them
        paths = {id(variable): path for path, variable in self._paths()}
        return {paths[id(weight)]: weight for weight in weights}


def name_layers(layers: "Sequence[Layer]") -> None:
    """Name layers without a name after their class, "dense"; the second of a kind gets "_1", as in Keras.

    Default names, which models have from the beginning, give way to others. ConfigError if two have the same name.
    """
    used_names = Counter(layer._name for layer in layers if layer._name is not None and not layer._has_default_name)
    repeated = [name for name, times in used_names.items() if times > 1]
    if repeated:
        raise ConfigError(f"layer names must be unique, found {repeated[0]!r} {used_names[repeated[0]]} times")
    for layer in layers:
        if layer._name is None or (layer._has_default_name and layer.name in used_names):
            kind = layer._default_name
            names = (kind if number == 0 else f"{kind}_{number}" for number in range(len(layers) + 1))
            layer.name = next(name for name in names if name not in used_names)
            used_names[layer.name] += 1
        elif layer._has_default_name:
            used_names[layer.name] += 1


def _unique(variables: Sequence[Variable]) -> list[Variable]:
    return list({id(variable): variable for variable in variables}.values())
