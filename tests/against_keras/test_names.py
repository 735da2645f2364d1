"""The names that dptrain knows Keras by are those that Keras has."""

import types

from dptrain.registry.keras_names import KERAS_NAMES


def public(module, name=""):
    """Yield (module, names) of a package and those in it."""
    names = {one for one in vars(module) if not one.startswith("_") and one != "src"}
    yield name, names
    for one in names:
        found = vars(module)[one]
        if isinstance(found, types.ModuleType) and found.__name__ == f"{module.__name__}.{one}":
            yield from public(found, f"{name}.{one}" if name else one)


def test_every_public_name_is_known(keras):
    found = dict(public(keras))
    assert set(KERAS_NAMES) == set(found)
    for module, names in found.items():
        assert KERAS_NAMES[module] == names, module
