"""Optimizer: slots beside the trained variables, and the update of a variable, written in ops.

The order of an update is Keras 3's: accumulation, clipping, weight decay, the optimizer's rule, moving averages,
constraints. Masks of pruned weights multiply gradients before all of this, and values after the rule. Nothing branches
on a value, so one traced program serves every step: learning rate and iterations are variables.
"""

import copy
import functools
import inspect
import math
import operator
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from dptrain import initializers
from dptrain.errors import ArgumentTypeError, ConfigError
from dptrain.ops import cast, clip, equal, maximum, sqrt, square, where
from dptrain.ops import sum as summed
from dptrain.optimizers import schedules
from dptrain.optimizers.schedules import LearningRateSchedule
from dptrain.optimizers.schedules.base import float64
from dptrain.optimizers.weight_decay import Decaying
from dptrain.program.stateless import lending, values_of
from dptrain.program.tensor import (
    Drawn,
    DType,
    Operand,
    Tensor,
    Variable,
    as_tensors,
    constant,
    is_tracing,
    note_applied,
)
from dptrain.program.turns import TURNS
from dptrain.registry.names import snake_case
from dptrain.registry.reads import Readable
from dptrain.runtime.floatx import floatx
from dptrain.runtime.signals import in_step

# Slots of pruned variables: the kept elements, and the gradient of all, for regrowth.
_MASK, _DENSE = _OF_PRUNING = ("mask", "dense_gradient")
_ACCUMULATOR = "gradient_accumulator"

# Classes by lower-case names in descriptions: `OPTIMIZERS`, and those that contain other optimizers.
CLASSES: dict[str, type[Any]] = {}


class LearningRate(float):
    """A learning rate at one time, with the methods of Keras' variable."""

    _optimizer: "Optimizer"

    def __new__(cls, rate: float, optimizer: "Optimizer") -> Self:
        """Return the number, which a float takes here, not in `__init__`."""
        number = super().__new__(cls, rate)
        number._optimizer = optimizer
        return number

    def __reduce__(self) -> tuple[type[float], tuple[float]]:
        """A copy is a plain float."""
        return float, (float(self),)

    def assign(self, value: Any) -> None:
        """Set the optimizer's learning rate, see `Optimizer.learning_rate`; this number stays."""
        self._optimizer.learning_rate = value

    @property
    def value(self) -> Tensor:
        """The number as a float64 tensor."""
        return constant(self.numpy())

    def numpy(self) -> np.float64:
        """The number as NumPy float64."""
        return np.float64(self)


