"""LoRA: what is computed, what is trained and kept, and what files and exported programs have."""

import copy
import json

import numpy as np
import pytest

import dptrain as dp
from dptrain import layers, ops
from dptrain.backend.cpu import compile as compiling
from dptrain.backend.cpu.compiled import CompiledExecutable
from dptrain.errors import ConfigError
from dptrain.models import load_model
from dptrain.program.execute import HostMemory, evaluate
from dptrain.program.sharding.mesh import ALL_REDUCE
from dptrain.program.sharding.placement import place
from dptrain.pruning import prune_low_magnitude, sparsity, strip_pruning
from tests.unit.layers.cases import Case
from tests.unit.layers.test_every_layer import program_of

rng = np.random.default_rng(7)

# A layer, the shape of a sample, and what NumPy makes of inputs and a matrix.
LAYERS = {
    "Dense": (lambda: layers.Dense(3, use_bias=False), (5, 4), lambda x, w: x @ w),
    "EinsumDense": (
        *(lambda: layers.EinsumDense("abc,cde->abde", (None, 3, 2)), (5, 4)),
        lambda x, w: np.einsum("abc,cde->abde", x, w),
    ),
    "EinsumDense, the kernel's last axis within": (
        *(lambda: layers.EinsumDense("ab...,bc->ac...", 3), (5, 4)),
        lambda x, w: np.einsum("ab...,bc->ac...", x, w),
    ),
    "EinsumDense, the kernel's last axis summed over": (
        *(lambda: layers.EinsumDense("abc,dc->abd", (None, 3)), (5, 4)),
        lambda x, w: np.einsum("abc,dc->abd", x, w),
    ),
    "Embedding": (lambda: layers.Embedding(6, 3), (5,), lambda x, w: w[x.astype(int)]),
    "Conv1D": (
        *(lambda: layers.Conv1D(3, 2, use_bias=False), (5, 4)),
        lambda x, w: sum(x[:, step : step + 4] @ w[step] for step in range(2)),
    ),
}
every_layer = pytest.mark.parametrize("name", LAYERS)


def adapted(name, dtype="float64", rank=2, alpha=3.0):
    """Return a layer with LoRA and a product that is not 0, an input, and the layer's frozen matrix and factors."""
    make, shape, _ = LAYERS[name]
    layer = make()
    x = rng.integers(0, 6, (7, *shape)).astype("float32") if name == "Embedding" else rng.normal(size=(7, *shape))
    layer._set_dtype(dtype)
    layer(x)
    layer.enable_lora(rank, alpha)
    matrix, a, b = layer.weights
    b.assign(rng.normal(size=b.shape))
    return layer, x, matrix, a, b


def summed(matrix, a, b, scale=1.5):
    return matrix.numpy() + scale * np.tensordot(a.numpy(), b.numpy(), 1)


def stack():
    """Return a compiled model with an embedding, a convolution and a dense layer, all three built."""
    model = dp.Sequential(
        [
            layers.Input((6,), dtype="int32"),
            layers.Embedding(9, 4),
            layers.Conv1D(5, 2),
            layers.Flatten(),
            layers.Dense(3, kernel_regularizer="l2"),
        ],
        seed=5,
    )
    model.compile("adam", "mse", device="cpu")
    return model


X, Y = rng.integers(0, 9, (23, 6)), rng.normal(size=(23, 3))
ADAPTED = [0, 1, 3]


def trained(model, epochs=2):
    model.fit(X, Y, batch_size=5, epochs=epochs, verbose=0)
    return model


def enabled(model, rank=2, alpha=None):
    for index in ADAPTED:
        model.layers[index].enable_lora(rank, alpha)
    return model


@every_layer
@pytest.mark.parametrize("dtype", ["float64", "float32", "mixed_bfloat16"])
def test_outputs_are_those_of_the_matrix_and_the_product(name, dtype):
    layer, x, matrix, a, b = adapted(name, dtype)
    expected = LAYERS[name][2](x, summed(matrix, a, b))
    tolerance = {"float64": 1e-13, "float32": 1e-6, "mixed_bfloat16": 0.03}[dtype]
    scale = np.abs(expected).max()
    np.testing.assert_allclose(np.asarray(layer(x), "float64"), expected, rtol=0, atol=tolerance * scale)
    read = layer.embeddings if name == "Embedding" else layer.kernel
    assert read.dtype == layer.compute_dtype
    np.testing.assert_allclose(np.asarray(read, "float64"), summed(matrix, a, b), rtol=0, atol=tolerance * scale)


