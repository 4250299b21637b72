"""What the checks of the exercises share: comparison with a witness, and messages that help."""

import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

SEED = 0  # the teacher's own seed: with another one, the numbers of all checks are others


class Wrong(AssertionError):
    """An answer is not right; the message says what is off, and why if the mistake is known."""


def same(
    what: str,
    found: Any,
    expected: Tensor,
    mistakes: Mapping[str, Tensor] | None = None,
    tolerance: float = 1e-10,
) -> None:
    """Wrong unless a result is a tensor equal to the expected one, relative to its largest entry.

    Args:
        what: what the result is called in the exercise.
        found: the student's result.
        expected: the witness's result.
        mistakes: for each mistake that is often made, the result that it leads to.
        tolerance: largest relative error; the rounding of float64 is far below it. Numbers that are
            right to the rounding of float32 only are told as such. For the mistakes 1e-4 is enough.
    """
    if not isinstance(found, Tensor):
        raise Wrong(f"{what} must be a tensor, not {type(found).__name__}")
    if found.shape != expected.shape:
        shapes = f"{tuple(found.shape)}, not {tuple(expected.shape)}"
        raise Wrong(f"{what} has the shape {shapes}")
    wrong_type = found.dtype != expected.dtype
    error = distance(found, expected)
    if error <= 1e-4 and wrong_type and not expected.is_floating_point():
        raise Wrong(
            f"the numbers of {what} are right, but they are {name(found)}; an index is a whole "
            f"number, {name(expected)}, as `argsort` gives it"
        )
    if error <= 1e-4 and wrong_type:
        raise Wrong(
            f"the numbers of {what} are right, but they are {name(found)}, and the arguments are "
            f"{name(expected)}; make a new tensor with the type of an argument, as in "
            "`torch.zeros(3, dtype=x.dtype)` or `torch.zeros_like(x)`"
        )
    if error <= tolerance:
        return
    for mistake, wrong in (mistakes or {}).items():
        if distance(found, wrong) <= 1e-4:
            raise Wrong(f"{what}: {mistake}")
    if error <= 1e-6:
        raise Wrong(
            f"{what} is right to the digits of float32 only; a tensor on the way is float32, such "
            "as `torch.eye(3)` without `dtype=`"
        )
    if expected.ndim == 2:  # the first row that is off; those before it are right
        for k in range(len(expected)):
            if distance(found[k], expected[k]) > tolerance:
                what = f"row {k + 1} of {what}"
                found = found[k]
                expected = expected[k]
                break
    begins = first(found), first(expected)
    if begins[0] == begins[1]:
        begins = first(found, 10), first(expected, 10)
    raise Wrong(
        f"{what} begins with {begins[0]}, but should with {begins[1]} "
        f"(largest difference: {error:.0e} of the largest entry)"
    )


def distance(found: Tensor, expected: Tensor) -> float:
    """Largest difference over the largest expected entry; infinite where a number is not finite."""
    if found.shape != expected.shape or not bool(found.isfinite().all()):
        return float("inf")
    a = found.detach().double()
    b = expected.detach().double()
    if a.numel() == 0:
        return 0.0
    return float((a - b).abs().max() / b.abs().max().clamp_min(1e-300))


def name(x: Tensor) -> str:
    """The type of a tensor's numbers, such as float32."""
    return str(x.dtype).removeprefix("torch.")


def first(x: Tensor, digits: int = 4) -> str:
    """The first numbers of a tensor, to be shown."""
    numbers = [f"{float(value):.{digits}g}" for value in x.detach().flatten()[:4]]
    return " ".join(numbers)


def untouched(what: str, now: Tensor, before: Tensor) -> None:
    """Wrong if an argument was changed."""
    if not torch.equal(now.detach(), before):
        raise Wrong(f"{what} was changed; it must stay as it is")


def guarded(answer: Any, names: str) -> Any:
    """The student's function, but Wrong if a call changes one of the arguments of these names.

    Args:
        answer: the student's function.
        names: of the arguments, in their order; `_` for one that may change.
    """

    def call(*arguments: Any) -> Any:
        before = [x.detach().clone() if isinstance(x, Tensor) else None for x in arguments]
        found = answer(*arguments)
        for what, now, was in zip(names.split(), arguments, before, strict=True):
            if what != "_" and was is not None:
                untouched(what, now, was)
        return found

    return call


class Grads:
    """The `.grad` of tensors that a function has to leave alone, to be compared later."""

    def __init__(self, **tensors: Tensor) -> None:
        self.tensors = tensors
        self.before = {name: copy_of(x.grad) for name, x in tensors.items()}

    def compare(self) -> None:
        """Wrong if a function left a gradient behind, or cleared one."""
        for name, x in self.tensors.items():
            before = self.before[name]
            if x.grad is None and before is None:
                continue
            if x.grad is None:
                what = f"`{name}.grad` was cleared, and somebody else's gradient was in it"
            elif before is None or not torch.equal(x.grad, before):
                what = f"a gradient is left behind in `{name}.grad`"
            else:
                continue
            raise Wrong(
                f"the numbers are right, but {what}; `torch.autograd.grad` leaves every `.grad` "
                "alone"
            )


