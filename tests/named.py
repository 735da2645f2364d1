"""Objects of each kind that Keras' scripts subclass, with attributes of the scripts' own."""

from types import SimpleNamespace
from typing import Any

import numpy as np

X, Y = np.ones((4, 3), np.float32), np.zeros((4, 2), np.float32)


class Mine:
    """Something of the user's, which is nothing that dptrain could use."""


def classes(module: Any) -> SimpleNamespace:
    """Return a user's classes of each kind."""

    class Doubling(module.layers.Layer):
        def build(self, input_shape):
            self.factor = self.add_weight((1,), initializer="ones", name="factor")

        def call(self, inputs):
            return inputs * self.factor

    class Small(module.Model):
        def __init__(self):
            super().__init__()
            self.dense = module.layers.Dense(2)

        def call(self, inputs):
            return self.dense(inputs)

    class Absolute(module.losses.Loss):
        def call(self, y_true, y_pred):
            return module.ops.abs(y_true - y_pred)

    class Counting(module.metrics.Metric):
        def __init__(self):
            super().__init__(name="counting")
            self.total = self.add_variable((), "zeros", name="total")

        def update_state(self, y_true, y_pred, sample_weight=None):
            self.total.assign(self.total + 1)

        def result(self):
            return self.total + 0.0  # JAX refuses a variable as the result of a traced function

        def reset_state(self):
            self.total.assign(0.0)

    class Epochs(module.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.seen = epoch

    return SimpleNamespace(Doubling=Doubling, Small=Small, Absolute=Absolute, Counting=Counting, Epochs=Epochs)


def parts(module: Any, attributes: dict[str, list[str]]) -> dict[str, Any]:
    """Return a trained object of each kind, subclasses whose constructors set attributes."""

    def subclass_of(base: type[Any], kind: str) -> type[Any]:
        def construct(self: Any, *arguments: Any, **options: Any) -> None:
            base.__init__(self, *arguments, **options)
            for name in attributes.get(kind, []):
                setattr(self, name, Mine())

        return type(f"Own{kind}", (base,), {"__init__": construct})

    kinds = classes(module)
    layer, dense = subclass_of(kinds.Doubling, "Layer")(), subclass_of(module.layers.Dense, "Dense")(2)
    sequential = subclass_of(module.Sequential, "Sequential")([module.Input((3,)), layer, dense])
    inputs = module.Input((3,))
    functional = subclass_of(module.Model, "Functional")(inputs, module.layers.Dense(2)(inputs))
    subclass = subclass_of(kinds.Small, "Subclass")()
    optimizer, callback = subclass_of(module.optimizers.SGD, "Optimizer")(0.1), subclass_of(kinds.Epochs, "Callback")()
    loss, metric = subclass_of(kinds.Absolute, "Loss")(), subclass_of(kinds.Counting, "Metric")()
    for model in (sequential, functional, subclass):
        model.compile("sgd", "mse", metrics=["mae"])
        model.fit(X, Y, batch_size=2, verbose=0)
    sequential.compile(optimizer, loss, metrics=[metric])
    sequential.fit(X, Y, batch_size=2, verbose=0, validation_data=(X, Y), callbacks=[callback])
    for model in (sequential, functional, subclass):
        model.evaluate(X, Y, verbose=0)
        model.predict(X, verbose=0)
        model.summary(print_fn=lambda text, **options: None)
    return {
        "Layer": layer,
        "Dense": dense,
        "Sequential": sequential,
        "Functional": functional,
        "Subclass": subclass,
        "Optimizer": optimizer,
        "Loss": loss,
        "Metric": metric,
        "Callback": callback,
    }