@every_layer
def test_gradients_are_those_of_the_factors_alone(name):
    layer, x, matrix, a, b = adapted(name)
    pull = rng.normal(size=LAYERS[name][2](x, summed(matrix, a, b)).shape)
    ops.sum(layer(x) * pull).backward()
    assert matrix._gradient is None
    for factor in (a, b):
        step = rng.normal(size=factor.shape)
        moved = copy.deepcopy({"a": a.numpy(), "b": b.numpy()})
        values = []
        for sign in (1, -1):
            factor.assign(moved["a" if factor is a else "b"] + sign * 1e-6 * step)
            values.append(float(ops.sum(layer(x) * pull)))
        factor.assign(moved["a" if factor is a else "b"])
        np.testing.assert_allclose(np.sum(factor._gradient.numpy() * step), (values[0] - values[1]) / 2e-6, rtol=1e-6)


@pytest.mark.skipif(compiling.compiler() is None, reason="no C++ compiler")
@every_layer
def test_generated_code_computes_what_numpy_computes(monkeypatch, name):
    monkeypatch.setattr(compiling, "OPTIONS", ("-O0", *compiling.OPTIONS[1:]))
    layer, x, *_ = adapted(name)
    make, shape, _ = LAYERS[name]
    case = Case(make, shape, layer(x).shape[1:], integers=6 if name == "Embedding" else 0)
    program, values = program_of(case, layer)
    expected, _ = evaluate(program, values)
    executable = CompiledExecutable(program, HostMemory(), values)
    executable.run()
    for key, value in executable.outputs.items():
        np.testing.assert_allclose(value, expected[key], rtol=1e-11, atol=1e-12, err_msg=key)


@every_layer
def test_weights_have_keras_names_shapes_and_order(name):
    make, shape, _ = LAYERS[name]
    layer = make()
    with pytest.raises(AttributeError, match="You must build the layer before accessing"):
        _ = layer.embeddings if name == "Embedding" else layer.kernel
    layer(np.zeros((2, *shape), "float32"))
    assert not layer.lora_enabled
    (matrix,) = layer.weights
    assert (layer.embeddings if name == "Embedding" else layer.kernel) is matrix
    layer.enable_lora(rank=2)
    assert (layer.lora_enabled, layer.lora_rank, layer.lora_alpha) == (True, 2, 2)
    a, b = layer.trainable_weights
    assert layer.weights == [matrix, a, b]
    assert layer.non_trainable_weights == [matrix]
    assert [weight.name for weight in (a, b)] == [f"lora_{matrix.name}_a", f"lora_{matrix.name}_b"]
    assert [weight.shape for weight in (a, b)] == [(*matrix.shape[:-1], 2), (2, matrix.shape[-1])]
    assert a.path == f"{layer.path}/lora_{matrix.name}_a"
    assert not b.numpy().any()
    assert a.numpy().any()


@pytest.mark.parametrize(
    ("policy", "dtype"),
    [("float32", "float32"), ("mixed_float16", "float32"), ("bfloat16", "float32"), ("float64", "float64")],
)
def test_factors_are_never_halves(policy, dtype):
    layer = layers.Dense(3, lora_rank=2, dtype=policy)
    layer.build((None, 4))
    assert [layer.lora_kernel_a.dtype, layer.lora_kernel_b.dtype] == [dtype, dtype]
    layer.dtype_policy = "float16"
    assert layer._kernel.dtype == "float16"
    assert [layer.lora_kernel_a.dtype, layer.lora_kernel_b.dtype] == ["float32", "float32"]
    assert layer(np.ones((2, 4))).dtype == "float16"


