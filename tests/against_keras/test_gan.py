"""examples/gan.py, the DCGAN of Keras' guide, on dptrain and on Keras itself: the same source but for its imports."""

import numpy as np
import pytest

import dptrain as dp
from tests.conftest import ROOT

# Of Keras' own copies of its variables.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
BATCH, STEPS, LATENT = 4, 25, 6


def script(module: str) -> dict:
    """Return the names of the example as it is with another module for dptrain, and noise that depends on the data."""
    source = (ROOT / "examples" / "gan.py").read_text()
    replaced = {
        "import dptrain as keras\nfrom dptrain import layers": f"import {module} as keras\nfrom {module} import layers",
        "keras.random.normal(shape=(batch_size, self.latent_dim), seed=self.seed_generator)": (
            "10 * keras.ops.reshape(real_images, (batch_size, -1))[:, 300 : 300 + self.latent_dim]"
        ),
        "keras.random.uniform((batch_size, 1), seed=self.seed_generator)": "real_images[:, 3, 4]",
    }
    for old, new in replaced.items():
        assert old in source
        source = source.replace(old, new)
    names = {"__name__": "gan"}
    exec(compile(source, "gan.py", "exec"), names)
    return names


@pytest.mark.parametrize("options", [{"jit_compile": False}, {"jit_compile": True}, {"run_eagerly": True}])
def test_the_guide_as_it_is(torch_keras, monkeypatch, options):
    from torch.nn import functional

    for name in ("conv2d", "conv_transpose2d"):  # whose gradients in float64 need kernels in one piece
        torchs = getattr(functional, name)
        contiguous_conv = lambda x, kernel, *args, f=torchs, **kwargs: f(x, kernel.contiguous(), *args, **kwargs)  # noqa: E731
        monkeypatch.setattr(functional, name, contiguous_conv)
    images = np.random.default_rng(0).random((BATCH * STEPS - 1, 28, 28, 1))
    results, start = [], None
    for k in (torch_keras, dp):
        names, losses = script(k.__name__), []
        build_options = {"dtype": "float64", **options} if k is dp else {"run_eagerly": True}
        gan = names["make_gan"](2, LATENT, **build_options)
        start = start or [gan.discriminator.get_weights(), gan.generator.get_weights()]
        gan.discriminator.set_weights(start[0])
        gan.generator.set_weights(start[1])
        each_batch = k.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs, losses=losses: losses.append([logs["d_loss"], logs["g_loss"]])
        )
        history = gan.fit(images, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[each_batch]).history
        results.append(
            (list(history), np.array(losses), [*gan.discriminator.get_weights(), *gan.generator.get_weights()])
        )
    (their_keys, theirs, their_weights), (our_keys, ours, our_weights) = results
    assert our_keys == their_keys
    assert len(ours) == STEPS
    np.testing.assert_allclose(ours, theirs, rtol=1e-9)
    assert abs(theirs[-1] - theirs[0]).max() > 1e-3, "the comparison would say little"
    for mine, expected in zip(our_weights, their_weights, strict=True):
        np.testing.assert_allclose(mine, expected, rtol=1e-7, atol=1e-9)
