"""Program: the exact permutation test of two arms.

It counts whole numbers, such as test images that were right, so that no rounding decides.
"""

import math
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

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
        return f"difference={difference:.2f} p={p} splits={self.splits}"


def compare(arm: Sequence[int], against: Sequence[int], images: int = 100) -> Comparison:
    """Exact two-sample permutation test of means of whole numbers, such as images that were right.

    p is the share of the C(n + m, n) ways to split all n + m numbers into n and m whose means
    differ at least as much as those of the arms. The difference is in percentage points where each
    number is out of so many `images`. ValueError: an arm without a seed, or numbers not whole.

    >>> compare([3, 4], [1, 2])  # the observed split and its mirror differ most
    Comparison(difference=2.0, p=0.3333333333333333, splits=6)
    """
    if not arm or not against:
        raise ValueError("an arm without a seed cannot be compared")
    pooled = [*arm, *against]
    if any(number % 1 for number in pooled):
        raise ValueError("compare counts, such as images that were right, not percentages")
    n = len(arm)
    m = len(against)

    def apart(total: int) -> int:
        """The difference of the means times n m, if the first arm's numbers had this sum."""
        return (n + m) * total - n * sum(pooled)

    observed = apart(sum(arm))
    extreme = 0
    for total, count in count_sums(pooled, n).items():
        if abs(apart(total)) >= abs(observed):
            extreme += count
    splits = math.comb(n + m, n)
    # One seed against one: both splits differ as much, whatever the numbers are.
    p = extreme / splits if splits > 2 else None
    difference = Fraction(100 * observed, n * m * images)
    return Comparison(difference=float(difference), p=p, splits=splits)


def count_sums(numbers: Sequence[int], n: int) -> Counter[int]:
    """How many choices of n of the numbers have each sum.

    >>> count_sums([1, 2, 2], 2)
    Counter({3: 2, 4: 1})
    """
    choices = [Counter[int]() for _ in range(n + 1)]  # by how many numbers are chosen
    choices[0][0] = 1
    for number in numbers:
        # From large to small: a choice of `size` without this number is not yet changed.
        for size in range(n, 0, -1):
            for total, count in choices[size - 1].items():
                choices[size][total + number] += count
    return choices[n]
