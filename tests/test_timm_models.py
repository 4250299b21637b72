"""timm's Vision Transformers as ψ: weights, sizes, channels, and the commands with them."""

import json
import re
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import timm
import torch
from conftest import close
from quilts import quilts
from safetensors.torch import load_file, save_file
from test_lora import IMAGES, tiny_vit
from torchvision.transforms.functional import to_pil_image
from toy import PEFT_STEPS, done, refusal

import head
import lora
from config import PLAIN_VITS, AlignConfig, Arch
from data import rng
from mae import MAE, Decoder, positions
from support import checkpoints
from support.adapters import find_adapters, load_adapter
from support.checkpoints import Pretrained, arch_of_timm, find_weights, load_backbone
from support.errors import UsageError
from support.experiment import open_experiment

pytestmark = pytest.mark.usefixtures("elsewhere")
NAME = "test_vit2"  # timm's own for tests: width 64, mean of patches, a register, layer scale
STEPS = (
    "--alternations 2 --lower-steps 2 --upper-steps 1 --p-batch 4 --d-batch 8 --probe-epochs 0 "
    "--eval-every 2 --warmup 0 mask_ratio=0.5 --rank 2"
)


def settings(**changes: Any) -> AlignConfig:
    """Settings of align with the network NAME and a file of weights."""
    given = {"backbone": f"timm:{NAME}", "dataset": "quilts", "weights": "w.safetensors"}
    return AlignConfig(**given | changes)


def load(cfg: AlignConfig) -> Pretrained:
    """The networks of these settings."""
    return load_backbone(cfg, find_weights(cfg))


@pytest.fixture(autouse=True)
def small_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fresh decoder of width 32, since that of 512 takes most of the time of a short run."""

    def arch_of(vit: Any) -> Arch:
        return arch_of_timm(vit)._replace(decoder_dim=32, decoder_depth=1, decoder_heads=2)

    monkeypatch.setattr(checkpoints, "arch_of_timm", arch_of)


@pytest.fixture
def vit() -> Any:
    """The network of w.safetensors: without its classifier, and no tensor is zero or one."""
    vit = timm.create_model(NAME).eval()
    vit.reset_classifier(0)
    g = rng(1, NAME)
    for tensor in vit.state_dict().values():
        tensor.copy_(0.2 * torch.randn(tensor.shape, generator=g))
    save_file(vit.state_dict(), "w.safetensors")
    return vit


def test_a_file_of_weights_gives_timms_own_features(vit: Any) -> None:
    images = torch.randn(2, 3, 160, 160, generator=rng(2))
    loaded = load(settings())
    close(loaded.backbone(images), vit.forward_features(images), 1e-5)
    close(head.features(loaded.backbone, None, images), vit(images), 1e-5)
    assert not any(tensor.requires_grad for tensor in loaded.backbone.parameters())
    sizes = loaded.arch
    assert (sizes.dim, sizes.depth, sizes.heads, sizes.image_size) == (64, 8, 2, 160)
    assert (sizes.patch_size, sizes.class_token, sizes.registers) == (16, False, 1)


def test_one_network_has_one_digest_in_any_file_and_at_any_image_size(vit: Any) -> None:
    digest = load(settings()).sha256
    torch.save({"model": vit.state_dict()}, "w.pth")
    assert load(settings(weights="w.pth")).sha256 == digest
    assert load(settings(image_size=64)).sha256 == digest
    vit.fc_norm.bias.data[3] += 1e-3
    save_file(vit.state_dict(), "w.safetensors")
    assert load(settings()).sha256 != digest


def test_other_image_sizes_are_timms_own_resampling(vit: Any) -> None:
    images = torch.randn(2, 3, 64, 64, generator=rng(2))
    vit.set_input_size((64, 64))
    loaded = load(settings(image_size=64))
    close(loaded.backbone(images), vit.forward_features(images), 1e-5)
    assert isinstance(loaded.head, Decoder) and loaded.head.patches == 16
    with pytest.raises(UsageError, match="not a multiple of patches of 16"):
        load(settings(image_size=72))
    with pytest.raises(UsageError, match=r"^--patch-size 8: the weights in .* have 16; leave"):
        load(settings(patch_size=8))


def test_a_file_that_lacks_a_tensor_is_refused(vit: Any) -> None:
    """None of a network's tensors may be left as random as timm made it."""
    state = {name: x.clone() for name, x in load_file("w.safetensors").items()}
    del state["blocks.3.attn.qkv.weight"]
    save_file(state, "w.safetensors")
    with pytest.raises(UsageError, match=r"cannot be read .*\"blocks\.3\.attn\.qkv\.weight\""):
        load(settings())


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("vit_smal_patch14_dinov2", "vit_small_patch14_dinov2"),
        ("vit_base_patch16_224_dino", "vit_base_patch16_224.dino"),
        ("resnet18", "ResNet"),
    ],
)
def test_a_network_that_cannot_be_used_is_refused_in_a_line(name: str, named: str) -> None:
    line = f"finetune --backbone timm:{name} --dataset few_quilts --out f"
    assert named in refusal(line)
    assert not Path("f").exists()


