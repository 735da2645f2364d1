"""What a sweep's sentences say, and what they do not."""

import pytest

pytest.importorskip("scipy", reason="statistics need the extra 'sweep'")

from dptrain.sweeps.analysis import statistics
from dptrain.sweeps.records import Status, Trial
from dptrain.sweeps.reporting import findings
from dptrain.sweeps.reporting.findings import sentences
from tests.unit.sweeps.samples import ending, endings, trials

NOISE = [0.0, 0.003, -0.002, 0.004, -0.003, 0.001, -0.002, -0.001]


def said(number, ended, mode="max"):
    summaries = statistics.summarize(trials(number), ended, "val_accuracy", mode)
    comparisons = statistics.compare(summaries, ended, "val_accuracy", mode)
    return " ".join(sentences(trials(number), summaries, comparisons, "val_accuracy", mode))


def three_trials(mode="max"):
    """Trial 1 is best, 2 hardly worse, 0 far worse."""
    sign = 1 if mode == "max" else -1
    best = [0.9 + noise for noise in NOISE]
    return endings(
        {
            0: [value - sign * 0.2 + 0.5 * noise for value, noise in zip(best, reversed(NOISE), strict=True)],
            1: best,
            2: [value - sign * 0.0001 + noise for value, noise in zip(best, NOISE[3:] + NOISE[:3], strict=True)],
        }
    )


@pytest.mark.parametrize("mode", ["max", "min"])
def test_the_best_the_worse_and_what_cannot_be_told_apart(mode):
    text = said(3, three_trials(mode), mode)
    assert "Trial 1 (learning_rate=0.1, model.hidden=[128]) has the best mean of val_accuracy: 0.9 (95 % " in text
    assert "n = 8" in text
    assert "Trial 0 is significantly worse than it, at 5 % after correction." in text
    assert "Trial 2 cannot be told apart from it" in text
    assert "3 pairs of trials are compared and corrected together" in text
    assert "roughly normal" in text
    assert "failed" not in text
    assert "exactly equal" not in text


def test_significance_is_that_of_the_corrected_value(monkeypatch):
    monkeypatch.setattr(findings, "SIGNIFICANCE", 1e-30)
    text = said(3, three_trials())
    assert "significantly worse" not in text
    assert "Trials 0 and 2 cannot be told apart from it" in text


def test_how_large_a_difference_is():
    text = said(3, three_trials())
    assert "The difference is 0.2 (corrected interval 0.1" in text
    assert "), huge beside the deviation over seeds." in text
    worst = {2: [0.5 + noise for noise in NOISE[3:] + NOISE[:3]]}
    ended = [*three_trials()[:16], *(ending(2, seed, value) for seed, value in enumerate(worst[2]))]
    assert "The least difference, to trial 0, is 0.2 (" in said(3, ended)


def test_one_seed_shows_nothing_about_differences():
    text = said(2, endings({0: [0.5], 1: [0.9]}))
    assert "No conclusion about differences: no other complete trial shares 2 seeds" in text
    assert "More seeds are needed" in text
    assert "one run, so no interval" in text
    assert "worse" not in text


def only_one_complete(other):
    return said(2, [*endings({0: [0.5, 0.6]}), *(other(seed) for seed in range(2))])


def test_more_seeds_are_not_advised_where_they_are_not_what_is_missing():
    stopped = only_one_complete(lambda seed: ending(1, seed, 0.9, Status.PRUNED, epochs=1))
    assert "only one trial is complete, as halving stopped the others early. Without halving they" in stopped
    failed = only_one_complete(lambda seed: ending(1, seed, status=Status.FAILED))
    assert "only one trial is complete; the others have failed." in failed
    killed = only_one_complete(lambda seed: ending(1, seed, 0.9, Status.PAUSED, epochs=1))
    assert "the sweep resumes" in killed
    assert not any("eeds are needed" in text for text in (stopped, failed, killed))


def test_a_sweep_over_seeds_alone():
    single_trial = [Trial(0, {})]

    def of(ended):
        summaries = statistics.summarize(single_trial, ended, "val_accuracy", "max")
        return " ".join(sentences(single_trial, summaries, [], "val_accuracy", "max"))

    text = of(endings({0: [0.8, 0.9, 0.7]}))
    assert text.startswith("The one setting has a mean of val_accuracy of 0.8 (95 % interval 0.4")
    assert text.endswith(", n = 3); single seeds deviate from it by 0.1 (standard deviation).")
    assert of(endings({0: [0.8]})) == (
        "The one setting has one run with a value: val_accuracy 0.8, without an interval."
    )
    text = of([*endings({0: [0.8, 0.9]}), ending(0, 2, status=Status.FAILED)])
    assert text.endswith("1 run failed and is not part of any mean.")
    assert "not trained to its end with every seed (2 epochs)" in of([ending(0, 0, 0.5, Status.PAUSED, epochs=2)])


def of_one(ended, metric="val_accuracy", samples=None):
    summaries = statistics.summarize([Trial(0, {})], ended, metric, "max", samples)
    return " ".join(sentences([Trial(0, {})], summaries, [], metric, "max"))


