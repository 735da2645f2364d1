"""Intervals of means over seeds and test samples.

Seeds and samples are two sources of chance. The seeds' part of a mean's variance is estimated from their runs
(Student's t). The part of the samples, which are the same for all runs, is estimated by a paired bootstrap over them,
or for accuracies, which count samples, by the binomial distribution. The variances add up; their degrees of freedom are
Welch's and Satterthwaite's (F. Satterthwaite, "An approximate distribution of estimates of variance components",
Biometrics Bulletin 2, 1946). Accuracies then have E. Wilson's interval ("Probable inference, the law of succession, and
statistical inference", JASA 22, 1927) with the number of samples that has this binomial variance, as in surveys
(C. Franco et al., "Comparative study of confidence intervals for proportions in complex sample surveys", Journal of
Survey Statistics and Methodology 7, 2019). It has a width even if every run is right on every sample. If the samples'
part is unknown, the interval is of the seeds alone, and says so.

Other intervals respect the metric's bounds (`bounds_of`): Student's t intervals of the mean's logit between 0 and 1, of
its logarithm above 0, with the standard error by the delta method, mapped back to the metric's scale. These are the
intervals of a quasi-likelihood model of a constant with that link: R. Wedderburn, "Quasi-likelihood functions,
generalized linear models, and the Gauss-Newton method", Biometrika 61 (1974); for fractions L. Papke and J. Wooldridge,
"Econometric methods for fractional response variables", Journal of Applied Econometrics 11 (1996). With a deviation
small beside the distance from the bounds they are Student's t interval of the mean.
"""

import math
import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from dptrain.errors import ConfigError
from dptrain.runtime.extras import pip_install

CONFIDENCE = 0.95
Bounds = tuple[float, float]
UNBOUNDED: Bounds = (-math.inf, math.inf)
# Ends of the names of metrics that lie between 0 and 1, and of those that are not below 0.
_FRACTION = re.compile(r"(?:^|_)(?:accuracy|acc|auc|precision|recall|f1|f1_score|iou)(?:_\d+)?$")
_POSITIVE = re.compile(r"(?:^|_)(?:loss|error|crossentropy|mse|rmse|mae|mape|msle|perplexity)(?:_\d+)?$")
# Names of those that count samples.
_SHARE = re.compile(r"(?:^|_)(?:accuracy|acc)(?:_\d+)?$")
# The sources of chance that an interval allows for; "" where there is no interval.
Covers = Literal["seeds and samples", "seeds alone", "samples alone", ""]


@dataclass(frozen=True)
class SampleSize:
    """The samples that every value was measured on."""

    count: int
    variance: float | None = None  # of the mean of the values, by bootstrap; None for the binomial one of accuracies


@dataclass(frozen=True)
class Interval:
    """A mean and its 95 % confidence interval."""

    mean: float
    low: float | None  # within the metric's bounds; None if no width is known
    high: float | None
    covers: Covers


def bounds_of(metric: str, values: Iterable[float]) -> Bounds:
    """Return a metric's range by its name, unless a value lies outside: (0, 1), (0, inf) or (-inf, inf)."""
    name = metric.lower()
    bounds = (0.0, 1.0) if _FRACTION.search(name) else (0.0, math.inf) if _POSITIVE.search(name) else UNBOUNDED
    return bounds if all(bounds[0] <= value <= bounds[1] for value in values) else UNBOUNDED


def counts_samples(metric: str) -> bool:
    """Return whether a metric, by its name, is a share of correct samples."""
    return _SHARE.search(metric.lower()) is not None


def mean_and_interval(
    values: Sequence[float], bounds: Bounds = UNBOUNDED, folds: int = 1
) -> tuple[float, float | None, float | None]:
    """Return mean, low and high of `interval_of` over the seeds alone."""
    interval = interval_of(values, bounds, folds)
    return interval.mean, interval.low, interval.high


