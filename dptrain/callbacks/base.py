"""Callback: hooks that the training loop calls on every rank."""

from collections import UserDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial, wraps
from inspect import isfunction
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dptrain.train.trainer import Trainer

Logs = dict[str, float]

_PHASE_HOOKS = tuple(f"on_{mode}_{when}" for mode in ("train", "test", "predict") for when in ("begin", "end"))
# Batch hooks are called often, and most callbacks have none.
_BATCH_HOOKS = tuple(f"on_{mode}_batch_{when}" for mode in ("train", "test", "predict") for when in ("begin", "end"))


class StepLogs(UserDict[str, float]):
    """Logs of a step, read from the device on first access, for which the host waits."""

    def __init__(self, read: Callable[[], Logs]) -> None:
        self._read = read
        self._values: Logs | None = None

    @property
    def data(self) -> Logs:  # type: ignore[override]  # an attribute in UserDict
        """The values."""
        if self._values is None:
            self._values = self._read()
        return self._values


class Callback:
    """Hooks in Keras' words and order, called on every rank with the same, global, values.

    Only rank 0 may write files or to the terminal. A hook that raises on one rank alone ends the job. A hook that sets
    `self.model.stop_training = True`, on whatever rank, ends the training of all ranks after the same step; likewise
    batch hooks set `stop_evaluating` and `stop_predicting`.

    Attributes:
        params: "verbose", "epochs" and "steps" (None if unknown).
        model: the model that is trained, evaluated or used to predict.
        copies_of_weights: names of attributes, on all ranks, that are None or immutable copies of each rank's parts of
            the model's weights (`Model.local_weights`). A checkpoint holds them by parts, like the weights;
            `load_state_dict` gets this rank's parts, on whatever mesh (not in Keras).
    """

    params: dict[str, Any]
    _trainer: "Trainer"
    # Names of attributes that must be the same on all ranks, because the hooks wait for the other ranks or change what
    # is trained; None if a rank may have the callback alone.
    _same_on_all_ranks: tuple[str, ...] | None = None
    copies_of_weights: tuple[str, ...] = ()
    # Whether its hooks neither stop the training nor wait for other ranks, so that ranks need not meet after a batch
    # for its sake; holds for a class itself, not for its subclasses.
    _shows_only = False

    def __init__(self) -> None:
        self._model: Any = None

    @property
    def model(self) -> Any:
        """The model."""
        return getattr(self, "_model", None)  # a subclass may not call this class's constructor

    def set_params(self, params: dict[str, Any]) -> None:
        """Called once before all others."""
        self.params = params

    def set_model(self, model: Any) -> None:
        """Called once before `on_..._begin`."""
        self._model = model

    def _set_trainer(self, trainer: "Trainer") -> None:
        """Called once before `on_..._begin`."""
        self._trainer = trainer

    def _set_callbacks(self, callbacks: "Sequence[Callback]") -> None:
        """Called once before all others, with all callbacks in order. Not in Keras."""

    def _most_steps(self, steps: int) -> int:
        """Return how many of these steps may run before `on_train_batch_end` is called again. Not in Keras."""
        return steps

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Before the first epoch; logs is empty."""

    def on_train_end(self, logs: Logs | None = None) -> None:
        """After the last epoch, with its logs."""

    def _release(self) -> None:
        """Release terminal and files, also after an error. Not collective, and not in Keras."""

    def state_dict(self) -> dict[str, Any]:
        """Return this callback's state for a checkpoint, JSON and arrays, on rank 0. Keras' callbacks have none."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict`, whose tuples have become lists, on every rank.

        Called after `on_train_begin`, and again after `on_epoch_begin` if the training continues in the middle of an
        epoch. Not in Keras.
        """

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Before an epoch, counted from 0; logs is empty."""

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """After an epoch and its validation, with the means of loss and metrics, validation's as "val_..."."""

    def on_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Another name of `on_train_batch_begin`."""

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        """Another name of `on_train_batch_end`."""

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Before a step, counted from 0; logs is empty."""
        self.on_batch_begin(batch, logs)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """After a step, with the means of loss and metrics over the epoch so far (`StepLogs`)."""
        self.on_batch_end(batch, logs)

    def on_test_begin(self, logs: Logs | None = None) -> None:
        """Before an evaluation or validation."""

    def on_test_end(self, logs: Logs | None = None) -> None:
        """After an evaluation or validation, with its logs."""

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Before a batch of an evaluation, counted from 0."""

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        """After a batch of an evaluation, with the means so far (`StepLogs`)."""

    def on_predict_begin(self, logs: Logs | None = None) -> None:
        """Before a prediction."""

    def on_predict_end(self, logs: Logs | None = None) -> None:
        """After a prediction."""

    def on_predict_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Before a batch of a prediction, counted from 0."""

    def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
        """After a batch of a prediction, with {"outputs": this rank's outputs of the batch}."""


