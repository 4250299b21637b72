"""What an upper gradient costs: floating-point operations, counted without computing anything.

    python -m experiments.cost                       # the paper's setting, ViT-B, L and H; seconds
    python -m experiments.cost --backbone vit_l16 --rank 8 --p-batch 64

The passes run on torch's `meta` device, where tensors have shapes but no numbers. `Counter` adds up
their products, 2abc operations for a matrix (a, b) times (b, c). M-FAC's operations are by formula;
a test counts them as well.
"""

from functools import partial
from typing import Annotated, Any, NamedTuple

import torch
import typer
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

import mae
from bisslight import Passes
from config import BACKBONES, Arch, Record
from experiments.recipe import markdown, run_script
from head import Examples, downstream_loss
from lora import Backbone
from support.checkpoints import build_head, build_vit

CLASSES = 100
IMAGES = {"cub200": (4800, 1194), "flowers": (1020, 1020)}  # most and least: train, validation
TERA = 1e12
flop_registry[torch.ops.aten.addmm_] = flop_registry[torch.ops.aten.addmm]  # torch leaves it out
GIGA = 1e9


class Counter(TorchDispatchMode):
    """Adds up the operations of all products of matrices and vectors that run while it is active.

    torch's own `FlopCounterMode` cannot be used with `torch.autograd.grad`, and leaves products of
    a matrix and a vector out.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        """Every operation of torch passes here."""
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        packet = func._overloadpacket
        if packet in (torch.ops.aten.mv, torch.ops.aten.dot):
            self.operations += 2 * args[0].numel()
        elif packet in flop_registry:
            self.operations += flop_registry[packet](*args, **kwargs, out_val=made)
        return made


class Sizes(NamedTuple):
    """The sizes in the formulas."""

    K: int  # blocks
    p: int  # numbers of a block
    m: int  # N_L, stored gradients
    N_U: int  # queries


class PerImage(NamedTuple):
    """Operations of one image in a lower step, an upper step, validation, and CG's two parts."""

    lower: float  # line 6: L^P and its gradients with respect to θ_P and φ_P
    upper: float  # lines 12 and 14: two passes of L^D
    forward: float  # L^D alone, as in validation
    graph: float  # the gradient of L^P with a graph, once for each solve
    product: float  # one Hessian-vector product with that graph


def recursion(s: Sizes) -> tuple[float, float]:
    """Eq. 7 and Eq. 10: operations of line 10, and of all lines 13.

    Gradient g_i has an inner product and a sum with each of the i − 1 vectors v_j before it, which
    is 4p(i − 1), and then d_i = v_i·g_i, 2p; the sum over i = 1 to m is 2pm². A query has an inner
    product and a sum with each of the m vectors, 4pm.
    """
    return s.K * 2 * s.p * s.m**2, s.N_U * s.K * 4 * s.p * s.m


def closed_form(s: Sizes) -> tuple[float, float]:
    """The closed form: operations of line 10, and of all lines 13.

    G Gᵀ takes 2pm². A query takes a product with G and one with Gᵀ. The Cholesky factor, m³/3, and
    its two solves, 2m², are left out: they are 1/p of the rest.
    """
    return s.K * 2 * s.p * s.m**2, s.N_U * s.K * 4 * s.p * s.m


def cg(s: Sizes, per_image: PerImage, p_batch: int, iterations: int) -> float:
    """Conjugate gradients: operations of all lines 13.

    Each query makes a graph of the pretext batch, and takes a product in each iteration.
    """
    return s.N_U * p_batch * (per_image.graph + iterations * per_image.product)


