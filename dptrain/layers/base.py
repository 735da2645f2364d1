"""Base class of layers: weights, sublayers and a `call` in ops."""

import copy
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from numbers import Integral
from typing import Any, Self, TypeVar

import numpy as np

from dptrain import activations, constraints, initializers, regularizers
from dptrain.errors import ConfigError, DptrainError
from dptrain.layers.constructor import ConstructorArguments, is_dptrain_class, is_plain, named_parameters, remembering
from dptrain.layers.input_spec import check
from dptrain.layers.masks import attach_masks, fill_masks
from dptrain.layers.node import LayerCall
from dptrain.layers.parts import Parts
from dptrain.layers.weight import Weight
from dptrain.mixed_precision import dtype_policy, policy_name, policy_of
from dptrain.ops.branches import IN_BODY
from dptrain.ops.elementwise import cast
from dptrain.ops.math.division import divide_no_nan
from dptrain.ops.operation_calls import is_symbolic
from dptrain.ops.random import SeedGenerator
from dptrain.program.dims import Dim, Size, UnknownLengthError, is_number, number_of, read, symbolic, unknown
from dptrain.program.shapes import is_open
from dptrain.program.stateless import lending, values_of, with_values
from dptrain.program.tensor import (
    Tensor,
    Variable,
    constant,
    is_tracing,
    is_whole,
    mask_of,
    placeholder,
    reading_weights_in,
    scope,
    tracing,
    with_mask,
)
from dptrain.program.tree import leaves, map_leaves
from dptrain.program.turns import MAKING, TURNS, OfThread
from dptrain.random import Purpose, default_seed, next_position, own_seed
from dptrain.registry.serialization import custom_object, function_to_dict, plain
from dptrain.runtime.failure import warn
from dptrain.runtime.text import short
from dptrain.runtime.types import is_floating, is_narrow

T = TypeVar("T")
InitializerArgument = str | dict[str, Any] | initializers.InitializerLike
RegularizerArgument = str | dict[str, Any] | regularizers.RegularizerLike | None
ConstraintArgument = str | dict[str, Any] | constraints.ConstraintLike | None
ActivationArgument = str | activations.Activation | None
BuildShape = tuple[int | None, ...]

# Whether the current call is in training; None outside of calls.
_training: ContextVar[bool | None] = ContextVar("training", default=None)
# The layers called within one that is called for the first time, or traced.
_called: ContextVar[list["Layer"] | None] = ContextVar("called", default=None)
# The layer whose `call` runs.
_in_call: ContextVar["Layer | None"] = ContextVar("in_call", default=None)
# Whether a model will draw the weights being built anew: see `Weight`.
_provisional: ContextVar[bool] = ContextVar("provisional", default=False)
# Pairs of stand-ins for unknown lengths if a layer asks, with many divisors: longer than most windows; then as short as
# tables of positions may be; then longer than almost all windows.
_TRIAL_SIZES = (240, 360), (48, 72), (12, 18), (4, 6), (2, 3), (7680, 11520)
# Keras' modules with layers and models.
_MODULES_OF_LAYERS = ("keras.layers", "keras", "keras.src.models.functional", "keras.models")
# Arguments of every layer, which `Layer.config` writes itself.
_COMMON_ARGUMENTS = ("name", "trainable", "dtype", "autocast", "activity_regularizer", "input_shape", "input_dim")


