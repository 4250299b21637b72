"""The exact permutation test of two arms, on one data set or on several.

It counts whole numbers, such as test images that were right, so that no rounding decides.
"""

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction
from itertools import accumulate
from typing import NamedTuple

from pydantic import BaseModel


class Comparison(BaseModel, frozen=True):
    """An arm against another."""

    difference: float  # of the means
    p: float | None  # two-sided, exact; None for one seed against one
    splits: int  # of the pooled seeds; all of them are counted

    def __str__(self) -> str:
        """As people read it: two decimals, and two digits of p."""
        difference = round(self.difference, 2) + 0.0  # adding 0 makes -0 a plain 0
        p = "none" if self.p is None else f"{self.p:#.2g}"
        # of several data sets they may have 50 digits
        splits = f"{Decimal(self.splits):.2g}" if self.splits >= 10**9 else f"{self.splits}"
        return f"difference={difference:.2f} p={p} splits={splits}"


# The most sums that convolving two distributions may have to form: seconds, and under 1 GB.
MOST_SUMS = 5_000_000


class Stratum(NamedTuple):
    """Two arms on one data set: how many of its test images each seed had right."""

    arm: Sequence[int]
    against: Sequence[int]
    images: int  # test images of the data set


def compare(arm: Sequence[int], against: Sequence[int]) -> Comparison:
    """Exact two-sample permutation test of means of whole numbers, such as images that were right.

    p is the share of the C(n + m, n) ways to split all n + m numbers into n and m whose means
    differ at least as much as those of the arms.

    >>> compare([3, 4], [1, 2])  # the observed split and its mirror differ most
    Comparison(difference=2.0, p=0.3333333333333333, splits=6)
    """
    # Of 100 images, the difference in percentage points is that of the numbers.
    return compare_strata([Stratum(arm, against, images=100)])


def compare_strata(strata: Sequence[Stratum]) -> Comparison:
    """Exact stratified permutation test: two arms on several data sets, each a stratum.

    The statistic is the mean over strata of the difference of mean accuracies, in percentage
    points. Seeds are permuted within their stratum only, so that an easy data set is never taken
    for a good arm. p is the share of all permutations whose statistic is at least as far from 0 as
    the observed one. None is left out: the distribution of a sum over strata is the convolution of
    their distributions, and on a common scale all differences are whole numbers. ValueError: no
    strata, an empty one, or more different sums than can be counted.

    >>> easy = Stratum(arm=[90, 95], against=[80, 85], images=100)
    >>> hard = Stratum(arm=[21, 22], against=[20, 19], images=50)
    >>> compare_strata([easy, hard])  # 36 splits; the observed pair and its mirror differ most
    Comparison(difference=7.0, p=0.05555555555555555, splits=36)
    """
    check_strata(strata)
    # A difference of accuracies in a stratum is a whole number over n m images; so, times the
    # least common multiple of these, it is whole in every stratum.
    scale = math.lcm(*[len(arm) * len(against) * images for arm, against, images in strata])
    observed = 0
    splits = 1
    # In a stratum, neighbouring differences are a fixed distance apart: one right image changes
    # sides. Strata of one distance have many equal sums. Convolved first, they stay small.
    alike: dict[int, Counter[int]] = {}
    for stratum in strata:
        observed += scale_difference(stratum, sum(stratum.arm), scale)
        differences = count_differences(stratum, scale)
        splits *= differences.total()
        distance = scale_difference(stratum, 1, scale) - scale_difference(stratum, 0, scale)
        before = alike.get(distance, Counter({0: 1}))
        alike[distance] = convolve(before, differences)
    # The last convolution, the largest, is never formed: two halves are enough to count with.
    left = Counter({0: 1})
    right = Counter({0: 1})
    for differences in sorted(alike.values(), key=len, reverse=True):
        if len(left) <= len(right):
            left = convolve(left, differences)
        else:
            right = convolve(right, differences)
    extreme = splits - count_closer(left, right, abs(observed))
    # One seed against one on one data set: both splits differ as much, whatever the numbers are.
    p = extreme / splits if splits > 2 else None
    difference = Fraction(100 * observed, scale * len(strata))
    return Comparison(difference=float(difference), p=p, splits=splits)


def check_strata(strata: Sequence[Stratum]) -> None:
    """ValueError where strata cannot be compared."""
    if not strata:
        raise ValueError("no strata to compare")
    for stratum in strata:
        if not stratum.arm or not stratum.against:
            raise ValueError("every stratum needs a seed of each arm")
        if any(number % 1 for number in [*stratum.arm, *stratum.against]):
            raise ValueError("compare counts, such as images that were right, not percentages")


def scale_difference(stratum: Stratum, total: int, scale: int) -> int:
    """The difference of mean accuracies, times `scale`, if the first arm's counts had this sum."""
    n = len(stratum.arm)
    m = len(stratum.against)
    rest = sum(stratum.arm) + sum(stratum.against) - total
    # (total / n - rest / m) / images * scale, without a fraction
    factor = scale // (n * m * stratum.images)
    return (m * total - n * rest) * factor


def count_differences(stratum: Stratum, scale: int) -> Counter[int]:
    """How many splits of a stratum have each difference of mean accuracies, times `scale`."""
    n = len(stratum.arm)
    sets = Counter({(0, 0): 1})  # how many sets of at most n numbers have each (size, sum)
    for number in [*stratum.arm, *stratum.against]:
        # Each set without this number makes one with it; `list`, since the loop adds new ones.
        for (size, total), count in list(sets.items()):
            if size < n:
                sets[size + 1, total + number] += count
    differences: Counter[int] = Counter()
    for (size, total), count in sets.items():
        if size == n:
            differences[scale_difference(stratum, total, scale)] += count
    return differences


def convolve(these: Counter[int], those: Counter[int]) -> Counter[int]:
    """How many pairs, a number of these and one of those, have each sum (ValueError: too many)."""
    if len(these) * len(those) > MOST_SUMS:
        raise ValueError(
            f"counting every permutation of these {len(these)} x {len(those)} differences would "
            f"take more than {MOST_SUMS:,} sums: compare fewer data sets at once"
        )
    sums: Counter[int] = Counter()
    for this, count in these.items():
        for that, times in those.items():
            sums[this + that] += count * times
    return sums


def count_closer(these: Counter[int], those: Counter[int], limit: int) -> int:
    """How many pairs, a number of these and one of those, have a sum between -limit and limit."""
    ordered = sorted(those)
    counts = [those[number] for number in ordered]
    below = [0, *accumulate(counts)]  # how many of those come before each place of `ordered`
    closer = 0
    for number, count in these.items():
        first = bisect_right(ordered, -limit - number)  # the sum must be more than -limit
        end = bisect_left(ordered, limit - number)  # and less than limit
        end = max(first, end)  # for limit 0, no sum lies between, but end may be before first
        closer += count * (below[end] - below[first])
    return closer
