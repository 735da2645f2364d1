"""Fashion-MNIST: articles of clothing, H. Xiao et al., 2017; under Keras' name."""

from dptrain.data.loading import load_data_of

load_data = load_data_of("fashion-mnist")