def test_what_cannot_be_is_refused_in_keras_words():
    layer = layers.Dense(3)
    with pytest.raises(ConfigError, match=r"^Cannot enable lora on a layer that isn't yet built\.$"):
        layer.enable_lora(2)
    layer.build((None, 4))
    for rank in (0, -1, 1.5, True):
        with pytest.raises(ConfigError, match=f"`rank`, expected a positive integer. Received: rank={rank}"):
            layer.enable_lora(rank)
    for alpha in ("2", float("nan"), True):
        with pytest.raises(ConfigError, match="lora_alpha: expected a finite number"):
            layer.enable_lora(2, alpha)
    assert len(layer.weights) == 2
    assert not layer.lora_enabled
    layer.enable_lora(2)
    with pytest.raises(ConfigError, match=r"^lora is already enabled. This can only be done once per layer\.$"):
        layer.enable_lora(2)
    constrained = layers.Dense(3, kernel_constraint="max_norm", lora_rank=2)
    with pytest.raises(ConfigError, match=r"^Lora is incompatible with kernel constraints. .*`kernel_constraint`"):
        constrained.build((None, 4))
    with pytest.raises(ConfigError, match=r"^Lora is incompatible with embedding constraints. .*`embeddings_constr"):
        layers.Embedding(3, 2, embeddings_constraint="max_norm").enable_lora(2)
    with pytest.raises(ConfigError, match="SpectralNormalization of layer 'dense', which has LoRA"):
        layers.SpectralNormalization(layers.Dense(3, lora_rank=2)).build((None, 4))


def test_pruning_and_lora_do_not_go_together():
    model = stack()
    prune_low_magnitude(model, layers=["dense"])
    with pytest.raises(ConfigError, match=r"LoRA is incompatible with pruning: .* of layer 'dense'.*strip_pruning"):
        model.layers[-1].enable_lora(2)
    strip_pruning(model)
    enabled(model)
    with pytest.raises(ConfigError, match="no layer has a trainable kernel"):
        prune_low_magnitude(model)
    assert sparsity(model) == 0  # B is all zeros


def test_configurations_have_lora_where_it_is_enabled():
    layer = layers.Dense(3, lora_rank=2, lora_alpha=5)
    assert (layer.lora_rank, layer.lora_alpha, layer.lora_enabled) == (2, 5, False)
    config = json.loads(json.dumps(layer.get_config()))
    assert (config["lora_rank"], config["lora_alpha"]) == (2, 5)
    restored = layers.Dense.from_config(config)
    restored.build((None, 4))
    assert (restored.lora_rank, restored.lora_alpha, restored.lora_enabled) == (2, 5, True)
    assert not {"lora_rank", "lora_alpha"} & set(layers.Dense(3).get_config())
    later = layers.Conv2D(3, 2)
    later.build((None, 4, 4, 1))
    later.enable_lora(2, 0.5)
    assert (later.get_config()["lora_rank"], later.get_config()["lora_alpha"]) == (2, 0.5)


def test_a_copy_has_lora_and_factors_of_its_own():
    model = enabled(stack(), alpha=3)
    copied = dp.models.clone_model(model)
    for index in ADAPTED:
        layer, other = model.layers[index], copied.layers[index]
        assert (other.lora_enabled, other.lora_alpha) == (True, 3)
        assert other.trainable_weights[0] is not layer.trainable_weights[0]
        assert [weight.shape for weight in other.weights] == [weight.shape for weight in layer.weights]


def test_the_first_factor_is_a_function_of_the_models_seed():
    def first_factors(seed, before):
        for _ in range(before):  # what else the process has made does not matter
            layers.Dense(2).build((None, 2))
        model = dp.Sequential([layers.Input((4,)), layers.Dense(4), layers.Dense(4)], seed=seed)
        for layer in model.layers:
            layer.enable_lora(2)
        return [layer.lora_kernel_a.numpy() for layer in model.layers]

    one, same, other = first_factors(3, 0), first_factors(3, 2), first_factors(4, 0)
    assert [array.tobytes() for array in one] == [array.tobytes() for array in same]
    assert len({array.tobytes() for array in (*one, *other)}) == 4


def test_only_the_factors_are_trained_and_have_slots():
    model = trained(stack())
    assert len(model.optimizer.variables) == 2 + 2 * 5
    enabled(model)
    frozen = {index: model.layers[index].weights[0].numpy() for index in ADAPTED}
    before = {weight.path: weight.numpy() for weight in model.trainable_weights}
    expected = model.predict(X, verbose=0)
    trained(model)  # without another `compile`
    for index, matrix in frozen.items():
        assert model.layers[index].weights[0].numpy().tobytes() == matrix.tobytes()
    assert len(model.trainable_weights) == 2 + 2 * 3  # biases and factors
    for weight in model.trainable_weights:
        assert (weight.numpy() != before[weight.path]).any(), weight.path
    assert len(model.optimizer.variables) == 2 + 2 * 8
    assert {variable.shape for variable in model.optimizer.variables[2:]} == {
        weight.shape for weight in model.trainable_weights
    }
    assert (model.predict(X, verbose=0) != expected).any()  # nor is the program of before predicted with


