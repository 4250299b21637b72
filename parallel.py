"""Who does the work of a step: micro-batches and processes. Nothing here changes a result but by rounding.

    parts     a batch in pieces [(weight, piece)], whose weights add up to 1 over all pieces of all processes
    World     the processes of a run, one in most; `torchrun` starts more

A step's order, augmentation, masks and drop path are drawn for the whole batch, whoever computes what, and sums over
processes are one flat all-reduce, so the ranks stay equal to the bit. Losses are means over images, which makes weights
by numbers of images exact; a BatchNorm head takes its moments from the whole batch (`Summed`).
"""

import contextlib
import datetime
import os
import signal
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from config import RunError, UsageError
from stopping import signals

T = TypeVar("T")
Parts = Sequence[tuple[float, Any]]
PATIENCE = datetime.timedelta(minutes=10)  # for a silent peer; a dead one is noticed at once


# --- processes -------------------------------------------------------------------------------------------------------


def alone(loss: Callable[..., Tensor], tensors: Sequence[Tensor], *args: Any) -> list[Tensor]:
    """[loss, its gradient for each tensor] of a batch in one piece; no graph is kept."""
    value = loss(*args)
    return [value.detach(), *torch.autograd.grad(value, tensors)]


class Summed(torch.autograd.Function):
    """Sum over processes of a tensor that all of them go on with; so its gradient is a sum over processes too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.clone()
        world().talk(lambda: dist.all_reduce(x))
        return x

    @staticmethod
    def backward(ctx: Any, *grad: Tensor) -> Tensor:
        g = grad[0].clone()
        world().talk(lambda: dist.all_reduce(g))
        return g


class World:
    """Rank `rank` of `size` processes that share the work of every step. `World()` is a process on its own."""

    def __init__(self, rank: int = 0, size: int = 1, store: Any = None) -> None:
        self.rank, self.size, self.store = rank, size, store
        self.flags: list[Callable[[], Tensor]] = []  # the sum of `asked` that came with the last all-reduce, on a
        # GPU those of the last two

    def share(self, n: int) -> range:
        """This process's part of n things: contiguous, in order of ranks, sizes differ by one at most.

        >>> [World(rank, 3).share(7) for rank in range(3)]
        [range(0, 2), range(2, 4), range(4, 7)]
        """
        return range(n * self.rank // self.size, n * (self.rank + 1) // self.size)

    def total(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Sums over processes, by one flat all-reduce; a stop that any process was asked for travels with it.

        Raises RunError where a process is gone, with what it said last.
        """
        if self.size == 1:
            return list(tensors)
        flat = torch.cat([*(t.detach().reshape(-1) for t in tensors), tensors[0].new_tensor([float(signals.asked)])])
        self.talk(lambda: dist.all_reduce(flat))
        self.flags = [*(self.flags[-1:] if flat.is_cuda else ()), later(flat[-1].clone())]
        pieces = flat[:-1].split([t.numel() for t in tensors])
        return [piece.view_as(t) for piece, t in zip(pieces, tensors, strict=True)]

    def asked(self) -> int:
        """The signal to stop, 0 for none; the same in all processes, though with a GPU told one step later.

        So the host never waits for the all-reduce of the step that it has just put into the queue.
        """
        if self.size == 1:
            return signals.asked
        if not self.flags or not int(self.flags[0]()):
            return 0
        return signals.asked or int(signal.SIGTERM)

    def gradients(
        self, loss: Callable[..., Tensor], tensors: Sequence[Tensor], parts: Parts, *beside: Sequence[Any]
    ) -> list[Tensor]:
        """As `alone`, for a batch whose parts are here and in other processes.

        Args:
            beside: what else the loss takes, an item a part.
        """
        sums: list[Tensor] = []
        for (weight, part), *rest in zip(parts, *beside, strict=True):
            value = loss(part, *rest) * weight
            found = [value.detach().to(tensors[0].dtype), *torch.autograd.grad(value, tensors)]
            sums = [a + b for a, b in zip(sums, found, strict=True)] if sums else found
        value, *found = self.total(sums or [torch.zeros_like(t) for t in (tensors[0].reshape(-1)[0], *tensors)])
        return [value.clone(), *found]  # a view of one number would keep the gradients alive

    def gather(self, tensor: Tensor) -> Tensor:
        """Rows of all processes in order of ranks, on the CPU; numbers of rows may differ."""
        if self.size == 1:
            return tensor.cpu()
        rows: list[Any] = [None] * self.size
        self.talk(lambda: dist.all_gather_object(rows, tensor.cpu()))
        return torch.cat(rows)

    def first(self, fn: Callable[[], T]) -> T:
        """The result of `fn` in rank 0, given to all; where it raises, all raise the same."""
        if self.size == 1:
            return fn()
        box: list[Any] = [None, None]
        if self.rank == 0:
            try:
                box[0] = fn()
            except (UsageError, RunError) as error:
                box[1] = error
        self.talk(lambda: dist.broadcast_object_list(box, src=0))
        if box[1] is not None:
            raise box[1]
        result: T = box[0]
        return result

    def talk(self, collective: Callable[[], Any]) -> None:
        """A collective call; a peer that is gone becomes a RunError with the reason that it left."""
        try:
            collective()
        except RuntimeError as error:
            raise RunError(
                f"another process of this run is gone{self.reason()}; nothing was saved just now, "
                "--resume goes on from the last checkpoint"
            ) from error

    def reason(self) -> str:
        """What the first process to fail left behind."""
        with contextlib.suppress(RuntimeError):  # the store may have gone with its process
            if self.store is not None and self.store.check(["failed"]):
                return f" ({self.store.get('failed').decode()})"
        return ""

    def failed(self, why: str) -> None:
        """Tell the others why this process ends; the first one to speak is heard."""
        if self.store is not None and not self.reason():
            with contextlib.suppress(RuntimeError):  # the store may have gone with its process
                self.store.set("failed", f"rank {self.rank}: {why}")

    def rows(self, K: int, whole: bool = False) -> slice:
        """The layers whose gradients this process keeps and inverts; with `whole` (one block) rank 0 has them all."""
        share = range(K if self.rank == 0 else 0) if whole else self.share(K)
        return slice(share.start, share.stop)


