"""What an optimizer is: slots beside the variables that it trains, and one update of a variable, written in ops.

The order of an update is Keras 3's: accumulation, clipping, weight decay, the optimizer's own rule, moving averages,
constraints. Weights that are pruned have masks, which gradients are multiplied by before all of this, and values after
the rule.
Nothing in it decides by a value, so that one traced program serves every step: the learning rate, the number of
iterations and so what a schedule says are variables' values.
"""

import copy
import functools
import inspect
import math
import operator
import re
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
from dptrain.program.tensor import Drawn, DType, Operand, Tensor, Variable, constant, is_tracing, note_applied
from dptrain.program.turns import TURNS
from dptrain.registry.names import not_supported, snake_case
from dptrain.registry.reads import Readable
from dptrain.runtime.floatx import floatx

# Slots of what is pruned: which elements stay, and the gradient of all, for regrowth.
_MASK, _DENSE = _OF_PRUNING = ("mask", "dense_gradient")
_ACCUMULATOR = "gradient_accumulator"

# The classes of descriptions, by names in lower case: `OPTIMIZERS`, and what has another optimizer within.
CLASSES: dict[str, type[Any]] = {}


class LearningRate(float):
    """A learning rate as it was when it was asked for, with what Keras' variable has.

    Args:
        rate: the number.
        optimizer: whose it is.
    """

    _optimizer: "Optimizer"

    def __new__(cls, rate: float, optimizer: "Optimizer") -> Self:
        """Return the number; a float is made here, not in `__init__`."""
        made = super().__new__(cls, rate)
        made._optimizer = optimizer
        return made

    def __reduce__(self) -> tuple[type[float], tuple[float]]:
        """A copy is a plain float."""
        return float, (float(self),)

    def assign(self, value: Any) -> None:
        """Give the optimizer another learning rate; this number stays what it is.

        Raises:
            ConfigError: as `Optimizer.learning_rate`.
        """
        self._optimizer.learning_rate = value

    @property
    def value(self) -> Tensor:
        """The number as a tensor (float64)."""
        return constant(self.numpy())

    def numpy(self) -> np.float64:
        """Return the number as NumPy's."""
        return np.float64(self)


