"""Categories as vectors: what has no category is named with its layer and its sample."""

import re

import numpy as np
import pytest

import dptrain as dp
from dptrain import layers
from dptrain.errors import ConfigError, DataError
from tests.sample import sample

WAYS = [{"jit_compile": True}, {"jit_compile": False}, {"run_eagerly": True}]


def model(layer, options):
    inputs = dp.Input((3,), dtype="int32")
    net = dp.Model(inputs, layers.Flatten()(layer(inputs)))
    net.compile("sgd", "mse", **options)
    return net


@pytest.mark.parametrize("options", WAYS, ids=str)
@pytest.mark.parametrize("mode", sample(["multi_hot", "one_hot", "count"], 2))
@pytest.mark.parametrize("category", [5, -1])
def test_a_category_out_of_range(options, mode, category):
    ids = np.full((20, 3), 4)
    ids[7, 1] = category
    net = model(layers.CategoryEncoding(5, mode, name="colours"), options)
    message = f"layer 'colours': id {category} of sample 7 (1 in this batch), expected 0 to 4; correct the data"
    for ask in (
        lambda: net.predict(ids, verbose=0),
        lambda: net(ids),
        lambda: layers.CategoryEncoding(5, mode, name="colours")(ids),
        lambda: layers.CategoryEncoding(5, mode, name="colours")(ids.astype(np.float32)),
    ):
        with pytest.raises(DataError, match=re.escape(message)):
            ask()
    ids[7, 1] = 0
    np.testing.assert_array_equal(net.predict(ids, verbose=0), np.reshape(net(ids), (20, -1)))


@pytest.mark.parametrize("options", WAYS, ids=str)
@pytest.mark.parametrize("mode", ["int", "multi_hot"])
def test_an_integer_without_an_index(options, mode):
    def lookup():
        return layers.IntegerLookup(
            num_oov_indices=0, mask_token=-1, vocabulary=[10, 30, 20], output_mode=mode, name="codes"
        )

    ids = np.tile([10, -1, 30], (20, 1))
    net = model(lookup(), options)
    np.testing.assert_array_equal(net.predict(ids, verbose=0), lookup()(ids))
    ids[7, 1] = 11
    with pytest.raises(ConfigError, match=r"found OOV values \[11\]"):
        lookup()(ids)
    expected = r"OOV values \[11\]" if options.get("run_eagerly") else "layer 'codes': id -1 of sample 7"
    with pytest.raises((ConfigError, DataError), match=expected):
        net.predict(ids, verbose=0)
