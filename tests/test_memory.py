"""What stays in memory: one backbone, nothing that grows, and a budget that tells the truth."""

import gc
from pathlib import Path

import pytest
import torch

import cli
import stages
from config import AlignConfig, Bilevel, Data, Lower, Model, Upper


def live() -> dict[int, torch.Tensor]:
    """All tensors that Python can reach, one a storage."""
    gc.collect()
    tensors = [x for x in gc.get_objects() if type(x) in (torch.Tensor, torch.nn.Parameter)]
    return {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}


@pytest.mark.parametrize("pretext", ["mae", "ijepa"])
def test_one_backbone_and_nothing_that_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pretext: str) -> None:
    """Two levels, and I-JEPA's teacher, on one copy of ψ; bytes after 50 alternations within 1 MB of those after 2."""
    monkeypatch.chdir(tmp_path)
    line = "pretrain --pool quilts --backbone vit_mini --epochs 1 --warmup-epochs 0 --batch 500 --quiet --out pre"
    assert cli.run([*line.split(), "--pretext", pretext]) == 0
    jepa = pretext == "ijepa"
    cfg = AlignConfig.model_validate(
        {
            "model": Model(
                backbone="vit_mini", weights=Path("pre"), pretext=pretext, head="batchnorm" if jepa else "linear"
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
    bytes_at: dict[int, int] = {}
    copies: list[int] = []

    def report(stage: str, done: int, total: int, text: str) -> None:
        if stage == "align" and done in (2, 50):
            tensors = live().values()
            bytes_at[done] = sum(t.untyped_storage().nbytes() for t in tensors)
            copies.append(sum(t.shape == (192, 64) for t in tensors))  # qkv of the backbone: 4 layers

    stages.align(cfg, stages.Options(out=Path("a"), report=report))
    assert copies == [4, 4]
    assert abs(bytes_at[50] - bytes_at[2]) < 1e6
    about = stages.align(cfg, stages.Options(out=Path("b"), dry_run=True))
    assert Path("a/checkpoint.pt").stat().st_size == pytest.approx(about["checkpoint_MB"] * 1e6, rel=0.1)
