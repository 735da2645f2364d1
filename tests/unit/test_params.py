"""The flat layout: offsets, views, initial values."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dptrain.initializers import GlorotUniform, Zeros
from dptrain.params import ALIGNMENT, ParamLayout, ParamSpec

shapes = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple), max_size=6)


@given(shapes)
def test_views_cover_the_buffer_without_overlap(shape_list):
    layout = ParamLayout([(f"p{i}", ParamSpec("p", shape, Zeros())) for i, shape in enumerate(shape_list)])
    flat = np.zeros(layout.size)
    for number, (name, view) in enumerate(layout.views(flat).items(), start=1):
        assert view.shape == shape_list[number - 1]
        assert name == f"p{number - 1}"
        assert np.shares_memory(view, flat)
        assert not view.any(), "overlaps an earlier parameter"
        view += number
    assert np.count_nonzero(flat) == layout.count == sum(int(np.prod(shape)) for shape in shape_list)
    assert all(entry.offset % ALIGNMENT == 0 for entry in layout.entries)
    assert layout.size % ALIGNMENT == 0


@given(shapes, st.lists(st.booleans(), min_size=6, max_size=6))
def test_what_is_not_trained_lies_behind_all_that_is(shape_list, trainable):
    specs = [ParamSpec("p", shape, Zeros(), trained) for shape, trained in zip(shape_list, trainable, strict=False)]
    layout = ParamLayout([(f"p{i}", spec) for i, spec in enumerate(specs)])
    assert [entry.name for entry in layout.entries] == [f"p{i}" for i in range(len(specs))]
    assert [entry.trainable for entry in layout.entries] == [spec.trainable for spec in specs]
    for entry in layout.entries:
        assert (entry.offset + entry.size <= layout.size) == entry.trainable
        assert entry.offset + entry.size <= layout.full_size
    offsets = [entry.offset for entry in layout.entries if entry.trainable]
    assert offsets == sorted(offsets), "backward completes gradients from the last layer's on"
    gradients = layout.gradient_views(np.zeros(layout.size))
    assert list(gradients) == [entry.name for entry in layout.entries if entry.trainable]
    assert layout.trainable_count == sum(view.size for view in gradients.values())


def test_names_must_be_unique():
    spec = ParamSpec("kernel", (2,), Zeros())
    with pytest.raises(ValueError, match="repeat"):
        ParamLayout([("a", spec), ("a", spec)])


def test_initial_values_depend_on_seed_and_position_only():
    spec = ParamSpec("kernel", (50, 60), GlorotUniform())
    layout = ParamLayout([("a", spec), ("b", spec)])
    first, again, other = layout.initial(1, np.float32), layout.initial(1, np.float32), layout.initial(2, np.float32)
    assert first.tobytes() == again.tobytes()
    assert not np.array_equal(first, other)
    a, b = layout.views(first).values()
    assert not np.array_equal(a, b)


def test_glorot_uniform_has_its_limit_and_variance():
    values = GlorotUniform()((300, 500), 0, 0)
    limit = np.sqrt(6 / 800)
    assert np.abs(values).max() <= limit
    assert np.abs(values).max() > 0.999 * limit
    # 150,000 draws: the variance of a uniform distribution is limit^2 / 3, its estimate is within 2 %
    np.testing.assert_allclose(values.var(), limit**2 / 3, rtol=0.02)
    assert abs(values.mean()) < 4 * limit / np.sqrt(3 * values.size)
