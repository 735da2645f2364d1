"""MNIST: handwritten digits, Y. LeCun et al., 1998; under Keras' name."""

from dptrain.data.loading import load_data_of

load_data = load_data_of("mnist")