def later(x: Tensor) -> Callable[[], Tensor]:
    """A way to ask for x on the host. Of a GPU it is on its way at once, so asked a step later nothing waits for it."""
    if not x.is_cuda:
        return lambda: x
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    host.copy_(x, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()

    def ask() -> Tensor:
        arrived.synchronize()
        return host

    return ask


def micro(share: range, size: int | None) -> list[range]:
    """A process's share of a batch in pieces of at most `size` images.

    >>> micro(range(4, 9), 2)
    [range(4, 6), range(6, 8), range(8, 9)]
    """
    step = size or max(1, len(share))
    return [range(at, min(at + step, share.stop)) for at in range(share.start, share.stop, step)]


_world: World | None = None


def world() -> World:
    """The processes that `torchrun` has started (RANK, WORLD_SIZE ...), joined on the first call; or this one alone."""
    global _world
    if _world is not None:
        return _world
    size = os.environ.get("WORLD_SIZE", "1")
    if size == "1":
        return World()
    if not dist.is_available():
        raise UsageError("WORLD_SIZE: this build of torch has no distributed package")
    try:
        from torch.distributed.distributed_c10d import PrefixStore
        from torch.distributed.rendezvous import rendezvous

        store, rank, count = next(iter(rendezvous("env://", timeout=PATIENCE)))
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=count, timeout=PATIENCE)
    except (ValueError, RuntimeError) as error:
        raise UsageError(f"WORLD_SIZE {size}: the processes do not meet ({str(error).splitlines()[0]})") from error
    _world = World(rank, count, PrefixStore("bisslight", store))
    return _world


def tell(why: str) -> None:
    """Say why this process ends, if it has met the others."""
    if _world is not None:
        _world.failed(why)


def leave() -> None:
    """Take leave of the other processes."""
    global _world
    if _world is not None:
        _world = None
        dist.destroy_process_group()
