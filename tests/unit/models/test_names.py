"""Scripts may give their layers, models and the rest attributes of any name that Keras does not use itself."""

import pytest

import dptrain as dp
from dptrain import layers
from dptrain.errors import ConfigError
from tests.named import Mine, X, Y, parts

# What scripts may ask for, and names that dptrain may come to use, as it has.
OF_LAYERS = """
    add_seed_generator adopt config data_dtype default_name flat_layers has_default_name input_shape keep_dtype label
    last_output own_config pruning refuse set_dtype sublayers weights_by_path
"""
OF_MODELS = """
    agreed as_outputs awaits_shape build_shape calls collective compile_arguments compiled_with describe_compiled
    describe_device device_options expected expected_of_batches explain finalize_weights fit_steps fixed_batch_size
    graph has_own_steps input_layer input_names input_symbols local_weights makers metrics_by_key named_weights
    on_device optimizers output_names part prediction preprocessing put_on readable_on release require_weights seed
    set_local_weights skipped_steps step takes_any_size trainer variables_on_device zero_grad
"""
OF_SUBCLASSES = "inputs outputs output_shape"
NAMES = {
    "Layer": OF_LAYERS,
    "Dense": OF_LAYERS,
    "Sequential": OF_LAYERS + OF_MODELS,
    "Functional": OF_LAYERS + OF_MODELS,
    "Subclass": OF_LAYERS + OF_MODELS + OF_SUBCLASSES,
    "Optimizer": """
        config decays dense_gradient describe ends_with_averages follows_schedule masks moments number prune
        pruning_variables rates resume_learning_rate resumed_rate slots slots_of update variables_for version
    """,
    "Metric": "arguments config direction fn function takes_labels",
    "Loss": "arguments config depends_on_batches function ignored labels_number_outputs takes_labels",
    "Callback": """
        copies_of_weights load_state_dict most_steps release same_on_all_ranks set_callbacks set_trainer shows_only
        state_dict trainer
    """,
}


@pytest.fixture(scope="module")
def objects():
    """An object of each kind that was trained with all these attributes."""
    return parts(dp, {kind: names.split() for kind, names in NAMES.items()})


@pytest.mark.parametrize("kind", NAMES)
def test_an_attribute_of_any_name_is_the_scripts_own(objects, kind):
    assert all(isinstance(getattr(objects[kind], name), Mine) for name in NAMES[kind].split())


@pytest.mark.parametrize("kind", ["Sequential", "Functional", "Subclass"])
def test_a_model_with_such_attributes_is_saved(objects, kind, tmp_path):
    model = objects[kind]
    model.save_weights(tmp_path / "model.weights.h5")
    weights = model.get_weights()
    model.set_weights([0 * weight for weight in weights])
    model.load_weights(tmp_path / "model.weights.h5")
    assert all((weight == other).all() for weight, other in zip(model.get_weights(), weights, strict=True))
    model.save(tmp_path / "model.keras")
    assert (tmp_path / "model.keras").stat().st_size > 1000


def test_a_callback_with_such_attributes_is_resumed(objects, tmp_path):
    model = objects["Sequential"]
    for epochs in (1, 2):
        backup = dp.callbacks.BackupAndRestore(tmp_path, delete_checkpoint=False)
        model.fit(X, Y, epochs=epochs, verbose=0, callbacks=[backup, objects["Callback"]])
    assert objects["Callback"].seen == 1


def test_a_preprocessing_of_the_scripts_own_is_a_layer_of_the_model():
    class Small(dp.Model):
        def __init__(self):
            super().__init__()
            self.preprocessing = dp.Sequential([dp.layers.Dense(2)])

        def call(self, inputs):
            return self.preprocessing(inputs)

    model = Small()
    model.compile("sgd", "mse")
    model.fit(X, Y, verbose=0)
    assert len(model.weights) == 2


@pytest.mark.parametrize("name", ["block/dense", "/dense", "../dense", 3, b"dense"])
@pytest.mark.parametrize(
    "make",
    [
        lambda name: layers.Dense(2, name=name),
        lambda name: dp.Sequential(name=name),
        lambda name: dp.Input((2,), name=name),
    ],
)
def test_names_that_no_file_could_hold(make, name):
    with pytest.raises(ConfigError, match="must be a string and cannot contain character `/`"):
        make(name)
