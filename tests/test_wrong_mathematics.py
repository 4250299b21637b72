"""Mathematics that was once wrong, or that a user's own task or script could get wrong, each as a claim.

Most claims are tried with small problems whose answer is known by other means: dense algebra, torch's own optimiser,
brute-force minimisation. The commands are run as a user runs them.
"""

import ast
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tokenize
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import close
from torch import Tensor

import cli
import stages
from bisslight import State, align, pretrain
from cg import cg
from config import AlignConfig, Bilevel, Data, Lower, Machine, Model, Upper, UsageError
from mfac import exact, identity, mfac
from runtime import Group, Optimiser, constant

ROOT = Path(cli.__file__).parent
REBUILT = pytest.mark.xfail(strict=True, reason="the rebuilt program mends it")


def nothing(*args: Any) -> None:
    """A callback that does nothing."""


def forever(item: Any = 0) -> Iterator[Any]:
    while True:
        yield item


# --- conjugate gradients ---------------------------------------------------------------------------------------------


def spd() -> tuple[Tensor, Tensor]:
    """A Hessian (6, 6) with eigenvalues around 1, and a query (2, 3) of length 1."""
    g = torch.Generator().manual_seed(0)
    R, query = torch.randn(8, 6, generator=g).double(), torch.randn(2, 3, generator=g).double()
    return R.T @ R / 8, query / query.norm()


@pytest.mark.parametrize("scale", [1.0, 1e-5, 1e-9, 1e-25])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_conjugate_gradients_solve_small_queries_as_well_as_large_ones(scale: float, dtype: torch.dtype) -> None:
    """Five steps, as BiSSL takes, are as far from the dense solution, relative to it, whatever the query's length."""
    H, query = (x.to(dtype) for x in spd())
    theta, lam, damping = torch.zeros(2, 3, dtype=dtype), 1e-3, 1.0

    def loss(x: Tensor) -> Tensor:
        return x.flatten() @ H @ x.flatten() / 2

    c = lam + damping
    truth = (c * torch.linalg.solve(H + c * torch.eye(6, dtype=dtype), query.flatten())).view(2, 3)
    found = cg(theta, lam, theta, loss, 5, damping).apply(scale * query)
    close(found / scale, truth, 2e-3)


@pytest.mark.parametrize("sizes", [None, [2, 4]])
def test_a_query_of_zeros_gives_zeros(sizes: list[int] | None) -> None:
    theta = torch.zeros(2, 3)
    solve = cg(theta, 1e-3, theta, lambda x: (x**2).sum(), 5, sizes=sizes)
    found = solve.apply(torch.zeros(2, 3))
    assert torch.equal(found, torch.zeros(2, 3)) and bool(solve.ok.all())


def test_step_sizes_a_tensor_keep_the_absolute_tolerance_of_the_released_program() -> None:
    """One step on a query with |g|² = 1e-12, by hand: α = gᵀg / (gᵀAg + 1e-12), about half of what it should be."""
    theta, query = torch.zeros(2, dtype=torch.float64), torch.tensor([0.6e-6, 0.8e-6], dtype=torch.float64)
    A = 1 + 0.5 / (0.1 + 1.0)  # I + H/c for the loss ¼|θ|², whose Hessian is ½I
    found = cg(theta, 0.1, theta, lambda x: (x**2).sum() / 4, 1, 1.0, "c", [2]).apply(query)
    close(found, 1e-12 / (A * 1e-12 + 1e-12) * query, 1e-12)


# --- the optimiser ---------------------------------------------------------------------------------------------------

