"""The scripts under examples/, as a user starts them, alone and with two ranks."""

import functools
import re
import wave

import numpy as np
import pytest
import safetensors.numpy
from PIL import Image

from tests.conftest import ROOT
from tests.emulated import emulated_ranks, inside_emulator
from tests.launching import python
from tests.sample import sample

EXAMPLES = ROOT / "examples"


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(("name", "least", "ranks"), [("fashion_mnist", 0.95, 0), ("mnist_rmsprop", 0.97, 2)])
def test_on_real_digits(mnist_dir, name, least, ranks):
    """Fashion-MNIST has the files and the shapes of MNIST, which is at hand.

    Compiled, since two ranks that compute by NumPy take three times the CPU time.
    """
    arguments = [str(EXAMPLES / f"{name}.py"), "--data-dir", str(mnist_dir), "--epochs", "2"]
    done = python(ranks, *arguments, timeout=240, DPTRAIN_JIT_COMPILE=None)
    assert (done.code, done.err) == (0, "")
    (accuracy,) = re.findall(r"[Tt]est accuracy: ([0-9.]+)", done.out)  # printed once, whatever the number of ranks
    assert float(accuracy) > least


@functools.cache
def started(ranks: int, name: str, *arguments: str) -> list[str]:
    """Return the lines that an example prints."""
    done = python(ranks, str(EXAMPLES / f"{name}.py"), *arguments, timeout=120)
    assert (done.code, done.err) == (0, "")
    return done.out.splitlines()


@pytest.mark.long
def test_two_models_trained_in_turn():
    options = ["--dtype", "float64", "--steps", "5", "--batch-size", "10", "--width", "4"]
    alone, together = (started(ranks, "gan", *options) for ranks in (0, 3))
    assert together == alone
    losses = [[float(number) for number in re.findall(r"_loss ([0-9.]+)", line)] for line in alone[:-1]]
    assert np.array(losses).shape == (4, 2)
    assert 0 < losses[-1][0] < losses[0][0] < 0.8  # the discriminator learns


@pytest.mark.parametrize("name", sample(["resnet", "unet"], 2))
def test_networks_for_pictures(name):
    options = ["--dtype", "float64", "--samples", "60", "--batch-size", "20", "--epochs", "2", "--width", "4"]
    alone, together = (started(ranks, name, *options) for ranks in (0, 2))
    assert together == alone
    first, last = (float(re.findall(r" loss ([0-9.]+)", line)[0]) for line in alone)
    assert last < first


SEQUENCES = {
    "sentiment": ["--samples", "60", "--length", "7", "--units", "3"],
    "addition": ["--samples", "80", "--digits", "1", "--units", "6"],
    "speech": ["--samples", "40", "--rate", "2400", "--units", "6"],
    "forecast": ["--hours", "120", "--past", "24", "--ahead", "6", "--units", "3"],
}


@pytest.mark.parametrize("name", sample(SEQUENCES, 3))
def test_sequences(name):
    options = [*SEQUENCES[name], "--dtype", "float64", "--batch-size", "20", "--epochs", "3"]
    alone, together = (started(ranks, name, *options) for ranks in (0, 2))
    assert together == alone
    losses = [float(loss) for loss in re.findall(r"^epoch .*loss ([0-9.]+)", "\n".join(alone), re.MULTILINE)]
    assert len(losses) == 3
    assert losses[-1] < losses[0]


@pytest.mark.long
def test_commands_in_a_folder_of_sounds(tmp_path):
    rng = np.random.default_rng(0)
    for name, pitch in (("high", 900), ("low", 200)):
        (tmp_path / name).mkdir()
        for number in range(10):
            tone = 9000 * np.sin(2 * np.pi * pitch * rng.uniform(0.9, 1.1) * np.arange(12000 + 500 * number) / 16000)
            with wave.open(str(tmp_path / name / f"{number}.wav"), "wb") as file:
                file.setparams((1, 2, 16000, 0, "NONE", ""))
                file.writeframes(tone.astype("<i2").tobytes())
    options = ["--wav", str(tmp_path), "--dtype", "float64", "--batch-size", "4", "--epochs", "3", "--units", "4"]
    alone, together = (started(ranks, "speech", *options) for ranks in (0, 2))
    assert together == alone
    losses = [float(loss) for loss in re.findall(r"loss ([0-9.]+)", "\n".join(alone))]
    assert len(losses) == 4
    assert losses[2] < losses[0]


