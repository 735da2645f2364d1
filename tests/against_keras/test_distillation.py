"""Students of `keras.distillation`: the same losses, logs and weights as in Keras; the same files."""

import keras
import numpy as np
import pytest

import dptrain as dp

pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),  # of Keras' tensors
    pytest.mark.filterwarnings("ignore:Skipping variable loading for optimizer:UserWarning"),
]

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(24, 4)).astype(np.float32), RNG.integers(0, 3, 24)
WEIGHTS = [RNG.normal(size=shape).astype(np.float32) for shape in ((4, 5), (5,), (5, 3), (3,))]
LOSSES = {
    "divergence": lambda d, k: d.LogitsDistillation(loss=k.losses.KLDivergence()),
    "logits": lambda d, k: d.LogitsDistillation(
        temperature=2.0, loss=k.losses.CategoricalCrossentropy(from_logits=True)
    ),
    "outputs": lambda d, k: d.FeatureDistillation(loss="mae"),
    "features": lambda d, k: d.FeatureDistillation("mse", teacher_layer_name="hidden", student_layer_name="hidden"),
}


def network(k, factor):
    layers = [k.layers.Dense(5, "tanh", name="hidden"), k.layers.Dense(3, name="logits")]
    model = k.Sequential([k.Input((4,)), *layers])
    model.set_weights([factor * weight for weight in WEIGHTS])
    return model


def distiller(k, *losses, **options):
    chosen = [LOSSES[name](k.distillation, k) for name in losses]
    model = k.distillation.Distiller(network(k, 1.0), network(k, 0.5), chosen, **options)
    loss = k.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(k.optimizers.SGD(0.1), loss=loss, metrics=["accuracy"])
    return model


@pytest.mark.parametrize(
    ("losses", "options"),
    [
        (("divergence",), {}),
        (("logits",), {"student_loss_weight": 0.2}),
        (("outputs", "features"), {"distillation_loss_weights": [2.0, 0.5]}),
        (("features",), {"student_loss_weight": 0.1}),
        (("divergence",), {"student_loss_weight": 1.0}),
    ],
    ids=str,
)
def test_training(losses, options):
    results = []
    for k in (dp, keras):
        model = distiller(k, *losses, **options)
        before = [np.array(weight) for weight in model.teacher.get_weights()]
        logs = model.fit(X, Y, epochs=3, batch_size=8, shuffle=False, verbose=0).history
        evaluated = model.evaluate(X, Y, verbose=0, batch_size=24, return_dict=True)
        results.append((logs, evaluated, model.student.get_weights(), model.predict(X, verbose=0)))
        assert model.teacher.trainable is False
        for weight, initial in zip(model.teacher.get_weights(), before, strict=True):
            np.testing.assert_array_equal(weight, initial)
    for ours, theirs in zip(results[0][:2], results[1][:2], strict=True):
        assert ours.keys() == theirs.keys()
        for name in theirs:
            np.testing.assert_allclose(ours[name], theirs[name], rtol=2e-5, atol=1e-6, err_msg=name)
    for ours, theirs in zip(results[0][2], results[1][2], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(results[0][3], results[1][3], rtol=1e-4, atol=1e-5)


def test_a_divergence_by_name_compares_probabilities():
    """Keras compares logits as if they were probabilities unless a KLDivergence object is passed."""
    taught, learnt = RNG.normal(size=(2, 5, 3))
    losses = [dp.distillation.LogitsDistillation(loss=loss) for loss in ("kl_divergence", dp.losses.KLDivergence())]
    expected = keras.distillation.LogitsDistillation(loss=keras.losses.KLDivergence()).compute_loss(
        keras.ops.convert_to_tensor(taught), keras.ops.convert_to_tensor(learnt)
    )
    for loss in losses:
        np.testing.assert_allclose(float(loss.compute_loss(taught, learnt)), float(expected), rtol=1e-6)


def test_several_outputs():
    values = []
    outputs = [{name: RNG.normal(size=(5, 3)) for name in ("a", "b")} for _ in range(2)]
    for k in (dp, keras):
        loss = k.distillation.LogitsDistillation(loss={"a": k.losses.KLDivergence(), "b": None})
        features = k.distillation.FeatureDistillation(loss={"a": "mse", "b": "mae"})
        tensors = [{name: k.ops.convert_to_tensor(value) for name, value in each.items()} for each in outputs]
        values.append([float(each.compute_loss(*tensors)) for each in (loss, features)])
    np.testing.assert_allclose(values[0], values[1], rtol=1e-6)


def test_files(tmp_path):
    model = distiller(dp, "divergence", "features")
    model.fit(X, Y, verbose=0)
    model.save(tmp_path / "distiller.keras")
    with pytest.warns(UserWarning, match="method is custom"):  # as in Keras
        loaded = dp.models.load_model(tmp_path / "distiller.keras")
    np.testing.assert_allclose(loaded.predict(X, verbose=0), model.predict(X, verbose=0), rtol=1e-6)
    np.testing.assert_array_equal(loaded.teacher.get_weights()[0], WEIGHTS[0])
    for k in (dp, keras):
        described = k.saving.serialize_keras_object(distiller(k, "divergence", "features"))
        assert (described["module"], described["class_name"]) == ("keras.distillation", "Distiller")
        restored = dp.saving.deserialize_keras_object(described)
        assert [type(loss).__name__ for loss in restored.distillation_losses] == [
            *("LogitsDistillation", "FeatureDistillation"),
        ]
        assert restored.distillation_losses[1].teacher_layer_name == "hidden"


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda k: k.distillation.LogitsDistillation(temperature=0.0), "temperature must be positive"),
        (lambda k: k.distillation.LogitsDistillation(loss=[None]), "At least one loss must be non-`None`"),
        (lambda k: k.distillation.FeatureDistillation(loss={"a": None}), "at least one non-`None` value"),
        (lambda k: distiller(k, "outputs", student_loss_weight=2.0), "must be between 0.0 and 1.0"),
        (
            lambda k: distiller(k, "outputs", distillation_loss_weights=[1.0, 2.0]),
            "Number of distillation_loss",
        ),
        (lambda k: k.distillation.Distiller(network(k, 1), network(k, 1), None), "cannot be `None`"),
        (lambda k: k.distillation.Distiller("a", network(k, 1), []), "Teacher must be a keras.Model"),
        (
            lambda k: k.distillation.Distiller(
                network(k, 1), k.Sequential([k.Input((7,)), k.layers.Dense(3)]), LOSSES["outputs"](k.distillation, k)
            ),
            "input shapes are incompatible",
        ),
        (
            lambda k: k.distillation.Distiller(
                network(k, 1), network(k, 1), k.distillation.FeatureDistillation("mse", "nowhere")
            ),
            "In teacher model: No such layer: nowhere",
        ),
        (lambda k: distiller(k, "outputs").compile("sgd"), "'loss' cannot be `None`"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_refused(build, message):
    for k in (dp, keras):
        with pytest.raises(ValueError, match=message):
            build(k)
