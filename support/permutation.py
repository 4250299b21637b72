"""Program: the exact permutation test of two arms (App. C.2.1).

An arm is a list of whole numbers, one per seed, such as how many test images were right. With whole
numbers, no rounding error decides whether two differences are equal.
"""

import math
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

from pydantic import BaseModel


class Comparison(BaseModel, frozen=True):
    """An arm compared with another one by `compare`."""

    difference: float  # the first mean minus the second, in percentage points
    p: float | None  # two-sided and exact; None for one seed against one, which allows no test
    splits: int  # how many ways there are to split the seeds of both into two such arms

    def __str__(self) -> str:
        """Return the comparison as text, with two decimals, and two digits of p."""
        difference = round(self.difference, 2) + 0.0  # adding 0.0 turns -0.0 into 0.0
        p = "none" if self.p is None else f"{self.p:#.2g}"
        return f"difference={difference:.2f} p={p} splits={self.splits}"


def compare(arm: Sequence[int], against: Sequence[int], images: int = 100) -> Comparison:
    """Compare the means of two arms by an exact two-sided permutation test.

    The arms have n and m whole numbers, one per seed: how many of `images` test images were right.
    p is the share of the C(n + m, n) ways to split all n + m numbers into n and m whose means
    differ at least as much as those of the arms. The difference is in percentage points.

    1. Refuse an arm without a seed, and numbers that are not whole, by a ValueError.
    2. Compute the difference of the arms' means, scaled to be a whole number.
    3. Count the splits whose means differ at least as much. The mean of a part follows from its
       sum, so `count_sums` counts the splits by the sum of their first part.
    4. Divide by the number of all splits.

    >>> compare([3, 4], [1, 2])  # the observed split and its mirror differ most
    Comparison(difference=2.0, p=0.3333333333333333, splits=6)
    """
    if not arm or not against:
        raise ValueError("an arm without a seed cannot be compared")
    pooled = [*arm, *against]
    if any(number % 1 for number in pooled):  # also true for nan and inf
        raise ValueError("compare counts, such as images that were right, not percentages")

    n = len(arm)
    m = len(against)
    total = sum(pooled)
    observed = scale_difference(sum(arm), total, n, m)

    extreme = 0  # splits whose means differ at least as much as those of the arms
    ways_by_sum = count_sums(pooled, n)  # such as {3: 2, 4: 1}: two splits have the sum 3
    for first_sum, ways in ways_by_sum.items():
        scaled = scale_difference(first_sum, total, n, m)  # of each of these splits
        if abs(scaled) >= abs(observed):
            extreme += ways

    splits = math.comb(n + m, n)  # the ways to choose n of n + m
    # With one seed each there are two splits, which differ equally, whatever the numbers are.
    p = extreme / splits if splits > 2 else None
    difference = Fraction(100 * observed, n * m * images)  # exact, in percentage points
    return Comparison(difference=float(difference), p=p, splits=splits)


def scale_difference(first_sum: int, total: int, n: int, m: int) -> int:
    """Return n m times the difference of two means, which is a whole number.

    The first mean is that of n numbers with the sum `first_sum` (s), the second that of the m
    others; `total` is the sum of all (S). n m (s/n - (S - s)/m) = (n + m) s - n S.

    >>> scale_difference(first_sum=7, total=10, n=2, m=2)  # of 3, 4 and 1, 2: 2 * 2 * (3.5 - 1.5)
    8
    """
    return (n + m) * first_sum - n * total


def count_sums(numbers: Sequence[int], n: int) -> Counter[int]:
    """Count the ways to choose n of the numbers, by the sum of those that are chosen.

    It looks at one number after the other. A choice of `size` numbers that has this number, too, is
    a choice of size - 1 numbers among those before it, with a smaller sum.

    >>> count_sums([1, 2, 2], 2)  # 1 + 2 in two ways, and 2 + 2
    Counter({3: 2, 4: 1})
    """
    # ways[size][total]: the ways to choose `size` of the numbers so far with this sum.
    ways = [Counter[int]() for _ in range(n + 1)]
    ways[0][0] = 1  # there is one way to choose nothing, and its sum is 0
    for number in numbers:
        # From large to small sizes, so that ways[size - 1] does not have this number yet.
        for size in range(n, 0, -1):
            for total, count in ways[size - 1].items():
                ways[size][total + number] += count
    return ways[n]
