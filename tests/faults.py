"""Bad input by kind, and how it ends: settings, files, images, checkpoints, runs.

A case ends well in a correct reading, compared with what was written, or in one line that names the
fault: exit code 1 or 2 and one line on stderr that starts with `error:`. Anything else, a traceback
or a minute without an end, is a defect.
"""

import contextlib
import io
import json
import pickle
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image

import cli
from commands import AlignConfig, FinetuneConfig, flag
from data import ImageError, Images, Split, Transform, batches, in_order, read_image
from extras.settings import BenchConfig, PretrainConfig, SweepConfig

LIMIT = 60  # seconds
SAVED = (".json", ".pt", ".safetensors")  # files of a run
KINDS: dict[str, Any] = {
    "pretrain": PretrainConfig,
    "align": AlignConfig,
    "finetune": FinetuneConfig,
    "sweep": SweepConfig,
    "bench": BenchConfig,
}
ALIGN = (
    "--alternations 2 --lower-steps 2 --upper-steps 1 --p-batch 8 --d-batch 8 --probe-epochs 0 "
    "--eval-every 1 --warmup 0 --quiet"
)


class Refused(Exception):
    """A command ended with exit code 1 or 2 and this one line."""


class Case(NamedTuple):
    """One bad, or odd, input."""

    name: str
    run: Callable[[], object]  # returns after a correct reading; raises Refused otherwise


class Hang(BaseException):
    """No end within the limit."""


def defect(case: Case) -> str | None:
    """Run one case: None if it ended well, else what went wrong."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(LIMIT)
    try:
        case.run()
    except (Refused, ImageError) as error:
        return None if 10 < len(str(error)) < 4000 else f"{case.name}: says {str(error)[:200]!r}"
    except (Exception, Hang) as error:
        return f"{case.name}: {type(error).__name__}: {error}"
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    return None


def command(*arguments: str) -> str:
    """Run a command line: its stdout, or Refused with the line on stderr."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.run([*arguments])
    if code == 0:
        return out.getvalue()
    lines = [line for line in err.getvalue().splitlines() if "not shorter than" not in line]
    assert code in (1, 2) and len(lines) == 1 and lines[0].startswith("error: "), (code, lines)
    assert not out.getvalue()
    raise Refused(lines[0])


# --- damage -----------------------------------------------------------------------------------


def flipped(data: bytes, rng: random.Random) -> bytes:
    """One bit of it is another."""
    at, bit = rng.randrange(len(data)), rng.randrange(8)
    return data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]


def damaged(data: bytes, rng: random.Random, count: int) -> Iterator[tuple[str, bytes]]:
    """Nothing, one byte, noise and an end that is missing; then `count` cuts at random."""
    yield from {"empty": b"", "one byte": data[:1], "end missing": data[:-1]}.items()
    yield "noise", rng.randbytes(5000)
    for _ in range(count):
        at = rng.randrange(len(data))
        yield f"cut at {at}", data[:at]


