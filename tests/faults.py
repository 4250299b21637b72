"""Bad input by kind, and how it ends. The suite runs a few cases a kind, `benchmarks/reliability.py` many and counts.

A case ends well in a correct reading, compared with what was written, or in one line that names the fault: UsageError
or RunError from a function; from the command line exit code 1 or 2 and one line on stderr that starts with `error:`.
Anything else, a traceback or a minute without an end, is a defect.
"""

import contextlib
import io
import json
import os
import random
import shutil
import signal
import struct
import tarfile
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from test_tasks import MAKE
from torch import Tensor

import cli
from config import AlignConfig, BenchConfig, Data, FinetuneConfig, PretrainConfig, RunError, UsageError, leaves
from data import Images, Split, View, batches, find_images, in_order, read_image
from lora import load_adapter
from runtime import load_tensors
from tasks import BENCHMARKS, check, load_task, unpack

LIMIT = 60  # seconds
MARK = "executed"  # the file that a malicious pickle would make
MODELS = {"pretrain": PretrainConfig, "align": AlignConfig, "finetune": FinetuneConfig, "bench": BenchConfig}


class Case(NamedTuple):
    """One bad, or odd, input."""

    name: str
    run: Callable[[], None]  # returns after a correct reading; raises UsageError or RunError otherwise


class Outcome(NamedTuple):
    """How a case ended: read, refused or defect."""

    name: str
    how: str
    line: str
    seconds: float


class Hang(BaseException):
    """No end within the limit."""


def outcome(case: Case) -> Outcome:
    """Run one case."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(LIMIT)
    began = time.monotonic()
    try:
        case.run()
        how, line = "read", ""
    except (UsageError, RunError) as error:
        line = cli.one_line(error)
        how = "refused" if 10 < len(line) < 1000 else "defect"
    except (Exception, Hang) as error:
        how, line = "defect", f"{type(error).__name__}: {error}"
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    return Outcome(case.name, how, line, time.monotonic() - began)


def command(*arguments: str) -> str:
    """Run a command line: its stdout, or the UsageError (2) or RunError (1) that its one line on stderr tells."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.run([*arguments])
    lines = err.getvalue().splitlines()
    if code == 0:
        assert not lines, lines
        return out.getvalue()
    assert code in (1, 2) and len(lines) == 1 and lines[0].startswith("error: "), (code, lines)
    assert not out.getvalue()
    raise (UsageError if code == 2 else RunError)(lines[0].removeprefix("error: "))


# --- damage ----------------------------------------------------------------------------------------------------------


def flipped(data: bytes, rng: random.Random) -> bytes:
    """One bit of it is another."""
    at, bit = rng.randrange(len(data)), rng.randrange(8)
    return data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]


def noise(size: int, rng: random.Random) -> bytes:
    return rng.randbytes(size)