class Layer(Parts):
    """A function of tensors with weights.

    A subclass makes weights in `build` (`add_weight`) and computes in `call`, in `dptrain.ops`. Layers in its
    attributes, also in lists and dictionaries, are its sublayers. Constructor arguments that are attributes of the same
    name make up its configuration; others need a `get_config`.

    All layers share: `options` are the keyword arguments below; `X_initializer`, `X_regularizer` and `X_constraint` of
    a weight X are names or objects; `activation` is a name in `dptrain.activations`, a function, or None for "linear";
    the default `seed` is the model's; an argument that is unknown, unsupported or out of range raises ConfigError.

    Args:
        activity_regularizer: penalty on the layer's output, divided by the rows of the batch.
        trainable: False freezes the weights.
        dtype: a policy of `dptrain.mixed_precision`, or its name; by default the model's.
        autocast: whether floating-point inputs are cast to that type.
        name: unique in the model; by default the class's in snake case, numbered, once a model has the layer.
        input_shape: shape of a sample, for the first layer of a `Sequential`.
        input_dim: the number of features of flat samples, instead.

    Attributes:
        built: whether the weights exist.
        input_spec: an `InputSpec`, or one for each input, that inputs are checked against.
        name: unique in a model.
    """

    # Arguments that Keras does not write to files, and common ones that it writes even if they are None.
    _unwritten: tuple[str, ...] = ()
    _always_written: tuple[str, ...] = ()
    # True in a class whose arguments all layers, or all models, have; and the arguments of a user's constructor.
    _is_base = True
    _constructed_with: ConstructorArguments | None = None
    # Whether outputs get the inputs' mask; None lets `supports_masking` find out.
    _passes_masks: bool | None = None
    # Whether it is built from its constructor on, unless a subclass makes weights.
    _has_no_weights = False
    # Set by a class whose `build` itself sets `built`.
    _marks_itself_built: bool
    # Whether it is being built; its weights so far may be drawn anew.
    _builds = False
    # Whether a layer that does not hold it has called it, and a warning said so.
    _is_untracked = False
    # Whether a call has ended, and whether the layer was made in a later call of another: again for each batch.
    _was_called = _is_of_later_call = False
    # Counts changes that invalidate traced programs.
    _changes = 0
    # How weights that are still to be made are pruned: see `dptrain.pruning`.
    _pruning: Any = None
    # The layers of a model that lists them; files number these by class.
    _stack: Sequence["Layer"] = ()

    def __init__(
        self,
        *,
        activity_regularizer: RegularizerArgument = None,
        trainable: bool = True,
        dtype: Any = None,
        autocast: bool = True,
        name: str | None = None,
        input_shape: Sequence[int | None] | None = None,
        input_dim: int | None = None,
        **unknown: Any,
    ) -> None:
        if unknown:
            raise ConfigError(f"Unrecognized keyword arguments passed to {type(self).__name__}: {unknown}")
        if name is not None and (not isinstance(name, str) or "/" in name):
            raise ConfigError(
                f"Argument `name` must be a string and cannot contain character `/`. Received: name={name} (of type "
                f"{type(name)})"
            )
        try:
            policy = policy_of(dtype)
        except ConfigError as error:
            raise ConfigError(f"{error} of layer {type(self).__name__}") from error
        self._weights, self._frozen, self._generators, self._of_thread = [], [], [], OfThread()
        self._nodes: list[LayerCall] = []
        # Keras' configurations always have a policy's description, whether or not a type was passed.
        self._own_policy = policy is not None and not isinstance(dtype, Mapping)
        self._policy = policy or dtype_policy()
        if not isinstance(trainable, bool | np.bool_):
            raise ConfigError(
                f"Expected `trainable` to be a boolean. Received: trainable={trainable} (of type {type(trainable)})"
            )
        self._trainable, self.autocast = bool(trainable), bool(autocast)
        self.built = self._has_no_weights and type(self).build is Layer.build
        self.activity_regularizer = regularizers.get(activity_regularizer)
        self.input_spec: Any = None
        self._built_for: Any = None  # the shape of its first argument
        self._built_with: dict[str, Any] = {}  # shapes by `build`'s argument names, if several
        self._described_build: dict[str, Any] | None = None  # how it was built where its description comes from
        if input_dim is not None:
            input_shape = (input_dim,)
        self._sample_shape = None if input_shape is None else checked_shape(input_shape)
        self._name = name or None
        if (caller := _in_call.get()) is not None and caller._was_called:
            self._is_of_later_call = True

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "build" in vars(cls):
            build = cls.build if "_marks_itself_built" in vars(cls) else _marking_built(cls.build)
            cls.build = _in_scope(build)  # type: ignore[method-assign]
        if "__init__" in vars(cls) and not is_dptrain_class(cls):
            cls.__init__ = remembering(cls.__init__)  # type: ignore[method-assign]

    # For subclasses to override

    def build(self, input_shape: Any) -> None:
        """Make the weights.

        Args:
            input_shape: with None for the rows of the batch; nested like the inputs. A layer that is called with
                several tensors may take an argument for each, `x_shape` for `call`'s `x`.
        """
        self.built = True

    def call(self, *arguments: Any, **keywords: Any) -> Any:
        """Return the outputs for the inputs, tensors both; `training` is passed if it is a parameter."""
        raise NotImplementedError(f"Layer {type(self).__name__} does not have a `call` method implemented.")

    def compute_output_shape(self, input_shape: Any) -> Any:
        """Return the shape of the outputs, None for unknown lengths, by running `call` without values.

        `input_shape` is that of `build`; ConfigError if the layer cannot take it.
        """
        inputs = map_shapes(lambda shape: placeholder(symbolic(shape), self.compute_dtype, "input"), input_shape)
        layer = self if self.built else _unbuilt_copy(self)
        results = layer._symbolic_call((inputs,), {"training": False})
        return map_leaves(lambda _, tensor: read(tensor.shape), results)

    def compute_output_spec(self, *arguments: Any, **keywords: Any) -> Any:
        """Return symbolic tensors like the outputs of `call` with these arguments, which may be symbolic, too.

        A subclass's own `compute_output_shape` is asked instead of `call`, as in Keras.
        """
        if _has_own_output_shape(type(self)) and len(arguments) == 1 and not keywords:
            shape = self.compute_output_shape(map_leaves(lambda _, leaf: _batch_shape(leaf), arguments[0]))
            return _placeholders_of(shape, self.compute_dtype, self._display_name)
        layer = self if self.built else _unbuilt_copy(self)
        outputs = layer._symbolic_call(arguments, keywords)
        return map_leaves(lambda _, tensor: placeholder(tensor.shape, tensor.dtype, self._display_name), outputs)

    # For subclasses to call

    def add_weight(
        self,
        shape: int | Sequence[int | None] | None = None,
        initializer: InitializerArgument | None = None,
        dtype: str | None = None,
        trainable: bool = True,
        autocast: bool = True,
        regularizer: RegularizerArgument = None,
        constraint: ConstraintArgument = None,
        aggregation: str | None = "none",
        name: str | None = None,
    ) -> Variable:
        """Return a new weight; also called `add_variable`.

        Args:
            shape: its dimensions; none by default.
            initializer: by default "glorot_uniform", for integers "zeros".
            dtype: by default the layer's.
            trainable: False for what no gradient changes, such as moving averages.
            autocast: in `call` it is read in the type in which the layer computes.
            regularizer: of its penalty.
            constraint: applied after every update.
            aggregation: "sum" if ranks may each keep a summand of it.
            name: within the layer.

        Raises:
            ConfigError: an argument is unknown or not supported, a dimension is None, or each `call` would make it.
        """
        if isinstance(shape, str):
            raise ConfigError(
                f"`name` must be passed as a keyword argument. Use: add_weight(shape=..., name={shape!r})"
            )
        if self._is_of_later_call or (self._was_called and _in_call.get() is self):
            raise ConfigError(
                f"layer {self._display_name!r}: `call` makes a new weight each time. You cannot add new elements of "
                "state (variables or sub-layers) to a layer that is already built: make them in `__init__()` or "
                "`build()`"
            )
        kind = np.dtype(dtype or self.variable_dtype)
        lengths = (shape,) if isinstance(shape, int) else tuple(shape or ())
        if None in lengths:
            raise ConfigError(
                "Shapes used to initialize variables must be fully-defined (no `None` dimensions). Received: "
                f"shape={lengths} for variable path='{self._display_name}/{name or 'variable'}'"
            )
        weight = Weight(
            tuple(int(n) for n in lengths if n is not None),
            initializers.get(
                ("glorot_uniform" if is_floating(kind) else "zeros") if initializer is None else initializer
            ),
            default_seed(),
            next_position(),
            _provisional.get(),
            kind,
            name or "variable",
            trainable and self._trainable,
            regularizers.get(regularizer),
            constraints.get(constraint),
            "sum" if aggregation == "sum" else "none",
        )
        weight.autocast, weight.declared_trainable = autocast and is_floating(kind), trainable
        with self._in_scope():
            weight._scope_path = f"{self.path}/{weight.name}"
        if self._pruning is not None and self._pruning.takes(weight):
            self._pruning.mark(weight, self._display_name)
        self._weights.append(weight)
        if trainable and not self._trainable:
            self._frozen.append(weight)
        return weight

    add_variable = add_weight

    def _add_seed_generator(self, purpose: Purpose = Purpose.NOISE, seed: int | None = None) -> SeedGenerator:
        """Return a new seed generator of the layer."""
        layer_seed = own_seed(seed)
        generator = SeedGenerator(
            default_seed() if layer_seed is None else layer_seed, purpose=purpose, number=next_position()
        )
        self._generators.append((generator, layer_seed))
        return generator

    def _floating(self, inputs: Tensor) -> Tensor:
        """Cast integers to the layer's type."""
        return inputs if is_floating(inputs.dtype) else cast(inputs, self.compute_dtype)

    def add_loss(self, loss: Any) -> None:
        """Add a number, or several, to the loss of the current step; for use in `call`."""
        self._losses += leaves(loss)
        self._of_thread.adds_in_loop = IN_BODY.get() or getattr(self._of_thread, "adds_in_loop", False)

    def _refuse(self, **arguments: Any) -> None:
        """Refuse unsupported arguments; keep them as attributes that are None."""
        for name, value in arguments.items():
            if value is not None:
                raise ConfigError(f"not supported: {name} = {value!r} of layer {type(self).__name__}")
            setattr(self, name, None)

    @property
    def supports_masking(self) -> bool:
        """Whether outputs get the mask of `compute_mask`, by default if the class overrides it; it can be set.

        Otherwise masks end here, with a warning.
        """
        return type(self).compute_mask is not Layer.compute_mask if self._passes_masks is None else self._passes_masks

    @supports_masking.setter
    def supports_masking(self, value: bool) -> None:
        self._passes_masks = bool(value)

    def compute_mask(self, inputs: Any, previous_mask: Any = None) -> Any:
        """Return the mask of the outputs, nested like them; by default the inputs'.

        Args:
            inputs: the first argument of `call`.
            previous_mask: its mask, nested likewise: booleans (rows, time), False for steps that do not count; or None.
        """
        return previous_mask

    def _refuse_mask(self, mask: Any) -> None:
        """Refuse a mask that the layer would ignore."""
        if leaves(mask):
            raise ConfigError(
                f"not supported: a mask for layer {self._display_name!r} ({type(self).__name__}), which would ignore it"
            )

    # Calling it

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Return the outputs for tensors or arrays; for symbolic tensors, symbolic ones.

        The arguments are `call`'s; floating-point numbers are cast to the layer's type. `training` is by default that
        of the enclosing call, or False. ConfigError if the layer cannot take the input.
        """
        if "_weights" not in vars(self):
            raise ConfigError(
                f"In layer {type(self).__name__}, you forgot to call `super().__init__()` as the first statement in "
                "the `__init__()` method."
            )
        if any(is_symbolic(leaf) for leaf in leaves([arguments, keywords])):
            outputs = self._symbolic_call(arguments, keywords)
            node = LayerCall(self, arguments, keywords)
            self._nodes.append(node)
            return node.finish(outputs)
        accepted = self._signature.parameters
        training = keywords.get("training")
        if not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in accepted.values()):
            if "mask" not in accepted:
                self._refuse_mask(keywords.get("mask"))
            keywords = {
                key: value for key, value in keywords.items() if key not in ("training", "mask") or key in accepted
            }
        filled_in = "training" in accepted and accepted["training"].default is inspect.Parameter.empty
        bind = self._signature.bind_partial if filled_in else self._signature.bind
        bound = bind(*arguments, **keywords)
        training = bound.arguments.get("training", training)
        outer = _training.get()
        if training is None:
            training = outer
        if training is None:
            default = accepted["training"].default if "training" in accepted else None
            training = bool(default) if isinstance(default, bool) else False
        if "training" in accepted:
            bound.arguments["training"] = training
        is_outermost = outer is None and not is_tracing()
        turn: AbstractContextManager[None] = TURNS.eager() if is_outermost else nullcontext()
        if (called := _called.get()) is not None:
            called.append(self)
        is_first = outer is None and called is None and (is_tracing() or not self.built)
        warning = _warning_of_untracked(self) if is_first else nullcontext()
        with (
            turn,
            warning,
            scope(self._display_name),
            self._in_scope(),
            _calling(training),
            reading_weights_in(self._read_in),
        ):
            if outer is None:
                self._clear_losses()
            if self.built and not self._builds:
                return self._call_bound(bound)
            with MAKING:  # until the sublayers are built as well
                return self._call_bound(bound)

    def stateless_call(
        self,
        trainable_variables: Sequence[Any],
        non_trainable_variables: Sequence[Any],
        *args: Any,
        return_losses: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Call the layer with other values of its variables; it keeps its own.

        Gradients flow to the values, but not through the new state.

        Args:
            trainable_variables: a tensor, an array or a variable for each of `trainable_variables`.
            non_trainable_variables: likewise, for each of `non_trainable_variables`: moving averages, random states.
            args: of the call.
            return_losses: whether to return `losses`, too.
            kwargs: of the call.

        Returns:
            The outputs, and the new values of `non_trainable_variables`; with `return_losses` also the penalties of the
            given weights and the arguments of `add_loss`.

        Raises:
            ConfigError: the layer is not built, not one value for each variable, or a value of another shape.
        """
        if not self.built:
            raise ConfigError(
                f"To call stateless_call, {type(self).__name__} must be built (i.e. its variables must have been "
                "already created). You can build it by calling it on some data."
            )
        with self._lending(trainable_variables, non_trainable_variables) as others:
            outputs = with_values(self(*args, **kwargs))
            state = values_of(others)
            return (outputs, state, self.losses) if return_losses else (outputs, state)

    @contextmanager
    def _lending(self, trainable: Sequence[Any], non_trainable: Sequence[Any]) -> Iterator[Sequence[Variable]]:
        """Give its variables other values in this context, and no losses of calls before; yield the non-trainable."""
        whose, others = f"{type(self).__name__}()", self.non_trainable_variables
        with (
            lending(self.trainable_variables, trainable, "trainable_variables", f"{whose}.trainable_variables"),
            lending(others, non_trainable, "non_trainable_variables", f"{whose}.non_trainable_variables"),
            self._separate_losses(),
        ):
            yield others

    @property
    def _read_in(self) -> np.dtype[Any] | None:
        """The type in which `call` reads weights; None for their own."""
        mixed = self.autocast and self.compute_dtype != self.variable_dtype
        return np.dtype(self.compute_dtype) if mixed else None

    def _symbolic_call(self, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
        """Call the layer without values, for shapes and types, as Keras' `compute_output_spec` does."""
        token = _called.set([])  # what the model that is being made will hold is open
        try:
            return self._call_without_values(arguments, keywords)
        finally:
            _called.reset(token)

    def _call_without_values(self, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
        try:
            with tracing():
                return self(*arguments, **keywords)
        except UnknownLengthError as error:
            asked = error
            tensors = [leaf for leaf in leaves([arguments, keywords]) if isinstance(leaf, Tensor)]
            if not any(is_open(tensor.shape) for tensor in tensors):
                raise
        finally:
            self._clear_losses()
        results = self._call_with_trial_sizes(arguments, keywords)
        if len(leaves(results[0])) != len(leaves(results[1])):  # as many outputs as the length, as of `unstack`
            raise asked
        second_leaves = iter(leaves(results[1]))
        return map_leaves(lambda _, leaf: _common_placeholder(leaf, next(second_leaves)), results[0])

    def _call_with_trial_sizes(self, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> list[Any]:
        """Return the outputs for each of two numbers in the place of unknown lengths.

        Where the layer refuses these, others are tried, and the first error says why none will do.
        """
        errors: list[Exception] = []
        for sizes in _TRIAL_SIZES:
            results = []
            try:
                for size in sizes:
                    bound = map_leaves(
                        lambda _, leaf, size=size: _with_size(leaf, Size(size)), [list(arguments), dict(keywords)]
                    )
                    with tracing():
                        results.append(self(*bound[0], **bound[1]))
            except Exception as error:  # a user's layer may refuse a length by any
                errors.append(error)
            finally:
                self._clear_losses()
            if len(results) == len(sizes):
                return results
        raise errors[0]

    def _call_bound(self, bound: inspect.BoundArguments) -> Any:
        """Build the layer if needed, then call it on bound arguments as tensors."""
        for number, (name, value) in enumerate(bound.arguments.items()):
            if not number and _is_number_list(value):
                value = np.asarray(value)
            bound.arguments[name] = map_leaves(lambda _, leaf: self._as_masked_tensor(leaf), value)
        first = next(iter(bound.arguments.values()), None)
        previous_mask = fill_masks(bound, first)
        if self.input_spec is not None:
            check(self.input_spec, first, self._display_name)
        if not self.built:
            self._build_for(bound.arguments)
            if self.input_spec is not None:
                check(self.input_spec, first, self._display_name)
        token = _in_call.set(self)
        try:
            outputs = self.call(*bound.args, **bound.kwargs)
        finally:
            _in_call.reset(token)
        self._was_called = True
        attach_masks(self, first, outputs, previous_mask)
        if self.activity_regularizer is not None:
            for output in leaves(outputs):
                penalty = self.activity_regularizer(output)
                self.add_loss(divide_no_nan(penalty, output.shape[0]) if output.ndim else penalty)
        return outputs

    def _as_masked_tensor(self, value: Any) -> Any:
        tensor, mask = self._as_tensor(value), mask_of(value)
        return tensor if mask is None else with_mask(tensor, mask)

    def _as_tensor(self, value: Any) -> Any:
        """Return a tensor, a variable or an array as a tensor, cast to the layer's type if it has decimals."""
        if isinstance(value, Variable):
            value = value.value
        elif not isinstance(value, Tensor) and hasattr(value, "__array__"):
            array = np.asarray(value)
            value = constant(array, self._data_dtype if is_floating(array.dtype) and not self.autocast else None)
        if self.autocast and isinstance(value, Tensor) and is_floating(value.dtype) and self._rounds(value):
            return cast(value, self.compute_dtype)
        return value

    def _rounds(self, value: Tensor) -> bool:
        """Return whether to cast an input to the layer's type: not ids that half precision would round."""
        if not is_narrow(np.dtype(self.compute_dtype)):
            return True
        if is_whole(value) and (self._moves_values or not type(self).call.__module__.startswith("dptrain.layers.")):
            return False
        return not any(layer._takes_ids for layer in self._flatten_layers()[1:])

    def _build_for(self, arguments: Mapping[str, Any]) -> None:
        tensors = {
            name: value for name, value in arguments.items() if any(isinstance(leaf, Tensor) for leaf in leaves(value))
        }
        self._built_for = map_leaves(lambda _, leaf: build_shape(leaf), next(iter(tensors.values()), None))
        shapes = {
            f"{name}_shape": map_leaves(lambda _, leaf: build_shape(leaf), value) for name, value in tensors.items()
        }
        parameters = inspect.signature(self.build).parameters
        required = {name for name, parameter in parameters.items() if parameter.default is inspect.Parameter.empty}
        has_values = any(leaf.value is not None for leaf in leaves(list(tensors.values())) if isinstance(leaf, Tensor))
        token = _provisional.set(_provisional.get() or not has_values)
        try:
            if len(parameters) == 1 or not required <= set(shapes):
                if len(required) > 1:
                    raise ConfigError(
                        "For a `build()` method with more than one argument, all arguments should have a `_shape` "
                        f"suffix and match an argument from `call()`. Layer {self._display_name!r}: build() takes "
                        f"{', '.join(parameters)}; call() was given {', '.join(tensors)}"
                    )
                self.build(next(iter(shapes.values()), None))
            else:
                self._built_with = {name: shapes[name] for name in parameters if name in shapes}
                self.build(**self._built_with)
        finally:
            _provisional.reset(token)
        self.built = True

    def _note_shapes(self, shapes: Mapping[str, Any]) -> None:
        """Note the arguments with which `build` is called directly."""
        self._built_for = next(iter(shapes.values()), None)
        if len(shapes) > 1:
            self._built_with = dict(shapes)

    @functools.cached_property
    def _signature(self) -> inspect.Signature:
        return inspect.signature(self.call)

    @property
    def input(self) -> Any:
        """The symbolic tensors of the layer's first call; AttributeError without such a call."""
        arguments = self._first_node("inputs").arguments
        return arguments[0] if len(arguments) == 1 else list(arguments)

    @property
    def output(self) -> Any:
        """The symbolic outputs of the layer's first call; AttributeError without such a call."""
        return self._first_node("output").outputs

    @property
    def _last_output(self) -> Any:
        """The symbolic outputs of the last symbolic call, or of the shape the layer was built for; else None."""
        if self._nodes:
            return self._nodes[-1].outputs
        with suppress(ConfigError, NotImplementedError, TypeError):
            if self.built and self._built_for is not None:
                shape = self.compute_output_shape(self._built_for)
                return map_shapes(
                    lambda lengths: placeholder(symbolic(lengths), self.compute_dtype, self._display_name), shape
                )
        return None

    def _first_node(self, name: str) -> LayerCall:
        if not self._nodes:
            raise AttributeError(
                f"The layer {self._display_name} has never been called and thus has no defined {name}."
            )
        return self._nodes[0]

    # In files

    def _get_own_config(self) -> dict[str, Any]:
        """Return the constructor's own arguments for `get_config`: attributes, or what a user's constructor got."""
        strict = type(self).get_config is Layer.get_config
        cls = next(base for base in type(self).__mro__ if "__init__" in vars(base))
        if not is_dptrain_class(cls) and strict and self._constructed_with is not None:
            arguments = {
                name: value for name, value in self._constructed_with.arguments.items() if self._is_written(name)
            }
            described = {name: self._argument_to_json(name, value) for name, value in arguments.items()}
            return self._attributes_to_json(self._constructed_with.forwarded, strict=True) | described
        if not strict:  # the override adds the arguments of the user's class
            cls = next(base for base in cls.__mro__ if is_dptrain_class(base))
        return self._attributes_to_json([] if _is_base(cls) else named_parameters(cls), strict)

    def _is_written(self, name: str) -> bool:
        return name not in (*_COMMON_ARGUMENTS, *self._unwritten)

    def _attributes_to_json(self, names: Iterable[str], strict: bool) -> dict[str, Any]:
        """Return constructor arguments from attributes of the same names."""
        attributes = {}
        for name in filter(self._is_written, names):
            if name in vars(self) or hasattr(type(self), name):
                attributes[name] = _to_json(getattr(self, name), strict)
            elif strict:
                raise ConfigError(
                    f"layer {type(self).__name__}: argument {name!r} is not an attribute of the layer: keep it "
                    f"as self.{name}, or override `get_config()`, to write the layer to a file"
                )
        return attributes

    def _argument_to_json(self, name: str, value: Any) -> Any:
        """Return an argument as passed, or its attribute if JSON lacks the type or the layer changed it."""
        assert self._constructed_with is not None
        if is_plain(value) and not self._constructed_with.was_changed(self, name):
            return value
        is_attribute = name in vars(self)
        value = getattr(self, name) if is_attribute else value
        described = plain(value) if callable(value) else _to_json(value, strict=True)
        if not is_attribute and not is_plain(plain(described)):
            raise ConfigError(
                f"layer {type(self).__name__}: argument {name!r} is not an attribute of the layer, and JSON cannot "
                f"hold a {type(value).__name__}: override `get_config()` to write the layer to a file"
            )
        return described

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments as Keras names them.

        From a user's class that overrides it, `super().get_config()` returns those of dptrain's class alone.
        """
        config = self._get_config()
        if "trainable" not in config:  # without what all layers share
            return config
        policy = {"module": "keras", "class_name": "DTypePolicy", "config": self._policy.get_config()}
        common = {"name": self._name, "trainable": self._trainable, "dtype": {**policy, "registered_name": None}}
        return common | config

    def get_build_config(self) -> dict[str, Any] | None:
        """Return what `build_from_config` needs in JSON: "input_shape", or "shapes_dict" by name; None if not built."""
        if len(self._built_with) > 1:
            return {"shapes_dict": dict(self._built_with)}
        if self._nodes and self._nodes[0].arguments:
            return {"input_shape": map_leaves(lambda _, spec: _batch_shape(spec), self._nodes[0].arguments[0])}
        return self._described_build if self._built_for is None else {"input_shape": self._built_for}

    def build_from_config(self, config: Mapping[str, Any]) -> None:
        """Build the layer from its `get_build_config`.

        Files are read by it if a subclass overrides both. Else a layer is built when its model calls it.
        """
        if "input_shape" in config:
            self.build(_with_tuples(config["input_shape"]))
        elif "shapes_dict" in config:
            self.build(**{name: _with_tuples(shape) for name, shape in config["shapes_dict"].items()})

    def _get_config(self) -> dict[str, Any]:
        """Return all constructor arguments as `get_config` names them, in JSON types."""
        config: dict[str, Any] = {"name": self._name, "trainable": self._trainable}
        if self._own_policy:
            config["dtype"] = self._policy.name
        if self.activity_regularizer is not None or "activity_regularizer" in self._always_written:
            config["activity_regularizer"] = regularizers.serialize(self.activity_regularizer)
        return config | self._get_own_config()

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Return the layer that `config` describes, Keras' configurations included.

        Default policies, which Keras writes for every layer, are left out.
        """
        arguments = {name: _from_json(value) for name, value in config.items()}
        if "dtype" in config and not isinstance(config["dtype"], str):
            name = policy_name(arguments.pop("dtype"))
            arguments |= {} if name in (None, dtype_policy().name) else {"dtype": name}
        parameters = inspect.signature(cls.__init__).parameters.values()
        unasked: dict[str, Any] = {}  # which every layer has, but not every constructor takes
        if all(parameter.kind != parameter.VAR_KEYWORD for parameter in parameters):
            accepted = {parameter.name for parameter in parameters}
            unasked = {name: arguments.pop(name) for name in ("name", "trainable") if name in {*config} - accepted}
        try:
            layer = cls(**arguments)
        except TypeError as error:
            raise ConfigError(f"layer {cls.__name__}: {error}") from error
        except (ValueError, ArithmeticError, LookupError, AttributeError) as error:
            if isinstance(error, DptrainError) or not is_dptrain_class(cls):
                raise
            raise ConfigError(f"layer {cls.__name__}: {error}; received {short(arguments)}") from error
        if unasked.get("name") is not None:
            layer.name = unasked["name"]
        if unasked.get("trainable") is False:
            layer.trainable = False
        return layer

    def __repr__(self) -> str:
        return f"<{type(self).__name__} name={self.name}, built={self.built}>"


def checked_shape(shape: Any) -> BuildShape:
    """Check and return the shape of a sample: a list of positive integers and None, else ConfigError."""
    if not isinstance(shape, Sequence) or any(
        n is not None and (isinstance(n, bool) or not isinstance(n, Integral) or int(n) < 1) for n in shape
    ):
        raise ConfigError(f"Input shape: expected positive integers. Received: shape={shape}")
    return tuple(None if n is None else int(n) for n in shape)


def build_as_described(layer: Layer, build_config: Any) -> None:
    """Build a layer whose class, the user's, has a `build_from_config`; the first call builds others."""
    owner = next(base for base in type(layer).__mro__ if "build_from_config" in vars(base))
    if not isinstance(build_config, Mapping) or not build_config:
        return
    if is_dptrain_class(owner):
        layer._described_build = _with_tuples(build_config)
    elif not layer.built:
        layer.build_from_config(build_config)


def build_shape(value: Any) -> BuildShape | None:
    """Return a tensor's shape for `build`: None for the rows of the batch."""
    if not isinstance(value, Tensor):
        return None
    return tuple(None if not axis or isinstance(n, Dim) else int(n) for axis, n in enumerate(value.shape))


@contextmanager
def _warning_of_untracked(outermost: Layer) -> Iterator[None]:
    """Warn of trainable layers that a layer calls and does not hold."""
    called: list[Layer] = []
    token = _called.set(called)
    try:
        yield
    finally:
        _called.reset(token)
    held = {id(layer) for layer in outermost._flatten_layers()}
    for layer in called:
        if id(layer) not in held and not layer._is_untracked and layer.trainable_weights:
            layer._is_untracked = True  # said once
            warn(
                f"layer {layer._display_name!r} is called in {outermost._display_name!r}, which does not track it: its "
                "weights are neither trained nor saved with it. Make it an attribute, or a member of a list, tuple or "
                "dictionary that is one; or set its `trainable = False`"
            )


@contextmanager
def _calling(training: bool) -> Iterator[None]:
    token = _training.set(training)
    try:
        yield
    finally:
        _training.reset(token)


def _has_own_output_shape(kind: type) -> bool:
    """Whether a user's class says which shape its outputs have."""
    owner = next(base for base in kind.__mro__ if "compute_output_shape" in vars(base))
    return not is_dptrain_class(owner)


def _placeholders_of(shape: Any, dtype: Any, name: str) -> Any:
    """Return placeholders of a shape, or of shapes nested in tuples, lists and dictionaries."""
    if isinstance(shape, Mapping):
        return {key: _placeholders_of(inner, dtype, name) for key, inner in shape.items()}
    if any(isinstance(inner, tuple | list | Mapping) for inner in shape):
        return type(shape)(_placeholders_of(inner, dtype, name) for inner in shape)
    return placeholder(symbolic(shape), dtype, name)


def _batch_shape(value: Any) -> BuildShape | None:
    """Return a tensor's shape, in which the rows are None unless their number is fixed, as for stateful layers."""
    return read(value.shape) if isinstance(value, Tensor) else None


def _with_tuples(shape: Any) -> Any:
    """Return a shape, or shapes, from JSON, which has lists for tuples."""
    if isinstance(shape, Mapping):
        return {name: _with_tuples(inner) for name, inner in shape.items()}
    if isinstance(shape, list | tuple) and all(isinstance(length, Integral | None) for length in shape):
        return tuple(shape)
    return [_with_tuples(inner) for inner in shape] if isinstance(shape, list | tuple) else shape


def _with_size(value: Any, size: Size) -> Any:
    """Return a placeholder in which unknown lengths are bound to a size."""
    if not isinstance(value, Tensor) or not is_open(value.shape):
        return value
    lengths = (Dim(n.name or n, size=size) if not is_number(n) else n for n in value.shape)
    bound, mask = placeholder(tuple(lengths), value.dtype, value.name), mask_of(value)
    if mask is not None:
        bound._keras_mask = _with_size(mask, size)
    return bound


def _common_placeholder(first: Any, second: Any) -> Any:
    """Return a placeholder with the lengths that two tensors share; others are unknown."""
    if not isinstance(first, Tensor):
        return first
    common, mask = (
        placeholder(tuple(map(_common_length, first.shape, second.shape)), first.dtype, first.name),
        mask_of(first),
    )
    if mask is not None:
        common._keras_mask = _common_placeholder(mask, mask_of(second))
    return common


def _common_length(first: Any, second: Any) -> Any:
    if (
        isinstance(first, Dim)
        and isinstance(second, Dim)
        and first.names == second.names
        and first.scale == second.scale
    ):
        if number_of(first) == number_of(second):  # a fixed batch size
            return first
        name = first.names[0]
        return (name if isinstance(name, Dim) else Dim(name)) * first.scale
    return number_of(first) if number_of(first) == number_of(second) else unknown()


def _marking_built(build: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(build)
    def noting(self: Layer, *arguments: Any, **keywords: Any) -> None:
        if self.built and self._weights:
            raise ConfigError(
                f"layer {self._display_name!r} is already built: a second `build` would add its weights again"
            )
        build(self, *arguments, **keywords)
        self.built = True

    return noting


def _in_scope(build: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(build)

    @functools.wraps(build)
    def scoped(self: Layer, *arguments: Any, **keywords: Any) -> None:
        if self._built_for is None:  # else a call, or a subclass's `build`, has noted the shapes
            with suppress(TypeError):  # which `build` raises itself
                self._note_shapes(dict(list(signature.bind(self, *arguments, **keywords).arguments.items())[1:]))
        with self._in_scope():
            build(self, *arguments, **keywords)

    return scoped


def _unbuilt_copy(layer: Layer) -> Layer:
    """Return a copy to build on trial; the layer itself if it cannot be copied."""
    with suppress(Exception):  # a user's attributes may raise
        return copy.deepcopy(layer)
    return layer


def _is_base(cls: type) -> bool:
    return bool(vars(cls).get("_is_base"))


def _from_json(value: Any) -> Any:
    """Revive layers and functions in a configuration's argument."""
    if type(value) in (list, tuple):
        return type(value)(map(_from_json, value))
    if not isinstance(value, dict):
        return value
    class_name = value.get("class_name")
    if not isinstance(class_name, str) or "config" not in value:
        return {key: _from_json(inner) for key, inner in value.items()}
    cls = custom_object(value.get("registered_name"), class_name)
    is_layer = issubclass(cls, Layer) if isinstance(cls, type) else value.get("module") in _MODULES_OF_LAYERS
    if (is_layer and class_name != "DTypePolicy") or class_name == "function":
        from dptrain.saving import deserialize_keras_object  # a higher layer than this module

        return deserialize_keras_object(value)
    return value


def _is_number_list(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(leaf, int | float) for leaf in leaves(value))


def map_shapes(function: Callable[[Sequence[Any]], Any], shapes: Any) -> Any:
    """Apply a function to each shape in nested ones."""
    if isinstance(shapes, Mapping):
        return {key: map_shapes(function, inner) for key, inner in shapes.items()}
    if all(length is None or isinstance(length, Integral) for length in shapes):
        return function(shapes)
    return [map_shapes(function, inner) for inner in shapes]


def _to_json(value: Any, strict: bool) -> Any:
    if isinstance(value, initializers.Initializer):
        return initializers.serialize(value)
    if isinstance(value, regularizers.Regularizer):
        return regularizers.serialize(value)
    if isinstance(value, constraints.Constraint):
        return constraints.serialize(value)
    if any(value is activation for activation in activations.BY_NAME.values()) or isinstance(value, Layer):
        return activations.serialize(value)
    if callable(value) and (strict or getattr(value, "__name__", "<lambda>") != "<lambda>"):
        return function_to_dict(value)
    return tuple(_to_json(item, strict) for item in value) if isinstance(value, tuple) else value
