"""What of Keras is not there says so."""

import pytest

import dptrain as dp


@pytest.mark.parametrize(
    ("module", "name", "message"),
    [
        (dp, "Model", "not supported: dptrain.Model; did you mean "),
        (dp.layers, "Conv2D", r"not supported: layers.Conv2D; known: Activation, .*Softmax"),
        (dp.layers, "Densse", "not supported: layers.Densse; did you mean 'Dense'"),
        (dp.losses, "KLDivergence", "not supported: losses.KLDivergence; known: "),
        (dp.metrics, "AUC", "not supported: metrics.AUC; known: "),
        (dp.optimizers, "Nadam", "not supported: optimizers.Nadam; did you mean 'Adam'"),
        (dp.optimizers.schedules, "Halving", "not supported: optimizers.schedules.Halving; known: "),
        (dp.initializers, "STFT", "not supported: initializers.STFT; known: "),
        (dp.callbacks, "RemoteMonitor", "not supported: callbacks.RemoteMonitor"),
    ],
)
def test_a_name_that_is_not_there(module, name, message):
    assert not hasattr(module, name)
    with pytest.raises(AttributeError, match=message):
        getattr(module, name)
