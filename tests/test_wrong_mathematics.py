"""Mathematics that was once wrong, or that a user's own task could get wrong, each as a claim.

Each is tried on a problem whose answer is known by other means: dense algebra, torch's own
optimiser, brute-force minimisation.
"""

import ast
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import close
from test_bisslight import LAM, Quadratic, base, body
from test_lift import MATHEMATICS
from torch import Tensor

import cli
from align import align
from bisslight import State
from cg import cg
from commands import AlignConfig
from config import UsageError
from mfac import exact
from training import Group, Optimiser, constant

ROOT = Path(cli.__file__).parent

# --- conjugate gradients ----------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1.0, 1e-5, 1e-9, 1e-25])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_cg_solves_small_queries_as_well_as_large_ones(scale: float, dtype: torch.dtype) -> None:
    """Five steps, as BiSSL takes, are as far from the dense solution whatever |g| is."""
    g = torch.Generator().manual_seed(0)
    R, query = torch.randn(8, 6, generator=g).double(), torch.randn(2, 3, generator=g).double()
    H, query = (R.T @ R / 8).to(dtype), (query / query.norm()).to(dtype)
    lam, damping = 1e-3, 1.0
    c = lam + damping
    truth = (c * torch.linalg.solve(H + c * torch.eye(6, dtype=dtype), query.flatten())).view(2, 3)
    inverse = cg(query, lam, lambda: lambda d: (H @ d.flatten()).view(2, 3), 5, damping)
    close(inverse(scale * query) / scale, truth, 2e-3)


def test_step_sizes_a_tensor_keep_the_absolute_tolerance_of_the_released_program() -> None:
    """One step with |g|² = 1e-12, by hand: α = gᵀg / (gᵀAg + 1e-12), half of what it should be."""
    query = torch.tensor([[0.6e-6, 0.8e-6]], dtype=torch.float64)
    A = 1 + 0.5 / (0.1 + 1.0)  # I + H/c for the Hessian ½I
    found = cg(query, 0.1, lambda: lambda d: 0.5 * d, 1, 1.0, "c", [2])(query)
    close(found, 1e-12 / (A * 1e-12 + 1e-12) * query, 1e-12)


# --- the optimiser ----------------------------------------------------------------------------