class Optimizer(Decaying, Readable, ABC):
    """A rule that turns gradients into new values of variables.

    A subclass writes `update_step`; with slots, it adds them in `build`:

        class Momentum(Optimizer):
            def build(self, variables):
                super().build(variables)
                self.add_optimizer_variables(variables, "momentum")

            def update_step(self, gradient, variable, learning_rate):
                momentum = self.slots_of(variable)["momentum"]
                momentum.assign(0.9 * momentum - ops.cast(learning_rate, variable.dtype) * gradient)
                variable.assign_add(momentum)

    Args:
        learning_rate: 0 or above, or a schedule.
        weight_decay: before every update variables lose this times the learning rate of themselves.
        clipnorm: highest norm of the gradient of each variable.
        clipvalue: highest absolute value of a gradient's elements.
        global_clipnorm: highest norm of all gradients together.
        use_ema: keep moving averages of the variables, which `finalize_variable_values` puts in their place.
        ema_momentum: what an average keeps of itself in an iteration, 0 to 1.
        ema_overwrite_frequency: iterations after which the variables become their averages; None for never.
        loss_scale_factor: `scale_loss` multiplies the loss by it, and `apply` divides gradients; None for 1.
        gradient_accumulation_steps: update once every this many batches (2 or more), by their mean gradient.
        name: by default the class's in snake case (which Keras numbers).

    Attributes:
        built: whether it has its slots.
        name: of the optimizer.

    Raises:
        ConfigError: an argument is out of range, or not supported. The same holds for all optimizers.
    """

    def __init__(
        self,
        learning_rate: float | LearningRateSchedule,
        weight_decay: float | None = None,
        clipnorm: float | None = None,
        clipvalue: float | None = None,
        global_clipnorm: float | None = None,
        use_ema: bool = False,
        ema_momentum: float = 0.99,
        ema_overwrite_frequency: int | None = None,
        loss_scale_factor: float | None = None,
        gradient_accumulation_steps: int | None = None,
        name: str | None = None,
        **kwargs: Any,
    ) -> None:
        if kwargs.pop("decay", None) is not None:
            warnings.warn("Argument `decay` is no longer supported and will be ignored.", stacklevel=2)
        if kwargs:
            raise ConfigError(f"Argument(s) not recognized: {kwargs}")
        _check_clips(clipnorm=clipnorm, clipvalue=clipvalue, global_clipnorm=global_clipnorm)
        if use_ema:
            _check_averages(ema_momentum, ema_overwrite_frequency)
        steps = gradient_accumulation_steps or None
        if steps is not None and not (steps >= 2 and steps == int(steps)):
            raise ConfigError(
                "`gradient_accumulation_steps` must be an integer >= 2. "
                f"Received: gradient_accumulation_steps={gradient_accumulation_steps}"
            )
        self.name = snake_case(type(self).__name__) if name is None else name
        self.weight_decay = _optional("weight_decay", weight_decay)
        self.clipnorm = _optional("clipnorm", clipnorm)
        self.clipvalue = _optional("clipvalue", clipvalue)
        self.global_clipnorm = _optional("global_clipnorm", global_clipnorm)
        self.use_ema, self.ema_momentum = use_ema, ema_momentum
        self.ema_overwrite_frequency = ema_overwrite_frequency
        self.loss_scale_factor = _optional("loss_scale_factor", loss_scale_factor)
        self.gradient_accumulation_steps = None if steps is None else int(steps)
        self.built, self._version = False, 0
        self._drafts = False  # whether slots are made for their order only
        self._slots: dict[Variable, dict[str, Variable]] = {}
        self._added: list[Variable] = []
        self._numbers: dict[Any, Tensor] | None = None
        self._iterations = self._variable(np.array(0, np.int64), "iteration")
        self._schedule = learning_rate if isinstance(learning_rate, LearningRateSchedule) else None
        # float64, so that a number that was set reads back unchanged, and schedules are exact.
        self._rate = self._variable(np.float64(0 if self._schedule else _rate(learning_rate)), "learning_rate")

    # State

    def build(self, variables: Iterable[Variable]) -> None:
        """Create the slots of variables that have none, and drop those of matrices that LoRA has frozen."""
        listed = list(variables)
        self._drop_slots(set(self._frozen_by_lora()) - set(listed))
        for variable in listed:
            self._slots.setdefault(variable, {})
        if self.use_ema:
            self.add_optimizer_variables(listed, "average")
        if self.gradient_accumulation_steps:
            self.add_optimizer_variables(listed, _ACCUMULATOR)
        pruned = [variable for variable in listed if variable.pruning is not None]
        self.add_optimizer_variables(pruned, _MASK, "ones")
        self.add_optimizer_variables([variable for variable in pruned if variable.pruning.regrows], _DENSE)
        self.built = True

    def _frozen_by_lora(self) -> list[Variable]:
        return [variable for variable in self._slots if variable.low_rank is not None and not variable.trainable]

    def _drop_slots(self, variables: Iterable[Variable]) -> None:
        dropped = {id(slot) for variable in variables for slot in self._slots.pop(variable).values()}
        if dropped:
            self._added = [slot for slot in self._added if id(slot) not in dropped]

    def add_variable(
        self,
        shape: Sequence[int],
        initializer: Any = "zeros",
        dtype: npt.DTypeLike | None = None,
        aggregation: str | None = None,
        name: str | None = None,
    ) -> Variable:
        """Return a new variable that the optimizer keeps from step to step.

        Args:
            shape: of the variable.
            initializer: as for a layer's weight, or a value, drawn when it is needed.
            dtype: float32 by default.
            aggregation: not used: all ranks have the same value.
            name: of the variable.
        """
        value: Any = initializer
        if not isinstance(initializer, Drawn):
            draw = partial(initializers.get(initializer), tuple(shape), 0, 0)
            value = (
                Drawn(tuple(shape), dtype or floatx(), draw)
                if isinstance(initializer, str) and initializer == "zeros"
                else draw()
            )
        self._added.append(self._variable(value, name or "variable", dtype or floatx()))
        return self._added[-1]

    def add_variable_from_reference(
        self, reference_variable: Variable, name: str | None = None, initializer: Any = "zeros"
    ) -> Variable:
        """Return a new variable shaped like "dense/kernel", say, with the path "adam/dense_kernel_NAME"."""
        path, ending = reference_variable._path.replace("/", "_"), name or "var"
        slot = self.add_variable(
            reference_variable.shape, initializer, reference_variable.dtype, name=f"{path}_{ending}"
        )
        slot._scope_path = f"{self.name}/{reference_variable.path.replace('/', '_')}_{ending}"
        return slot

    def add_optimizer_variables(
        self, trainable_variables: Iterable[Variable], name: str | Sequence[str], initializer: Any = "zeros"
    ) -> Any:
        """Give variables without them slots of these names; see `slots_of`.

        Returns:
            The slots, a list for each name; None for a variable that is overwritten with its gradient.
        """
        names, variables = [name] if isinstance(name, str) else list(name), list(trainable_variables)
        for variable in variables:
            slots = self._slots.setdefault(variable, {})
            for slot in names:
                if slot not in slots and (slot == _ACCUMULATOR or not variable.overwrite_with_gradient):
                    slots[slot] = self.add_variable_from_reference(variable, slot, initializer)
        by_name = tuple([self._slots[variable].get(slot) for variable in variables] for slot in names)
        return by_name[0] if isinstance(name, str) else by_name

    @property
    def _all_slots(self) -> list[tuple[Variable, Variable]]:
        """All slots, each with its variable."""
        return [(slot, variable) for variable, slots in self._slots.items() for slot in slots.values()]

    def slots_of(self, variable: Variable) -> Mapping[str, Variable]:
        """Return the slots of a variable by name, for an `update_step`; not in Keras."""
        return self._slots_of(variable)

    def _slots_of(self, variable: Variable) -> Mapping[str, Variable]:
        return self._slots[variable]

    @property
    def _masks(self) -> dict[Variable, Variable]:
        """Masks of the pruned variables: 1 where an element stays, 0 where it is zero."""
        return {
            variable: slots[_MASK]
            for variable, slots in self._slots.items()
            if variable.pruning is not None and _MASK in slots
        }

    @property
    def _pruning_variables(self) -> list[Variable]:
        """Variables that exist for pruning only."""
        return [slot for slots in self._slots.values() for name, slot in slots.items() if name in _OF_PRUNING]

    def _prune(self, variable: Variable, mask: npt.NDArray[np.bool_]) -> None:
        """Set a variable's mask, and zeros accordingly in its value and slots."""
        slots = self._slots[variable]
        slots[_MASK].assign(mask.astype(variable.dtype))
        rest = [slot for name, slot in slots.items() if name not in _OF_PRUNING and slot.shape == variable.shape]
        for target in (variable, *rest):
            target.assign(np.where(mask, target.numpy(), np.zeros((), target.dtype)))

    def _dense_gradient(self, variable: Variable) -> npt.NDArray[Any]:
        """Return the last gradient of a variable pruned with regrowth, including pruned elements."""
        return self._slots[variable][_DENSE].numpy()

    @property
    def variables(self) -> list[Variable]:
        """State in Keras' order: iterations, learning rate (unless scheduled), slots."""
        return [self._iterations, *([] if self._schedule else [self._rate]), *self._added]

    def set_weights(self, weights: Sequence[Any]) -> None:
        """Give each of `variables` a value; ConfigError before it is built, or for other numbers or shapes."""
        if not self.built:
            raise ConfigError(
                "You are calling `set_weights()` on an optimizer that has not yet been built. Please call "
                "`optimizer.build(trainable_variables)` to create the optimizer weights before calling `set_weights()`."
            )
        if len(weights) != len(self.variables):
            raise ConfigError(f"set_weights: {len(weights)} values for {len(self.variables)} variables of {self.name}")
        for variable, value in zip(self.variables, weights, strict=True):
            variable.assign(value)

    def _variables_for(self, variables: Iterable[Variable]) -> list[Variable]:
        """Return the state for these trained variables, in the order of a new optimizer; makes missing slots."""
        if not self.built:
            return self.variables
        listed = list(variables)
        self.build(listed)
        like = copy.copy(self)
        like._slots, like._added, like._drafts = {}, [], True
        like.build(listed)
        by_id = {
            id(slot): self._slots[variable][name] for variable in listed for name, slot in like._slots[variable].items()
        }
        slots = {id(slot) for each in self._slots.values() for slot in each.values()}
        at = next((n for n, variable in enumerate(self._added) if id(variable) in slots), len(self._added))
        ordered = [by_id[id(slot)] for slot in like._added if id(slot) in by_id]
        rest = [slot for slot in self._added[at:] if id(slot) not in slots]
        return [*self.variables[: -len(self._added) or None], *self._added[:at], *ordered, *rest]

    @property
    def iterations(self) -> Variable | Tensor:
        """Updates made (int64): batches divided by those that an update accumulates."""
        every = self.gradient_accumulation_steps
        return self._iterations if every is None else self._iterations // every

    @property
    def learning_rate(self) -> Any:
        """Learning rate of the next update: a float with `assign`, or in a trace the variable (float64).

        It can be set, unless there is a schedule (ConfigError and TypeError); a traced program sees a new number, not a
        new schedule.
        """
        if is_tracing():
            return self._rate if self._schedule is None else self._learning_rate()
        return LearningRate(float(self._learning_rate()), self)

    @learning_rate.setter
    def learning_rate(self, rate: Any) -> None:
        """See the getter; ConfigError if out of range."""
        if isinstance(rate, LearningRateSchedule):
            self._schedule, self._version = rate, self._version + 1
        elif self._schedule is not None:
            raise ArgumentTypeError(
                "This optimizer was created with a `LearningRateSchedule` object as its `learning_rate` constructor "
                "argument, hence its learning rate is not settable. If you need the learning rate to be settable, you "
                "should instantiate the optimizer with a float `learning_rate` argument."
            )
        else:
            self._rate.assign(rate if isinstance(rate, Operand) and is_tracing() else np.float64(_rate(rate)))

    @property
    def _program_version(self) -> int:
        """Version of what traced programs depend on."""
        return self._version

    @property
    def _follows_schedule(self) -> bool:
        return self._schedule is not None

    @property
    def _rates(self) -> dict[str, float]:
        return {"learning_rate": float(self.learning_rate)}

    @property
    def _resumed_rate(self) -> Any:
        """Argument of `_resume_learning_rate`, as JSON."""
        return float(self.learning_rate)

    def _resume_learning_rate(self, rate: Any) -> None:
        """Restore the learning rate of an interrupted training; a schedule computes it from the steps."""
        if not self._follows_schedule:
            self.learning_rate = rate

    def _learning_rate(self) -> Tensor:
        return float64(self._rate if self._schedule is None else self._schedule(float64(self._iterations)))

    def _variable(self, value: Any, name: str, dtype: npt.DTypeLike | None = None) -> Variable:
        variable = Variable(value, name, trainable=False, dtype=dtype)
        variable._path = f"{self.name}/{name}"
        return variable

    # Updates

    @property
    def _built_with(self) -> list[Variable]:
        """The variables that it trains, once it is built."""
        return list(self._slots)

    def stateless_apply(
        self, optimizer_variables: Sequence[Any], grads: Sequence[Any], trainable_variables: Sequence[Any]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return what `apply` would make of other values; the optimizer and its variables keep their own.

        Args:
            optimizer_variables: a value for each of `variables`.
            grads: a gradient for each trainable variable.
            trainable_variables: a value for each variable that the optimizer was built with.

        Returns:
            The values of the trainable variables, and those of the optimizer's.

        Raises:
            ConfigError: the optimizer is not built, or not one value for each variable.
        """
        if not self.built:
            raise ConfigError(
                f"To call `stateless_apply`, {type(self).__name__} must be built (i.e. its variables must have been "
                "created). You can build it via `optimizer.build(trainable_variables)`."
            )
        weights, state, kind = self._built_with, self.variables, type(self).__name__
        with (
            lending(weights, trainable_variables, "trainable_variables", f"the variables that {kind} was built with"),
            lending(state, optimizer_variables, "optimizer_variables", f"{kind}().variables"),
        ):
            self.apply(grads, weights)
            return values_of(weights), values_of(state)

    def scale_loss(self, loss: Any) -> Any:
        """Return the loss times the `loss_scale_factor`."""
        return loss if self.loss_scale_factor is None else loss * self.loss_scale_factor

    def apply_gradients(self, grads_and_vars: Iterable[tuple[Any, Variable]]) -> Variable:
        """Update variables by pairs of gradient and variable, like `apply`; return the number of batches seen."""
        pairs = list(grads_and_vars)
        self.apply([grad for grad, _ in pairs], [variable for _, variable in pairs])
        return self._iterations

    def apply(self, grads: Iterable[Any], trainable_variables: Iterable[Variable] | None = None) -> None:
        """Update variables by their gradients.

        Args:
            grads: a gradient, or None, for each variable.
            trainable_variables: by default those that the optimizer was built for; builds it if it is not.

        Raises:
            ConfigError: there is no gradient, or a variable that the optimizer was not built for.
        """
        listed = list(grads)
        if not listed:
            return
        variables = self._checked(listed, None if trainable_variables is None else list(trainable_variables))
        missing = [variable.path for grad, variable in zip(listed, variables, strict=True) if grad is None]
        if len(missing) == len(listed):
            raise ConfigError("No gradients provided for any variable.")
        if missing:
            warnings.warn(
                f"Gradients do not exist for variables {missing} when minimizing the loss. If using "
                "`model.compile()`, did you forget to provide a `loss` argument?",
                stacklevel=2,
            )
        by_variable = {
            variable: as_dtype(grad, variable.dtype)
            for grad, variable in zip(listed, variables, strict=True)
            if grad is not None
        }
        if self.loss_scale_factor is not None:
            by_variable = {variable: grad / self.loss_scale_factor for variable, grad in by_variable.items()}
        note_applied(list(by_variable.values()))
        changes = frozenset[Variable]() if is_tracing() else frozenset([*self.variables, *by_variable])
        with TURNS.of(writes=changes):
            self._numbers = {}
            try:
                with in_step(False):  # all of them, or none
                    self._apply(list(by_variable.values()), list(by_variable))
            finally:
                self._numbers = None

    @abstractmethod
    def update_step(self, gradient: Tensor, variable: Variable, learning_rate: Tensor) -> None:
        """Assign a variable and its slots.

        Args:
            gradient: of the variable's shape and dtype.
            variable: to be trained.
            learning_rate: float64; `number` converts it to the variable's dtype.
        """

    def assign(self, variable: Variable, value: Any) -> None:
        """Assign a variable; for `update_step`."""
        variable.assign(value)

    def assign_add(self, variable: Variable, value: Any) -> None:
        """Add to a variable; for `update_step`."""
        variable.assign_add(value)

    def assign_sub(self, variable: Variable, value: Any) -> None:
        """Subtract from a variable; for `update_step`."""
        variable.assign_sub(value)

    def _number(self, compute: Callable[[Tensor], Tensor], learning_rate: Any, dtype: DType) -> Tensor:
        """Return a float64 function of learning rate and iterations, rounded to a dtype and shared by all variables."""
        numbers = {} if self._numbers is None else self._numbers
        rate = float64(learning_rate)
        key = compute, id(rate)
        if key not in numbers:
            numbers[key], numbers[id(rate)] = compute(rate), rate  # keeps it alive, so that its id stays unique
        if (key, dtype) not in numbers:
            numbers[key, dtype] = as_dtype(numbers[key], dtype)
        return numbers[key, dtype]

    def _checked(self, grads: list[Any], variables: list[Variable] | None) -> list[Variable]:
        """Return the variables of the gradients; builds the optimizer if needed."""
        if variables is None:
            if not self.built:
                raise ConfigError(
                    "When passing `grads` without `variables`, the optimizer must already be built on a list of "
                    "variables. Call `optimizer.build(trainable_variables)` first. "
                )
            variables = list(self._slots)
        elif not self.built:
            self.build(variables)
        if len(grads) != len(variables):
            raise ConfigError(
                "When passing `grads` as a list of gradient tensors, the gradients must match `optimizer.variables` "
                f"one-to-on. Received a list of {len(grads)} gradients, but the optimizer is tracking "
                f"{len(variables)} trainable variables."
            )
        for variable in variables:
            if variable not in self._slots:
                raise ConfigError(
                    f"Unknown variable: {variable}. This optimizer can only be called for the variables it was "
                    "originally built with. When working with a new set of variables, you should recreate a new "
                    "optimizer instance."
                )
        return variables

    def _apply(self, grads: list[Tensor], variables: list[Variable]) -> None:
        rate, every = self._learning_rate(), self.gradient_accumulation_steps
        for grad, variable in zip(grads, variables, strict=True):
            if variable.pruning is not None and variable.pruning.regrows:
                self._slots[variable][_DENSE].assign(grad)
        # A product is linear: ranks sum their gradients after it.
        grads = [
            grad if variable.pruning is None else grad * self._slots[variable][_MASK]
            for grad, variable in zip(grads, variables, strict=True)
        ]
        if every is None:
            self._update_all(grads, variables, rate)
        else:
            due = _is_multiple(self._iterations + 1, every)
            old = {variable: variable.value for variable in (*variables, *self._added)}
            accumulators = [self._slots[variable][_ACCUMULATOR] for variable in variables]
            sums = [total + grad for total, grad in zip(accumulators, grads, strict=True)]
            self._update_all([total * (1 / every) for total in sums], variables, rate)
            for variable, value in old.items():
                if variable.value is not value:
                    variable.assign(where(due, variable, value))
            for accumulator, total in zip(accumulators, sums, strict=True):
                accumulator.assign(where(due, 0, total))
        for variable in variables:
            if variable.pruning is not None:
                variable.assign(self._masked(variable, variable))
        if self.use_ema:
            self._average()
        for variable in variables:
            if variable.constraint is not None:
                variable.assign(self._masked(variable, variable.constraint(variable)))
        self._iterations.assign_add(1)

    def _masked(self, variable: Variable, value: Any) -> Any:
        """Return a value with +0 where the variable's mask is 0."""
        return value if variable.pruning is None else where(equal(self._slots[variable][_MASK], 0), 0, value)

    def _update_all(self, grads: list[Tensor], variables: list[Variable], learning_rate: Tensor) -> None:
        """Clip gradients, decay weights and call `update_step`; or overwrite variables with their gradients."""
        for grad, variable in zip(grads, variables, strict=True):
            if variable.overwrite_with_gradient:
                variable.assign(grad)
        pairs = [
            (grad, variable)
            for grad, variable in zip(grads, variables, strict=True)
            if not variable.overwrite_with_gradient
        ]
        grads, variables = [grad for grad, _ in pairs], [variable for _, variable in pairs]
        if not variables:
            return
        grads = self._clip_gradients(grads)
        for variable in variables:
            decay = self._decay_of(variable)
            if decay is not None:
                variable.assign(variable * self._number(decay, learning_rate, variable.dtype))
        for grad, variable in zip(grads, variables, strict=True):
            self.update_step(grad, variable, learning_rate)

    def _clip_gradients(self, grads: list[Any]) -> list[Tensor]:
        """Return the clipped gradients; as in Keras, a limit of 0 or below is none."""
        grads = list(as_tensors(grads))
        if self.clipnorm is not None and self.clipnorm > 0:
            factors = [_factor(_squared_norm(grad), self.clipnorm) for grad in grads]
        elif self.global_clipnorm is not None and self.global_clipnorm > 0:
            total = functools.reduce(operator.add, map(_squared_norm, grads))
            factors = [_factor(total, self.global_clipnorm)] * len(grads)
        elif self.clipvalue is not None and self.clipvalue > 0:
            return [clip(grad, -self.clipvalue, self.clipvalue) for grad in grads]
        else:
            return grads
        return [grad * as_dtype(factor, grad.dtype) for grad, factor in zip(grads, factors, strict=True)]

    # Moving averages

    def _average(self) -> None:
        """Update the moving averages, and overwrite variables with them when due."""
        momentum = where(equal(self.iterations, 0), np.float64(0), np.float64(self.ema_momentum))
        frequency = self.ema_overwrite_frequency
        due = _is_multiple(self.iterations + 1, frequency) if frequency else None
        for variable, slots in self._slots.items():
            if "average" not in slots:
                continue
            average, keep = slots["average"], as_dtype(momentum, variable.dtype)
            average.assign(keep * average + (1 - keep) * variable)
            if due is not None:
                variable.assign(where(due, average, variable))

    @property
    def _ends_with_averages(self) -> bool:
        """Whether `finalize_variable_values` replaces the weights."""
        return self.use_ema

    def finalize_variable_values(self, var_list: Iterable[Variable]) -> None:
        """Replace variables by their moving averages, if there are any; `fit` ends with it."""
        for variable in var_list if self.use_ema and self.built else ():
            if "average" in self._slots.get(variable, {}):
                variable.assign(self._slots[variable]["average"])

    # Configuration

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments as Keras names them; schedules as from `schedules.serialize`.

        A subclass's arguments are included if they are attributes of the same name, numbers or strings.
        """
        config = {
            "name": self.name,
            "learning_rate": float(self.learning_rate)
            if self._schedule is None
            else schedules.serialize(self._schedule),
            "weight_decay": self.weight_decay,
            "clipnorm": self.clipnorm,
            "global_clipnorm": self.global_clipnorm,
            "clipvalue": self.clipvalue,
            "use_ema": self.use_ema,
            "ema_momentum": self.ema_momentum,
            "ema_overwrite_frequency": self.ema_overwrite_frequency,
            "loss_scale_factor": self.loss_scale_factor,
            "gradient_accumulation_steps": self.gradient_accumulation_steps,
        }
        constructors = [vars(cls)["__init__"] for cls in reversed(type(self).__mro__) if "__init__" in vars(cls)]
        names = [name for constructor in constructors for name in inspect.signature(constructor).parameters]
        values = {name: vars(self)[name] for name in names if name in vars(self) and name not in config}
        return config | {name: value for name, value in values.items() if isinstance(value, float | int | str | None)}

    def _describe(self) -> dict[str, Any]:
        """Return what must be the same on all ranks: `get_config()`, or less for a schedule without one."""
        try:
            return self.get_config()
        except NotImplementedError:
            return {"learning_rate": type(self._schedule).__name__}

    @classmethod
    def from_config(cls, config: Mapping[str, Any], custom_objects: Mapping[str, type[Any]] | None = None) -> Self:
        """Return an optimizer from its `get_config`; ConfigError for unknown arguments or classes of schedules."""
        arguments = dict(config)
        if isinstance(arguments.get("learning_rate"), Mapping):
            arguments["learning_rate"] = schedules.deserialize(arguments["learning_rate"], custom_objects)
        return cls(**arguments)


def _check_clips(**limits: float | None) -> None:
    if sum(limit is not None for limit in limits.values()) > 1:
        received = ", ".join(f"{name}={limit}" for name, limit in limits.items())
        raise ConfigError(f"Only one of `clipnorm`, `clipvalue` and `global_clipnorm` can be set. Received: {received}")


def _check_averages(momentum: float, frequency: int | None) -> None:
    if not 0 <= momentum <= 1:
        raise ConfigError(f"`ema_momentum` must be in the range [0, 1]. Received: ema_momentum={momentum}")
    if frequency and (not isinstance(frequency, int) or frequency < 1):
        raise ConfigError(
            f"`ema_overwrite_frequency` must be an integer >= 1 or None. Received: ema_overwrite_frequency={frequency}"
        )


def as_dtype(value: Any, dtype: DType) -> Tensor:
    """Cast a tensor, unless it has the dtype already."""
    return value if isinstance(value, Tensor) and value.dtype == dtype else cast(value, dtype)


def check_range(
    name: str, value: float, *, above: float | None = None, least: float | None = None, below: float = math.inf
) -> float:
    """Return `value` as a float, or raise ConfigError if it is out of range."""
    value = _number(name, value)
    if (
        not math.isfinite(value)
        or value >= below
        or (above is not None and value <= above)
        or (least is not None and value < least)
    ):
        low = f"> {above:g}" if above is not None else f">= {least:g}" if least is not None else ""
        high = f"< {below:g}" if math.isfinite(below) else ""
        expected = " and ".join(part for part in (low, high) if part) or "that is finite"
        raise ConfigError(f"{name} = {value:g}: expected a number {expected}")
    return value


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ConfigError(f"{name} = {value!r}: expected a number") from None


def _optional(name: str, value: float | None) -> float | None:
    return None if value is None else check_range(name, value)


def _rate(rate: Any) -> float:
    if callable(rate):
        raise ConfigError(
            "not supported: a function as learning_rate, which would be called once for all steps; subclass "
            "LearningRateSchedule, or change the rate between epochs with callbacks.LearningRateScheduler"
        )
    return check_range("learning_rate", rate, least=0.0)


def _is_multiple(count: Any, of: int) -> Tensor:
    result: Tensor = equal(count // of * of, count)
    return result


def _squared_norm(gradient: Tensor) -> Tensor:
    return summed(square(float64(gradient)))


def _factor(squared_norm: Tensor, limit: float) -> Tensor:
    """Return the factor that limits a norm: at most 1, NaN if the norm is not finite."""
    norm = sqrt(squared_norm)
    factor: Tensor = limit / maximum(where(norm < np.inf, norm, np.nan), limit)
    return factor