class Payload:
    """What a malicious pickle runs when it is loaded."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


def malicious(mark: Path) -> Iterator[tuple[str, bytes]]:
    """Files that make `mark` where they are unpickled."""
    for name, zipped in (("zip", True), ("legacy", False)):
        buffer = io.BytesIO()
        made = {"model": Payload(mark)}
        torch.save(made, buffer, _use_new_zipfile_serialization=zipped)
        yield f"malicious {name}", buffer.getvalue()
    yield "malicious pickle", pickle.dumps(Payload(mark))


# --- images -----------------------------------------------------------------------------------


def odd_images(root: Path, rng: random.Random) -> Iterator[tuple[Path, Any]]:
    """(file, the pixels that it should be read as): modes and containers of image files."""
    generator = np.random.default_rng(rng.randrange(2**32))
    a = generator.integers(0, 256, (24, 26, 3)).astype(np.uint8)
    grey, alpha = a[..., 0], a[..., 1]
    three = np.repeat(grey[..., None], 3, -1)
    palette = generator.integers(0, 256, (256, 3)).astype(np.uint8)
    coloured = Image.fromarray(grey, "L")
    coloured.putpalette(palette.tobytes())
    images = {
        "rgb": (Image.fromarray(a), a),
        "grey": (Image.fromarray(grey), three),
        "one-bit": (Image.fromarray(grey > 127), np.where(three > 127, 255, 0)),
    }
    transparent = {
        "rgba": (Image.fromarray(np.dstack([a, alpha])), a),  # alpha is dropped, colours stay
        "grey-alpha": (Image.fromarray(np.dstack([grey, alpha])), three),
        "palette": (coloured, palette[grey]),
    }
    for suffix, kinds in {"png": images | transparent, "tif": images, "bmp": images}.items():
        for name, (image, pixels) in kinds.items():
            path = root / f"{name}.{suffix}"
            image.save(path)
            yield path, pixels
    Image.fromarray(a).save(root / "lossless.webp", lossless=True)
    yield root / "lossless.webp", a
    more = [Image.fromarray(255 - a)]
    Image.fromarray(a).save(root / "animated.png", save_all=True, append_images=more)
    yield root / "animated.png", a


def bad_images(root: Path, rng: random.Random) -> Iterator[Path]:
    """Files with an image's name that cannot be read as one."""
    for path, _ in [*odd_images(root, rng)]:
        data = path.read_bytes()
        for cut in (0, 1, rng.randrange(2, 40), len(data) // 6):  # before a first frame ends
            path.with_name(f"cut-at-{cut}-{path.name}").write_bytes(data[:cut])
            yield path.with_name(f"cut-at-{cut}-{path.name}")
    heads = {"jpg": b"", "png": b"\x89PNG\r\n\x1a\n", "webp": b"RIFF", "tif": b"II\x2a\0"}
    for suffix, head in heads.items():
        (root / f"noise.{suffix}").write_bytes(head + rng.randbytes(1000))
        yield root / f"noise.{suffix}"
    (root / "page.jpg").write_bytes(b"<!DOCTYPE html><title>404</title>")
    (root / "bomb.pgm").write_bytes(b"P5 100000 100000 255\n")
    Image.fromarray(np.ones((20, 20), np.float32)).save(root / "floats.tif")
    (root / "dangling.jpg").symlink_to(root / "nowhere")
    yield from (root / name for name in ("page.jpg", "bomb.pgm", "floats.tif", "dangling.jpg"))


def image_cases(root: Path, rng: random.Random) -> Iterator[Case]:
    """Each odd file's pixels against what was written; each bad one through a batch."""
    root.mkdir()
    transform = Transform(8, (0.5,) * 3, (0.5,) * 3, augment="crop")

    def reads(path: Path, expected: Any) -> None:
        assert (np.asarray(read_image(path)) == expected).all()

    def refuses(path: Path, workers: int) -> None:
        split = Split([root / "rgb.png", path], torch.zeros(2, dtype=torch.long))
        images = Images(split, transform, True, 0, "x")
        try:
            next(iter(batches(images, in_order(range(2), 2), workers, torch.device("cpu"))))
        except ImageError as error:
            assert str(path) in str(error)
            return
        raise AssertionError("was read")

    for path, expected in [*odd_images(root, rng)]:
        yield Case(path.name, lambda p=path, e=expected: reads(p, e))
    for i, path in enumerate(bad_images(root, rng)):
        workers = 2 if i % 20 == 0 else 0
        yield Case(path.name, lambda p=path, w=workers: refuses(p, w))


# --- weights, adapters, checkpoints, runs -----------------------------------------------------


class Made(NamedTuple):
    """Real runs of toy size, to be damaged."""

    weights: Path  # a pretrain run
    aligned: Path  # an align run, finished
    stopped: Path  # an align run with a checkpoint
    direct: Path  # a finetune run


def make_runs(root: Path, weights: Path) -> Made:
    """align, the same stopped after its first alternation, and finetune on quilts in seconds."""
    made = Made(weights, root / "align", root / "stopped", root / "direct")
    start = ("--backbone", "vit_mini", "--weights", str(weights), "--dataset", "quilts")
    command("align", *start, *ALIGN.split(), "--out", str(made.aligned))
    import run

    class Kill(BaseException):
        pass

    def killed(self: Any, result: Any) -> Any:
        raise Kill

    finish, run.Run.finish = run.Run.finish, killed  # type: ignore[method-assign]
    with contextlib.suppress(Kill):
        command("align", *start, *ALIGN.split(), "--out", str(made.stopped))
    run.Run.finish = finish  # type: ignore[method-assign]
    tune = "--epochs 1 --warmup-epochs 0 --seeds 1 --lr 1e-2 --batch 80 --quiet --out"
    command("finetune", *start, *tune.split(), str(made.direct))
    return made


def entry_cases(root: Path, rng: random.Random, made: Made) -> Iterator[Case]:
    """Damaged, foreign, malicious files through the commands: refused by name, nothing is run."""
    root.mkdir()
    start = ["--backbone", "vit_mini", "--dataset", "quilts", *ALIGN.split()]
    tune = ["--weights", str(made.weights), *start[:4], "--lr", "1", "--quiet"]
    entries = {
        "w.pth": ["align", *start, "--weights"],
        "w.pth.tar": ["align", "--pretext", "ijepa", *start, "--weights"],
        "l.pt": ["finetune", *tune, "--from"],
        "l.safetensors": ["finetune", *tune, "--from"],
    }
    foreign = io.BytesIO()
    torch.save({"encoder": torch.zeros(3), "model": [torch.zeros(3)]}, foreign)
    contents = dict(damaged((made.weights / "backbone.pth").read_bytes(), rng, 2))
    contents |= {"tensors of something else": foreign.getvalue(), **dict(malicious(root / "mark"))}

    def enters(line: list[str], path: Path, content: bytes | None) -> None:
        path.parent.mkdir()
        path.mkdir() if content is None else path.write_bytes(content)
        try:
            command(*line, str(path), "--out", str(root / "out"))
        except Refused as error:
            assert path.name in str(error), error
            raise
        finally:
            assert not (root / "mark").exists(), "the payload was run"
            assert not (root / "out").exists(), "something was written"
        raise AssertionError("was accepted")

    for file, line in entries.items():
        for i, (name, content) in enumerate([*contents.items(), ("a folder", None)]):
            path = root / f"{file}-{i}" / file
            yield Case(f"{file}: {name}", lambda a=(line, path, content): enters(*a))


def run_cases(root: Path, rng: random.Random, made: Made) -> Iterator[Case]:
    """Runs with damaged files, where commands read them: read as they are, or refused by name."""
    root.mkdir()
    wrong = [b"", b"[]", b"{}", b"3", b"null", b'{"test": ["x"]}', b"\xff\xfe", b"[" * 100_000]
    tune = "--epochs 1 --warmup-epochs 0 --seeds 1 --lr 1 --quiet --out never --from"
    uses = {
        "evaluate": (made.direct, ["evaluate", "--json"]),
        "goes on": (made.stopped, ["align", "--config", f"{made.stopped}/config.json", "--out"]),
        "finetune": (made.aligned, ["finetune", *tune.split()]),
    }

    def reads(source: Path, own: Path, name: str, content: bytes, line: list[str]) -> None:
        shutil.copytree(source, own)
        (own / name).write_bytes(content)
        try:
            command(*line, str(own))
        finally:
            shutil.rmtree("never", ignore_errors=True)

    for use, (source, line) in uses.items():
        for file in sorted(path for path in source.iterdir() if path.suffix in SAVED):
            data = file.read_bytes()
            for i, content in enumerate([*wrong, flipped(data, rng), data[: len(data) // 2]]):
                own = root / f"{use}-{file.name}-{i}".replace(" ", "")
                given = (source, own, file.name, content, line)
                yield Case(f"{use}, {file.name}: {content[:40]!r}", lambda a=given: reads(*a))


# --- settings ---------------------------------------------------------------------------------

WORDS = [
    "", " ", "-1", "0", "1", "7", "-0.5", "0.5", "1e-3", "1e400", "-inf", "inf", "nan", "9" * 400,
    "true", "None", "auto", "mae", "ijepa", "quilts", "imagenet", "cub200", "folder:", "folder:.",
    "crop", "layer", "cpu", "cuda:9", "meta", "..", "/dev/null", ".", "~nobody", "0.1,0.2",
    "0.2,0.1", ",", "1,2,3", "1e-3,1e-3", "ⅷ", "\u202e", "a\nb", "x" * 5000, "vit_mini", "vit_b16",
    "timm:", "timm:resnet18", "--", "[1]", "{}", "0x10", "1_000", "+3", "own:1", "a.py:B",
]  # fmt: skip


def flags_of(kind: Any) -> list[tuple[str, bool]]:
    """(flag, whether it is a switch) of a command's settings."""
    fields = [(name, field) for name, field in kind.model_fields.items() if name != "swept"]
    return [(flag(name), field.annotation is bool) for name, field in fields]


def base_line(name: str) -> list[str]:
    """A command line that is right; with --dry-run, nothing is loaded (see `settled_only`)."""
    start = ["--backbone", "vit_mini", "--dataset", "quilts"]
    lines = {"pretrain": ["--pool", "quilts", *start[:2]], "sweep": [*start, "--clip", "3"]}
    return [name, *lines.get(name, start if name != "bench" else []), "--dry-run", "--json"]


@contextlib.contextmanager
def settled_only() -> Iterator[None]:
    """A dry run ends when its settings are settled, so that a thousand take seconds."""
    tell, cli.tell = cli.tell, lambda *given: {"settled": True}
    try:
        yield
    finally:
        cli.tell = tell


def flag_cases(root: Path, rng: random.Random) -> Iterator[Case]:
    """Each flag of each command with random words: settled, or one line; nothing is written."""
    root.mkdir()
    for name, kind in KINDS.items():
        for option, switch in flags_of(kind):
            for word in [None] if switch else rng.sample(WORDS, 3):
                given = [option] if word is None else [f"{option}={word}"]
                yield Case(f"{name} {given[0][:60]}", lambda a=(name, given): dry(*a))


def dry(name: str, given: list[str]) -> None:
    """A command line, settled."""
    with settled_only():
        assert json.loads(command(*base_line(name), *given)) == {"settled": True}


def settings_cases(root: Path, rng: random.Random, made: Made) -> Iterator[Case]:
    """Settings files: a run's with a value or key replaced, and damaged TOML."""
    root.mkdir()
    whole = json.loads((made.aligned / "config.json").read_text())
    values: list[Any] = [None, True, 0, -1, 1.5, 1e300, 10**30, [], [1], [0.2, 0.1], {}, {"a": 1}]
    for i in range(120):
        table = dict(whole)
        key = rng.choice([*table])
        if i % 5 == 0:
            table[rng.choice(["x", "", f"{key}s", "model", "🙂", "a.b"])] = table.pop(key)
        else:
            table[key] = rng.choice([*values, *WORDS])
        (root / f"{i}.json").write_text(json.dumps(table))
        given = ["--config", str(root / f"{i}.json")]
        yield Case(f"--config: {key}", lambda a=given: dry("align", a))
    text = b"lam = 0.5\nlower-steps = 3\ndataset = 'quilts'\n"
    for i, (name, content) in enumerate(damaged(text, rng, 30)):
        (root / f"{i}.toml").write_bytes(flipped(content, rng) if content and i % 2 else content)
        given = ["--config", str(root / f"{i}.toml")]
        yield Case(f"--config x.toml: {name}", lambda a=given: dry("align", a))