def test_steps_are_those_of_plain_numpy():
    model = dp.Sequential([layers.Input((4,)), layers.Dense(3, lora_rank=2, lora_alpha=5)])
    model.compile(dp.optimizers.SGD(0.01), "mse", dtype="float64", device="cpu")
    x, y = rng.normal(size=(20, 4)), rng.normal(size=(20, 3))
    model.layers[0].lora_kernel_b.assign(rng.normal(size=(2, 3)))
    kernel, bias, a, b = model.get_weights()
    for _ in range(3):
        for rows in range(0, 20, 5):
            dy = 2 * (x[rows : rows + 5] @ (kernel + 2.5 * a @ b) + bias - y[rows : rows + 5]) / 15
            dk = x[rows : rows + 5].T @ dy
            bias, a, b = bias - 0.01 * dy.sum(0), a - 0.025 * dk @ b.T, b - 0.025 * a.T @ dk
    model.fit(x, y, batch_size=5, epochs=3, shuffle=False, verbose=0)
    for actual, expected in zip(model.get_weights(), (kernel, bias, a, b), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-12, atol=1e-13)


def test_freezing_the_layer_and_training_it_again_leaves_the_matrix_frozen():
    layer = layers.Dense(3, trainable=False)
    layer.build((None, 4))
    layer.enable_lora(2)
    assert layer.trainable_weights == []
    assert [weight.name for weight in layer.weights] == ["kernel", "bias", "lora_kernel_a", "lora_kernel_b"]
    for _ in range(2):
        layer.trainable = True
        assert [weight.name for weight in layer.trainable_weights] == ["bias", "lora_kernel_a", "lora_kernel_b"]
        layer.trainable = False
    assert not any(weight.trainable for weight in layer.weights)


def test_the_order_of_weights_is_that_of_their_making():
    layer = layers.Dense(3)
    layer.build((None, 4))
    layer.kernel.trainable = False
    assert [weight.name for weight in layer.weights] == ["kernel", "bias"]


@pytest.mark.parametrize("ending", ["model.keras", "model.weights.h5", "model.safetensors", "model.h5"])
def test_files_bring_back_what_was_predicted(tmp_path, ending):
    model = trained(enabled(stack(), alpha=3))
    expected = model.predict(X, verbose=0)
    (model.save_weights if "weights" in ending or "safetensors" in ending else model.save)(tmp_path / ending)
    if ending in ("model.keras", "model.h5"):
        other = load_model(tmp_path / ending)
        assert all(other.layers[index].lora_enabled for index in ADAPTED)
        if ending == "model.h5":  # Keras 2's form has the factors
            assert [a.tobytes() for a in other.get_weights()] == [a.tobytes() for a in model.get_weights()]
    else:
        other = enabled(stack(), rank=1)
        other.load_weights(tmp_path / ending)
        plain = stack()
        plain.load_weights(tmp_path / ending)
        np.testing.assert_allclose(plain.predict(X, verbose=0), expected, rtol=1e-4, atol=1e-5)
        plain.save_weights(tmp_path / f"plain {ending}", overwrite=True)
        model.load_weights(tmp_path / f"plain {ending}")  # which had another product
        np.testing.assert_allclose(model.predict(X, verbose=0), expected, rtol=1e-4, atol=1e-5)
        assert not model.layers[-1].lora_kernel_b.numpy().any()
    np.testing.assert_allclose(other.predict(X, verbose=0), expected, rtol=1e-4, atol=1e-5)
    before = other.layers[-1].trainable_weights
    values = [weight.numpy() for weight in before]
    trained(other)  # both factors are: not both are 0
    for weight, value in zip(before, values, strict=True):
        assert (weight.numpy() != value).any(), weight.path


