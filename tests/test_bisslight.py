"""Algorithm 1 against recorded whole runs, a quadratic with a known optimum, and its own rules."""

import itertools
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import pytest
import replay
import torch
from conftest import close
from replay import Steps, replayed, to_theta
from torch import Tensor

import bisslight
import hypergradients
from bisslight import Diverged, Passes, State, TorchOptimiser, agreement, algorithm_1
from config import AlignConfig
from experiments.time_and_memory import alternations
from hypergradients import exact, identity
from mfac import Partition, in_blocks, mfac
from mfac import recursion as by_recursion

ADAMW = "bisslight_tiny_adamw_f64"
RUNS = [  # name, tolerance, micro-batch, hypergradient
    (ADAMW, 1e-10, None, mfac),
    (ADAMW, 1e-10, 3, mfac),
    (ADAMW, 1e-10, 3, by_recursion),
    ("bisslight_tiny_clipactive_blockgroups_f64", 1e-10, None, mfac),
    ("bisslight_tiny_sgdupper_wd0_f64", 1e-10, None, mfac),
    # A starts with a zero gradient, whose rounding Adam enlarges
    ("bisslight_tiny_adamw_f32", 1e-4, None, mfac),
]


@pytest.mark.parametrize(("name", "tolerance", "micro", "hypergrad"), RUNS)
def test_algorithm_1_reproduces_a_recorded_run(
    name: str, tolerance: float, micro: int | None, hypergrad: Any
) -> None:
    """Same weights, batches and noise as the recorded program: all numbers of all steps agree."""
    rec, r = replayed(name)
    m, K, dim = rec.meta, r.arch.depth, r.arch.dim
    partition: Partition = "layer" if m["grouping"] == "layer" else "projection"
    seen = replay.Spy(in_blocks(hypergrad, partition))
    logs = replay.follow(r, seen, replay.lower_batches(r), tolerance, Passes(micro))
    for G, expected in zip(seen.G, rec["pretext_grads_lora"], strict=True):
        close(G.transpose(0, 1), to_theta(expected, K, dim), tolerance)  # (N_L, K, p)
    close(torch.stack(seen.g), to_theta(rec["q_grad_LD_at_thetaP"], K, dim), tolerance)
    for field, key in [
        ("loss_P", "lower_loss_pretext"), ("spring", "lower_loss_reg"),
        ("norm_P", "lower_gradnorm_before_clip"), ("loss_D_at_P", "upper_loss_at_thetaP"),
        ("loss_D_at_D", "upper_loss_at_thetaD"), ("norm_D", "upper_gradnorm_before_clip"),
    ]:  # fmt: skip
        values = [x for log in logs for x in getattr(log, field)]
        close(torch.tensor(values, dtype=torch.float64), rec[key], tolerance)
    norms = torch.tensor([log.norm_P_theta for log in logs])  # (T, N_L)
    close(norms, rec["pretext_grads_lora"].norm(dim=-1), max(tolerance, 1e-6))
    decoder = torch.cat([r.phi_P[k].flatten() for k in m["decoder_param_order"]])
    close(decoder, rec["decoder_after_last"], 1e-4 if r.dtype is torch.float32 else 1e-6)


class Sample(NamedTuple):
    """A batch of one image; its number is added to where L^P is least."""

    shift: Tensor = torch.zeros(1, 1)


