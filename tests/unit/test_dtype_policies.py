"""Policies of types, found, written and read."""

import numpy as np
import pytest

import dptrain as keras
from dptrain.errors import ConfigError

POLICY = {"module": "keras", "class_name": "DTypePolicy", "config": {"name": "mixed_float16"}, "registered_name": None}


def test_policies_come_and_go():
    policy = keras.dtype_policies.DTypePolicy("mixed_float16")
    assert keras.dtype_policies.serialize(policy) == POLICY
    assert keras.dtype_policies.deserialize(POLICY) == policy
    for identifier in (policy, "mixed_float16", POLICY):
        assert keras.dtype_policies.get(identifier) == policy
    assert keras.dtype_policies.get(None) == keras.config.dtype_policy()
    assert keras.dtype_policies.get(np.float64).name == "float64"


@pytest.mark.parametrize("identifier", ["float8", {"class_name": "Dense", "config": {}}, {"class_name": "DTypePolicy"}])
def test_what_means_none(identifier):
    with pytest.raises(ConfigError, match="not supported: d"):
        keras.dtype_policies.get(identifier)