def test_what_an_interval_covers_is_said_beside_it_and_none_has_no_width():
    assert "0.8 (95 % interval 0.4" in (text := of_one(endings({0: [0.8, 0.9, 0.7]})))
    assert " over seeds alone, n = 3)" in text
    text = of_one(endings({0: [1.0] * 4}), samples=36)
    assert "a mean of val_accuracy of 1 (95 % interval 0.89" in text
    assert " to 1 over seeds and samples, n = 4)" in text
    assert "a mean of val_accuracy of 1 (the same with every seed, so no interval; n = 4)" in of_one(
        endings({0: [1.0] * 4})
    )
    assert " over samples alone, one run)" in of_one(endings({0: [0.8]}), samples=9)
    narrow = of_one(endings({0: [0.123456789, 0.123456788, 0.123456787]}))
    low, high = narrow.partition("95 % interval ")[2].partition(" over")[0].split(" to ")
    assert float(low) < float(high)


def test_no_run_has_ended():
    assert said(2, []) == "No run has ended with a value of val_accuracy: there is no result."


def test_failed_and_stopped_runs_are_named():
    ended = [
        *endings({0: [0.5, 0.6, 0.7]}),
        *(ending(1, 0, 0.9), ending(1, 1, 0.95), ending(1, 2, status=Status.DIVERGED)),
        *(ending(2, seed, 0.99, Status.PRUNED, epochs=1) for seed in range(3)),
    ]
    text = said(3, ended)
    assert text.startswith("Trial 0 ")
    assert "1 run failed, of trial 1." in text
    assert (
        "Stopped early or unfinished, so ranked behind the complete ones by their last values and not compared: trial "
        "2." in text
    )


def test_a_better_trial_that_lost_runs_is_said_to_be_better():
    worse = [0.3 + noise for noise in NOISE]
    better = [0.9 + noise for noise in reversed(NOISE)]
    ended = [*endings({0: worse, 1: better})[:-1], ending(1, 7, status=Status.FAILED)]
    text = said(2, ended)
    assert text.startswith("Trial 0 ")
    assert "trial 1 is significantly better than it, but lost runs" in text


def test_all_trials_lost_runs():
    ended = [ending(trial, seed, 0.5 + trial / 10) for trial in range(2) for seed in range(2)]
    ended += [ending(trial, 2, status=Status.FAILED) for trial in range(2)]
    assert "But 1 run of it failed, and no complete trial lost fewer." in said(2, ended)


def test_no_trial_is_complete():
    text = said(2, [ending(0, 0, 0.5, Status.PAUSED, epochs=2)])
    assert "the best mean so far (no trial is complete; 2 epochs)" in text
    assert "No conclusion about differences: no trial is complete" in text


def test_differences_that_are_all_alike_are_not_passed_off_as_certain():
    text = said(2, endings({0: [0.5, 1.5], 1: [0.25, 1.25]}))
    assert "exactly equal for all seeds" in text
    assert "Trial 1 cannot be told apart from it" in text
    assert "too few seeds to tell trial 1 from it, though the means differ visibly: add at least 4 (" in said(
        2, endings({0: [0.5, 0.625], 1: [0.125, 0.25]})
    )
    # ten seeds of one sign are more than chance
    assert "The difference is 0.25, the same for every seed." in said(
        2, endings({0: [0.5 + seed for seed in range(10)], 1: [0.25 + seed for seed in range(10)]})
    )


def test_many_trials_are_compared_with_the_best_alone(monkeypatch):
    for module in (statistics, findings):
        monkeypatch.setattr(module, "MOST_PAIRS", 2)
    text = said(3, three_trials())
    assert "only the best one was compared with the others (2 pairs), with the correction for all 3 pairs" in text


def seeds_of(differences):
    """Two trials whose seeds differ by these numbers, beside deviations of 0.01 over seeds."""
    noise = [0.5 + 0.01 * (-1) ** seed for seed in range(len(differences))]
    return endings({0: noise, 1: [value + more for value, more in zip(noise, differences, strict=True)]})


def test_where_means_differ_visibly_seeds_are_missing():
    few = [0.14, 0.04]
    text = said(2, seeds_of(few))
    number = int(text.partition("though the means differ visibly: add at least ")[2].partition(" ")[0])
    assert number >= 1
    assert "cannot be told apart" not in text
    # as many more of the same mean and deviation are significant, one less are not
    spread = statistics.statistics.stdev(few)

    def alike(n):
        base = [(-1) ** seed for seed in range(n)]
        scale = spread / statistics.statistics.stdev(base)
        mean = sum(base) / n
        return [0.09 + scale * (value - mean) for value in base]

    assert "significantly worse" in said(2, seeds_of(alike(2 + number)))
    if number > 1:
        assert "significantly worse" not in said(2, seeds_of(alike(1 + number)))


def headline_of(number, ended, mode="max"):
    summaries = statistics.summarize(trials(number), ended, "val_accuracy", mode)
    comparisons = statistics.compare(summaries, ended, "val_accuracy", mode)
    return dict(findings.headline(trials(number), summaries, comparisons, "val_accuracy", mode))


def test_mean_interval_and_verdict_come_first():
    first = headline_of(3, three_trials())
    assert first["mean of val_accuracy of trial 1, the best"] == "0.9"
    assert first["95 % interval over seeds alone"].startswith("0.89")
    assert first["verdict"] == "cannot be told apart from trial 2"
    assert headline_of(2, three_trials()[:16])["verdict"] == "better than the other"
    few = headline_of(2, seeds_of([0.14, 0.04]))
    assert few["verdict"].startswith("too few seeds to tell it from trial 0: add at least ")
    assert headline_of(2, endings({0: [0.5], 1: [0.9]}))["verdict"] == "too few seeds to tell: add at least 1"
    assert headline_of(2, endings({0: [0.5, 0.6]}))["verdict"] == "no trial to compare it with"
    assert headline_of(2, []) == {}
    assert "verdict" not in headline_of(1, endings({0: [0.5, 0.6]}))