def test_the_factor_that_begins_at_zero_does_after_reading():
    layer = layers.Dense(3)
    layer.build((None, 4))
    layer.enable_lora(2, a_initializer="zeros", b_initializer="he_normal")
    layer.lora_kernel_a.assign(np.ones((4, 2)))
    b, store = layer.lora_kernel_b.numpy(), {}
    layer.save_own_variables(store)
    assert list(store) == ["0", "1"]
    merged = np.asarray(layer.kernel)
    layer.load_own_variables(store)
    np.testing.assert_allclose(layer._kernel.numpy(), merged, rtol=1e-6)
    assert not layer.lora_kernel_a.numpy().any()
    assert layer.lora_kernel_b.numpy().tobytes() == b.tobytes()


def test_a_file_need_not_hold_the_factors_of_a_rank_up_to_the_matrixs(tmp_path):
    model = dp.Sequential([layers.Input((30,)), layers.Dense(30, use_bias=False, lora_rank=30)])
    model.save(tmp_path / "model.keras")
    assert load_model(tmp_path / "model.keras").layers[0].lora_kernel_a.shape == (30, 30)
    config = model.get_config()
    config["layers"][-1]["config"]["lora_rank"] = 10**9
    huge = json.dumps({"class_name": "Sequential", "config": config})
    with pytest.raises(ConfigError, match="which the file cannot hold"), dp.layers.weight.without_values(10**6):
        dp.models.model_from_json(huge)


@pytest.mark.parametrize("form", ["program", "onnx"])
def test_exported_programs_have_the_sum_alone(tmp_path, form):
    if form == "onnx":
        pytest.importorskip("onnx")
    model = trained(enabled(stack()))
    model.export(tmp_path / "model", form)
    content = (tmp_path / "model").read_bytes()
    assert b"lora" not in content
    assert b"dense/kernel" in content
    if form == "program":
        program = dp.saving.load_program(tmp_path / "model", device="cpu")
        np.testing.assert_allclose(program(X), model.predict(X, verbose=0), rtol=1e-4, atol=1e-5)
    else:
        runtime = pytest.importorskip("onnxruntime")
        session = runtime.InferenceSession(content)
        (actual,) = session.run(None, {session.get_inputs()[0].name: X.astype("int32")})
        np.testing.assert_allclose(actual, model.predict(X, verbose=0), rtol=1e-4, atol=1e-5)
    assert all(model.layers[index].lora_enabled for index in ADAPTED)


def test_training_resumes_with_its_factors_and_slots(tmp_path):
    def run(epochs, folder):
        model = enabled(stack())
        model.compile("adam", "mse", device="cpu")
        model.fit(
            *(X, Y, 5, epochs),
            verbose=0,
            callbacks=[dp.callbacks.BackupAndRestore(tmp_path / folder, delete_checkpoint=False)],
        )
        return model.get_weights()

    whole = run(4, "whole")
    run(2, "parts")
    assert [array.tobytes() for array in run(4, "parts")] == [array.tobytes() for array in whole]


@every_layer
def test_ranks_send_gradients_of_the_factors_alone(name):
    layer, x, matrix, a, b = adapted(name, rank=1)
    make, shape, _ = LAYERS[name]
    program, _ = program_of(Case(make, shape, layer(x).shape[1:], integers=6 if name == "Embedding" else 0), layer)
    sent = [tensor.shape for tensor in place(program).tensors if tensor.op is ALL_REDUCE]
    assert sorted(sent) == sorted([(), a.shape, b.shape])  # and the loss
    assert matrix.shape not in sent


def test_packs_of_runs_train_what_single_runs_train():
    def build(rate=0.01):
        model = dp.Sequential([layers.Input((4,)), layers.Dense(3, "tanh", lora_rank=2), layers.Dense(3)])
        model.layers[1].enable_lora(1)
        model.compile(dp.optimizers.Adam(rate), "mse", device="cpu", jit_compile=False)
        return model

    x = rng.normal(size=(23, 4)).astype("float32")
    y = rng.normal(size=(23, 3)).astype("float32")
    arguments = {"seeds": "0-1", "x": x, "y": y, "verbose": 0, "epochs": 2, "batch_size": 12}
    packed, single = (
        dp.sweep(build, {"rate": [0.01]}, validation_data=(x, y), runs_per_device=runs, **arguments).runs
        for runs in (2, 1)
    )
    assert [run["metrics"] for run in packed] == [run["metrics"] for run in single]
    assert len({run["metrics"]["loss"] for run in packed}) == 2
    assert {run["status"] for run in packed} == {"done"}