class Quadratic:
    """L^P = ½xᵀHx + xᵀCφ + ½|φ|² with x = θ − a, L^D = ½|θ − c|² + ½|φ|², θ (K, p), a φ a level.

    At its best φ_P is −Cᵀx, so θ_P*(θ_D) = (S + λI)⁻¹(Sa + λθ_D) with S = H − CCᵀ. So the upper
    level (Eq. 3) is quadratic too, and its optimum is one solve. Also pretext task and optimiser.
    """

    state: dict[str, Tensor] = {}  # noqa: RUF012
    K, lam, rate = 2, 0.5, 0.25
    samples = (Sample(),)

    def __init__(self) -> None:
        g = torch.Generator().manual_seed(0)
        R, self.a, self.c = (torch.randn(*n, generator=g).double() for n in ((6, 6), (6,), (6,)))
        self.H, self.C = R @ R.T / 3 + 0.1 * torch.eye(6), torch.zeros(6, 1).double()
        self.solve()

    def solve(self) -> None:
        """The optimum; A is dθ_P*/dθ_D."""
        eye, S = torch.eye(len(self.a)).double(), self.H - self.C @ self.C.T
        A = self.lam * torch.linalg.inv(S + self.lam * eye)
        self.at_zero = A @ S @ self.a / self.lam  # θ_P*(0)
        self.theta_D = torch.linalg.solve(A @ A + eye, self.c - A @ (self.at_zero - self.c))
        self.theta_P = self.at_zero + A @ self.theta_D

    def loss(self, theta: Tensor, phi: dict[str, Tensor], batch: Any) -> Tensor:
        x, y = theta.flatten() - self.a - batch.shift[0], phi["x"]
        return x @ self.H @ x / 2 + x @ self.C @ y + y @ y / 2

    def loss_D(self, theta: Tensor, phi: dict[str, Tensor], batch: Any) -> Tensor:
        return (theta.flatten() - self.c).square().sum() / 2 + phi["x"].square().sum() / 2

    def after_step(self, theta_P: Tensor) -> None:
        """No teacher."""

    def update(self, tensors: list[Tensor], gradients: list[Tensor]) -> Tensor:
        """Plain gradient descent."""
        for tensor, gradient in zip(tensors, gradients, strict=True):
            tensor.data -= self.rate * gradient
        return torch.zeros(())

    def begin(self) -> State:
        """θ of zeros and heads of ones."""
        theta = [torch.zeros(self.K, len(self.a) // self.K).double() for _ in "PD"]
        phi = [{"x": torch.ones(self.C.shape[1]).double()} for _ in "PD"]
        for tensor in (*theta, *(head["x"] for head in phi)):
            tensor.requires_grad_()
        opt: Any = self  # it has an `update`
        return State(theta[0], theta[1], phi[0], phi[1], opt, opt)

    def run(self, hypergrad: Any, passes: Passes | None = None, **steps: int) -> State:
        given = {"alternations": 25, "lower_steps": 12, "upper_steps": 2, "lam": self.lam} | steps
        s = self.begin()
        samples, labelled = itertools.cycle(self.samples), itertools.repeat(Sample())
        inputs: Any = s, Steps(**given), self, self.loss_D, hypergrad, samples, labelled
        list(algorithm_1(*inputs, passes))
        return s


def test_the_loop_reaches_the_bilevel_optimum() -> None:
    """With the exact inverse, by converged CG too.

    Without curvature it ends somewhere else: the inverse matters on this problem.
    """
    problem = Quadratic()
    converged = partial(hypergradients.cg, iterations=6, damping=0.0)
    for how in (exact, converged):
        s = problem.run(how)
        close(s.theta_D.flatten(), problem.theta_D, 1e-4)
        close(s.theta_P.flatten(), problem.theta_P, 1e-4)
    off = problem.run(identity).theta_D.detach().flatten() - problem.theta_D
    assert float(off.abs().max()) > 0.05


def test_the_hessian_is_that_at_theta_p() -> None:
    """That of `Quadratic` is the same everywhere, so the point itself is looked at."""
    problem, seen = Quadratic(), []

    class Watched(Passes):
        def hessian(self, loss: Any, theta: Tensor, phi: Any, batch: Any) -> Any:
            seen.append((theta, phi))
            return super().hessian(loss, theta, phi, batch)

    s = problem.run(exact, Watched(), alternations=2, lower_steps=3, upper_steps=1)
    assert len(seen) == 2
    assert all(theta is s.theta_P and phi is s.phi_P for theta, phi in seen)


class Sampled(Quadratic):
    """Samples of mean a and covariance H⁻¹, so that F is H at θ_P = a. Elsewhere F is larger."""

    lam, rate = 0.1, 0.05

    def __init__(self) -> None:
        self.H = torch.diag(torch.tensor([0.5, 1, 2, 4]).double())
        self.C = torch.zeros(4, 1).double()
        self.a = torch.ones(4).double()
        self.c = torch.tensor([2, -1, 0.5, -2]).double()
        shift = 2 / self.H.diag().sqrt()
        self.samples = tuple(Sample(x[None]) for x in (*shift.diag(), *-shift.diag()))
        self.solve()


@pytest.mark.parametrize("method", ["mfac", "recursion", "identity", "q = 0"])
def test_with_stored_gradients_it_ends_at_the_optimum_and_without_them_where_q_says(
    method: str,
) -> None:
    """Each end is where ∇L^D(θ_P*) through q, plus ∇L^D(θ_D), is 0; with A = dθ_P*/dθ_D.

    q = g ends where θ_P*(θ_D) − c + θ_D − c = 0, and q = 0, which leaves the implicit part of
    Eq. 5 out, at c. 4 %: batches are few, and F is H at a alone; c is 8 % from the optimum.
    """
    problem = Sampled()
    eye = torch.eye(4).double()
    A = problem.lam * torch.linalg.inv(problem.H + problem.lam * eye)
    hypergrad, end = {
        "mfac": (mfac, problem.theta_D),
        "recursion": (by_recursion, problem.theta_D),
        "identity": (identity, torch.linalg.solve(A + eye, 2 * problem.c - problem.at_zero)),
        "q = 0": (lambda *_: torch.zeros_like, problem.c),
    }[method]
    state = problem.run(hypergrad, alternations=8, lower_steps=16, upper_steps=20)
    close(state.theta_D.flatten(), end, 0.04)


class WithTeacher(Quadratic):
    """θ_T, the mean of itself and θ_P after each call; `moved` has θ_P after each step of opt_P."""

    def __init__(self) -> None:
        super().__init__()
        self.theta_T = torch.zeros(2, 3).double()
        self.moved: list[Tensor] = []

    def after_step(self, theta_P: Tensor) -> None:
        self.theta_T = (self.theta_T + theta_P.detach()) / 2

    def begin(self) -> State:
        state = super().begin()
        state.opt_P = cast(Any, SimpleNamespace(update=self.keep))
        return state

    def keep(self, tensors: list[Tensor], gradients: list[Tensor]) -> Tensor:
        norm = self.update(tensors, gradients)
        self.moved.append(tensors[0].detach().clone())
        return norm


def test_theta_T_moves_once_after_each_lower_step() -> None:
    """Its weights for θ_P of the six steps, from the last one back: 1/2, 1/4, ..., 1/64."""
    problem = WithTeacher()
    problem.run(identity, alternations=2, lower_steps=3, upper_steps=2)
    assert len(problem.moved) == 6
    by_hand = sum(x / 2 ** (6 - i) for i, x in enumerate(problem.moved))
    close(problem.theta_T, cast(Tensor, by_hand), 1e-12)


@pytest.mark.parametrize(("passes", "shared"), [(Passes(2), False), (Passes(), True)])
def test_a_loss_that_compares_images_refuses_parts_and_processes(
    passes: Passes, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bisslight, "processes_share", lambda: shared)
    problem: Any = Quadratic()
    bisslight.check_whole(problem, passes)
    problem.mean_over_images = False
    with pytest.raises(ValueError, match="compares images"):
        problem.run(identity, passes)


def test_a_number_that_is_not_finite_is_told_with_alternation_level_and_step() -> None:
    """A loss, and a hypergradient with its block; the lower level is in `test_faults`."""
    problem, calls = Quadratic(), itertools.count(1)
    good = problem.loss_D

    def broken(*inputs: Any) -> Tensor:
        spoilt = next(calls) == 13  # there are 5 upper steps, with two passes each
        return good(*inputs) * (float("nan") if spoilt else 1)

    problem.loss_D = broken
    with pytest.raises(Diverged, match=r"alternation 2, upper level, step 2: .*not finite"):
        problem.run(identity, upper_steps=5)
    with pytest.raises(Diverged, match="upper level, step 1: "):
        Quadratic().run(lambda G, lam, H: lambda g: g / torch.tensor([[1.0], [0.0]]))


@pytest.mark.parametrize(("pretext", "method"), [("mae", "mfac"), ("ijepa", "identity")])
def test_a_device_is_asked_for_numbers_once_a_level(
    monkeypatch: pytest.MonkeyPatch, pretext: str, method: Any
) -> None:
    """On the meta device every question for a value is an error, and so is a mix of devices."""
    asked: list[str] = []

    def columns(names: Any, rows: Any, where: str) -> dict[str, list[float]]:
        assert all(x.device.type == "meta" for row in rows for x in row)
        asked.append(where)
        return {name: [0.0] * len(rows) for name in names}

    monkeypatch.setattr(bisslight, "columns", columns)  # the one function that reads numbers
    sizes: Any = {"alternations": 2, "warmup": 0, "lower_steps": 2, "upper_steps": 1, "min_keep": 0}
    names: Any = {"backbone": "vit_mini", "dataset": "own", "pool": "own", "pretext": pretext}
    cfg = AlignConfig(**names, **sizes, hypergrad=method)
    list(alternations(cfg, torch.device("meta")))  # a random network and batch
    levels = [f"alternation {t}, {level} level" for t in (1, 2) for level in ("lower", "upper")]
    assert asked == levels


class Coupled(Quadratic):
    """a and c were chosen so that the bilevel optimum of Eq. 3 and 4 and the zero of Eq. 5 differ
    in the second decimal; H and C are arbitrary.
    """

    K = 1

    def __init__(self) -> None:
        self.H = torch.diag(torch.tensor([1.0, 2.0, 1.5])).double()
        self.C = torch.tensor([[0.3, -0.1, -0.7], [0.3, 0.5, 0.1], [-0.9, -0.4, -0.4]]).double()
        self.a = torch.tensor([1.10, 1.91, -1.56]).double()
        self.c = torch.tensor([-0.83, -1.51, -0.86]).double()
        self.solve()


def test_where_theta_and_phi_are_coupled_the_papers_eq_5_ends_beside_the_bilevel_optimum() -> None:
    """Eq. 5 as in the paper, and with the Schur complement, as Eq. 3 and 4 have it.

    Eq. 5 ends where J (θ_P*(θ_D) − c) + θ_D − c = 0 with J = λ (H + λI)⁻¹, which is one solve.
    """
    problem = Coupled()
    eye, S = torch.eye(3).double(), problem.H - problem.C @ problem.C.T
    A = problem.lam * torch.linalg.inv(S + problem.lam * eye)  # dθ_P*/dθ_D
    J = problem.lam * torch.linalg.inv(problem.H + problem.lam * eye)
    zero = torch.linalg.solve(J @ A + eye, problem.c - J @ (problem.at_zero - problem.c))
    assert float((zero - problem.theta_D).abs().max()) > 0.1

    def with_schur_complement(G: Tensor, lam: float, H: Any) -> Any:
        product, C = H(), problem.C
        return exact(G, lam, lambda: lambda d: product(d) - (C @ (C.T @ d.flatten())).view_as(d))

    for how, where in ((exact, zero), (with_schur_complement, problem.theta_D)):
        close(problem.run(how).theta_D.flatten(), where, 3e-3)


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1.0, 1e12])
def test_ratio_and_cosine_are_those_of_queries_of_any_size(scale: float) -> None:
    """In float32, where squares of small numbers vanish and those of large ones are not finite."""
    g = scale * torch.tensor([[3.0, 0.0], [0.0, 4.0]])
    turned = scale * torch.tensor([[0.0, 0.0], [0.0, 2.0]])
    assert [*map(float, agreement(g, g))] == pytest.approx([1, 1])
    assert [*map(float, agreement(g, turned))] == pytest.approx([0.4, 0.8])
    zero = torch.zeros(1, 2)  # no gradient: no NaN
    assert [*map(float, agreement(zero, zero))] == [0, 0]


