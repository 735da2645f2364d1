"""Whatever Keras does not have is private, but for what scripts may ask for, which their own attributes may hide."""

import warnings

import dptrain as dp
from tests.named import parts

OF_MODELS = {"explain", "input_names", "local_weights", "output_names", "preprocessing", "seed", "set_local_weights"}
OF_MODELS |= {"zero_grad"}  # that Keras has on PyTorch
OURS = {
    "Sequential": OF_MODELS,
    "Functional": OF_MODELS,
    "Subclass": OF_MODELS | {"input_shape", "inputs", "output_shape", "outputs"},  # of other models Keras has them
    "Optimizer": {"slots_of"},
    "Callback": {"copies_of_weights", "load_state_dict", "state_dict"},
}


def test_few_public_names_are_none_of_keras(keras):
    ours = parts(dp, {})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of PyTorch
        theirs = parts(keras, {})
    for kind, symbol in ours.items():
        public = {name for name in dir(symbol) if not name.startswith("_")}
        assert public - set(dir(theirs[kind])) <= OURS.get(kind, set()), kind