class CallbackList(Callback):
    """Calls several callbacks in order.

    Args:
        callbacks: a callback, or lists of them, in order.
        model, params: passed to `set_model` and `set_params`.

    Attributes:
        callbacks: all callbacks in order.
        facts: returns, by name, settings that a checkpoint must share with the training besides its model.
    """

    def __init__(self, callbacks: Any, model: Any = None, **params: Any) -> None:
        super().__init__()
        self.facts: Callable[[], dict[str, Any]] = dict
        self.callbacks = list(flatten(callbacks))
        self.set_model(model)
        self.set_params(params)
        for callback in self.callbacks:
            callback._set_callbacks(self.callbacks)
        self._with_hook = {
            hook: [callback for callback in self.callbacks if _overrides(callback, hook)] for hook in _BATCH_HOOKS
        }

    def _decisive(self) -> list[list[Any]]:
        """Return, as JSON, the attributes of callbacks that must be the same on all ranks."""
        return [
            [type(callback).__name__, *(_fact(getattr(callback, name)) for name in callback._same_on_all_ranks)]
            for callback in self.callbacks
            if callback._same_on_all_ranks is not None
        ]

    def _has_batch_hooks(self, mode: str) -> bool:
        """Return whether a callback needs each batch of a mode: "train", "test" or "predict".

        Callbacks that only show batches do not count: ranks need not meet for them. Nor do those with `_most_steps`.
        """
        hooks = (f"on_{mode}_batch_{when}" for when in ("begin", "end"))
        return any(
            any(not is_of_the_package(function) for function in _set_on(callback, hook))
            or not {"_shows_only", "_most_steps"} & vars(type(callback)).keys()
            for hook in hooks
            for callback in self._with_hook[hook]
        )

    def _most_steps(self, steps: int) -> int:
        """Return how many of these steps may run before the next hook."""
        return min((callback._most_steps(steps) for callback in self.callbacks), default=steps)

    def set_params(self, params: dict[str, Any]) -> None:
        """Pass the parameters on."""
        self.params = params
        for callback in self.callbacks:
            callback.set_params(params)

    def set_model(self, model: Any) -> None:
        """Pass the model on."""
        super().set_model(model)
        for callback in self.callbacks:
            callback.set_model(model)

    def _set_trainer(self, trainer: "Trainer") -> None:
        super()._set_trainer(trainer)
        for callback in self.callbacks:
            callback._set_trainer(trainer)

    def _release(self) -> None:
        for callback in self.callbacks:
            callback._release()

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Call the hook."""
        for callback in self.callbacks:
            callback.on_epoch_begin(epoch, _logs_or_empty(logs))

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Call the hook; additions to the logs reach later callbacks, but not `on_train_end`, as in Keras."""
        logs = dict(logs or {})
        for callback in self.callbacks:
            callback.on_epoch_end(epoch, logs)


def _calling(hook: str) -> Callable[..., None]:
    """Return `CallbackList`'s method for a hook without an epoch."""

    @wraps(getattr(Callback, hook))
    def of_phase(self: CallbackList, logs: Any = None) -> None:
        for callback in self.callbacks:
            getattr(callback, hook)(_logs_or_empty(logs))

    @wraps(getattr(Callback, hook))
    def of_batch(self: CallbackList, batch: int, logs: Any = None) -> None:
        for callback in self._with_hook[hook]:
            getattr(callback, hook)(batch, _logs_or_empty(logs))

    return of_batch if hook in _BATCH_HOOKS else of_phase


for _hook in (*_PHASE_HOOKS, *_BATCH_HOOKS):
    setattr(CallbackList, _hook, _calling(_hook))


def flatten(callbacks: Any) -> Iterator[Callback]:
    """Yield the callbacks in nested lists, a callback or None, in order."""
    if callbacks is None:
        return
    if isinstance(callbacks, list | tuple):
        for entry in callbacks:
            yield from flatten(entry)
    else:
        yield callbacks


def method_of(callback: Callback, name: str) -> Callable[..., Any]:
    """Return a method that Keras lacks; `Callback`'s own if a user has another attribute of that name."""
    classes = (vars(cls).get(name) for cls in type(callback).__mro__)
    return partial(next(method for method in classes if isfunction(method)), callback)


def _logs_or_empty(logs: Any) -> Any:
    """Return the logs for a hook: never None, as in Keras, and unread if of a step."""
    return {} if logs is None else logs


def _fact(value: Any) -> Any:
    return value if isinstance(value, str | int | float | None) else repr(value)


def is_of_the_package(function: Any) -> bool:
    """Return whether a function or class is dptrain's, not the user's."""
    return str(getattr(function, "__module__", "")).partition(".")[0] == __name__.partition(".")[0]


def _names(hook: str) -> list[str]:
    return [hook, hook.replace("train_", "")] if "train" in hook else [hook]


def _set_on(callback: Callback, hook: str) -> list[Any]:
    return [vars(callback)[name] for name in _names(hook) if name in vars(callback)]


def _overrides(callback: Callback, hook: str) -> bool:
    of_class = (getattr(type(callback), name) is not getattr(Callback, name) for name in _names(hook))
    return bool(_set_on(callback, hook)) or any(of_class)
