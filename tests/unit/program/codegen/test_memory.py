"""Memory of programs."""

import itertools

import numpy as np
import pytest

from dptrain.program.codegen.memory import ALIGNMENT, Access, aligned, in_place, plan
from dptrain.program.tensor import placeholder


def test_arrays_begin_on_a_cache_line():
    for shape in ((), (3,), (2, 5)):
        array = aligned(shape, np.float32)
        assert (array.shape, array.dtype) == (shape, np.float32)
        assert array.ctypes.data % ALIGNMENT == 0


@pytest.mark.parametrize("shape", [(1 << 62,), (1 << 63,), (1 << 32, 1 << 32), (1 << 40, 1 << 40, 1 << 40)])
def test_more_than_any_memory_is_an_error_of_memory(shape):
    with pytest.raises(MemoryError, match="unable to allocate"):
        aligned(shape, np.float32)


def test_what_lives_together_lies_apart():
    lives = {"a": (100, 0, 2), "b": (64, 1, 3), "c": (10, 3, 4), "d": (100, 4, 5), "e": (0, 0, 5)}
    kernels = [Access(writes=[name for name, life in lives.items() if at in life[1:]]) for at in range(6)]
    layout = plan(kernels, {name: nbytes for name, (nbytes, *_) in lives.items()})
    assert (layout.size, layout.alone) == (256, 384)
    assert all(start % ALIGNMENT == 0 for start in layout.offsets.values())
    for first, second in itertools.combinations(lives, 2):
        (a, born, died), (b, birth, death) = lives[first], lives[second]
        if born <= death and birth <= died and a and b:
            x, y = layout.offsets[first], layout.offsets[second]
            assert x + a <= y or y + b <= x


def tensors(count, dtype="float32"):
    return [placeholder((4,), dtype, f"t{number}") for number in range(count)]


def always(new, old):
    return True


def test_what_is_read_for_the_last_time_makes_room():
    a, b, c, outside = tensors(4)
    kernels = [Access({outside}, [a]), Access({a}, [b, "scratch"]), Access({b}, [c])]
    layout = plan(kernels, {a: 64, b: 128, c: 10, "scratch": 64})
    assert layout.offsets.keys() == {a, b, c, "scratch"}
    assert (layout.size, layout.alone) == (256, 320)
    assert layout.offsets[c] == 128  # where `a` was, or the scratch of the second kernel
    assert plan(kernels, {a: 64, b: 128, c: 10, "scratch": 64}, 256).size == 768


def test_a_value_that_nothing_reads_any_more_is_written_over():
    old, new = tensors(2)
    before, maker = Access({old}, stage=0), Access(set(), [new], stage=1)
    assert in_place([(new, old)], [before, maker]) == {new: old}
    assert in_place([(new, old)], [before, maker, Access({old}, stage=2)]) == {}


def test_a_kernel_that_reads_the_old_value_must_do_so_element_by_element():
    old, new = tensors(2)
    assert in_place([(new, old)], [Access({old}, [new])]) == {}
    assert in_place([(new, old)], [Access({old}, [new], replaces=always)]) == {new: old}


def test_kernels_without_an_order_get_one():
    """Two variables, each of whose new values is made of both old ones: one of them must be copied."""
    a, b, new_a, new_b = tensors(4)
    first, second = Access({a, b}, [new_a], replaces=always), Access({a, b}, [new_b], replaces=always)
    assert in_place([(new_a, a), (new_b, b)], [first, second]) == {new_a: a}
    assert (first.after, second.after) == ({second}, set())


def test_what_is_of_another_type_or_has_its_place_is_not_written_over():
    old, other, new = tensors(3)
    (wide,) = tensors(1, "float64")
    assert in_place([(wide, old)], [Access(set(), [wide])]) == {}
    assert in_place([(new, old), (new, other)], [Access(set(), [new])]) == {new: old}
    assert in_place([(new, old)], []) == {}