class Payload:
    """What a malicious pickle runs as it is loaded."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


# --- images ----------------------------------------------------------------------------------------------------------

SIDE = 24


def drawn(rng: random.Random, channels: int = 3, top: int = 256) -> Any:
    """Pixels (SIDE, SIDE + 2, channels) that no filter would leave as they are."""
    generator = np.random.default_rng(rng.randrange(2**32))
    return generator.integers(0, top, (SIDE, SIDE + 2, channels))


def odd_images(root: Path, rng: random.Random) -> Iterator[tuple[Path, Any, int]]:
    """(file, the pixels that it should be read as, tolerance): modes, depths and containers of image files."""
    a = drawn(rng).astype(np.uint8)
    grey, alpha = a[..., 0], a[..., 1]
    three = np.repeat(grey[..., None], 3, -1)

    def at(name: str) -> Path:
        return root / f"{rng.randrange(10**9)}-{name}"

    for suffix in ("png", "bmp", "ppm", "tif", "tiff"):
        path = at(f"rgb.{suffix}")
        Image.fromarray(a).save(path)
        yield path, a, 0
        path = at(f"grey.{suffix}")
        Image.fromarray(grey).save(path)
        yield path, three, 0
    path = at("lossless.webp")
    Image.fromarray(a).save(path, lossless=True)
    yield path, a, 0
    for suffix in ("png", "tif"):
        path = at(f"rgba.{suffix}")
        Image.fromarray(np.dstack([a, alpha])).save(path)  # transparency is dropped, colours stay
        yield path, a, 0
        path = at(f"la.{suffix}")
        Image.fromarray(np.dstack([grey, alpha])).save(path)
        yield path, three, 0
        path = at(f"one-bit.{suffix}")
        Image.fromarray(grey > 127).save(path)
        yield path, np.where(three > 127, 255, 0), 0
    palette = rng.randbytes(768)
    table = np.frombuffer(palette, np.uint8).reshape(256, 3)
    for name, extra in (
        ("palette", {}),
        ("palette-one-transparent", {"transparency": 3}),
        ("palette-alpha", {"transparency": rng.randbytes(256)}),
    ):
        image = Image.fromarray(grey, "L")
        image.putpalette(palette)
        path = at(f"{name}.png")
        image.save(path, **extra)
        yield path, table[grey], 0
    path = at("rgb-one-transparent.png")
    Image.fromarray(a).save(path, transparency=tuple(int(x) for x in a[0, 0]))
    yield path, a, 0
    wide = drawn(rng, 1, 65536).astype(np.uint16)[..., 0]
    scaled = np.repeat(np.floor(wide / 257 + 0.5).astype(np.uint8)[..., None], 3, -1)
    for suffix in ("png", "tif"):
        path = at(f"sixteen.{suffix}")
        Image.fromarray(wide).save(path)
        yield path, scaled, 0
    path = at("sixteen-big-endian.tif")
    path.write_bytes(tiff(wide.astype(">u2").tobytes(), (wide.shape[1], wide.shape[0]), 16, 1, ">"))
    yield path, scaled, 0
    path = at("sixteen.pgm")
    path.write_bytes(b"P5 %d %d 65535\n" % wide.shape[::-1] + wide.astype(">u2").tobytes())
    yield path, scaled, 0
    ten = wide % 1024
    path = at("ten.pgm")
    path.write_bytes(b"P5 %d %d 1023\n" % ten.shape[::-1] + ten.astype(">u2").tobytes())
    yield path, np.repeat((ten / 1023 * 255)[..., None], 3, -1), 1
    ink = np.dstack([a, alpha])
    dry = (255 - ink[..., :3].astype(float)) * (255 - ink[..., 3:].astype(float)) / 255
    path = at("cmyk.tif")
    Image.fromarray(ink, "CMYK").save(path)
    yield path, dry, 1
    smooth = np.clip(np.add.outer(np.arange(SIDE), np.arange(SIDE + 2))[..., None] * np.array([4, 3, 2]), 0, 255)
    for name, extra in (("baseline", {}), ("progressive", {"progressive": True}), ("full chroma", {"subsampling": 0})):
        path = at(f"{name}.jpg")
        Image.fromarray(smooth.astype(np.uint8)).save(path, **extra)
        yield path, smooth, 12  # lossy
    soft = np.dstack([smooth, smooth[..., 0]]).astype(np.uint8)
    path = at("cmyk.jpg")
    Image.fromarray(soft, "CMYK").save(path, quality=95, subsampling=0)
    yield path, (255 - soft[..., :3].astype(float)) * (255 - soft[..., 3:].astype(float)) / 255, 12
    frames = [Image.fromarray(drawn(rng).astype(np.uint8)) for _ in range(2)]
    for suffix, extra in (("png", {}), ("webp", {"lossless": True}), ("tif", {})):
        path = at(f"animated.{suffix}")
        Image.fromarray(a).save(path, save_all=True, append_images=frames, **extra)
        yield path, a, 0
    exif = Image.Exif()
    exif[0x0112] = 6  # a camera on its side: ImageFolder does not turn it, and nor do we
    for suffix, extra in (("png", {}), ("webp", {"lossless": True})):
        path = at(f"turned.{suffix}")
        Image.fromarray(a).save(path, exif=exif, **extra)
        yield path, a, 0


def tiff(pixels: bytes, size: tuple[int, int], bits: int, channels: int, order: str = "<") -> bytes:
    """An uncompressed TIFF, made by hand: 8 bytes of head, then one directory, then the pixels."""
    tags = [(256, 4, size[0]), (257, 4, size[1]), (258, 3, bits), (259, 3, 1), (262, 3, 1 if channels == 1 else 2)]
    tags += [(273, 4, 8 + 2 + 12 * 9 + 4), (277, 3, channels), (278, 4, size[1]), (279, 4, len(pixels))]
    head = (b"II" if order == "<" else b"MM") + struct.pack(order + "HIH", 42, 8, len(tags))
    for tag, kind, value in tags:
        head += struct.pack(order + ("HHIHxx" if kind == 3 else "HHII"), tag, kind, 1, value)
    return head + bytes(4) + pixels


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_of(width: int, height: int) -> bytes:
    """A PNG of few bytes that says it is this large: its rows compress to nothing."""
    rows = zlib.compress(bytes(1000))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")  # fmt: skip


def bad_images(root: Path, rng: random.Random) -> Iterator[Path]:
    """Files with an image's name that cannot be read as one."""
    whole = list(odd_images(root, rng))
    for path, _, _ in whole:
        data = path.read_bytes()
        for cut in {0, 1, rng.randrange(2, 40), rng.randrange(2, len(data) // 6)}:  # before a first frame ends
            short = path.with_name(f"cut-at-{cut}-{path.name}")
            short.write_bytes(data[:cut])
            yield short
    for name, data in {
        "noise.jpg": noise(1000, rng), "noise.png": b"\x89PNG\r\n\x1a\n" + noise(1000, rng),
        "noise.webp": b"RIFF" + noise(1000, rng), "noise.tif": b"II\x2a\0" + noise(1000, rng),
        "page.jpg": b"<!DOCTYPE html><title>404</title>", "text.png": b"an image\n", "link.bmp": b"BM" + noise(60, rng),
        "bomb.png": png_of(50_000, 50_000), "large.png": png_of(10_000, 10_000), "thin.png": png_of(100_000, 3),
        "bomb.pgm": b"P5 100000 100000 255\n", "bomb.bmp": b"BM" + struct.pack("<IIIIiiHHIIiiII", 10**6, 0, 54, 40, 60000, 60000, 1, 24, 0, 0, 0, 0, 0, 0),
        "bomb.tif": tiff(b"", (10**6, 10**6), 8, 3),
        "integers.tif": tiff(bytes(4 * 20 * 20), (20, 20), 32, 1),
    }.items():  # fmt: skip
        path = root / name
        path.write_bytes(data)
        yield path
    floats = root / "floats.tif"
    Image.fromarray(np.ones((20, 20), np.float32)).save(floats)
    yield floats
    (root / "folder.jpg").mkdir()
    yield root / "folder.jpg"
    os.mkfifo(root / "pipe.jpg")
    yield root / "pipe.jpg"
    (root / "dangling.jpg").symlink_to(root / "nowhere")
    yield root / "dangling.jpg"
    yield root / "missing.jpg"


def pixels(image: Image.Image) -> Any:
    assert image.mode == "RGB"
    return np.asarray(image).astype(float)


VIEW = View(8, (0.5,) * 3, (0.5,) * 3, augment="crop")


def batch_of(path: Path, workers: int) -> Tensor:
    """A batch with this image in it, as training sees it."""
    good = path.parent / "good.png"
    if not good.exists():
        Image.new("RGB", (20, 20)).save(good)
    images = Images(Split([good, path], torch.zeros(2, dtype=torch.long)), VIEW, True, 0, "x")
    ((x, _),) = batches(images, in_order(range(2), 2), workers, torch.device("cpu"))
    return x


def image_cases(root: Path, rng: random.Random, scale: int) -> Iterator[Case]:
    """Each odd file's pixels against what was written; each bad one alone, and through batches of 0 and 2 workers."""
    root.mkdir()
    for path, expected, tolerance in odd_images(root, rng):

        def reads(path: Path = path, expected: Any = expected, tolerance: int = tolerance) -> None:
            off = np.abs(pixels(read_image(path)) - expected).max()
            assert off <= tolerance, off
            assert batch_of(path, 0).isfinite().all()

        yield Case(path.name, reads)
    for i, path in enumerate(bad_images(root, rng)):

        def refuses(path: Path = path, workers: int = 0) -> None:
            try:
                batch_of(path, workers)
            except RunError as error:
                assert str(path) in str(error), error
                raise
            raise AssertionError("was read")

        for workers in (0, 2) if i % max(1, 16 // scale) == 0 else (0,):
            yield Case(f"{path.name}, {workers} workers", lambda p=path, w=workers, f=refuses: f(p, w))  # type: ignore[misc]


def flipped_image_cases(root: Path, rng: random.Random, scale: int) -> Iterator[Case]:
    """A flipped bit: some RGB image of the same size, or one line; a flip in a JPEG's pixels cannot be noticed."""
    root.mkdir()
    for path, _, _ in odd_images(root, rng):
        data = path.read_bytes()
        for i in range(4 * scale):
            other = path.with_name(f"flip-{i}-{path.name}")
            other.write_bytes(flipped(data, rng))
            yield Case(other.name, lambda other=other: check_rgb(other))  # type: ignore[misc]


def check_rgb(path: Path) -> None:
    assert read_image(path).mode == "RGB"


def vanishing_cases(root: Path, rng: random.Random, scale: int) -> Iterator[Case]:
    """A dataset's folder is gone, or an image of it is, after the first batch."""
    root.mkdir()
    for workers in (0, 2):
        for what in ("folder", "image"):
            base = root / f"{what}{workers}"
            base.mkdir()
            for i in range(40):
                Image.new("RGB", (20, 20)).save(base / f"{i}.png")

            def vanish(base: Path = base, what: str = what, workers: int = workers) -> None:
                files = find_images(base)
                images = Images(Split(files, torch.zeros(len(files), dtype=torch.long)), VIEW, True, 0, "x")
                found = batches(images, in_order(range(40), 4), workers, torch.device("cpu"))
                next(found)
                shutil.rmtree(base) if what == "folder" else files[-1].unlink()
                for _ in found:
                    pass
                raise AssertionError("went on")

            yield Case(f"{what} vanishes, {workers} workers", vanish)


def check_cases(root: Path, rng: random.Random, scale: int) -> Iterator[Case]:
    """`data check` lists all bad files and no others."""
    root.mkdir()
    bad = {path for path in bad_images(root, rng) if path.name not in ("folder.jpg", "missing.jpg")}

    def lists() -> None:
        problems = check(str(root), root, lambda *told: None).problems
        assert len(problems) == len(bad)
        for path in bad:
            assert sum(problem.startswith(f"{path}: ") for problem in problems) == 1, path

    yield Case(f"data check finds {len(bad)} bad files", lists)


# --- weights, adapters, checkpoints ----------------------------------------------------------------------------------


class Made(NamedTuple):
    """Real runs of toy size, to be damaged."""

    weights: Path  # a pretrain run
    aligned: Path  # an align run, finished
    direct: Path  # a finetune run


ALIGN = "--alternations 2 --lower-steps 2 --upper-steps 1 --p-batch 8 --d-batch 8 --probe-epochs 0 --eval-every 1"


def make_runs(root: Path) -> Made:
    """pretrain, align and finetune on quilts in seconds."""
    weights, aligned, direct = root / "pre", root / "align", root / "direct"
    start = ("--backbone", "vit_mini", "--weights", str(weights), "--dataset", "quilts", "--quiet")
    pre = "pretrain --pool quilts --backbone vit_mini --epochs 1 --warmup-epochs 0 --batch 1000 --quiet --out"
    command(*pre.split(), str(weights))
    command("align", *start, *ALIGN.split(), "--warmup", "0", "--out", str(aligned))
    command(
        "finetune", *start, *["--epochs", "1", "--seeds", "1", "--lr", "1e-2", "--batch", "80", "--out"], str(direct)
    )
    return Made(weights, aligned, direct)


def same(a: Any, b: Any) -> bool:
    """Whether two nests of tensors, numbers and words are equal, bit by bit."""
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return torch.equal(a, b) if isinstance(a, Tensor) else bool(a == b)


def damaged(data: bytes, rng: random.Random, count: int) -> Iterator[tuple[str, bytes]]:
    """Nothing, one byte, noise, cuts and flips; always the same few, then `count` of each at random."""
    yield "empty", b""
    yield "one byte", data[:1]
    yield "last byte missing", data[:-1]
    yield "noise", noise(5000, rng)
    for _ in range(count):
        cut = rng.randrange(len(data))
        yield f"cut at {cut}", data[:cut]
        yield "a bit flipped", flipped(data, rng)


def file_cases(root: Path, rng: random.Random, scale: int, made: Made) -> Iterator[Case]:
    """backbone.pth, adapter.safetensors and checkpoint.pt, damaged: they load equal, or are refused."""
    root.mkdir()
    readers: dict[Path, Callable[[Path], Any]] = {
        made.weights / "backbone.pth": load_tensors,
        made.aligned / "checkpoint.pt": resumed,
        made.aligned / "adapter.safetensors": load_adapter,
    }
    for file, reader in readers.items():
        data, original = file.read_bytes(), reader(file)
        for i, (name, content) in enumerate(damaged(data, rng, 10 * scale)):
            path = root / f"{i}" / file.name
            path.parent.mkdir(exist_ok=True)

            def loads(
                path: Path = path, content: bytes = content, reader: Any = reader, original: Any = original
            ) -> None:
                path.write_bytes(content)
                assert same(reader(path), original), "was read as something else"

            yield Case(f"{file.name}: {name}", loads)


def resumed(path: Path) -> Any:
    """What a resumed run takes from a checkpoint."""
    from parallel import World
    from runtime import Run

    return Run(path.parent, True, [], World()).restore(lambda record: True, torch.device("cpu"))


def entry_cases(root: Path, rng: random.Random, scale: int, made: Made) -> Iterator[Case]:
    """The same through the commands, with malicious pickles, folders and 100 MB of noise: refused, nothing is run."""
    root.mkdir()
    mark = root / MARK
    evil: dict[str, bytes] = {}
    for name, old in (("zip", False), ("legacy", True)):
        buffer = io.BytesIO()
        torch.save({"model": Payload(mark)}, buffer, _use_new_zipfile_serialization=not old)
        evil[f"malicious {name}"] = buffer.getvalue()
    import pickle

    evil["malicious pickle"] = pickle.dumps(Payload(mark))
    evil["malicious pickle, protocol 0"] = pickle.dumps(Payload(mark), 0)
    big = root / "big.noise"
    big.write_bytes(np.random.default_rng(rng.randrange(2**32)).bytes(100_000_000))
    start = ("--backbone", "vit_mini", "--dataset", "quilts", "--quiet", "--dry-run")
    weights = (made.weights / "backbone.pth").read_bytes()
    entries = {
        "align --weights w.pth": ("align", "--weights", "w.pth", *start),
        "align --weights w.safetensors": ("align", "--weights", "w.safetensors", *start),
        "align --pretext ijepa": ("align", "--weights", "w.tar", "--pretext", "ijepa", *start),
        "finetune timm:": ("finetune", "--weights", "w.pt", *start, "--backbone", "timm:vit_tiny_patch16_224"),
        "finetune --from l.pt": ("finetune", "--from", "l.pt", "--weights", str(made.weights), *start),
        "finetune --from l.safetensors": (
            "finetune",
            "--from",
            "l.safetensors",
            "--weights",
            str(made.weights),
            *start,
        ),
    }
    contents = {**dict(damaged(weights, rng, scale)), **evil}
    for i, (entry, line) in enumerate(entries.items()):
        for j, name in enumerate((*contents, "a folder", "100 MB of noise", "a list", "tensors of something else")):
            own = root / f"{i}-{j}"

            def enters(own: Path = own, line: tuple[str, ...] = line, name: str = name) -> None:
                own.mkdir()
                file = next(word for word in line if word.startswith(("w.", "l.")))
                if name == "a folder":
                    (own / file).mkdir()
                elif name == "100 MB of noise":
                    (own / file).hardlink_to(big)
                elif name in ("a list", "tensors of something else"):
                    x = torch.zeros(3)
                    torch.save([x] if name == "a list" else {"encoder": x, "predictor": 3, "model": [x]}, own / file)
                else:
                    (own / file).write_bytes(contents[name])
                try:
                    command(*(str(own / word) if word == file else word for word in line))
                except (UsageError, RunError) as error:
                    assert str(own / file) in str(error), error
                    raise
                finally:
                    assert not mark.exists(), "the payload was run"
                raise AssertionError("was accepted")

            yield Case(f"{entry}: {name}", enters)
    for j, (name, content) in enumerate(
        {**evil, **dict(damaged((made.aligned / "checkpoint.pt").read_bytes(), rng, scale))}.items()
    ):
        own = root / f"resume-{j}"

        def resumes(own: Path = own, content: bytes = content) -> None:
            shutil.copytree(made.aligned, own)
            (own / "result.json").unlink()
            (own / "checkpoint.pt").write_bytes(content)
            try:
                command("align", "--config", str(own / "config.json"), "--out", str(own), "--resume", "--quiet")
            finally:
                assert not mark.exists(), "the payload was run"
            raise AssertionError("was accepted")

        yield Case(f"--resume: {name}", resumes)


def run_cases(root: Path, rng: random.Random, scale: int, made: Made) -> Iterator[Case]:
    """config.json, result.json and env.json of runs, damaged, where other commands read them."""
    root.mkdir()
    wrong = (b"", b"[]", b"{}", b"3", b'{"test": 3}', b'{"test": ["x"]}', b"null", b"[" * 100_000, b"\xff\xfe", b'{"model": 1, "bilevel": 2}')  # fmt: skip
    uses = {
        "evaluate": (made.direct, lambda run: command("evaluate", str(run), "--json")),
        "finetune --from": (made.aligned, lambda run: command("finetune", "--from", str(run), "--dry-run", "--json")),
        "export": (made.aligned, lambda run: command("export", str(run), "--out", str(run / "out"), "--no-merged")),
        "align --resume": (
            made.aligned,
            lambda run: command(
                "align",
                "--config",
                str(made.aligned / "config.json"),
                "--out",
                str(run),
                "--resume",
                "--dry-run",
                "--json",
            ),
        ),
    }
    for use, (source, read) in uses.items():
        for file in ("config.json", "result.json", "env.json"):
            data = (source / file).read_bytes()
            cuts = [flipped(data, rng) for _ in range(2 * scale)] + [
                data[: rng.randrange(len(data))] for _ in range(scale)
            ]
            for j, content in enumerate([*wrong, *cuts]):
                own = root / f"{use}-{file}-{j}"

                def reads(
                    own: Path = own, source: Path = source, file: str = file, content: bytes = content, read: Any = read
                ) -> None:
                    shutil.copytree(source, own)
                    (own / file).write_bytes(content)
                    read(own)

                yield Case(f"{use}, {file}: {content[:40]!r}", reads)


# --- lists -----------------------------------------------------------------------------------------------------------


def near(text: bytes, rng: random.Random) -> bytes:
    """A list with one line that is nearly right."""
    lines = text.split(b"\n")
    at = rng.randrange(len(lines))
    line = lines[at]
    words = line.split() or [b""]
    w = rng.randrange(len(words))
    lines[at] = rng.choice([
        b" ".join(words[:-1]), line + b" 1", line + b"\n" + line, b"", b"-" + line, line.replace(b"1", b"9"), line[::-1],
        b" ".join([*words[:w], rng.choice([b"-1", b"0", b"1e3", b"nan", b"99999999999999999999", "²".encode(), b"\0",
                                           b"../../x.jpg", b"/etc/passwd", b"a" * 5000]), *words[w + 1 :]]),
        noise(5, rng), line.upper(),
    ])  # fmt: skip
    return b"\n".join(lines)


def list_cases(root: Path, rng: random.Random, scale: int) -> Iterator[Case]:
    """Every list file of every benchmark: a task with labels in range and files that are there, or one line."""
    root.mkdir()
    for name, make in MAKE.items():
        whole = root / name
        make(whole)
        base = whole / BENCHMARKS[name].folder
        files = sorted(path for path in base.rglob("*") if path.suffix in (".txt", ".mat"))
        for file in rng.sample(files, min(len(files), 4 * scale)):
            data = file.read_bytes()
            contents = {"empty": b"", "noise": noise(2000, rng), "cut": data[: rng.randrange(len(data))]}
            contents |= {"nearly right" + " " * i: near(data, rng) for i in range(4 * scale)}
            contents |= {"a bit flipped" + " " * i: flipped(data, rng) for i in range(scale)}
            for how, content in contents.items():
                yield Case(f"{name}, {file.name}: {how}", listing(name, whole, file, content))
            yield Case(f"{name}, {file.name}: a folder", listing(name, whole, file, None))


def listing(name: str, root: Path, file: Path, content: bytes | None) -> Callable[[], None]:
    """Read a benchmark with one of its list files replaced; content None is a folder."""

    def reads() -> None:
        before = file.read_bytes()
        try:
            file.unlink()
            file.write_bytes(content) if content is not None else file.mkdir()
            task = load_task(Data(dataset=name, partial=True), root)
            for split in (task.train, task.val, task.test):
                assert isinstance(split.images, list) and len(split.images) == len(split.targets) > 0
                assert all(path.is_file() and root in path.parents and ".." not in path.parts for path in split.images)
                low, high = (-1, 1) if name == "voc07" else (0, BENCHMARKS[name].classes - 1)
                assert low <= int(split.targets.min()) and int(split.targets.max()) <= high
        finally:
            file.rmdir() if file.is_dir() else file.unlink()
            file.write_bytes(before)

    return reads


def large_cases(root: Path, rng: random.Random, scale: int) -> Iterator[Case]:
    """100 MB of noise as a list of each benchmark, as settings, as a split file; an endless device as both."""
    root.mkdir()
    big = root / "big"
    big.write_bytes(np.random.default_rng(rng.randrange(2**32)).bytes(100_000_000))
    for name, make in MAKE.items():
        make(root / name)
        base = root / name / BENCHMARKS[name].folder
        for file in sorted(path for path in base.rglob("*") if path.suffix in (".txt", ".mat"))[: 3 * scale]:
            if file.name in ("images_variant_trainval.txt",):  # not read
                continue

            def reads(name: str = name, file: Path = file) -> None:
                before = file.read_bytes()
                file.unlink()
                file.hardlink_to(big)
                try:
                    load_task(Data(dataset=name, partial=True), root / name)
                finally:
                    file.unlink()
                    file.write_bytes(before)
                raise AssertionError("was read")

            yield Case(f"{name}, {file.name}: 100 MB of noise", reads)
    for path in (big, Path("/dev/zero"), root):
        for suffix in ("", ".toml", ".json"):
            file = root / f"{path.name}-as{suffix}"
            file.symlink_to(path)
            yield Case(f"--config {file.name}", lambda file=file: refused("align", "--config", str(file)))  # type: ignore[misc]
    yield Case("--split-file, 100 MB of noise", lambda: splits(root, big))
    yield Case("--split-file, an endless device", lambda: splits(root, Path("/dev/zero")))
    yield Case("--split-file, a folder", lambda: splits(root, root))


def splits(root: Path, file: Path) -> None:
    """CUB-200 as if it were whole, so that the file is read."""
    from tasks import with_validation

    b = BENCHMARKS["cub200"]._replace(sizes=(8, 4, 4))
    with_validation(b.read(root / "cub200/CUB_200_2011").parts, b, Data(dataset="cub200", split_file=file))
    raise AssertionError("was read")


def refused(*arguments: str) -> None:
    command(*arguments)
    raise AssertionError("was accepted")


# --- archives --------------------------------------------------------------------------------------------------------


def archive_cases(root: Path, rng: random.Random, scale: int) -> Iterator[Case]:
    """Archives that would write elsewhere, damaged ones, devices: nothing is ever outside the target."""
    root.mkdir()
    members = {
        "parent": ("../outside", tarfile.REGTYPE, ""), "deep parent": ("a/../../outside", tarfile.REGTYPE, ""),
        "symlink out": ("link", tarfile.SYMTYPE, "../../elsewhere"), "absolute symlink": ("link", tarfile.SYMTYPE, "/etc"),
        "hard link out": ("link", tarfile.LNKTYPE, "../secret"), "absolute hard link": ("l", tarfile.LNKTYPE, "/etc/passwd"),
        "character device": ("null", tarfile.CHRTYPE, ""), "block device": ("disk", tarfile.BLKTYPE, ""),
        "pipe": ("pipe", tarfile.FIFOTYPE, ""), "absolute": ("/outside.txt", tarfile.REGTYPE, ""),
    }  # fmt: skip
    for i, (name, (path, kind, target)) in enumerate(members.items()):
        for mode in ("w", "w:gz", "w:xz", "w:bz2"):
            buffer = io.BytesIO()
            with tarfile.open(fileobj=buffer, mode=mode) as tar:  # type: ignore[call-overload]
                info = tarfile.TarInfo(path)
                info.type, info.linkname, info.size = kind, target, 3 * (kind == tarfile.REGTYPE)
                tar.addfile(info, io.BytesIO(b"bad") if info.size else None)
            yield Case(
                f"{name}, {mode}", unpacking(root / f"{i}{mode[2:]}", buffer.getvalue(), allowed=name == "absolute")
            )
    for mode in ("w", "w:gz", "w:xz", "w:bz2"):  # a link, then a file through it
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode=mode) as tar:  # type: ignore[call-overload]
            link, file = tarfile.TarInfo("in"), tarfile.TarInfo("in/outside")
            link.type, link.linkname, file.size = tarfile.SYMTYPE, "..", 3
            tar.addfile(link)
            tar.addfile(file, io.BytesIO(b"bad"))
        whole = buffer.getvalue()
        yield Case(f"through a link, {mode}", unpacking(root / f"through{mode[2:]}", whole, allowed=False))
        good = io.BytesIO()
        with tarfile.open(fileobj=good, mode=mode) as tar:  # type: ignore[call-overload]
            info = tarfile.TarInfo("a.txt")
            info.size = 5000
            tar.addfile(info, io.BytesIO(noise(5000, rng)))
        for j, (name, content) in enumerate(damaged(good.getvalue(), rng, 3 * scale)):
            yield Case(f"{name}, {mode}", unpacking(root / f"d{j}{mode[2:]}", content, allowed=True))


def unpacking(base: Path, content: bytes, allowed: bool) -> Callable[[], None]:
    """Unpack below `base`; whatever comes of it, nothing is written beside the target. `allowed`: it may succeed."""

    def run() -> None:
        target = base / "target"
        target.mkdir(parents=True)
        archive = base / "x.tar"
        archive.write_bytes(content)
        try:
            unpack(archive, target)
            assert allowed, "was unpacked"
        finally:
            assert {path.name for path in base.iterdir()} == {"target", "x.tar"}
            assert not {path.name for path in base.parent.iterdir()} & {"outside", "elsewhere", "secret"}
            assert not any(path.is_symlink() or path.is_fifo() or path.is_block_device() for path in target.rglob("*"))

    return run


# --- settings --------------------------------------------------------------------------------------------------------

WORDS = [
    "", " ", "-1", "0", "1", "2", "7", "-0.5", "0.5", "1e-3", "1e300", "1e400", "-inf", "inf", "nan", "99999999999999999999",
    "9" * 400, "true", "False", "None", "null", "auto", "mae", "ijepa", "quilts", "imagenet", "cub200", "folder:", "folder:.",
    "crop", "first", "layer", "cpu", "cuda:9", "mps", "xla", "hpu", "ipu", "vulkan", "privateuseone", "meta", "cpu:1", "..", "/dev/null",
    "/dev/zero", ".", "~nobody", "0.1,0.2", "0.2,0.1", ",", "1,2,3", "1e-3,1e-3", "ⅷ", "²", "\u202e", "a\nb", "x" * 5000,
    "vit_mini", "vit_b16", "timm:", "timm:resnet18", "timm:vit_tiny_patch16_224", "--", "[1]", "{}", "0x10", "1_000", "+3",
]  # fmt: skip


def flags_of(model: Any) -> list[tuple[str, bool]]:
    """(flag, whether it is a switch) of a command's settings."""
    out = []
    for leaf in leaves(model):
        name = leaf.path[-1]
        switch = cli.flag_type(leaf.field.annotation) is bool
        out.append((cli.RENAMED.get(name, (f"--{name.replace('_', '-')}",))[0], switch))
    return out


def base_line(name: str, made: Made) -> list[str]:
    """A command line that is right."""
    start = ["--backbone", "vit_mini", "--weights", str(made.weights), "--dataset", "quilts"]
    return {
        "pretrain": ["pretrain", "--pool", "quilts", "--backbone", "vit_mini"],
        "align": ["align", *start],
        "finetune": ["finetune", *start],
        "bench": ["bench"],
    }[name] + ["--dry-run", "--json", "--out", "runs/never"]


def flag_cases(root: Path, rng: random.Random, scale: int, made: Made) -> Iterator[Case]:
    """Each flag of each command with random words: resolved, or one line; never a traceback, nothing written."""
    root.mkdir()
    for name, model in MODELS.items():
        for flag, switch in flags_of(model):
            for word in [None] if switch else rng.sample(WORDS, 3 * scale):
                given = [flag] if word is None else [f"{flag}={word}"]
                yield Case(f"{name} {' '.join(given)[:60]}", dry(base_line(name, made) + given))


def dry(line: list[str]) -> Callable[[], None]:
    """A dry run ends with settings as JSON, or with a usage error."""

    def run() -> None:
        try:
            told = json.loads(command(*line))
        except RunError as error:  # a folder of ours, given as a pool, may hold damaged images
            assert "cannot be read as an image" in str(error), f"exit code 1: {error}"
            raise
        assert told["settings"]
        assert not Path("runs/never").exists()

    return run


def settings_cases(root: Path, rng: random.Random, scale: int, made: Made) -> Iterator[Case]:
    """Settings files: valid ones with a value or key replaced, and bytes."""
    root.mkdir()
    whole = json.loads((made.aligned / "config.json").read_text())
    values: list[Any] = [
        None,
        True,
        0,
        -1,
        1.5,
        1e300,
        10**30,
        "",
        "x",
        [],
        [1],
        [0.2, 0.1],
        {},
        {"a": 1},
        [[1]],
        "9" * 5000,
        *WORDS,
    ]
    for i in range(60 * scale):
        table = json.loads(json.dumps(whole))
        place = rng.choice([table, *(group for group in table.values() if isinstance(group, dict))])
        key = rng.choice([*place])
        if rng.random() < 0.2:
            place[rng.choice(["x", "", key + "s", "model", "lam", "🙂", "a.b"])] = place.pop(key)
        else:
            place[key] = rng.choice(values)
        file = root / f"{i}.json"
        file.write_text(json.dumps(table))
        yield Case(
            f"--config: {key}", dry(["align", "--config", str(file), "--dry-run", "--json", "--out", "runs/never"])
        )
    text = b"lam = 0.5\n[bilevel]\nlower_steps = 3\n[data]\ndataset = 'quilts'\n"
    for i, (name, content) in enumerate(damaged(text, rng, 20 * scale)):
        file = root / f"{i}.toml"
        file.write_bytes(content)
        line = [
            "align",
            "--backbone",
            "vit_mini",
            "--weights",
            str(made.weights),
            "--dry-run",
            "--json",
            "--out",
            "runs/never",
        ]
        yield Case(f"--config x.toml: {name}", dry([*line, "--config", str(file)]))


# --- all -------------------------------------------------------------------------------------------------------------


def kinds(root: Path, rng: random.Random, scale: int, made: Made) -> dict[str, Iterator[Case]]:
    """All cases by kind; `scale` 1 is what the suite runs."""
    return {
        "odd, truncated, foreign and missing images": image_cases(root / "images", rng, scale),
        "images with a flipped bit": flipped_image_cases(root / "flips", rng, scale),
        "images that vanish during a run": vanishing_cases(root / "vanish", rng, scale),
        "data check": check_cases(root / "check", rng, scale),
        "backbone, adapter, checkpoint: cuts and flips": file_cases(root / "files", rng, scale, made),
        "weights, LoRA files, checkpoints: commands, malicious pickles": entry_cases(
            root / "entries", rng, scale, made
        ),
        "run directories with damaged JSON": run_cases(root / "runs", rng, scale, made),
        "benchmark lists, nearly right or noise": list_cases(root / "lists", rng, scale),
        "lists, settings, split files of 100 MB, devices": large_cases(root / "large", rng, scale),
        "archives": archive_cases(root / "archives", rng, scale),
        "flags": flag_cases(root / "flags", rng, scale, made),
        "settings files": settings_cases(root / "settings", rng, scale, made),
    }