def test_the_networks_that_people_ask_for_are_taken() -> None:
    """Which is known without their weights. Those that are offered to others are among them."""
    offered = re.findall(r"timm:([\w.]+\w)", PLAIN_VITS)
    assert len(offered) == 2 and {*offered} <= {*timm.list_pretrained(), *timm.list_models()}
    for name in (*offered, "vit_small_patch14_reg4_dinov2", "vit_base_patch16_clip_224.openai",
                 "vit_small_patch16_224.dino", "deit3_small_patch16_224.fb_in1k"):  # fmt: skip
        with torch.device("meta"):
            lora.check_vit(timm.create_model(name))


def test_images_are_normalised_as_the_network_was_trained(vit: Any) -> None:
    """The test networks of timm want 0.5 and 0.5, whatever the mean of the quilts is."""
    pool, task = quilts(0)
    experiment = open_experiment(settings(image_size=32), task, pool)
    assert experiment.pool
    assert experiment.task.mean == experiment.pool.std == (0.5, 0.5, 0.5) != task.mean
    examples = next(experiment.examples("test", 0, 4, range(1), 0.0))
    assert float(examples.images.min()) < 0 < float(examples.images.max()) <= 1
    assert experiment.adapter_info().channels == ((0.5, 0.5, 0.5),) * 2


def test_the_decoder_is_fresh_and_knows_where_the_patches_are(vit: Any) -> None:
    """The same numbers for a seed; a register has no position, and no patch is lost to it."""
    cfg = settings(image_size=64)
    head = load(cfg).head
    assert isinstance(head, Decoder)
    again = load(cfg).head
    other = load(cfg.replace(seed=1)).head
    assert torch.equal(again.state_dict()["mask_token"], head.mask_token)
    assert not torch.equal(other.state_dict()["mask_token"], head.mask_token)
    assert float(head.mask_token.detach().abs().max()) > 0
    assert torch.equal(head.decoder_pos_embed, positions(32, 16))
    assert torch.equal(positions(512, 4, 5)[:, 5:], positions(512, 4)[:, 1:])
    assert not positions(512, 4, 5)[:, :5].any()


@pytest.mark.parametrize("registers", [0, 1, 4])
def test_masked_prediction_works_with_any_prefix(registers: int) -> None:
    """Each removed patch is predicted where it was; the prefix is not a patch."""
    vit = tiny_vit(class_token=False, global_pool="avg", reg_tokens=registers)
    decoder = Decoder(24, 16, 4, width=8, depth=0, heads=2, prefix=registers).double()
    task = MAE(lora.Backbone(vit), decoder, 0.75)
    # Without blocks the decoder predicts the same of every removed patch, but for its position.
    decoder.decoder_pos_embed[:, registers:] = torch.arange(16.0)[None, :, None]
    decoder.decoder_norm = torch.nn.Identity()  # type: ignore[assignment]
    torch.nn.init.constant_(decoder.decoder_pred.weight, 1 / 8)
    torch.nn.init.zeros_(decoder.decoder_pred.bias)
    batch = task.prepare(IMAGES, *task.draw(5, rng(3)))
    prediction, mask = task.predict(None, task.phi, batch)
    assert prediction.shape == (5, 16, 48) and mask.sum(1).tolist() == [12] * 5
    expected = torch.arange(16.0).expand(5, -1)
    close(prediction[mask == 1].mean(-1), expected[mask == 1], 1e-6)