Change = Callable[[Tensor], Tensor]
LAYOUTS: dict[str, tuple[Change, Change]] = {
    # of a (3, 4) tensor and of its gradient: the same values, laid out differently in memory
    "transposed gradient": (torch.clone, lambda g: g.T.contiguous().T),
    "transposed tensor": (lambda x: x.T.contiguous().T, torch.clone),
    "gradient of a view": (torch.clone, lambda g: torch.cat([g, g], 1)[:, :4]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_may_lie_in_memory_in_any_order(layout: str) -> None:
    """Three steps of the program's AdamW and of torch's plain one (not fused) agree."""
    of_tensor, of_gradient = LAYOUTS[layout]
    g = torch.Generator().manual_seed(0)
    start = torch.randn(3, 4, generator=g).double()
    ours, theirs = of_tensor(start).requires_grad_(), start.clone().requires_grad_()
    opt = Optimiser([Group([ours], 0.1, 0.05)], constant, (0.9, 0.95), clip=10.0)
    plain = {"weight_decay": 0.05, "foreach": False, "fused": False}
    reference = torch.optim.AdamW([theirs], 0.1, (0.9, 0.95), **plain)
    for _ in range(3):
        gradient = torch.randn(3, 4, generator=g).double()
        opt.update([(ours, of_gradient(gradient))])
        theirs.grad = gradient
        reference.step()
        close(ours, theirs, 1e-12)


def test_a_gradient_that_repeats_one_number_moves_every_entry() -> None:
    """What autograd gives for the sum of a tensor: one number in memory, shown (3, 4) times."""
    x = torch.zeros(3, 4, requires_grad=True)
    (gradient,) = torch.autograd.grad(x.sum(), x)
    assert gradient.stride() == (0, 0)  # otherwise this test shows nothing
    opt = Optimiser([Group([x], 0.1, 0.0)], constant, (0.9, 0.95), clip=10.0)
    opt.update([(x, gradient)])
    close(x, torch.full((3, 4), -0.1), 1e-6)


# --- a loss that is no mean over images -------------------------------------------------------

APART = """
import torch
import torch.nn.functional as F

import examples.rotation
from lora import features


class Apart(examples.rotation.Rotation):
    '''Drives the images of a batch apart.'''
    MEAN

    def loss(self, theta, phi, batch):
        x = features(self.backbone, theta, batch.images)
        x = F.normalize(F.linear(x, phi["weight"], phi["bias"]), dim=1)
        return F.cross_entropy(x @ x.T / 0.1, torch.arange(len(x)))
"""


@pytest.mark.parametrize(
    ("micro", "mean", "refused"),
    [(4, False, True), (None, False, False), (8, False, False), (4, True, False), (4, None, False)],
)
def test_a_loss_that_is_no_mean_over_images_is_not_computed_in_pieces(
    weights: Path, tmp_path: Path, micro: int | None, mean: bool | None, refused: bool
) -> None:
    """Before any work, with what to do. Whole batches, and tasks that say nothing, are taken."""
    says = f"mean_over_images = {mean}" if mean is not None else ""
    (tmp_path / "apart.py").write_text(APART.replace("MEAN", says))
    short: Any = {"p_batch": 8, "d_batch": 8, "alternations": 2, "lower_steps": 2, "warmup": 0}
    about: Any = {"backbone": "vit_mini", "weights": weights, "dataset": "quilts"}
    about |= {"pretext": f"{tmp_path}/apart.py:Apart", "micro_batch": micro}
    cfg = AlignConfig(**about, **short, upper_steps=1, probe_epochs=0)
    if not refused:
        assert align(cfg, tmp_path / "a").pretext == "apart"
        return
    with pytest.raises(UsageError, match=r"apart\.py:Apart: .* leave --micro-batch out"):
        align(cfg, tmp_path / "a")
    assert not (tmp_path / "a").exists()


# --- settings that are read otherwise than they stand -----------------------------------------

MINI = "--backbone vit_mini --dataset quilts --weights WEIGHTS"
PRETRAIN = "pretrain --pool quilts --backbone vit_mini --epochs 1 --batch 2000"
PEFT = "--lr 1e-2 --seeds 1 --epochs 2"
TINY = "--lower-steps 1 --upper-steps 1 --p-batch 8 --d-batch 8 --probe-epochs 0 --alternations 2"
LATE = {  # command lines whose warm-up is as long as the run, and the option that makes it shorter
    "pretrain": (f"{PRETRAIN} --warmup-epochs 1", "--warmup-epochs 0"),
    "align": (f"align {MINI} {TINY} --warmup 2", "--warmup 1"),
    "finetune": (f"finetune {MINI} {PEFT} --warmup-epochs 5", "--warmup-epochs 1"),
    "sweep": (
        f"sweep --rank 1,2 {MINI} {TINY} --warmup 1 {PEFT} --warmup-epochs 2",
        "--warmup-epochs 1",
    ),
}


@pytest.mark.parametrize("command", LATE)
def test_every_command_says_when_the_warm_up_is_not_shorter_than_the_run(
    command: str, weights: Path, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    line, mended = (text.replace("WEIGHTS", str(weights)) for text in LATE[command])
    said = {}
    for name, more in (("late", ""), ("mended", mended)):
        assert cli.run(f"{line} {more} --out {name}".split()) == 0, capsys.readouterr().err
        out, err = capsys.readouterr()
        said[name] = re.search(r"warm-?up.{,40} is not shorter than", " ".join((out + err).split()))
    assert said["late"] and not said["mended"]


def test_a_setting_given_flat_and_nested_is_refused(
    weights: Path, tmp_path: Path, capsys: Any
) -> None:
    (tmp_path / "s.toml").write_text("alternations = 3\n[bilevel]\nalternations = 4")
    line = f"align {MINI} --config {tmp_path}/s.toml --dry-run".replace("WEIGHTS", str(weights))
    assert cli.run(line.split()) == 2
    err = capsys.readouterr().err
    assert re.search("alternations|bilevel", err) and err.count("\n") == 1, err
    assert not re.search(r"'(\w+)', did you mean \1\b", err)  # as it once was


# --- what files say about themselves ----------------------------------------------------------


@pytest.mark.parametrize("name", [*MATHEMATICS, "training"])
def test_messages_of_the_mathematics_name_no_flags(name: str) -> None:
    """A flag in a text that the file can raise helps nobody in a notebook."""
    strings = [
        part.value
        for node in ast.walk(ast.parse((ROOT / f"{name}.py").read_text()))
        if isinstance(node, ast.Raise)
        for part in ast.walk(node)
        if isinstance(part, ast.Constant) and isinstance(part.value, str)
    ]
    assert not [text for text in strings if re.search(r"--[a-z]", text)]


def test_files_that_readme_says_can_be_copied_are_those_that_lift_alone() -> None:
    (sentence,) = re.findall(r"[^;:]*can be copied", (ROOT / "README.md").read_text())
    assert {*re.findall(r"`([a-z_]+)\.py`", sentence)} == {*MATHEMATICS}


def test_marks_stand_where_algorithm_1_does_what_the_line_says() -> None:
    """Line 4 empties G; the gradient at θ_D is line 14's; Eq. 7 and 10 are one form of several."""
    statements, lines = body()
    marked = {}
    for node in statements:
        if not hasattr(node, "body"):
            own = range(node.lineno - 1, node.end_lineno or 0)
            marked[ast.unparse(node)] = " ".join(lines[i].partition("#")[2] for i in own)
    emptied = [code for code, mark in marked.items() if re.search(r"\bl\.4\b", mark)]
    assert emptied and all(re.search(r"\bG\b", code) for code in emptied)
    at_D = [mark for code, mark in marked.items() if re.search(r"= grad\w*\(.*theta_D", code)]
    assert at_D and all(re.search(r"\bl\.14\b", mark) for mark in at_D)
    named = [mark for mark in marked.values() if re.search(r"Eq\. ?(7|10)\b", mark)]
    assert all("closed form" in mark for mark in named)


# --- Eq. 4 and Eq. 5 where θ and φ_P are coupled ----------------------------------------------


class Coupled(Quadratic):
    """L^P = ½xᵀHx + xᵀCφ + ½|φ|² with x = θ − a, so φ's best value depends on θ; L^D as there.

    H and C are arbitrary, λ is ½. a and c were chosen so that two solutions differ in the second
    decimal: the bilevel optimum of Eq. 3 and 4, and the zero of Eq. 5.
    """

    H = torch.diag(torch.tensor([1.0, 2.0, 1.5], dtype=torch.float64))
    C = torch.tensor([[0.3, -0.1, -0.7], [0.3, 0.5, 0.1], [-0.9, -0.4, -0.4]], dtype=torch.float64)
    a = torch.tensor([1.10, 1.91, -1.56], dtype=torch.float64)
    c = torch.tensor([-0.83, -1.51, -0.86], dtype=torch.float64)
    optimum = torch.tensor([-1.22, -2.05, -0.77], dtype=torch.float64)
    as_eq_5 = torch.tensor([-1.10, -1.97, -0.92], dtype=torch.float64)

    def __init__(self) -> None:
        zero, rows = torch.zeros(3, dtype=torch.float64), torch.eye(3, dtype=torch.float64)
        self.at_zero = self.lower(zero)
        self.slopes = torch.stack([self.lower(row) - self.at_zero for row in rows], 1)

    def loss(self, theta: Tensor, phi: dict[str, Tensor], batch: Any) -> Tensor:
        x, y = theta.flatten() - self.a, phi["x"]
        return x @ self.H @ x / 2 + x @ self.C @ y + y @ y / 2

    def loss_D(
        self, theta: Tensor, phi: dict[str, Tensor], batch: Any, regularise: bool = False
    ) -> Tensor:
        return (theta.flatten() - self.c).square().sum() / 2 + phi["x"].square().sum() / 2

    def begin(self, device: str = "cpu") -> State:
        def level() -> tuple[Tensor, dict[str, Tensor], Optimiser]:
            theta = torch.zeros(1, 3, dtype=torch.float64, requires_grad=True)
            phi = {"x": torch.zeros(3, dtype=torch.float64, requires_grad=True)}
            return theta, phi, Optimiser([Group([theta, phi["x"]], 0.05, 0.0)], base, None)

        (theta_P, phi_P, opt_P), (theta_D, phi_D, opt_D) = level(), level()
        return State(theta_P, theta_D, phi_P, phi_D, opt_P, opt_D)

    def lower(self, theta_D: Tensor) -> Tensor:
        """θ_P*(θ_D) of Eq. 4: one step of Newton's method on θ_P and φ_P together."""

        def objective(z: Tensor) -> Tensor:
            pull = LAM / 2 * (z[:3] - theta_D).square().sum()
            return self.loss(z[:3], {"x": z[3:]}, None) + pull

        z = torch.zeros(6, dtype=torch.float64, requires_grad=True)
        (slope,) = torch.autograd.grad(objective(z), z)
        curvature = torch.autograd.functional.hessian(objective, z.detach())
        step: Tensor = torch.linalg.solve(curvature, slope)
        return (z.detach() - step)[:3]

    def upper(self, theta_D: Tensor) -> float:
        """The objective of Eq. 3 as a function of θ_D alone; θ_P* is linear in θ_D."""
        phi = {"x": torch.zeros(3, dtype=torch.float64)}
        theta_P = self.at_zero + self.slopes @ theta_D
        return float(self.loss_D(theta_P, phi, None) + self.loss_D(theta_D, phi, None))

    def best(self) -> Tensor:
        """Minimises Eq. 3 by brute force: coordinate steps, from far away and ever smaller."""
        best = self.optimum
        for step in (0.1, 0.01, 0.001):
            best, better = best + 3 * step, True
            moves = step * torch.cat([torch.eye(3), -torch.eye(3)]).double()
            while better:
                nearest = min(moves, key=lambda move: self.upper(best + move))
                better = self.upper(best + nearest) < self.upper(best)
                best = best + nearest if better else best
        return best


def with_schur_complement(G: Tensor, lam: float, H: Any) -> Any:
    """The exact hypergradient of Eq. 3 and 4 on `Coupled`: H_θφ is C, H_φφ the identity."""

    def opened() -> Any:
        product = H()
        C = Coupled.C
        return lambda d: product(d) - (C @ (C.T @ d.flatten())).view_as(d)

    return exact(G, lam, opened)


def test_where_theta_and_phi_are_coupled_the_papers_eq_5_ends_beside_the_bilevel_optimum() -> None:
    """Where the loop arrives with Eq. 5 as in the paper, and with the Schur complement."""
    problem = Coupled()
    assert float((problem.best() - problem.optimum).abs().max()) < 0.006  # two decimals, last step
    for how, where in ((exact, problem.as_eq_5), (with_schur_complement, problem.optimum)):
        found = problem.run(how, alternations=60).theta_D.detach().flatten()
        assert float((found - where).abs().max()) < 0.005
    assert problem.upper(problem.optimum) < problem.upper(problem.as_eq_5)