LAYOUTS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    # of a (3, 4) tensor and of its gradient: the same values, laid out differently in memory
    "transposed gradient": (torch.clone, lambda g: g.T.contiguous().T),
    "transposed tensor": (lambda x: x.T.contiguous().T, torch.clone),
    "gradient of a view": (torch.clone, lambda g: torch.cat([g, g], 1)[:, :4]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_may_lie_in_memory_in_any_order(layout: str) -> None:
    """Three steps of the program's AdamW and of torch's plain one (not fused, gradients contiguous) agree."""
    of_tensor, of_gradient = LAYOUTS[layout]
    g = torch.Generator().manual_seed(0)
    start = torch.randn(3, 4, generator=g).double()
    ours, theirs = of_tensor(start).requires_grad_(), start.clone().requires_grad_()
    opt = Optimiser([Group([ours], 0.1, 0.05)], constant, (0.9, 0.95), clip=10.0)
    reference = torch.optim.AdamW([theirs], 0.1, (0.9, 0.95), weight_decay=0.05, foreach=False, fused=False)
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
    Optimiser([Group([x], 0.1, 0.0)], constant, (0.9, 0.95), clip=10.0).update([(x, gradient)])
    close(x, torch.full((3, 4), -0.1), 1e-6)


# --- a loss that is no mean over images ------------------------------------------------------------------------------


def contrastive(weights: Path, out: Path, micro: int | None, is_mean: bool | None, **options: Any) -> dict[str, Any]:
    """Two alternations with a task that drives the images of a batch apart."""
    sys.path.insert(0, str(ROOT / "examples"))
    import rotation

    from lora import features

    class Apart(rotation.Rotation):
        def loss(self, theta: Tensor | None, phi: Any, batch: Any) -> Tensor:
            x = features(self.backbone, theta, batch.images)
            x = F.normalize(F.linear(x, phi["weight"], phi["bias"]), dim=1)
            return F.cross_entropy(x @ x.T / 0.1, torch.arange(len(x)))

    if is_mean is not None:
        Apart.mean_over_images = is_mean  # type: ignore[attr-defined]
    cfg = AlignConfig(
        model=Model(backbone="vit_mini", weights=weights),
        data=Data(dataset="quilts"),
        lower=Lower(p_batch=8),
        upper=Upper(d_batch=8, probe_epochs=0),
        bilevel=Bilevel(alternations=2, lower_steps=2, upper_steps=1, warmup=0),
        machine=Machine(micro_batch=micro),
    )

    def make(cfg: AlignConfig, loaded: Any, theta: Tensor) -> Any:
        return Apart(loaded.backbone, torch.Generator().manual_seed(0))

    return stages.align(cfg, stages.Options(out=out, **options), make)


@pytest.mark.parametrize("dry_run", [True, False])
def test_a_loss_that_is_no_mean_over_images_is_not_computed_in_pieces(
    weights: Path, tmp_path: Path, dry_run: bool
) -> None:
    """Refused before any work, with what to do; whole batches, and tasks that say nothing, are as they were."""
    out = tmp_path / "a"
    with pytest.raises(UsageError, match="micro-batch 4: the loss of Apart is not a mean over images") as error:
        contrastive(weights, out, 4, False, dry_run=dry_run)
    assert "recompute" in str(error.value) and not out.exists()
    for number, (micro, is_mean) in enumerate([(None, False), (8, False), (4, True), (4, None)]):
        contrastive(weights, tmp_path / f"allowed-{number}", micro, is_mean, dry_run=dry_run)


# --- the warm-up, and the worked example -----------------------------------------------------------------------------

MINI = "--backbone vit_mini --dataset quilts"
PRETRAIN = "pretrain --pool quilts --backbone vit_mini --epochs 1 --batch 2000"
PEFT = "--lr 1e-2 --seeds 1 --epochs 2"
TINY = "--lower-steps 1 --upper-steps 1 --p-batch 8 --d-batch 8 --probe-epochs 0"
LATE = {  # command lines whose warm-up is as long as the run, and the option that makes it shorter
    "pretrain": (f"{PRETRAIN} --warmup-epochs 1", "--warmup-epochs 0"),
    "align": (f"align {MINI} --weights WEIGHTS {TINY} --alternations 2 --warmup 2", "--warmup 1"),
    "finetune": (f"finetune {MINI} --weights WEIGHTS {PEFT} --warmup-epochs 5", "--warmup-epochs 1"),
    "sweep": (f"sweep --rank 1,2 {MINI} --weights WEIGHTS {TINY} --alternations 2 --warmup 1 {PEFT} --warmup-epochs 2",
              "--warmup-epochs 1"),
}  # fmt: skip


@pytest.mark.parametrize("command", LATE)
@pytest.mark.parametrize("how", ["", "--dry-run", "--dry-run --json"])
def test_every_command_says_when_the_warm_up_is_not_shorter_than_the_run(
    command: str, how: str, weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    line, mended = (text.replace("WEIGHTS", str(weights)) for text in LATE[command])
    said = {}
    for name, more in (("late", ""), ("mended", mended)):
        assert cli.run(f"{line} {more} --out {name} {how}".split()) == 0, capsys.readouterr().err
        out, err = capsys.readouterr()
        text = out if how else err
        assert "json" not in how or json.loads(out)
        said[name] = re.search(r"warm-up of \d+ \w+ is not shorter than the run", " ".join(text.split()))
    assert said["late"] and not said["mended"]


@pytest.mark.slow
def test_the_commands_of_the_worked_example_lead_away_from_chance(tmp_path: Path) -> None:
    """All of its commands as written, in an empty folder. Chance is 12.5 %; guessing rotations costs log 4 = 1.39."""
    example = ROOT / "examples/rotation.py"
    text = example.read_text().split('"""')[1].replace("\\\n", " ")
    lines = [line.strip() for line in text.splitlines() if re.match(r" {4}(bisslight|python) ", line)]
    assert [line.split()[0] for line in lines] == ["bisslight", "python", "bisslight"]
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples/rotation.py").symlink_to(example)
    for line in lines:
        words = shlex.split(line)
        words = [sys.executable, *(["-m", "cli"] if words[0] == "bisslight" else []), *words[1:]]
        words = [str(example) if word == "examples/rotation.py" else word for word in words]
        done = subprocess.run(words, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert "not shorter than the run" not in done.stderr
    out = tmp_path / next(line.split()[-1] for line in lines if line.startswith("python"))
    records = [json.loads(text) for text in (out / "metrics.jsonl").read_text().splitlines()]
    probe = next(record["probe_val"]["accuracy"] for record in records if "probe_val" in record)
    assert probe >= 25, probe
    losses = [record["loss_P"] for record in records if "loss_P" in record]
    assert sum(losses[-1]) / len(losses[-1]) < 1.0 < sum(losses[0]) / len(losses[0])
    results = [json.loads(file.read_text()) for file in tmp_path.glob("runs/*/result.json")]
    (result,) = (one for one in results if "test" in one)
    assert min(result["test"]) >= 25, result["test"]


def environment() -> dict[str, str]:
    """Of a subprocess that imports this checkout, on one thread."""
    return os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


# --- settings that are read otherwise than they stand ----------------------------------------------------------------


@REBUILT
@pytest.mark.parametrize("text", ["alternations = true", "seed = false"])
def test_true_and_false_are_no_numbers(
    text: str, weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    refused(text, weights, tmp_path, monkeypatch, capsys)


@REBUILT
def test_a_setting_given_flat_and_nested_is_refused(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    refused("alternations = 3\n[bilevel]\nalternations = 4", weights, tmp_path, monkeypatch, capsys)


def refused(text: str, weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """A file of settings ends in one line that names the setting, or the table it stands in."""
    monkeypatch.chdir(tmp_path)
    Path("s.toml").write_text(text)
    code = cli.run(f"align {MINI} --weights {weights} --config s.toml --dry-run".split())
    err = capsys.readouterr().err
    assert code == 2 and re.search("alternations|bilevel|seed", err), err
    assert err.count("\n") == 1


# --- Algorithm 1 called from Python ----------------------------------------------------------------------------------


def problem(theta: Tensor) -> tuple[State, Callable[..., Tensor], Callable[..., Tensor]]:
    """A state around θ, and two losses: log-cosh of A θ for the lower level, squares for the upper one."""
    g = torch.Generator().manual_seed(0)
    A = torch.randn(5, theta.numel(), generator=g).double()

    def level() -> tuple[Tensor, dict[str, Tensor], Optimiser]:
        x = theta.clone().requires_grad_()
        phi = {"x": torch.ones((), dtype=torch.float64, requires_grad=True)}
        return x, phi, Optimiser([Group([x, phi["x"]], 0.05, 0.0)], constant, None)

    def loss_P(theta: Tensor, phi: dict[str, Tensor], batch: Any) -> Tensor:
        return (A @ theta.flatten() + phi["x"]).cosh().log().sum()

    def loss_D(theta: Tensor, phi: dict[str, Tensor], batch: Any, here: Any = None) -> Tensor:
        return (theta - 1).square().sum() + phi["x"].square()

    (theta_P, phi_P, opt_P), (theta_D, phi_D, opt_D) = level(), level()
    return State(theta_P, theta_D, phi_P, phi_D, opt_P, opt_D), loss_P, loss_D


def run_loop(theta: Tensor, function: Any, **settings: Any) -> Tensor:
    s, loss_P, loss_D = problem(theta)
    cfg = Bilevel(**{"alternations": 3, "lower_steps": 4, "upper_steps": 2, "lam": 0.1} | settings)
    return align(s, cfg, loss_P, loss_D, function, forever(), forever((0, None)), nothing, nothing)


@pytest.mark.parametrize("name", ["identity", "cg", "exact"])
def test_the_hypergradient_that_is_given_is_used_whatever_the_settings_name(name: str) -> None:
    """M-FAC as a function, while `hypergrad` in the settings says something else: the same bits as when they agree."""
    theta = torch.full((2, 3), 0.5, dtype=torch.float64)
    agreed = run_loop(theta, mfac, hypergrad="mfac")
    assert torch.equal(run_loop(theta, mfac, hypergrad=name), agreed)
    assert not torch.equal(run_loop(theta, identity, hypergrad="mfac"), agreed)  # the problem tells them apart


def test_a_theta_without_rows_is_refused_in_words() -> None:
    with pytest.raises(ValueError, match=r"theta_P \(6,\).*\(K, p\).*theta\[None\]"):
        run_loop(torch.zeros(6, dtype=torch.float64), identity)
    assert run_loop(torch.zeros(1, 6, dtype=torch.float64), mfac).shape == (1, 6)  # what the message advises


@pytest.mark.parametrize("shape", [(5, 6), (0, 5, 6), (2, 0, 6)])
def test_gradients_that_are_no_rows_of_layers_are_refused_in_words(shape: tuple[int, ...]) -> None:
    theta = torch.zeros(2, 6)
    with pytest.raises(ValueError, match=re.escape(f"G (K, N_L, p), a row a block; these are {shape}")):
        mfac(torch.zeros(shape), 0.1, theta, torch.sum)


def test_errors_met_in_python_advise_no_flags() -> None:
    """The loop, M-FAC's system and pretraining, each with a value that is not finite."""
    theta = torch.zeros(2, 3, dtype=torch.float64)
    s, loss_P, loss_D = problem(theta)
    cfg = Bilevel(alternations=1, lower_steps=2, upper_steps=1)
    weight = {"w": torch.zeros(2, requires_grad=True)}
    opt = Optimiser([Group([weight["w"]], 0.1, 0.0)], constant, (0.9, 0.95))

    def broken(theta: Any, phi: Any, batch: Any, here: Any = None) -> Tensor:
        x: Tensor = weight["w"] if theta is None else theta
        return torch.nan * torch.stack([x.sum().double(), *(y.sum().double() for y in phi.values())]).sum()

    batches = (forever(), forever((0, None)), nothing, nothing)
    calls: list[Callable[[], Any]] = [
        partial(align, s, cfg, broken, loss_D, identity, *batches),
        partial(align, s, cfg, loss_P, broken, identity, *batches),
        partial(pretrain, weight, {}, broken, opt, iter([None]), nothing, nothing),
    ]
    for call in calls:
        with pytest.raises(Exception, match=r"(not finite|nan).*(rate|λ)") as error:
            call()
        assert "--" not in str(error.value)


LATER = ("lora", "mae", "ijepa", "data")


@pytest.mark.parametrize(
    "name", ["bisslight", "mfac", "cg", "finetune", *(pytest.param(x, marks=REBUILT) for x in LATER)]
)
def test_messages_of_the_mathematics_name_no_flags(name: str) -> None:
    """A flag in a text that the file can raise; docstrings may name them."""
    strings = [
        part.value
        for node in ast.walk(ast.parse((ROOT / f"{name}.py").read_text()))
        if isinstance(node, ast.Raise)
        for part in ast.walk(node)
        if isinstance(part, ast.Constant) and isinstance(part.value, str)
    ]
    assert not [text for text in strings if re.search(r"--[a-z]", text)]


# --- what files say about themselves ---------------------------------------------------------------------------------


def imported_alone(name: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Import a file that lies in an otherwise empty folder, with what is installed but nothing else of this program."""
    shutil.copy(ROOT / name, folder)
    code = f"import sys; sys.path = [p for p in sys.path if p != {str(ROOT)!r}]; sys.path.insert(0, {str(folder)!r}); "
    hide = "sys.meta_path = [f for f in sys.meta_path if 'editable' not in getattr(f, '__module__', str(f)).lower()]; "
    words = [sys.executable, "-P", "-c", f"{code}{hide}import {Path(name).stem}"]
    env = {key: value for key, value in environment().items() if key != "PYTHONPATH"}
    return subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, check=False)


def says_torch_alone(name: str) -> bool:
    return "Needs torch alone" in (ROOT / name).read_text().split('"""')[1]


def test_the_check_for_files_that_can_be_copied_notices_one_that_cannot(tmp_path: Path) -> None:
    assert "No module named" in imported_alone("stages.py", tmp_path).stderr


@pytest.mark.parametrize("name", ["mfac.py", pytest.param("cg.py", marks=REBUILT)])
def test_a_file_that_says_it_needs_torch_alone_does(name: str, tmp_path: Path) -> None:
    assert says_torch_alone(name)
    done = imported_alone(name, tmp_path)
    assert done.returncode == 0, done.stderr


def test_files_that_readme_says_can_be_copied_can_be(tmp_path: Path) -> None:
    text = " ".join((ROOT / "README.md").read_text().split())
    (sentence,) = (part for part in re.split(r"(?<=[.;:,]) ", text) if re.search("can be copied|copy the file", part))
    names = re.findall(r"`([a-z_]+\.py)`", sentence)
    assert names, sentence
    for name in names:
        done = imported_alone(name, tmp_path)
        assert done.returncode == 0, done.stderr


def marked(file: str) -> list[tuple[str, str]]:
    """(code, comment) of the lines of a file that have both."""
    text = (ROOT / file).read_text()
    lines = text.splitlines()
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    found = [(lines[t.start[0] - 1][: t.start[1]].strip(), t.string) for t in tokens if t.type == tokenize.COMMENT]
    return [(code, comment) for code, comment in found if code]


@REBUILT
def test_line_4_is_marked_where_the_gradients_are_kept() -> None:
    """Line 4 of Algorithm 1 empties G, so the line that carries its mark has to do with G."""
    codes = [code for code, comment in marked("bisslight.py") if re.search(r"\bl\.4\b", comment)]
    assert codes and all(re.search(r"\bG\b", code) for code in codes), codes


@REBUILT
def test_line_14_is_marked_where_its_second_gradient_is_computed() -> None:
    """The gradient of L^D at θ_D appears in line 14 and nowhere before."""
    text = (ROOT / "bisslight.py").read_text()
    calls = [line for line in text.splitlines() if re.search(r"= grad\w*\(.*theta_D", line)]
    assert calls and all(re.search(r"#.*\bl\.14\b", line) for line in calls), calls


@REBUILT
def test_equations_7_and_10_do_not_mark_calls_of_another_form() -> None:
    """Both equations are the recursion; where the closed form runs, a mark that names them has to say so."""
    marks = [comment for _, comment in marked("bisslight.py") if re.search(r"Eq\. ?(7|10)\b", comment)]
    assert all("closed form" in comment for comment in marks), marks


# --- Eq. 4 and Eq. 5 where θ and φ_P are coupled ---------------------------------------------------------------------


class Coupled:
    """L^P(θ, φ) = ½xᵀHx + xᵀCφ + ½|φ|² with x = θ − a, so φ's best value depends on θ. L^D(θ, φ) = ½|θ − c|² + ½φ².

    H and C are arbitrary, λ is ½. a and c were chosen such that the two solutions can be told apart, to two decimals:
    the bilevel optimum of Eq. 3 and 4 lies at θ_D = (-1.22, -2.05, -0.77), the zero of Eq. 5 at (-1.10, -1.97, -0.92).
    """

    lam = 0.5
    H = torch.diag(torch.tensor([1.0, 2.0, 1.5], dtype=torch.float64))
    C = torch.tensor([[0.3, -0.1, -0.7], [0.3, 0.5, 0.1], [-0.9, -0.4, -0.4]], dtype=torch.float64)
    a = torch.tensor([1.10, 1.91, -1.56], dtype=torch.float64)
    c = torch.tensor([-0.83, -1.51, -0.86], dtype=torch.float64)
    optimum = torch.tensor([-1.22, -2.05, -0.77], dtype=torch.float64)
    as_eq_5 = torch.tensor([-1.10, -1.97, -0.92], dtype=torch.float64)

    def loss_P(self, theta: Tensor, phi: dict[str, Tensor], batch: Any) -> Tensor:
        x, y = theta.flatten() - self.a, phi["y"]
        return x @ self.H @ x / 2 + x @ self.C @ y + y @ y / 2

    def loss_D(self, theta: Tensor, phi: dict[str, Tensor], batch: Any, here: Any = None) -> Tensor:
        return (theta.flatten() - self.c).square().sum() / 2 + phi["y"].square().sum() / 2

    def __init__(self) -> None:
        zero, rows = torch.zeros(3, dtype=torch.float64), torch.eye(3, dtype=torch.float64)
        self.at_zero = self.lower(zero)
        self.slopes = torch.stack([self.lower(row) - self.at_zero for row in rows], 1)

    def lower(self, theta_D: Tensor) -> Tensor:
        """θ_P*(θ_D) of Eq. 4 by Newton's method on (θ_P, φ_P) together, in one step since all is quadratic."""

        def objective(z: Tensor) -> Tensor:
            pull = self.lam / 2 * (z[:3] - theta_D).square().sum()
            return self.loss_P(z[:3], {"y": z[3:]}, None) + pull

        z = torch.zeros(6, dtype=torch.float64, requires_grad=True)
        (slope,) = torch.autograd.grad(objective(z), z)
        curvature = torch.autograd.functional.hessian(objective, z.detach())
        step: Tensor = torch.linalg.solve(curvature, slope)
        return (z.detach() - step)[:3]

    def upper(self, theta_D: Tensor) -> float:
        """The objective of Eq. 3 as a function of θ_D alone. θ_P* is linear in θ_D, so four of them tell all others."""
        phi = {"y": torch.zeros(3, dtype=torch.float64)}
        theta_P = self.at_zero + self.slopes @ theta_D
        return float(self.loss_D(theta_P, phi, None) + self.loss_D(theta_D, phi, None))

    def run(self, hypergrad: Any) -> Tensor:
        """Where Algorithm 1 takes θ_D: plain gradient descent, long lower levels, so that both levels arrive."""

        def level() -> tuple[Tensor, dict[str, Tensor], Optimiser]:
            theta = torch.zeros(1, 3, dtype=torch.float64, requires_grad=True)
            phi = {"y": torch.zeros(3, dtype=torch.float64, requires_grad=True)}
            return theta, phi, Optimiser([Group([theta, phi["y"]], 0.05, 0.0)], constant, None)

        (theta_P, phi_P, opt_P), (theta_D, phi_D, opt_D) = level(), level()
        s = State(theta_P, theta_D, phi_P, phi_D, opt_P, opt_D)
        cfg = Bilevel(alternations=60, lower_steps=40, upper_steps=5, lam=self.lam)
        align(s, cfg, self.loss_P, self.loss_D, hypergrad, forever(), forever((0, None)), nothing, nothing)
        return theta_D.detach().flatten()


def with_schur_complement(G: Tensor, lam: float, theta_P: Tensor, loss_P: Any) -> Any:
    """The exact hypergradient of Eq. 3 and 4 on `Coupled`: its H_θφ is C, its H_φφ the identity."""
    return exact(G, lam, theta_P, lambda theta: loss_P(theta) - (Coupled.C.T @ theta.flatten()).square().sum() / 2)


def test_where_theta_and_phi_are_coupled_the_papers_eq_5_ends_beside_the_bilevel_optimum() -> None:
    """The bilevel optimum by minimising Eq. 3 by brute force; Eq. 5 as in the paper, and with the Schur complement."""
    quadratic = Coupled()
    best = quadratic.optimum.clone()
    for step in (0.1, 0.01, 0.001):  # coordinate steps until none is better, from far away and ever smaller
        best = best + 3 * step
        moves = [sign * step * row for row in torch.eye(3, dtype=torch.float64) for sign in (1, -1)]
        better = True
        while better:
            nearest = min(moves, key=lambda move: quadratic.upper(best + move))
            better = quadratic.upper(best + nearest) < quadratic.upper(best)
            best = best + nearest if better else best
    assert float((best - quadratic.optimum).abs().max()) < 0.006  # two decimals, and the last step
    assert float((quadratic.run(exact) - quadratic.as_eq_5).abs().max()) < 0.005
    assert float((quadratic.run(with_schur_complement) - quadratic.optimum).abs().max()) < 0.005
    assert quadratic.upper(quadratic.optimum) < quadratic.upper(quadratic.as_eq_5)