def test_align_finetune_and_export_work_with_a_network_of_timm(vit: Any) -> None:
    """θ starts at ψ's own rows and is trained; the export is timm's own network, merged."""
    own = f"--backbone timm:{NAME} --weights w.safetensors --image-size 32 --dataset few_quilts"
    done(f"align {own} {STEPS} --quiet --out a")
    origin = load_adapter(Path("a/adapter.safetensors")).info
    assert origin.definition["decoder"] == "random"
    peft = "--epochs 1 --warmup-epochs 0 --seeds 1 --lr 1e-2 --batch 40 --quiet"
    done(f"finetune --from a {peft} --out f")
    assert json.loads(Path("f/config.json").read_text())["backbone"] == f"timm:{NAME}"
    done("export f")
    theta, phi_D, _ = load_adapter(find_adapters(Path("f"))[0])
    images = torch.as_tensor(quilts(0)[1].test.images)[:8]
    big = torch.nn.functional.interpolate(images, 32, mode="nearest")
    x = head.features(load(settings(image_size=32)).backbone, theta, 2 * big - 1)
    merged: Any = timm.create_model("local-dir:f/export/timm", pretrained=True).eval()
    cfg = merged.pretrained_cfg
    mean, std = (torch.tensor(cfg[name]).view(3, 1, 1) for name in ("mean", "std"))
    close(merged((big - mean) / std), head.logits(x, phi_D), 1e-5)
    # the export has a table of positions for 32 pixels, and comes back at this size
    again = load(settings(image_size=32, weights="f/export/timm/model.safetensors"))
    assert torch.equal(again.backbone.vit.pos_embed, merged.pos_embed)


def to_folder(vit: Any, **said: Any) -> None:
    """A folder own/ with this network of 32 pixels, for local-dir; its config.json says this."""
    Path("own").mkdir(exist_ok=True)
    vit.set_input_size((32, 32))
    save_file(vit.state_dict(), "own/model.safetensors")
    content: Any = {"architecture": NAME, "model_args": {"img_size": 32}, "num_classes": 0}
    content["pretrained_cfg"] = {"mean": [0.5] * 3, "std": [0.5] * 3}
    Path("own/config.json").write_text(json.dumps(content | said))


def test_a_folder_without_weights_is_refused_by_the_dry_run_too(vit: Any) -> None:
    """Nothing of a folder could be fetched."""
    to_folder(vit)
    Path("own/model.safetensors").unlink()
    said = refusal(f"finetune --backbone timm:local-dir:own {PEFT} --dry-run")
    assert "timm:local-dir:own" in said and "--weights FILE" in said


def with_class_token() -> Any:
    """A network that its name NAME alone does not give."""
    return timm.create_model(NAME, img_size=32, class_token=True, num_classes=0)


PEFT = f"--dataset few_quilts --image-size 32 --rank 2 {PEFT_STEPS} --epochs 1 --quiet"


def test_an_export_is_timms_own_network_also_where_the_folder_of_the_backbone_has_gone() -> None:
    """It predicts what the run does, in timm and as a backbone; names of folders may have dots."""
    to_folder(with_class_token(), model_args={"img_size": 32, "class_token": True})
    Path("own").rename("v1.0")
    line = f"finetune --backbone timm:local-dir:v1.0 {PEFT}"
    done(f"{line} --out g")
    Path("v1.0").rename("v2.0")
    image = to_pil_image(torch.as_tensor(quilts(0)[1].test.images)[77])
    image.save("image.png")
    now = "--weights v2.0/model.safetensors"
    done(f"export g --out e {now}")
    (guess,) = json.loads(done(f"predict g image.png --json {now}"))["guesses"]
    network: Any = timm.create_model("local-dir:e/timm", pretrained=True).eval()
    about: Any = timm.data
    transform = about.create_transform(**about.resolve_data_config(model=network))
    probabilities = network(transform(image)[None]).softmax(1)[0].detach()
    assert network.cls_token is not None
    assert float(probabilities.max()) == pytest.approx(guess["probability"], abs=1e-5)
    done(f"{line} {now} --seeds 2 --out g")  # the same run, with a seed more
    done(f"finetune --backbone timm:local-dir:e/timm {PEFT} --out h")