@pytest.mark.parametrize("of", ["copies", "the task's φ_P", "fewer tensors", "more tensors"])
def test_an_optimiser_of_other_tensors_is_refused_before_anything_moves(of: str) -> None:
    """Its steps would leave θ_P, or the head, as they were, and the losses would look right."""
    problem: Any = Quadratic()
    state = problem.begin()
    mine = [state.theta_P, *state.phi_P.values()]
    copies = [tensor.detach().clone().requires_grad_() for tensor in mine]
    made_for = {
        "copies": copies,
        "the task's φ_P": [mine[0], copies[1]],
        "fewer tensors": mine[:1],
        "more tensors": mine + copies[:1],
    }
    state.opt_P = TorchOptimiser(torch.optim.SGD(made_for[of], lr=0.25))
    problem.begin = lambda: state
    with pytest.raises(ValueError, match="made for other tensors"):
        problem.run(mfac)
    assert not state.theta_P.any() and all(x.eq(1).all() for x in state.phi_P.values())


def test_an_optimiser_takes_its_tensors_in_any_order_until_one_is_replaced() -> None:
    """Plain descent with rate 1, by hand; the gradients (3, 4) are clipped to a length of 1."""
    x, y = (torch.zeros(1, requires_grad=True) for _ in "xy")
    opt = TorchOptimiser(torch.optim.SGD([x, y], lr=1.0), clip=1.0)
    norm = opt.update([y, x], [torch.tensor([4.0]), torch.tensor([3.0])])
    close(torch.cat([norm[None], x, y]), torch.tensor([5.0, -0.6, -0.8]), 1e-6)
    with pytest.raises(ValueError, match="made for other tensors"):
        opt.update([x, y.detach().clone().requires_grad_()], [torch.ones(1), torch.ones(1)])


class Few(NamedTuple):
    """A batch of images alone."""

    images: Tensor


@pytest.mark.parametrize("micro", [None, 2])
def test_a_part_weighs_its_share_of_the_images_of_all_processes(
    micro: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here another process has 3 images, and this one 5."""
    monkeypatch.setattr(bisslight, "processes_share", lambda: True)
    monkeypatch.setattr(bisslight, "sum_over_processes", lambda values: [values[0] + 3])
    parts = bisslight.microbatches(Few(torch.zeros(5, 1)), micro, torch.device("cpu"))
    assert [weight for _, weight in parts] == [len(part.images) / 8 for part, _ in parts]
    assert sum(weight for _, weight in parts) == pytest.approx(5 / 8)