def interval_of(
    values: Sequence[float], bounds: Bounds = UNBOUNDED, folds: int = 1, samples: SampleSize | None = None
) -> Interval:
    """Return the mean of at least one value and its 95 % confidence interval; the module's docstring has the method."""
    mean, runs = statistics.mean(values), len(values)
    is_share = samples is not None and samples.variance is None and bounds == (0.0, 1.0)
    # Standard errors of the mean.
    of_seeds = 0.0 if runs < 2 else statistics.stdev(values) / math.sqrt(runs) * widening(runs, folds)
    has_both = samples is not None and folds > 1 and of_seeds > 0  # each fold has other samples: in the widening
    of_samples = 0.0
    if samples is not None and not has_both:
        of_samples = math.sqrt(mean * (1 - mean) / samples.count if is_share else samples.variance or 0.0)
    has_both = has_both or (runs > 1 and (of_samples > 0 or is_share))
    covers: Covers = "seeds and samples" if has_both else "samples alone" if runs == 1 else "seeds alone"
    error, count = math.hypot(of_seeds, of_samples), 0 if samples is None else samples.count
    if is_share:
        quantile = _quantile(_freedom(of_seeds, runs, of_samples, count) if error else count)
        effective = min(count * runs, mean * (1 - mean) / error**2) if error else count
        return Interval(mean, *_wilson(mean, effective, quantile), covers)
    if error == 0:
        return Interval(mean, None, None, "")
    half = _quantile(_freedom(of_seeds, runs, of_samples, count)) * error
    if bounds == UNBOUNDED or not bounds[0] < mean < bounds[1]:
        return Interval(mean, mean - half, mean + half, covers)
    if bounds[1] == math.inf:
        factor = _exp(half / mean)
        return Interval(mean, mean / factor, mean * factor, covers)
    # The ends' odds; those of the mean times and over the exponential of t times the logit's standard error.
    odds, factor = mean / (1 - mean), _exp(half / (mean * (1 - mean)))
    return Interval(mean, odds / (odds + factor), odds / (odds + 1 / factor), covers)


def _freedom(of_seeds: float, runs: int, of_samples: float, count: int) -> float:
    """Return Welch-Satterthwaite degrees of freedom of a sum of two squared errors, not both 0."""
    if not of_samples:
        return runs - 1
    whole = math.hypot(of_seeds, of_samples)
    parts = (of_seeds / whole) ** 4 / max(1, runs - 1) + (of_samples / whole) ** 4 / max(1, count - 1)
    return max(1.0, 1 / parts)


def _exp(exponent: float) -> float:
    return math.exp(min(exponent, 700.0))


def _wilson(mean: float, count: float, quantile: float) -> tuple[float, float]:
    square = quantile**2
    middle = (mean + square / (2 * count)) / (1 + square / count)
    half = quantile / (1 + square / count) * math.sqrt(mean * (1 - mean) / count + square / (4 * count**2))
    return min(mean, max(0.0, middle - half)), max(mean, min(1.0, middle + half))


def widening(values: int, folds: int) -> float:
    """Return the factor by which folds widen the standard error of a mean of `values` values.

    Any two trainings of cross-validation share most of their samples, so Student's t would be far too sure. The
    variance of the mean of n values is (1 / n + 1 / (folds - 1)) times theirs instead of 1 / n times: 1 / (folds - 1)
    is the ratio of samples held out to samples trained on. This is the corrected resampled t-test of C. Nadeau and Y.
    Bengio, "Inference for the generalization error", Machine Learning 52 (2003), for repeated folds (each seed cuts its
    own) as R. Bouckaert and E. Frank, "Evaluating the replicability of significance tests for comparing learning
    algorithms", PAKDD 2004, with n - 1 degrees of freedom.
    """
    return 1.0 if folds == 1 else math.sqrt(1 + values / (folds - 1))


@lru_cache(maxsize=1024)
def _quantile(freedom: float) -> float:
    return float(scipy_stats().t.ppf((1 + CONFIDENCE) / 2, freedom))


def scipy_stats() -> Any:
    """Return `scipy.stats`, or raise ConfigError if SciPy is missing."""
    try:
        from scipy import stats
    except ImportError as error:
        raise ConfigError(f"scipy is not installed: {pip_install('sweep')}") from error
    return stats