class Optimizer(Readable, ABC):
    """One rule that turns gradients into new values of variables.

    A subclass writes `update_step`; one with slots adds them in `build`:

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
        clipvalue: highest absolute value of an element of the gradients.
        global_clipnorm: highest norm of all gradients together.
        use_ema: keep moving averages of the variables, which `finalize_variable_values` puts in their place.
        ema_momentum: what an average keeps of itself in an iteration, 0 to 1.
        ema_overwrite_frequency: iterations after which the variables become their averages; None for never.
        loss_scale_factor: by which `scale_loss` multiplies the loss, and `apply` divides gradients; None for 1.
        gradient_accumulation_steps: update once in so many batches, 2 or more, by the mean of their gradients.
        name: the class's in snake case by default (which Keras numbers).

    Attributes:
        built: whether it has its slots.
        name: see above.

    Raises:
        ConfigError: an argument is out of range, or not supported.
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
        clips = {"clipnorm": clipnorm, "clipvalue": clipvalue, "global_clipnorm": global_clipnorm}
        if sum(limit is not None for limit in clips.values()) > 1:
            received = ", ".join(f"{clip}={limit}" for clip, limit in clips.items())
            raise ConfigError(
                f"Only one of `clipnorm`, `clipvalue` and `global_clipnorm` can be set. Received: {received}"
            )
        if use_ema and not 0 <= ema_momentum <= 1:
            raise ConfigError(f"`ema_momentum` must be in the range [0, 1]. Received: ema_momentum={ema_momentum}")
        frequency = ema_overwrite_frequency
        if use_ema and frequency and (not isinstance(frequency, int) or frequency < 1):
            raise ConfigError(
                "`ema_overwrite_frequency` must be an integer >= 1 or None. "
                f"Received: ema_overwrite_frequency={frequency}"
            )
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
        self.use_ema, self.ema_momentum, self.ema_overwrite_frequency = use_ema, ema_momentum, frequency
        self.loss_scale_factor = _optional("loss_scale_factor", loss_scale_factor)
        self.gradient_accumulation_steps = None if steps is None else int(steps)
        self.built, self._version = False, 0
        self._drafts = False  # slots are made for their order alone
        self._slots: dict[Variable, dict[str, Variable]] = {}
        self._added: list[Variable] = []
        self._excluded: set[Variable] = set()
        self._excluded_names: re.Pattern[str] | None = None
        self._numbers: dict[Any, Tensor] | None = None
        self._iterations = self._variable(np.array(0, np.int64), "iteration")
        self._schedule = learning_rate if isinstance(learning_rate, LearningRateSchedule) else None
        # float64: what was set is read again, and a schedule's numbers are as exact.
        self._rate = self._variable(np.float64(0 if self._schedule else _rate(learning_rate)), "learning_rate")

    # State

    def build(self, variables: Iterable[Variable]) -> None:
        """Make the slots of variables that have none yet."""
        known = list(variables)
        for one in known:
            self._slots.setdefault(one, {})
        if self.use_ema:
            self.add_optimizer_variables(known, "average")
        if self.gradient_accumulation_steps:
            self.add_optimizer_variables(known, _ACCUMULATOR)
        pruned = [one for one in known if one.pruning is not None]
        self.add_optimizer_variables(pruned, _MASK, "ones")
        self.add_optimizer_variables([one for one in pruned if one.pruning.regrows], _DENSE)
        self.built = True

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
            initializer: as of a layer's weight, or a value that is drawn when it is needed.
            dtype: float32 by default.
            aggregation: not used: every rank has the same.
            name: of the variable.
        """
        value: Any = initializer
        if not isinstance(initializer, Drawn):
            own = partial(initializers.get(initializer), tuple(shape), 0, 0)
            value = (
                Drawn(tuple(shape), dtype or floatx(), own)
                if isinstance(initializer, str) and initializer == "zeros"
                else own()
            )
        self._added.append(self._variable(value, name or "variable", dtype or floatx()))
        return self._added[-1]

    def add_variable_from_reference(
        self, reference_variable: Variable, name: str | None = None, initializer: Any = "zeros"
    ) -> Variable:
        """Return a new variable like another one, "dense/kernel", under the path "adam/dense_kernel_NAME"."""
        path = f"{reference_variable.path.replace('/', '_')}_{name or 'var'}"
        return self.add_variable(reference_variable.shape, initializer, reference_variable.dtype, name=path)

    def add_optimizer_variables(
        self, trainable_variables: Iterable[Variable], name: str | Sequence[str], initializer: Any = "zeros"
    ) -> Any:
        """Give variables a slot, or one of each name; see `slots_of`. Those that have it keep it.

        Returns:
            The slots, a list for each name; None of a variable that is overwritten with its gradient.
        """
        names, variables = [name] if isinstance(name, str) else list(name), list(trainable_variables)
        for one in variables:
            own = self._slots.setdefault(one, {})
            for slot in names:
                if slot not in own and (slot == _ACCUMULATOR or not one.overwrite_with_gradient):
                    own[slot] = self.add_variable_from_reference(one, slot, initializer)
        found = tuple([self._slots[one].get(slot) for one in variables] for slot in names)
        return found[0] if isinstance(name, str) else found

    @property
    def _all_slots(self) -> list[tuple[Variable, Variable]]:
        """All slots, each with the variable that it belongs to."""
        return [(slot, variable) for variable, own in self._slots.items() for slot in own.values()]

    def slots_of(self, variable: Variable) -> Mapping[str, Variable]:
        """Return the slots of a variable by name, for an `update_step`; not in Keras."""
        return self._slots_of(variable)

    def _slots_of(self, variable: Variable) -> Mapping[str, Variable]:
        return self._slots[variable]

    @property
    def _masks(self) -> dict[Variable, Variable]:
        """The masks of the variables that are pruned, 1 where an element stays and 0 where it is zero."""
        return {one: own[_MASK] for one, own in self._slots.items() if one.pruning is not None and _MASK in own}

    @property
    def _pruning_variables(self) -> list[Variable]:
        """Those of the variables that are there for pruning alone."""
        return [slot for own in self._slots.values() for name, slot in own.items() if name in _OF_PRUNING]

    def _prune(self, variable: Variable, mask: npt.NDArray[np.bool_]) -> None:
        """Give a variable another mask, and zeros where it has them to its value and slots.

        Args:
            variable: that is pruned.
            mask: which elements stay, of the variable's shape.
        """
        own = self._slots[variable]
        own[_MASK].assign(mask.astype(variable.dtype))
        rest = [one for name, one in own.items() if name not in _OF_PRUNING and one.shape == variable.shape]
        for one in (variable, *rest):
            one.assign(np.where(mask, one.numpy(), np.zeros((), one.dtype)))

    def _dense_gradient(self, variable: Variable) -> npt.NDArray[Any]:
        """Return the last gradient of a variable that is pruned with regrowth, of pruned elements too."""
        return self._slots[variable][_DENSE].numpy()

    @property
    def variables(self) -> list[Variable]:
        """The state in Keras' order: iterations, learning rate (unless a schedule says it), slots."""
        return [self._iterations, *([] if self._schedule else [self._rate]), *self._added]

    def _variables_for(self, variables: Iterable[Variable]) -> list[Variable]:
        """Return those of `variables` that belong to these, in the order in which a new optimizer would make them.

        They get slots where they have none, and the optimizer has been used.

        Args:
            variables: that are trained now; others may have been before.
        """
        if not self.built:
            return self.variables
        known = list(variables)
        self.build(known)
        like = copy.copy(self)
        like._slots, like._added, like._drafts = {}, [], True
        like.build(known)
        own = {id(slot): self._slots[one][name] for one in known for name, slot in like._slots[one].items()}
        slots = {id(slot) for each in self._slots.values() for slot in each.values()}
        at = next((n for n, one in enumerate(self._added) if id(one) in slots), len(self._added))
        ordered = [own[id(one)] for one in like._added if id(one) in own]
        rest = [one for one in self._added[at:] if id(one) not in slots]
        return [*self.variables[: -len(self._added) or None], *self._added[:at], *ordered, *rest]

    @property
    def iterations(self) -> Variable | Tensor:
        """Updates made (int64): batches, divided by those that one update accumulates."""
        every = self.gradient_accumulation_steps
        return self._iterations if every is None else self._iterations // every

    @property
    def learning_rate(self) -> Any:
        """The learning rate of the next update: a float with `assign`, or in a trace the variable (float64).

        It can be set, unless a schedule says it (in a trace that is a tensor); a program that was traced before sees a
        new number, not a new schedule.

        Raises:
            ConfigError: set to a number that is out of range; also a TypeError where a schedule says it.
        """
        if is_tracing():
            return self._rate if self._schedule is None else self._learning_rate()
        return LearningRate(float(self._learning_rate()), self)

    @learning_rate.setter
    def learning_rate(self, rate: Any) -> None:
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
        """What a program depends on that was traced with this optimizer: another one needs another trace."""
        return self._version

    @property
    def _follows_schedule(self) -> bool:
        """Whether a schedule says the learning rate, which then goes by the steps and cannot be set."""
        return self._schedule is not None

    @property
    def _rates(self) -> dict[str, float]:
        """Learning rates by the names under which they are logged."""
        return {"learning_rate": float(self.learning_rate)}

    @property
    def _resumed_rate(self) -> Any:
        """What `resume_learning_rate` takes, as JSON can carry it."""
        return float(self.learning_rate)

    def _resume_learning_rate(self, rate: Any) -> None:
        """Go on with the learning rate that an interrupted training had; a schedule knows it from the steps."""
        if not self._follows_schedule:
            self.learning_rate = rate

    def _learning_rate(self) -> Tensor:
        return float64(self._rate if self._schedule is None else self._schedule(float64(self._iterations)))

    def _variable(self, value: Any, name: str, dtype: npt.DTypeLike | None = None) -> Variable:
        made = Variable(value, name, trainable=False, dtype=dtype)
        made.path = f"{self.name}/{name}"
        return made

    # Updates

    stateless_apply = not_supported("stateless_apply", "call apply(grads, variables), which assigns the variables")

    def scale_loss(self, loss: Any) -> Any:
        """Return the loss times the `loss_scale_factor`."""
        return loss if self.loss_scale_factor is None else loss * self.loss_scale_factor

    def apply_gradients(self, grads_and_vars: Iterable[tuple[Any, Variable]]) -> Variable:
        """Update variables by their gradients; as `apply`.

        Args:
            grads_and_vars: pairs.

        Returns:
            The number of batches seen.
        """
        pairs = list(grads_and_vars)
        self.apply([grad for grad, _ in pairs], [variable for _, variable in pairs])
        return self._iterations

    def apply(self, grads: Iterable[Any], trainable_variables: Iterable[Variable] | None = None) -> None:
        """Update variables by their gradients.

        Args:
            grads: a gradient, or None, for each variable.
            trainable_variables: those that the optimizer was built for by default; builds it where it is not.

        Raises:
            ConfigError: there is no gradient, or a variable that the optimizer was not built for.
        """
        found = list(grads)
        if not found:
            return
        variables = self._checked(found, None if trainable_variables is None else list(trainable_variables))
        missing = [one.path for grad, one in zip(found, variables, strict=True) if grad is None]
        if len(missing) == len(found):
            raise ConfigError("No gradients provided for any variable.")
        if missing:
            warnings.warn(
                f"Gradients do not exist for variables {missing} when minimizing the loss. If using "
                "`model.compile()`, did you forget to provide a `loss` argument?",
                stacklevel=2,
            )
        known = {one: as_dtype(grad, one.dtype) for grad, one in zip(found, variables, strict=True) if grad is not None}
        if self.loss_scale_factor is not None:
            known = {one: grad / self.loss_scale_factor for one, grad in known.items()}
        note_applied(list(known.values()))
        changes = frozenset[Variable]() if is_tracing() else frozenset([*self.variables, *known])
        with TURNS.of(writes=changes):
            self._numbers = {}
            try:
                self._apply(list(known.values()), list(known))
            finally:
                self._numbers = None

    @abstractmethod
    def update_step(self, gradient: Tensor, variable: Variable, learning_rate: Tensor) -> None:
        """Assign a variable and its slots.

        Args:
            gradient: of the variable's shape and dtype.
            variable: that is trained.
            learning_rate: float64; `number` gives it in the variable's dtype.
        """

    def assign(self, variable: Variable, value: Any) -> None:
        """Give a variable a new value; for `update_step`."""
        variable.assign(value)

    def assign_add(self, variable: Variable, value: Any) -> None:
        """Add to a variable; for `update_step`."""
        variable.assign_add(value)

    def assign_sub(self, variable: Variable, value: Any) -> None:
        """Subtract from a variable; for `update_step`."""
        variable.assign_sub(value)

    def _number(self, compute: Callable[[Tensor], Tensor], learning_rate: Any, dtype: DType) -> Tensor:
        """Return a number that depends on the learning rate and the iterations alone, which all variables share.

        Args:
            compute: takes the learning rate and returns the number, float64.
            learning_rate: as `update_step` has it.
            dtype: to which it is rounded.
        """
        known = {} if self._numbers is None else self._numbers
        rate = float64(learning_rate)
        key = compute, id(rate)
        if key not in known:
            known[key], known[id(rate)] = compute(rate), rate  # kept, so that its id stays its own
        if (key, dtype) not in known:
            known[key, dtype] = as_dtype(known[key], dtype)
        return known[key, dtype]

    def _checked(self, grads: list[Any], variables: list[Variable] | None) -> list[Variable]:
        """Return the variables of gradients, for which the optimizer is built."""
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
        for one in variables:
            if one not in self._slots:
                raise ConfigError(
                    f"Unknown variable: {one}. This optimizer can only be called for the variables it was originally "
                    "built with. When working with a new set of variables, you should recreate a new optimizer "
                    "instance."
                )
        return variables

    def _apply(self, grads: list[Tensor], variables: list[Variable]) -> None:
        rate, every = self._learning_rate(), self.gradient_accumulation_steps
        for grad, one in zip(grads, variables, strict=True):
            if one.pruning is not None and one.pruning.regrows:
                self._slots[one][_DENSE].assign(grad)
        # A product, which is linear: ranks' summands are added up after it.
        grads = [
            grad if one.pruning is None else grad * self._slots[one][_MASK]
            for grad, one in zip(grads, variables, strict=True)
        ]
        if every is None:
            self._update_all(grads, variables, rate)
        else:
            due = _is_multiple(self._iterations + 1, every)
            old = {one: one.value for one in (*variables, *self._added)}
            accumulators = [self._slots[one][_ACCUMULATOR] for one in variables]
            sums = [total + grad for total, grad in zip(accumulators, grads, strict=True)]
            self._update_all([one * (1 / every) for one in sums], variables, rate)
            for one, value in old.items():
                if one.value is not value:
                    one.assign(where(due, one, value))
            for accumulator, total in zip(accumulators, sums, strict=True):
                accumulator.assign(where(due, 0, total))
        for one in variables:
            if one.pruning is not None:
                one.assign(self._masked(one, one))
        if self.use_ema:
            self._average()
        for one in variables:
            if one.constraint is not None:
                one.assign(self._masked(one, one.constraint(one)))
        self._iterations.assign_add(1)

    def _masked(self, variable: Variable, value: Any) -> Any:
        """Return a value of a variable with zeros, +0, where its mask has them."""
        return value if variable.pruning is None else where(equal(self._slots[variable][_MASK], 0), 0, value)

    def _update_all(self, grads: list[Tensor], variables: list[Variable], learning_rate: Tensor) -> None:
        """Clip the gradients, let the variables decay, and follow the rule: `update_step` for each variable.

        Those with `overwrite_with_gradient` become their gradients.
        """
        for grad, one in zip(grads, variables, strict=True):
            if one.overwrite_with_gradient:
                one.assign(grad)
        pairs = [(grad, one) for grad, one in zip(grads, variables, strict=True) if not one.overwrite_with_gradient]
        grads, variables = [grad for grad, _ in pairs], [one for _, one in pairs]
        if not variables:
            return
        grads = self._clipped(grads)
        for one in variables:
            kept = self._kept_of(one)
            if kept is not None:
                one.assign(one * self._number(kept, learning_rate, one.dtype))
        for grad, one in zip(grads, variables, strict=True):
            self.update_step(grad, one, learning_rate)

    def _clipped(self, grads: list[Tensor]) -> list[Tensor]:
        """Return the gradients within the limit; as in Keras one of 0 or below limits nothing."""
        if self.clipnorm is not None and self.clipnorm > 0:
            factors = [_factor(_squared_norm(one), self.clipnorm) for one in grads]
        elif self.global_clipnorm is not None and self.global_clipnorm > 0:
            total = functools.reduce(operator.add, map(_squared_norm, grads))
            factors = [_factor(total, self.global_clipnorm)] * len(grads)
        elif self.clipvalue is not None and self.clipvalue > 0:
            return [clip(one, -self.clipvalue, self.clipvalue) for one in grads]
        else:
            return grads
        return [one * as_dtype(factor, one.dtype) for one, factor in zip(grads, factors, strict=True)]

    # Weight decay

    def exclude_from_weight_decay(
        self, var_list: Iterable[Variable] | None = None, var_names: Iterable[str] | None = None
    ) -> None:
        """Name variables that do not decay, before the optimizer is built.

        Args:
            var_list: the variables.
            var_names: regular expressions; a variable is excluded where one is found in its own name ("bias").

        Raises:
            ConfigError: the optimizer is built.
        """
        if self.built:
            raise ConfigError(
                "`exclude_from_weight_decay()` can only be configued before the optimizer is built."  # as Keras has it
            )
        self._excluded = set(var_list or ())
        names = sorted(set(var_names or ()))
        self._excluded_names = re.compile("|".join(names)) if names else None

    def _decays(self, variable: Variable) -> bool:
        """Whether the weight decay applies to a variable."""
        return self.weight_decay is not None and not self._is_excluded(variable)

    def _is_excluded(self, variable: Variable) -> bool:
        named = self._excluded_names is not None and self._excluded_names.search(variable.name) is not None
        return variable in self._excluded or named

    def _kept_of(self, variable: Variable) -> Callable[[Tensor], Tensor] | None:
        """Return what gives the part of a variable that its decay leaves, of the learning rate; None without decay."""
        return self._kept if self._decays(variable) else None

    def _kept(self, rate: Tensor) -> Tensor:
        return 1 - (self.weight_decay or 0) * rate

    # Moving averages

    def _average(self) -> None:
        """Let the averages follow the variables, and these become their averages where it is time to."""
        momentum = where(equal(self.iterations, 0), np.float64(0), np.float64(self.ema_momentum))
        frequency = self.ema_overwrite_frequency
        due = _is_multiple(self.iterations + 1, frequency) if frequency else None
        for one, slots in self._slots.items():
            if "average" not in slots:
                continue
            average, keep = slots["average"], as_dtype(momentum, one.dtype)
            average.assign(keep * average + (1 - keep) * one)
            if due is not None:
                one.assign(where(due, average, one))

    @property
    def _ends_with_averages(self) -> bool:
        """Whether `finalize_variable_values` replaces what a training has come to."""
        return self.use_ema

    def finalize_variable_values(self, var_list: Iterable[Variable]) -> None:
        """Let variables become their moving averages, if there are any: what `fit` ends with."""
        for one in var_list if self.use_ema and self.built else ():
            if "average" in self._slots.get(one, {}):
                one.assign(self._slots[one]["average"])

    # Configuration

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments as Keras names them; a schedule as `schedules.serialize` gives it.

        A subclass's own are among them where they are attributes of the same name, numbers or words.
        """
        found = {
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
        made = [vars(one)["__init__"] for one in reversed(type(self).__mro__) if "__init__" in vars(one)]
        names = [name for one in made for name in inspect.signature(one).parameters]
        own = {name: vars(self)[name] for name in names if name in vars(self) and name not in found}
        return found | {name: one for name, one in own.items() if isinstance(one, float | int | str | None)}

    def _describe(self) -> dict[str, Any]:
        """Return what must be the same on all ranks: `get_config()`, or less where a schedule does not tell."""
        try:
            return self.get_config()
        except NotImplementedError:
            return {"learning_rate": type(self._schedule).__name__}

    @classmethod
    def from_config(cls, config: Mapping[str, Any], custom_objects: Mapping[str, type[Any]] | None = None) -> Self:
        """Return an optimizer with the arguments that `get_config` gave.

        Raises:
            ConfigError: the arguments are not this optimizer's, or the schedule's class is unknown.
        """
        arguments = dict(config)
        if isinstance(arguments.get("learning_rate"), Mapping):
            arguments["learning_rate"] = schedules.deserialize(arguments["learning_rate"], custom_objects)
        return cls(**arguments)


def as_dtype(value: Any, dtype: DType) -> Tensor:
    """Return a tensor in a dtype; one that has it as it is."""
    return value if isinstance(value, Tensor) and value.dtype == dtype else cast(value, dtype)


def check_range(
    name: str, value: float, *, above: float | None = None, least: float | None = None, below: float = math.inf
) -> float:
    """Return `value` as a float.

    Raises:
        ConfigError: it is not finite or not in the range.
    """
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
    found: Tensor = equal(count // of * of, count)
    return found


def _squared_norm(gradient: Tensor) -> Tensor:
    return summed(square(float64(gradient)))


def _factor(squared_norm: Tensor, limit: float) -> Tensor:
    """Return what brings a norm down to a limit: 1 or below, NaN where the norm is not finite."""
    norm = sqrt(squared_norm)
    factor: Tensor = limit / maximum(where(norm < np.inf, norm, np.nan), limit)
    return factor
