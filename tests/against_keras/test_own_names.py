"""Public names of our classes that Keras' do not have: scripts' subclasses may use them for attributes of their own."""

import inspect

import pytest

import dptrain as dp

# What Keras has on instances, or on other classes of the kind, and what scripts may ask for (docs/keras.md).
KNOWN = {
    "layers": {"activation", "mean", "rank", "variance", "vocabulary"},
    "metrics": {"accumulator", "false_negatives", "false_positives", "true_negatives", "true_positives"},
    "losses": set(),
    "optimizers": {"slots_of"},
}
BASES = {"layers": "Layer", "metrics": "Metric", "losses": "Loss", "optimizers": "Optimizer"}


def _public(cls):
    return {name for name in dir(cls) if not name.startswith("_")}


def _pairs(keras, room):
    """Yield our classes of a room and Keras' of the same names."""
    ours, theirs = getattr(dp, room), getattr(keras, room)
    base = getattr(ours, BASES[room])
    for name in ours.__all__:
        cls = getattr(ours, name)
        if inspect.isclass(cls) and issubclass(cls, base) and hasattr(theirs, name):
            yield cls, getattr(theirs, name)


@pytest.mark.parametrize("room", BASES)
def test_concrete_classes_have_no_public_names_of_their_own(keras, room):
    extra = {}
    for ours, theirs in _pairs(keras, room):
        if names := _public(ours) - _public(theirs) - KNOWN[room]:
            extra[ours.__name__] = sorted(names)
    assert extra == {}
