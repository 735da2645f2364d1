"""When masks are updated, and how sparse weights are then."""

import pytest

from dptrain.pruning import ConstantSparsity, PolynomialDecay


def due(schedule, steps):
    return [step for step in range(steps) if schedule(step)[0]]


def test_steps_of_updates():
    assert due(ConstantSparsity(0.5, 3, frequency=4), 13) == [3, 7, 11]
    assert due(ConstantSparsity(0.5, 0, end_step=8, frequency=4), 20) == [0, 4, 8]
    assert due(ConstantSparsity(0.5, 0, end_step=9, frequency=4), 20) == [0, 4, 8, 9]  # the end is one of them
    assert due(ConstantSparsity(0.5, 5, end_step=5), 20) == [5]
    assert [ConstantSparsity(0.5, 3, end_step=9, frequency=4).next_step(step) for step in (-1, 2, 3, 7, 8, 9)] == [
        *(3, 3, 7, 9, 9, None)
    ]


def test_sparsity_grows_as_in_the_paper():
    schedule = PolynomialDecay(0.5, 0.9, 100, 300)
    sparsities = [schedule.sparsity(step) for step in (0, 100, 150, 200, 300, 999)]
    assert sparsities == pytest.approx([0.5, 0.5, 0.9 - 0.4 * 0.75**3, 0.9 - 0.4 / 8, 0.9, 0.9])
    assert PolynomialDecay(0.0, 0.8, 0, 4, power=1).sparsity(3) == pytest.approx(0.6)
    assert ConstantSparsity(0.7, 10).sparsity(10) == 0.7


def test_configuration():
    for schedule in (ConstantSparsity(0.5, 3, 20, 4), PolynomialDecay(0.1, 0.9, 0, 30, 2, 5)):
        assert type(schedule).from_config(schedule.get_config()) == schedule


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ConstantSparsity(1.0, 0), r"target_sparsity must be in range \[0, 1\), got 1.0"),
        (lambda: ConstantSparsity(-0.1, 0), "target_sparsity must be in range"),
        (lambda: ConstantSparsity(0.5, -1), "begin_step should be >= 0, got -1"),
        (lambda: ConstantSparsity(0.5, 5, 4), "end_step should be >= begin_step or -1, got 5 and 4"),
        (lambda: ConstantSparsity(0.5, 0, frequency=0), "frequency should be > 0, got 0"),
        (lambda: PolynomialDecay(0, 0.5, 5, 5), "end_step should be > begin_step, got 5 and 5"),
        (lambda: PolynomialDecay(0, 1.5, 0, 5), "final_sparsity must be in range"),
        (lambda: PolynomialDecay(0, 0.5, 0, 5, power=0), "power should be > 0, got 0"),
    ],
)
def test_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_limits_are_taken():
    assert ConstantSparsity(0.0, 0, 0, 1)(0) == (True, 0.0)
    assert PolynomialDecay(0, 0.999, 0, 1).sparsity(1) == 0.999