@pytest.mark.long
def test_a_network_for_a_folder_of_pictures(tmp_path):
    for name, shade in (("dark", 20), ("light", 200)):
        (tmp_path / name).mkdir()
        for number in range(8):
            Image.new("RGB", (20 + number, 30), (shade, shade, number)).save(tmp_path / name / f"{number}.png")
    options = ["--pictures", str(tmp_path), "--dtype", "float64", "--batch-size", "5", "--epochs", "2", "--width", "2"]
    alone, together = (started(ranks, "resnet", *options) for ranks in (0, 2))
    assert together == alone
    assert len(alone) == 2


@pytest.mark.long
@pytest.mark.parametrize("name", ["siamese", "distillation"])
def test_models_of_several_towers(name):
    width = "4" if name == "distillation" else "2"  # the student has a quarter of it
    options = ["--dtype", "float64", "--images", "60", "--epochs", "2", "--width", width]
    alone, together = (started(ranks, name, *options) for ranks in (0, 2))
    assert together == alone
    losses = [float(number) for number in re.findall(r": loss ([0-9.]+)", "\n".join(alone))]
    assert len(losses) == 2
    assert 0 < losses[-1] < losses[0] * (0.95 if name == "siamese" else 1.0)  # of two steps alone


@pytest.mark.parametrize(("name", "most"), sample([("custom_layer", 0.2), ("custom_op", 0.05)], 2, first=1))
def test_a_layer_and_an_op_of_ones_own(name, most):
    alone, together = (started(ranks, name) for ranks in (0, 2))
    assert together == alone
    (loss,) = re.findall(r"loss: .* -> ([0-9.]+)", "\n".join(alone))
    assert float(loss) < most


@pytest.mark.long
def test_an_ensemble_is_better_calibrated_than_its_members():
    options = ["--members", "3", "--epochs", "4", "--samples", "2000"]
    alone, together = (started(ranks, "ensemble", *options) for ranks in (0, 2))
    scores = [[float(number) for number in re.findall(r" (\d\.\d+)", line)] for line in alone[-3:-1]]
    (_, member, _), (accuracy, ensemble, _) = scores
    assert ensemble < member  # as the logarithm is concave
    assert accuracy > 0.6
    assert together[-4:] == alone[-4:]


@pytest.mark.long
@pytest.mark.skipif(inside_emulator(), reason="starts the emulator itself")
@pytest.mark.parametrize(
    ("name", "ranks", "arguments"),
    sample(
        [
            ("gan", 2, ["--steps", "2", "--epochs", "2", "--width", "2"]),
            ("custom_op", 2, ["--epochs", "1"]),
            ("siamese", 0, ["--epochs", "1", "--images", "40", "--width", "1"]),
        ],
        3,
        first=1,
    ),
)
def test_on_the_emulated_gpu(name, ranks, arguments):
    """Queues are executed in random orders that the streams allow: models of one step must share theirs.

    The layer of `custom_layer` is compared in tests/ops/test_custom_ops.py.
    """
    cpu = started(0, name, *arguments)
    options = {"EMULATOR_DEVICES": "2", "EMULATOR_STREAMS": "random"}
    done = emulated_ranks(ranks, str(EXAMPLES / f"{name}.py"), "--device", "cuda", *arguments, **options)
    assert (done.code, done.err) == (0, "")
    cuda = done.out.splitlines()
    assert len(cuda) == len(cpu)
    for on_cuda, on_cpu in zip(cuda, cpu, strict=True):
        if on_cuda.startswith("checked:"):
            assert "cuda float32" in on_cuda
            assert on_cpu in on_cuda or "gradient" in on_cpu
        else:
            mine, others = ([float(number) for number in re.findall(r"-?\d+\.\d*", line)] for line in (on_cuda, on_cpu))
            assert mine == pytest.approx(others, abs=0.0101)


def test_a_transformer_that_classifies_texts():
    options = ["--dtype", "float64", "--reviews", "100", "--epochs", "2", "--width", "8", "--length", "12"]
    alone, together = (started(ranks, "text_transformer", *options) for ranks in (0, 2))
    assert together == alone
    first, last = (float(re.findall(r": loss ([0-9.]+)", line)[0]) for line in alone[:2])
    assert last < first