def test_a_config_json_that_says_another_network_of_the_same_tensors_is_another_one_everywhere(
    vit: Any,
) -> None:
    """Four heads have the tensors of two, and mean and std are in no tensor at all."""
    to_folder(vit)
    line = f"finetune --backbone timm:local-dir:own {PEFT}"
    done(f"{line} --out f")
    to_pil_image(torch.as_tensor(quilts(0)[1].test.images)[77]).save("image.png")
    to_folder(vit, model_args={"img_size": 32, "num_heads": 4})
    assert "--weights" in refusal("predict f image.png")
    to_folder(vit, pretrained_cfg={"mean": [0.0] * 3, "std": [1.0] * 3})
    for command in ("export f --out e", f"{line} --seeds 2 --out f", f"{line} --seed 5 --from f"):
        assert "--weights" in refusal(command)


def in_hub(repository: str, revision: str) -> Path:
    """The folder in which the hub's package keeps the files of a network."""
    place = Path("hub", f"models--{repository.replace('/', '--')}")
    (place / "refs").mkdir(parents=True)
    (place / "refs" / revision).write_text("0" * 40)
    (place / "snapshots" / ("0" * 40)).mkdir(parents=True)
    return place / "snapshots" / ("0" * 40)


def test_networks_of_the_hub_are_those_that_its_package_has_kept_and_offline_a_remedy_is_named(
    vit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights of a name of timm, and a network by its config.json; nothing is fetched."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(Path("hub").absolute()))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    classifier = {"head.weight": torch.ones(1000, 64), "head.bias": torch.ones(1000)}
    kept = in_hub("timm/test_vit2.r160_in1k", "main")
    save_file(load_file("w.safetensors") | classifier, kept / "model.safetensors")
    assert load(settings(weights=None)).sha256 == load(settings()).sha256
    said = refusal(f"finetune --backbone timm:test_vit {PEFT} --out f")
    assert "--backbone timm:test_vit, --weights timm's own" in said and "--weights FILE" in said

    own = with_class_token()
    kept = in_hub("somebody/vit", "v1")
    args = {"img_size": 32, "class_token": True, "num_classes": 5}
    content = {"architecture": NAME, "model_args": args, "pretrained_cfg": {}}
    (kept / "config.json").write_text(json.dumps(content))
    save_file(own.state_dict(), kept / "model.safetensors")
    done(f"finetune --backbone timm:hf-hub:somebody/vit@v1 {PEFT} --out f")
    done("export f --out e")
    merged: Any = timm.create_model("local-dir:e/timm", pretrained=True)
    assert torch.equal(merged.cls_token, own.cls_token)
    assert merged.num_classes == len(quilts(0)[1].classes)


def test_an_export_is_refused_for_other_data_than_it_was_trained_on(vit: Any) -> None:
    """Its file says this, also of an export before. Quilts and few_quilts differ in images."""
    peft = f"finetune {PEFT} --backbone"
    done(f"{peft} timm:{NAME} --weights w.safetensors --out f")
    done("export f --out e")
    by_file = f"timm:{NAME} --weights e/timm/model.safetensors --dataset quilts"
    assert "--other-data" in refusal(f"{peft} {by_file}")
    done(f"{peft} {by_file} --other-data --out g")
    done("export g --out e2")
    Path("e/timm/model.safetensors").rename("e/timm/mine.safetensors")  # timm takes any name
    align = f"align --pool quilts --image-size 32 {STEPS} --quiet --backbone"
    for given in (f"timm:{NAME} --weights e2/timm/model.safetensors", "timm:local-dir:e/timm"):
        for command in (peft, align):
            assert "--other-data" in refusal(f"{command} {given} --dataset quilts")
