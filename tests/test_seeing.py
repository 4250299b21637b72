"""Rollout and similarity of finished runs, from the command line, on MAE, I-JEPA and timm backbones."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from test_similarity import hsic_cka, pair_rsa
from test_tasks import make_voc
from torch import Tensor

import cli
import loading
from lora import Backbone, features, load_adapter, logits
from rollout import rollout

SMALL = "--epochs 4 --batch 40 --warmup-epochs 1 --lr 3e-2 --quiet"
ALIGN = "--alternations 2 --lower-steps 2 --upper-steps 2 --p-batch 8 --d-batch 8 --probe-epochs 1 --d-lr 1e-2 --quiet"


def run(line: str, capsys: Any) -> tuple[int, str, str]:
    code = cli.run(line.split())
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of vit_mini on quilts; what they learned does not matter here."""
    at = tmp_path_factory.mktemp("runs")
    own = f"--backbone vit_mini --weights {at}/pre --dataset quilts"
    for line in (
        f"pretrain --pool quilts --backbone vit_mini --epochs 1 --warmup-epochs 0 --batch 500 --quiet --out {at}/pre",
        f"align {own} {ALIGN} --out {at}/a",
        f"align {own} {ALIGN} --hypergrad cg --out {at}/cg",
        f"finetune --from {at}/a {SMALL} --seeds 1 --out {at}/aligned",
        f"finetune {own} {SMALL} --seeds 2 --out {at}/direct",
        f"finetune {own} {SMALL} --seeds 1 --data-seed 1 --out {at}/other",
    ):
        assert cli.run(line.split()) == 0
    return at


def quilts_val(at: Path) -> tuple[Backbone, Tensor, Tensor]:
    """The backbone, read apart from the program's own way, and the validation split as the network sees it."""
    from data import quilts
    from mae import load

    _, task = quilts(0)
    shift, scale = torch.tensor(task.mean).view(3, 1, 1), torch.tensor(task.std).view(3, 1, 1)
    assert isinstance(task.val.images, Tensor)
    return Backbone(load(at / "pre/backbone.pth", "vit_mini")[0]), (task.val.images - shift) / scale, task.val.targets