@pytest.mark.long
def test_a_transformer_that_writes(tmp_path):
    (tmp_path / "text").write_text("abc abd abe, the cat sat on the mat and the rat.\n")
    sizes = ["--length", "8", "--width", "8", "--heads", "2", "--blocks", "1", "--batch-size", "10", "--count", "6"]
    options = ["--dtype", "float64", "--text", str(tmp_path / "text"), "--epochs", "2", *sizes]
    alone, together = (started(ranks, "gpt", *options) for ranks in (0, 2))
    assert together == alone
    first, last = (float(re.findall(r": loss ([0-9.]+)", line)[0]) for line in alone[:2])
    assert last < first
    assert len(alone[2]) == 7


GPT2 = [*("--vocabulary", "256", "--context", "16", "--width", "8", "--blocks", "2", "--heads", "2"), "--count", "6"]


@pytest.mark.long
def test_gpt2_from_its_own_weights_and_on_ranks(tmp_path):
    weights = str(tmp_path / "model.safetensors")
    options = [*GPT2, *("--dtype", "float64", "--epochs", "2", "--warmup", "2", "--accumulate", "2")]
    alone, together = (started(ranks, "gpt2", *options, "--save", weights) for ranks in (0, 2))
    assert together == alone
    first, last = (float(re.findall(r" loss ([0-9.]+)", line)[0]) for line in alone[:2])
    assert last < first
    assert started(0, "gpt2", *GPT2, "--epochs", "0", "--weights", weights)[-1] == alone[-1]


def test_weights_of_gpt2_are_hugging_faces(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import gpt2

    rng = np.random.default_rng(0)
    model = gpt2.make_gpt2(50, 6, 8, 2, 2)
    sizes = {"c_attn": (8, 24), "attn.c_proj": (8, 8), "c_fc": (8, 32), "mlp.c_proj": (32, 8), "wte": (50, 8)}
    sizes |= {"wpe": (6, 8)}
    names = gpt2.weights_by_name(model)
    shapes = {
        name: next((size for part, size in sizes.items() if part in name), (8,)) for name in names if "weight" in name
    }
    shapes |= {name: shapes[name.replace("bias", "weight")][-1:] for name in names if "bias" in name}
    arrays = {f"transformer.{name}": rng.normal(0, 0.3, shape).astype("f") for name, shape in shapes.items()}
    safetensors.numpy.save_file(arrays, tmp_path / "hub.safetensors")
    gpt2.read(model, tmp_path / "hub.safetensors")
    gpt2.write(model, tmp_path / "written.safetensors")
    written = safetensors.numpy.load_file(tmp_path / "written.safetensors")
    assert written.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(written[name], array)
    ids = rng.integers(0, 50, (3, 6))
    logits = gpt2_logits({name.removeprefix("transformer."): a.astype("d") for name, a in arrays.items()}, ids, 2)
    np.testing.assert_allclose(model.predict(ids, verbose=0), logits, rtol=1e-5, atol=1e-5)


def gpt2_logits(arrays, ids, heads):
    """Return GPT-2's logits, as A. Radford et al. have it in their `model.py`."""

    def normed(x, name):
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
        return x * arrays[f"{name}.weight"] + arrays[f"{name}.bias"]

    def product(x, name):
        return x @ arrays[f"{name}.weight"] + arrays[f"{name}.bias"]

    length = ids.shape[1]
    x = arrays["wte.weight"][ids] + arrays["wpe.weight"][:length]
    for block in range(2):
        q, k, v = np.split(product(normed(x, f"h.{block}.ln_1"), f"h.{block}.attn.c_attn"), 3, -1)
        q, k, v = (part.reshape(*part.shape[:2], heads, -1).transpose(0, 2, 1, 3) for part in (q, k, v))
        scores = q @ k.transpose(0, 1, 3, 2) / np.sqrt(q.shape[-1])
        scores = np.exp(np.where(np.tri(length, dtype=bool), scores, -np.inf))
        seen = (scores / scores.sum(-1, keepdims=True) @ v).transpose(0, 2, 1, 3).reshape(x.shape)
        x = x + product(seen, f"h.{block}.attn.c_proj")
        y = product(normed(x, f"h.{block}.ln_2"), f"h.{block}.mlp.c_fc")
        y = 0.5 * y * (1 + np.tanh(np.sqrt(2 / np.pi) * (y + 0.044715 * y**3)))
        x = x + product(y, f"h.{block}.mlp.c_proj")
    return normed(x, "ln_f") @ arrays["wte.weight"].T
