"""Checks of sheet 5: on runs of the right Algorithm 1 and of the seven copies, on two problems."""

from collections.abc import Callable, Sequence
from typing import Any

import answers_3
import answers_5
import witness
from answers_5 import watch
from torch import Tensor
from witness import Wrong

Algorithm = Callable[[Any], Tensor]  # sheets 3 and 5 have a Problem each, with the same fields

COPIES: dict[str, Algorithm] = {
    "copy a": answers_5.copy_a,
    "copy b": answers_5.copy_b,
    "copy c": answers_5.copy_c,
    "copy d": answers_5.copy_d,
    "copy e": answers_5.copy_e,
    "copy f": answers_5.copy_f,
    "copy g": answers_5.copy_g,
}
ALL: dict[str, Algorithm] = {"the right Algorithm 1": answers_3.algorithm_1, **COPIES}


def check_shows_a(shows_a: Any) -> list[str]:
    """True for copy a alone."""
    return true_for(shows_a, "copy a")


def check_shows_b(shows_b: Any) -> list[str]:
    """True for copy b alone."""
    return true_for(shows_b, "copy b")


def check_shows_c(shows_c: Any) -> list[str]:
    """True for copy c alone."""
    return true_for(shows_c, "copy c")


def check_shows_d(shows_d: Any) -> list[str]:
    """True for copy d alone."""
    return true_for(shows_d, "copy d")


def check_shows_e(shows_e: Any) -> list[str]:
    """True for copy e alone."""
    return true_for(shows_e, "copy e")


def check_shows_f_and_g(shows_f_and_g: Any) -> list[str]:
    """True for copies f and g alone, which have one mistake."""
    return true_for(shows_f_and_g, "copy f", "copy g")


def true_for(shows: Any, *own: str) -> list[str]:
    """Wrong unless a function says True for runs of its own copies, and False for all others."""
    seed = 1000 * witness.SEED
    for k, N_L, N_U in ((1, 4, 2), (2, 7, 3)):
        for what, algorithm in ALL.items():
            run = watch(algorithm, answers_5.toy(seed + k, N_L, N_U))
            try:
                said = shows(run)
            except NotImplementedError:
                raise
            except Exception as error:  # whatever a student's function may raise
                raise Wrong(
                    f"for {what} it ends in {type(error).__name__}: {error}; it has to say True "
                    "or False of each run"
                ) from error
            if said is None or bool(said) != (what in own):
                raise Wrong(f"it says {said} of {what}" + hint(what, own))
    return []


def hint(what: str, own: Sequence[str]) -> str:
    """What an answer that is not the right one means."""
    if what in own:
        return ", so it does not show the mistake"
    if what in COPIES:
        return f", which has another mistake; look for what {' and '.join(own)} alone does"
    return ", which has no mistake"