def test_the_rollout_of_runs_is_drawn_beside_what_they_predict(
    finished: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Rows are input, direct, aligned; maps and predictions are those of the adapter files."""
    import rollout as room

    drawn: list[Any] = []
    draw = room.draw

    def watched(images: Tensor, labels: list[str], models: dict[str, Any], path: Path) -> None:
        drawn.append((images, labels, models))
        draw(images, labels, models, path)

    monkeypatch.setattr(room, "draw", watched)
    line = f"evaluate {finished}/aligned --against {finished}/direct --rollout 10"
    code, out, err = run(f"{line} --picture {tmp_path}/r.png --json", capsys)
    assert (code, err) == (0, "")
    result = json.loads(out)["rollout"]
    assert (result["picture"], result["dataset"]) == (f"{tmp_path}/r.png", "quilts")
    with Image.open(tmp_path / "r.png") as picture:
        assert picture.size[0] > picture.size[1] > 300
    index = [row["index"] for row in result["images"]]
    backbone, val, targets = quilts_val(finished)
    assert sorted(targets[index[:8]].tolist()) == list(range(8))
    assert [row["label"] for row in result["images"]] == [f"layout {k}" for k in targets[index].tolist()]
    images, _, models = drawn[0]
    assert [*models] == ["direct PEFT, seed 0", "aligned + PEFT, seed 0"]
    from data import quilts

    torch.testing.assert_close(images, torch.as_tensor(quilts(0)[1].val.images)[index], rtol=0, atol=1e-6)
    for name, model in zip(("direct", "aligned"), models.values(), strict=True):
        theta, phi_D, _ = load_adapter(finished / name / "adapter-s0.safetensors")
        expected = logits(backbone, theta, phi_D, val[index]).argmax(1)
        assert [row["predictions"][name] for row in result["images"]] == [f"layout {k}" for k in expected.tolist()]
        assert model.right == (expected == targets[index]).tolist()
        torch.testing.assert_close(model.maps, rollout(backbone, theta, val[index]), rtol=0, atol=1e-6)
    code, out, _ = run(f"{line} --seed 0", capsys)
    assert code == 0
    assert out.splitlines()[-1] == f"{finished}/aligned/rollout.png"
    assert Path(out.splitlines()[-1]).is_file()


def test_the_similarities_of_runs_are_those_of_their_features(finished: Path, capsys: Any, tmp_path: Path) -> None:
    """The pretrained backbone, two align runs and a fine-tuned one, against the Gram form on features read by hand."""
    line = f"evaluate {finished}/a --against {finished}/cg --against {finished}/direct --similarity --seed 1"
    code, out, err = run(f"{line} --picture {tmp_path}/s.png --json", capsys)
    assert (code, err) == (0, "")
    result = json.loads(out)["similarity"]
    assert result["models"] == ["pretrained", "aligned (mfac), seed 0", "aligned (cg), seed 0", "direct PEFT, seed 1"]
    assert (result["dataset"], result["images"], result["picture"]) == ("quilts", 160, f"{tmp_path}/s.png")
    assert (tmp_path / "s.png").stat().st_size > 5000
    backbone, val, _ = quilts_val(finished)
    files = ("a/adapter.safetensors", "cg/adapter.safetensors", "direct/adapter-s1.safetensors")
    thetas = [None, *(load_adapter(finished / file)[0] for file in files)]
    x = [features(backbone, theta, val).detach().double() for theta in thetas]
    for i in range(4):
        for j in range(4):
            # features are float32, and of other batches: they agree to some 1e-6
            assert result["cka"][i][j] == pytest.approx(hsic_cka(x[i], x[j]), abs=1e-5)
            assert result["rsa"][i][j] == pytest.approx(pair_rsa(x[i], x[j]), abs=1e-4)
    assert result["cka"][0][3] < 0.999  # it learned something
    code, out, _ = run(f"evaluate {finished}/a --against {finished}/aligned --similarity --limit 40", capsys)
    assert code == 0
    assert "quilts, 40 validation images" in out
    assert f"aligned + PEFT, seed 0: {finished}/aligned" in out
    assert (finished / "a/similarity.png").is_file()


def test_names_tell_runs_apart(finished: Path, tmp_path: Path) -> None:
    from seeing import rollout as seen
    from seeing import similarity

    shutil.copytree(finished / "a", tmp_path / "b")
    shutil.copytree(finished / "direct", tmp_path / "arm/direct")
    names = similarity([finished / "a", tmp_path / "b"], None)["models"]
    assert names == ["pretrained", "aligned (mfac), seed 0, a", "aligned (mfac), seed 0, b"]
    rows = seen([finished / "direct", tmp_path / "arm/direct"], 1, tmp_path / "r.png")["images"]
    assert {*rows[0]["predictions"]} == {f"{finished.name}/direct", "arm/direct"}
    assert [*seen([tmp_path / "arm"], 1, tmp_path / "r.png")["images"][0]["predictions"]] == ["arm"]


WRONG = [
    ("{at}/direct --rollout 0", "--rollout 0: quilts has 1 to 160 validation images"),
    ("{at}/direct --rollout 161", "--rollout 161: quilts has 1 to 160"),
    ("{at}/a --rollout 2", "a is an align run, it predicts nothing"),
    ("{at}/pre --rollout 2", "is neither an align nor a finetune run"),
    ("{at}/nowhere --similarity", "nowhere: there is no such run directory"),
    ("{at}/direct --similarity --seed 7", "has no adapter-s7.safetensors"),
    ("{at}/direct --against {at}/other --rollout 2", "direct: differs from other in images or labels"),
    ("{at}/direct --against {at}/direct --similarity", "one run twice"),
    ("{at}/direct --similarity --limit 2", "--limit 2: three images at least"),
    ("{at}/direct --similarity --rollout 2", "one at a time"),
    ("{at}/direct --similarity --device tpu", "--device tpu: not available here"),
    ("{at}/direct --rollout 2 --picture r.gif2", "take .png, .svg or .pdf"),
]


@pytest.mark.parametrize(("line", "message"), WRONG)
def test_a_wrong_input_gets_one_clear_line(finished: Path, capsys: Any, line: str, message: str) -> None:
    before = set(finished.rglob("*"))
    code, out, err = run(f"evaluate {line.format(at=finished)}", capsys)
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert message in err
    assert set(finished.rglob("*")) == before


def test_other_weights_are_refused(finished: Path, capsys: Any, tmp_path: Path) -> None:
    """The file that a run names has changed since; or two runs are of two files."""
    for name, seed in (("one", 0), ("two", 1)):
        line = "pretrain --pool quilts --backbone vit_mini --epochs 1 --warmup-epochs 0 --batch 500 --quiet"
        assert cli.run(f"{line} --seed {seed} --out {tmp_path}/pre-{name}".split()) == 0
        own = f"--backbone vit_mini --weights {tmp_path}/pre-{name} --dataset quilts --epochs 1 --batch 80 --lr 1e-2"
        assert cli.run(f"finetune {own} --seeds 1 --quiet --out {tmp_path}/{name}".split()) == 0
    capsys.readouterr()
    code, _, err = run(f"evaluate {tmp_path}/one --against {tmp_path}/two --similarity", capsys)
    assert (code, len(err.splitlines())) == (2, 1)
    assert "two: differs from one in weights" in err
    shutil.copy(tmp_path / "pre-two/backbone.pth", tmp_path / "pre-one/backbone.pth")
    loading.load_backbone.cache_clear()
    for line in (f"evaluate {tmp_path}/one --rollout 2", f"export {tmp_path}/one"):
        code, _, err = run(line, capsys)
        assert code == 2
        assert "was made with weights of sha256" in err


def test_i_jepa_runs_are_seen_before_their_batchnorm(tmp_path: Path, capsys: Any) -> None:
    from data import quilts
    from ijepa import load

    (tmp_path / "pool").mkdir()
    for i in range(4):
        Image.new("RGB", (16, 16), (60 * i, 90, 200)).save(tmp_path / f"pool/{i}.png")
    for line in (
        f"pretrain --pool {tmp_path}/pool --backbone vit_mini --pretext ijepa --epochs 2 --warmup-epochs 0 --batch 4 "
        f"--quiet --out {tmp_path}/pre",
        f"finetune --backbone vit_mini --pretext ijepa --weights {tmp_path}/pre --dataset quilts {SMALL} --seeds 1 "
        f"--out {tmp_path}/f",
        f"evaluate {tmp_path}/f --rollout 3",
    ):
        assert cli.run(line.split()) == 0, capsys.readouterr().err
    capsys.readouterr()
    code, out, _ = run(f"evaluate {tmp_path}/f --similarity --json", capsys)
    assert code == 0
    _, task = quilts(0)
    shift, scale = torch.tensor(task.mean).view(3, 1, 1), torch.tensor(task.std).view(3, 1, 1)
    images = (torch.as_tensor(task.val.images) - shift) / scale
    backbone = Backbone(load(tmp_path / "pre/backbone.pth", "vit_mini", "target_encoder")[0])
    theta, phi_D, _ = load_adapter(tmp_path / "f/adapter-s0.safetensors")
    assert "norm.mean" in phi_D
    x, y = (backbone(images, t).detach().mean(1).double() for t in (None, theta))
    assert json.loads(out)["similarity"]["cka"][0][1] == pytest.approx(hsic_cka(x, y), abs=1e-5)


def test_voc_and_timm_are_seen_where_the_data_has_moved(tmp_path: Path, capsys: Any) -> None:
    """Captions name the present classes, and as many predicted ones; an odd size, data in a new place."""
    import timm

    make_voc(tmp_path / "old")
    name = "vit_tiny_patch16_224"
    torch.manual_seed(0)
    torch.save(timm.create_model(name, img_size=48, num_classes=0).state_dict(), tmp_path / "w.pth")
    own = f"--backbone timm:{name} --weights {tmp_path}/w.pth --image-size 48 --rank 2 --dataset voc07 --partial"
    line = f"finetune {own} --data-root {tmp_path}/old --epochs 1 --batch 4 --seeds 1 --lr 1e-3 --quiet"
    assert cli.run(f"{line} --out {tmp_path}/f".split()) == 0, capsys.readouterr().err
    capsys.readouterr()
    (tmp_path / "old").rename(tmp_path / "new")
    loading.remembered.cache_clear()  # another process would have listed nothing yet
    code, _, err = run(f"evaluate {tmp_path}/f --rollout 4", capsys)
    assert code == 2
    assert f"{tmp_path}/old" in err
    code, out, err = run(f"evaluate {tmp_path}/f --rollout 4 --data-root {tmp_path}/new --workers 1 --json", capsys)
    assert (code, err) == (0, "")
    from tasks import VOC

    for row in json.loads(out)["rollout"]["images"]:
        assert row["label"] == VOC[row["index"]]  # image i shows class i; class i + 4 is difficult and does not count
        assert row["predictions"]["f"] in VOC
    code, out, _ = run(f"evaluate {tmp_path}/f --similarity --data-root {tmp_path}/new --json", capsys)
    assert code == 0
    assert json.loads(out)["similarity"]["images"] == 4


def test_as_many_classes_are_named_as_an_image_has() -> None:
    from seeing import classes_of, said

    assert classes_of(torch.tensor(3)) == [3]
    assert classes_of(torch.tensor([1, -1, 0, 1])) == [0, 3]
    assert said([3, 0], ["a", "b", "c", "d"]) == "a, d"
    assert said([], ["a"]) == "none"


def test_a_seed_names_one_of_several_align_runs(finished: Path, tmp_path: Path, capsys: Any) -> None:
    for seed in (0, 7):
        shutil.copytree(finished / ("a" if seed == 0 else "cg"), tmp_path / f"arms/s{seed}")
    file = tmp_path / "arms/s7/config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"seed": 7}))
    line = f"evaluate {tmp_path}/arms --similarity --limit 20 --json"
    for seed, at in ((0, "a"), (7, "cg")):
        code, out, _ = run(f"{line} --seed {seed}", capsys)
        own = json.loads(out)["similarity"]
        _, out, _ = run(f"evaluate {finished}/{at} --similarity --limit 20 --json", capsys)
        assert (code, own["cka"]) == (0, json.loads(out)["similarity"]["cka"])
    code, _, err = run(f"{line} --seed 3", capsys)
    assert (code, err) == (2, f"error: --seed 3: {tmp_path}/arms has runs of 0, 7\n")
    code, _, err = run(f"{line} --against {tmp_path}/arms/s0", capsys)
    assert (code, "arms/s0: one run twice" in err) == (2, True)
