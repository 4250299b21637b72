"""What stays in memory: one backbone, nothing that grows, and a budget that tells the truth."""

import gc
from pathlib import Path

import pytest
import torch

import stages
from config import AlignConfig, Bilevel, Data, Lower, Model, Upper


def live() -> dict[int, torch.Tensor]:
    """All tensors that Python can reach, one a storage."""
    gc.collect()
    tensors = [x for x in gc.get_objects() if type(x) in (torch.Tensor, torch.nn.Parameter)]
    return {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}


def backbones() -> float:
    """How many there are: four tensors each with the shape of vit_mini's qkv weights. Other tests may hold some."""
    return sum(tensor.shape == (192, 64) for tensor in live().values()) / 4


@pytest.mark.parametrize("pretext", ["mae", "ijepa"])
def test_one_backbone_and_nothing_that_grows(
    pretrained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pretext: str
) -> None:
    """Two levels, and I-JEPA's teacher, on one copy of ψ; bytes after 50 alternations within 1 MB of those after 2."""
    monkeypatch.chdir(tmp_path)
    jepa = pretext == "ijepa"
    cfg = AlignConfig.model_validate(
        {
            "model": Model(
                backbone="vit_mini",
                weights=pretrained / pretext,
                pretext=pretext,
                head="batchnorm" if jepa else "linear",
            ),
            "data": Data(dataset="quilts"),
            "lower": Lower(p_batch=8),
            "upper": Upper(d_batch=8, probe_epochs=0),
            "bilevel": Bilevel(alternations=50, lower_steps=2, upper_steps=1, eval_every=25),
            "masks": {"min_keep": 4},
        }
    )
    import loading

    loading.load_backbone.cache_clear()
    before = backbones()
    bytes_at: dict[int, int] = {}
    copies: list[int] = []

    def report(stage: str, done: int, total: int, text: str) -> None:
        if stage == "align" and done in (2, 50):
            tensors = live().values()
            bytes_at[done] = sum(t.untyped_storage().nbytes() for t in tensors)
            copies.append(backbones() - before)

    stages.align(cfg, stages.Options(out=Path("a"), report=report))
    assert copies == [1, 1]
    assert abs(bytes_at[50] - bytes_at[2]) < 1e6
    about = stages.align(cfg, stages.Options(out=Path("b"), dry_run=True))
    assert Path("a/checkpoint.pt").stat().st_size == pytest.approx(about["checkpoint_MB"] * 1e6, rel=0.1)
