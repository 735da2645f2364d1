"""What a subclass of `Sequential` may override, and what its own steps are made of.

Nothing here differentiates for you: a step says what is computed forwards and backwards. What it must not do is decide
by what one rank alone sees whether to call `apply_gradients`, in which the ranks meet.
"""

from typing import Any

from dptrain.backend.base import Backend, Buffer
from dptrain.comm.base import Communicator
from dptrain.errors import ConfigError
from dptrain.metrics.tracking import MeanTracker, Reading, Tracker
from dptrain.train.explicit import ExplicitReplica, StepData, StepLog

# What makes a model one with steps of its own.
_STEPS = ("train_step", "test_step", "compute_loss", "compute_metrics")


class Steps:
    """The steps of a model, to be overridden, and the calls to write them with.

    All buffers are the device's. Forward, backward and metrics do nothing on a rank without samples, whose `data.rows`
    is 0; it must still call `apply_gradients` as the others do.

    Attributes:
        loss_tracker: the mean of the loss, the log "loss" of the steps that are not overridden.
    """

    def __init__(self) -> None:
        self.loss_tracker = MeanTracker("loss")

    # To override

    def train_step(self, data: StepData) -> StepLog:
        """Make one update from this rank's part of a global batch. Collective.

        Override it to train in a way of your own. It may call `forward`, `backward` and `apply_gradients` as often as
        it needs, of this model and of other models that are its attributes.

        Args:
            data: the samples.

        Returns:
            The logs: results of metrics, or numbers that are the same on every rank.
        """
        y_pred = self.forward(data.x, training=True)
        loss, dy = self._loss(data, y_pred, training=True)
        self.loss_tracker.update_state(loss, data.rows)
        logs = self.compute_metrics(data.x, data.y, y_pred, data.sample_weight)
        self.backward(dy)
        self.apply_gradients()
        return logs

    def test_step(self, data: StepData) -> StepLog:
        """Evaluate this rank's part of a batch. Not collective: ranks may have different numbers of batches.

        Args:
            data: the samples.

        Returns:
            The logs, as `train_step`.
        """
        y_pred = self.forward(data.x, training=False)
        loss, _ = self._loss(data, y_pred, training=False)
        self.loss_tracker.update_state(loss, data.rows)
        return self.compute_metrics(data.x, data.y, y_pred, data.sample_weight)

    def compute_loss(
        self,
        x: Buffer = None,
        y: Buffer = None,
        y_pred: Buffer = None,
        sample_weight: Buffer = None,
        training: bool = True,
    ) -> tuple[Buffer, Buffer | None]:
        """Return the loss and its gradient. Override it for a loss of your own.

        Args:
            x: (rows, *input_shape) inputs; not used here.
            y: targets, as the loss takes them.
            y_pred: what `forward` returned.
            sample_weight: (rows,) weights of the samples, or None.
            training: whether a gradient is needed.

        Returns:
            (1,) the loss summed over this rank's samples, float64 (one of your own may be of the backend's dtype),
            and its gradient in y_pred, of that shape; None if not training. Neither is divided: `apply_gradients`
            divides by the samples of all ranks. The penalties of regularizers are in the loss, once for each sample;
            `apply_gradients` adds their gradients.

        Raises:
            ConfigError: `compile` was given no loss, or one that is divided by something else than samples.
        """
        return self._explicit().loss_and_gradient(y, y_pred, sample_weight, training)

    def compute_metrics(self, x: Buffer, y: Buffer, y_pred: Buffer, sample_weight: Buffer = None) -> StepLog:
        """Update the metrics that `compile` was given; return their results and the mean loss.

        Args:
            x: as in `compute_loss`.
            y: as in `compute_loss`.
            y_pred: as in `compute_loss`.
            sample_weight: (rows,) or None, for weighted metrics.
        """
        self._explicit().measure(y, y_pred, sample_weight)
        return self.results()

    # To call

    @property
    def ops(self) -> Backend:
        """The device's ops."""
        return self._explicit().backend

    def forward(self, x: Buffer, training: bool = False) -> Buffer:
        """Run the layers.

        Args:
            x: (rows, *input_shape), of the backend's dtype; it is copied.
            training: keep what `backward` needs, and let random layers draw.

        Returns:
            (rows, *output_shape), without the last activation where the compiled loss computes that itself (softmax
            for "sparse_categorical_crossentropy"). It is valid until the model's next forward pass.

        Raises:
            ConfigError: x has another shape.
        """
        return self._explicit().forward(x, training)

    def backward(self, dy: Buffer | None, *, input_gradient: bool = False, frozen: bool = False) -> Buffer | None:
        """Run the layers backwards, once for each `forward(x, training=True)`.

        The gradients of the parameters add to those of earlier calls since the last `apply_gradients`.

        Args:
            dy: (rows, *output_shape) gradient of the loss, summed over samples, in the output.
            input_gradient: compute the gradient in the input as well.
            frozen: leave the gradients of the parameters out, as for a model that is not to be updated.

        Returns:
            (rows, *input_shape) the gradient in the input, if asked for; valid until the next pass.

        Raises:
            ConfigError: no forward pass in training, or dy has another shape.
        """
        if dy is None:
            raise ConfigError("backward: the gradient is None; compute_loss(..., training=True) returns one")
        return self._explicit().backward(dy, input_gradient=input_gradient, frozen=frozen)

    def apply_gradients(self, rows: float | None = None) -> None:
        """Sum the gradients over the ranks, divide them, update the parameters. Collective.

        Args:
            rows: this rank's share of what the summed gradients are divided by; by default the rows of the model's
                last backward pass.

        Raises:
            ConfigError: `compile` was not called.
        """
        self._explicit().apply_gradients(rows)

    def results(self) -> dict[str, Reading]:
        """Return the mean loss and the compiled metrics by name, not read yet."""
        return {one.name: one.result() for one in [self.loss_tracker, *self._explicit().measured]}

    @property
    def parameters(self) -> dict[str, Buffer]:
        """The parameters by name ("dense/kernel"), in their own memory."""
        replica = self._explicit()
        return replica.architecture.layout.views(replica.params)

    @property
    def gradients(self) -> dict[str, Buffer]:
        """The gradients by name, summed over this rank's samples; what is added to them takes part in the update."""
        return self._explicit().gradients()

    def buffer(self, name: str, shape: tuple[int, ...], dtype: Any = None) -> Buffer:
        """Return memory on the device that is kept from step to step.

        Args:
            name: another name is other memory; the first call zeroes it.
            shape: its dimensions, of which the first may change from call to call.
            dtype: by default the backend's.
        """
        return self._explicit().buffer(name, tuple(shape), dtype)

    def random_normal(self, name: str, rows: int, features: int, first_row: int = 0) -> Buffer:
        """Return standard normal numbers, other ones in every call, the same on any number of ranks.

        Args:
            name: of the memory, as in `buffer`.
            rows: of this rank.
            features: numbers a row.
            first_row: place of the first row in the global batch (`data.first_row`).
        """
        return self._explicit().random_normal(name, rows, features, first_row)

    # For the loop

    @property
    def has_own_steps(self) -> bool:
        """Whether a subclass overrides any of the steps; else they run fused, with nothing between them."""
        return any(getattr(type(self), name) is not getattr(Steps, name) for name in _STEPS)

    def parts(self) -> list["Steps"]:
        """Return the models that are attributes of this one, in the order of their names' assignment."""
        return [part for part in vars(self).values() if isinstance(part, Steps)]

    def _trackers(self) -> list[Tracker]:
        """Return all trackers of this model and its parts, whose replicas are there."""
        own = [one for one in vars(self).values() if isinstance(one, Tracker)]
        return [*own, *self._explicit().measured, *(one for part in self.parts() for one in part._trackers())]

    def _loss(self, data: StepData, y_pred: Buffer, *, training: bool) -> tuple[Buffer, Buffer | None]:
        found = self.compute_loss(data.x, data.y, y_pred, data.sample_weight, training=training)
        if isinstance(found, tuple) and len(found) == 2:
            return found
        raise ConfigError(
            "compute_loss: expected (loss, gradient) to be returned, the loss summed over the samples and its gradient "
            f"in y_pred, found {type(found).__name__}"
        )

    # What `Sequential` supplies

    def _share_parameters(self, comm: Communicator) -> None:
        """Give every rank rank 0's parameters. Collective."""
        raise NotImplementedError

    def _explicit(self) -> ExplicitReplica:
        raise NotImplementedError