def copy_of(x: Tensor | None) -> Tensor | None:
    """A copy that shares nothing with a tensor, if there is one."""
    return None if x is None else x.detach().clone()


def any_type(answer: Any, *arguments: Any) -> list[str]:
    """Remarks on an answer that is right in float64, from a call in float32.

    Wrong if the call fails, or if its numbers are not those of float64.
    """
    right = tree_leaves(answer(*arguments))
    try:
        found = tree_leaves(answer(*[in_float32(x) for x in arguments]))
    except Exception as error:  # whatever a student's function may raise
        raise Wrong(
            f"with float32 arguments it ends in {type(error).__name__}: {error}; a new tensor gets "
            "the type of an argument, as in `torch.zeros(3, dtype=x.dtype)`"
        ) from error
    remarks = []
    for x, correct in zip(found, right, strict=True):
        if distance(x, correct) > 1e-3:
            raise Wrong("with float32 arguments the numbers are wrong, and with float64 right")
        if x.dtype != in_float32(correct).dtype:
            remarks = [f"for float32 arguments the result is {name(x)}"]
    return remarks


def in_float32(x: Any) -> Any:
    """A tensor of floating-point numbers as float32; anything else as it is."""
    if isinstance(x, Tensor) and x.is_floating_point():
        return x.detach().float().requires_grad_(x.requires_grad)
    return x


def several(what: str, found: Any, names: Sequence[str]) -> list[Any]:
    """Wrong unless a result is a tuple with so many parts; the parts."""
    if not isinstance(found, tuple | list) or len(found) != len(names):
        raise Wrong(f"{what} must return {len(names)} things: {', '.join(names)}")
    return list(found)


def no_graph(what: str, found: Any) -> None:
    """Wrong if a result keeps the graph of automatic differentiation alive."""
    if isinstance(found, Tensor) and found.requires_grad:
        raise Wrong(
            f"{what} still has the graph of automatic differentiation, so the memory of a whole "
            "pass stays as long as it is kept: detach it"
        )


def same_slopes(
    what: str, found: Any, expected: Tensor, inputs: Mapping[str, Tensor], weights: Tensor
) -> None:
    """Wrong unless the gradients of weights · found with respect to the inputs are as expected."""
    right = torch.autograd.grad((weights * expected).sum(), [*inputs.values()])
    slopes: tuple[Tensor | None, ...] = (None,) * len(inputs)
    if isinstance(found, Tensor) and found.requires_grad:
        slopes = torch.autograd.grad((weights * found).sum(), [*inputs.values()], allow_unused=True)
    for name, slope, correct in zip(inputs, slopes, right, strict=True):
        if slope is None or distance(slope, correct) > 1e-6:
            raise Wrong(
                f"{what} has the right numbers, but a wrong gradient with respect to {name}, so "
                "nothing could be trained through it: is a part of it detached?"
            )


def stay_small(function: Callable[[Tensor, Tensor], object]) -> None:
    """Wrong if a matrix p x p is made, by torch or by numpy, for G (3, p) and g (p,)."""
    p = 600
    with Watch():  # once before: what torch imports on first use would be counted as numpy's
        function(random(3, p), random(p, seed=1))
    tracemalloc.start()  # it sees numpy's memory, and not torch's
    try:
        with Watch() as made:
            function(random(3, p), random(p, seed=1))
        numpys = tracemalloc.get_traced_memory()[1] // 4
    finally:
        tracemalloc.stop()
    if max(made.largest, numpys) >= p * p:
        raise Wrong(
            f"the numbers are right, but with p = {p} a p x p matrix of {p * p:,} numbers is made; "
            "in a layer of ViT-B, p is 196,608"
        )


class Watch(TorchDispatchMode):
    """Notes how many numbers each tensor has that is made.

    A view, such as a transposed matrix, has the memory of another tensor and does not count.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sizes: list[int] = []
        self.tensors: list[Tensor] = []  # what was made, as it is at the end

    @property
    def largest(self) -> int:
        """Of the tensors that were made, the size of the largest."""
        return max(self.sizes, default=0)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        """Every operation of torch passes here."""
        made = func(*args, **(kwargs or {}))
        known = {memory(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for x in tree_leaves(made):
            if isinstance(x, Tensor) and memory(x) not in known:
                self.sizes.append(x.numel())
                self.tensors.append(x)
        return made


def memory(x: Tensor) -> int:
    """Where the numbers of a tensor are; a view has the address of its base."""
    return x.untyped_storage().data_ptr()


def random(*shape: int, seed: int = 0) -> Tensor:
    """Normally distributed numbers, float64, the same in every call with the same `SEED`."""
    generator = torch.Generator().manual_seed(1000 * SEED + seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def eye(n: int) -> Tensor:
    """The n x n identity, float64."""
    return torch.eye(n, dtype=torch.float64)