def count(arch: Arch, rank: int) -> PerImage:
    """Count the operations of one image in each kind of pass, with MAE as the pretext task."""
    with torch.device("meta"):
        backbone = Backbone(build_vit(arch)).requires_grad_(False)
        decoder = build_head(arch, "mae")
        assert isinstance(decoder, mae.Decoder)
        task = mae.MAE(backbone, decoder)
        theta = torch.empty(arch.depth, 4 * rank * arch.dim).requires_grad_()
        images = torch.empty(1, 3, arch.image_size, arch.image_size)
        noise = torch.empty(1, decoder.patches)
        head = {"weight": torch.empty(CLASSES, arch.dim), "bias": torch.empty(CLASSES)}
        examples = Examples(images, torch.zeros(1, dtype=torch.int64))
    phi_D = {name: x.requires_grad_() for name, x in head.items()}
    batch = task.prepare(images, noise)
    loss_D = partial(downstream_loss, backbone)
    passes = Passes()
    with sdpa_kernel(SDPBackend.MATH):  # attention as products that can be counted
        with Counter() as lower:
            passes.gradients(task.loss, theta, task.phi, batch)
        with Counter() as upper:
            passes.gradients(loss_D, theta, phi_D, examples)
        with Counter() as forward, torch.no_grad():
            loss_D(theta, phi_D, examples)
        with Counter() as graph:
            product = passes.hessian(task.loss, theta, task.phi, batch)
        with Counter() as one_product:
            product(torch.empty_like(theta))
    return PerImage(
        lower=lower.operations,
        upper=2 * upper.operations,
        forward=forward.operations,
        graph=graph.operations,
        product=one_product.operations,
    )


def rows_of(name: str, s: Sizes, per_image: PerImage, p_batch: int, passes: float) -> list[Record]:
    """A row for each method: what an alternation takes in lines 10 and 13, and its buffers.

    `passes`: operations of all other lines of the alternation, with which they are compared.
    """
    stored = 4 * s.K * s.m * s.p  # bytes of G in float32
    # By method: operations of line 10, and of all lines 13; bytes of buffers.
    methods = {
        "identity": (0.0, 0.0, 0.0),
        "closed form": (*closed_form(s), stored),
        "recursion": (*recursion(s), 3 * stored),  # v in float64 beside G
        "CG, 5 steps": (0.0, cg(s, per_image, p_batch, 5), 0.0),
    }
    rows = []
    for method, (prepare, queries, buffers) in methods.items():
        rows.append({
            "backbone": name,
            "method": method,
            "line 10, TFLOP": figure(prepare / TERA),
            "lines 13, TFLOP": figure(queries / TERA),
            "passes of all other lines, TFLOP": figure(passes / TERA),
            "lines 10 and 13, of the passes": f"{figure(100 * (prepare + queries) / passes)} %",
            "G and v, GB": figure(buffers / GIGA),
        })  # fmt: skip
    return rows


def runs_of_peft(name: str, per_image: PerImage, passes: float) -> list[Record]:
    """Rows that say how many runs of PEFT cost as much as an alignment, on two data sets.

    An alignment has 500 alternations of `passes` operations each, a run of PEFT 200 epochs.
    """
    alignment = 500 * passes
    rows = []
    for dataset, (train, val) in IMAGES.items():
        training = 200 * train * per_image.upper / 2  # an upper step has two passes, PEFT one
        validation = 200 * val * per_image.forward
        rows.append({
            "an alignment, in runs of PEFT": f"{dataset}, {name}",
            "without validation": f"{alignment / training:.1f}",
            "with one after each epoch": f"{alignment / (training + validation):.1f}",
        })  # fmt: skip
    return rows


def figure(value: float) -> str:
    """A number with two digits, or more if it is large."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.2g}"


def main(
    backbone: Annotated[str, typer.Option(help="Names, with commas.")] = "vit_b16,vit_l16,vit_h14",
    rank: int = 64,
    p_batch: int = 256,
    d_batch: int = 64,
    lower_steps: int = 20,
    upper_steps: int = 8,
) -> None:
    """Print a table of one alternation, and how many runs of PEFT cost as much as an alignment."""
    rows: list[Record] = []
    runs: list[Record] = []
    for name in backbone.split(","):
        if name not in BACKBONES:
            raise typer.BadParameter(f"{name}: is none of {', '.join(BACKBONES)}")
        arch = BACKBONES[name]
        s = Sizes(K=arch.depth, p=4 * rank * arch.dim, m=lower_steps, N_U=upper_steps)
        per_image = count(arch, rank)
        passes = lower_steps * p_batch * per_image.lower + upper_steps * d_batch * per_image.upper
        rows += rows_of(name, s, per_image, p_batch, passes)
        runs += runs_of_peft(name, per_image, passes)
    print(markdown(rows), markdown(runs), sep="\n\n")


if __name__ == "__main__":
    run_script(main)
