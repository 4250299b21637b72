"""What the file of a picture becomes: values worked out by hand, and what decoders warn of."""

import io
import logging
import multiprocessing
import struct
import subprocess
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

import data
from data import Images, Split, Transform
from support import looking

Pixels = NDArray[Any]


def read(path: Path) -> Pixels:
    """Its pixels, (height, width, 3)."""
    return np.asarray(data.as_tensor(data.read_image(path)).permute(1, 2, 0))


def test_images_are_read_as_they_were_written(tmp_path: Path) -> None:
    """Grey, a palette, one bit; 255 numbers in a row are not more than 8 bits each."""
    a = np.random.default_rng(0).integers(0, 256, (24, 126, 3)).astype(np.uint8)
    grey, rgb = Image.fromarray(a[..., 0], "L"), Image.fromarray(a)
    images: dict[str, Any] = {
        "rgb.bmp": (rgb, a),
        "rgb.png": (rgb, a),
        "grey.tif": (grey, np.repeat(a[..., :1], 3, -1)),
        "palette.png": (grey.convert("P"), np.repeat(a[..., :1], 3, -1)),
        "bit.png": (grey.point(lambda x: 255 * (x > 127), "1"), 255 * (a[..., [0, 0, 0]] > 127)),
        "opaque.png": (rgb.convert("RGBA"), a),
    }
    for name, (image, pixels) in images.items():
        image.save(tmp_path / name)
        assert (read(tmp_path / name) == pixels).all(), name


@pytest.mark.parametrize("name", ["a.png", "a.tif"])
def test_of_several_pages_the_first_is_taken_and_it_is_said(tmp_path: Path, name: str) -> None:
    a = np.random.default_rng(0).integers(0, 256, (24, 26, 3)).astype(np.uint8)
    first, second = Image.fromarray(a), Image.fromarray(255 - a)
    first.save(tmp_path / name, save_all=True, append_images=[second])
    assert (read(tmp_path / name) == a).all()
    assert "pages" in looking.look_at_file(tmp_path / name).rest


@pytest.mark.parametrize(("mode", "samples"), [("RGB", 4), ("RGB", 5), ("L", 2)])
def test_bands_that_are_not_taken_are_told(tmp_path: Path, mode: str, samples: int) -> None:
    """Near infrared, and more; by a TIFF file written by hand, of one pixel."""
    bands = len(mode)
    tags = [(256, 3, 1, 1), (257, 3, 1, 1), (259, 3, 1, 1), (262, 3, 1, 2 if bands == 3 else 1),
            (273, 4, 1, 300), (277, 3, 1, samples), (278, 3, 1, 1),
            (279, 4, 1, samples)]  # fmt: skip
    extra = samples - bands
    tags += [(258, 3, samples, 8 * 0x10001 if samples == 2 else 200)]
    tags += [(338, 3, extra, 0)]  # of unknown meaning; two zeros fit into the entry
    head = b"II*\0" + struct.pack("<IH", 8, len(tags))
    for tag in sorted(tags):
        head += struct.pack("<HHII", *tag)
    head = (head + bytes(4)).ljust(200, b"\0") + struct.pack("<5H", *[8] * 5)
    file = tmp_path / "a.tif"
    file.write_bytes(head.ljust(300, b"\0") + bytes([200, 100, 50, 25, 12][:samples]))
    assert looking.look_at_file(file).rest == f"{samples} bands, the first {bands} are taken"
    pixels = read(file)
    assert pixels[0, 0].tolist() == ([200, 100, 50] if bands == 3 else [200, 200, 200])


@pytest.mark.parametrize("name", ["rgba.png", "rgba.webp", "rgba.tif", "la.png", "palette.png"])
def test_what_is_transparent_is_laid_on_white(tmp_path: Path, name: str) -> None:
    """Left clear: 255. In the middle opaque: as it is. Right half of black: 255 - 128 = 127."""
    image = Image.new("RGBA", (3, 1), (0, 0, 0, 0))  # transparent black, as programs save it
    image.putpixel((1, 0), (10, 10, 10, 255))
    image.putpixel((2, 0), (0, 0, 0, 128))
    if name == "la.png":
        image = image.convert("LA")
    if name == "palette.png":
        image = image.quantize(4)
    image.save(tmp_path / name, lossless=True)  # as WebP by itself is not
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read(tmp_path / name)[0].tolist() == [[255] * 3, [10] * 3, [127] * 3]


def chunk(kind: bytes, content: bytes) -> bytes:
    """A chunk of a PNG file."""
    whole = kind + content
    return struct.pack(">I", len(content)) + whole + struct.pack(">I", zlib.crc32(whole))


def png(colour_type: int, channels: int) -> bytes:
    """2 x 2 pixels of 16 bits a channel, 4080 of 65535 each: white of a 12-bit camera."""
    row = b"\0" + struct.pack(">H", 4080) * 2 * channels
    header = struct.pack(">IIBBBBB", 2, 2, 16, colour_type, 0, 0, 0)
    parts = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(2 * row)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts


def tiff() -> bytes:
    """2 x 2 pixels of three channels of 16 bits."""
    tags = [(256, 3, 1, 2), (257, 3, 1, 2), (258, 3, 3, 134), (259, 3, 1, 1), (262, 3, 1, 2),
            (273, 4, 1, 140), (277, 3, 1, 3), (278, 3, 1, 2), (279, 4, 1, 24),
            (284, 3, 1, 1)]  # fmt: skip
    directory = b"".join(struct.pack("<HHII", *tag) for tag in tags)
    head = b"II*\0" + struct.pack("<IH", 8, len(tags)) + directory + bytes(4)
    return head + struct.pack("<3H", 16, 16, 16) + 12 * b"\xf0\x0f"


DEEP = {
    "grey.png": png(0, 1), "grey alpha.png": png(4, 2), "rgb.png": png(2, 3), "rgba.png": png(6, 4),
    "rgb.ppm": b"P6 2 2 65535\n" + 12 * b"\x0f\xf0",
    "grey.pgm": b"P5 2 2 65535\n" + 4 * b"\x0f\xf0",
    "camera.ppm": b"P6 2 2 4095\n" + 12 * b"\x0f\xf0",
    "nine bits.ppm": b"P6 2 2 256\n" + 12 * b"\x00\xf0",
    "rgb.tif": tiff(),
}  # fmt: skip


@pytest.mark.parametrize("name", DEEP)
def test_more_than_8_bits_are_refused_whatever_the_colours(tmp_path: Path, name: str) -> None:
    """Nothing in such a file says where white is; Pillow would make 4080 of 65535 a 15 of 255."""
    (tmp_path / name).write_bytes(DEEP[name])
    with pytest.raises(data.ImageError, match=f"{name}: .*8 bits a channel"):
        data.read_image(tmp_path / name)


@pytest.mark.parametrize(("sample_format", "is_signed"), [(1, False), (2, True)])
def test_signed_numbers_are_refused(tmp_path: Path, sample_format: int, is_signed: bool) -> None:
    """As of an index of plants: Pillow would make a white 255 of -1, beside a black 0."""
    file = tmp_path / "index.tif"
    Image.new("L", (2, 2), 255).save(file, tiffinfo={339: sample_format})
    if is_signed:
        with pytest.raises(data.ImageError, match=r"index.tif: .*signed, save it with 8 bits from"):
            data.read_image(file)
    else:
        assert read(file).min() == 255


def test_16_bits_for_three_channels_are_not_more_than_8_each(tmp_path: Path) -> None:
    """A BMP of 5, 6 and 5 bits: 31 of 31, 0 and 0 are red."""
    masks = struct.pack("<3I", 0xF800, 0x07E0, 0x001F)
    header = struct.pack("<IiiHHIIiiII", 40, 1, 1, 1, 16, 3, 4, 0, 0, 0, 0)
    start = 14 + 40 + len(masks)
    head = b"BM" + struct.pack("<IHHI", start + 4, 0, 0, start)
    (tmp_path / "a.bmp").write_bytes(head + header + masks + struct.pack("<HH", 0xF800, 0))
    assert read(tmp_path / "a.bmp")[0, 0].tolist() == [255, 0, 0]


def test_a_whole_picture_with_much_metadata_is_read(tmp_path: Path) -> None:
    """2 MB; Pillow by itself refuses more than one."""
    buffer = io.BytesIO()
    Image.new("RGB", (3, 2), (1, 2, 3)).save(buffer, "png")
    plain = buffer.getvalue()
    profile = chunk(b"iCCP", b"icc\0\0" + zlib.compress(bytes(2_000_000)))
    (tmp_path / "a.png").write_bytes(plain[:33] + profile + plain[33:])
    assert read(tmp_path / "a.png")[1, 2].tolist() == [1, 2, 3]


def spoilt_jpeg() -> bytes:
    """A JPEG whose last third is out of step: libjpeg decodes it, and warns."""
    buffer = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3)).astype(np.uint8)
    Image.fromarray(noise).save(buffer, "jpeg", quality=95)
    content = buffer.getvalue()
    middle = len(content) * 2 // 3
    return content[:middle] + bytes(8) + content[middle + 8 :]


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize(
    ("decoder", "word"), [("libjpeg", "extraneous bytes"), ("pillow", "400 pixels")]
)
def test_what_a_decoder_warns_of_is_said_once_with_the_files_name(
    decoder: str, word: str, tmp_path: Path, caplog: Any, capfd: Any, monkeypatch: Any
) -> None:
    """Training reads the same pixels, and prints nothing of it."""
    path = tmp_path / "odd.jpg"
    path.write_bytes(spoilt_jpeg())
    if decoder == "pillow":
        Image.new("RGB", (20, 20)).save(path)
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 300)  # it warns, and reads 400
    pixels = read(path)
    with caplog.at_level(logging.WARNING):
        looking.look_at_files([path])
        capfd.readouterr()  # up to here libjpeg, or the log, may have printed lines
        images = Images(Split([path, path], torch.zeros(2)), Transform(8, (0.5,) * 3, (0.5,) * 3))
        list(data.batches(images, [[(0, 0), (1, 1)]] * 2, 0, torch.device("cpu")))
        assert (read(path) == pixels).all()
    (said,) = caplog.messages
    assert said.startswith(f"{path}: ") and word in said
    assert capfd.readouterr().err == ""


def test_what_others_print_while_decoders_are_listened_to_is_printed(capfd: Any) -> None:
    with looking.overheard() as words:
        subprocess.run(["sh", "-c", "echo another >&2"], check=True)
    assert words == [] and capfd.readouterr().err == "another\n"


def test_crops_in_several_threads_are_those_of_one_and_leave_torchs_generator_as_it_was() -> None:
    picture = torch.rand(3, 40, 30, generator=torch.Generator().manual_seed(0))
    image = (255 * picture).byte()
    transform = Transform(8, (0.5,) * 3, (0.5,) * 3)
    one = [data.cut_random(image, transform, seed) for seed in range(200)]
    before = torch.get_rng_state()
    with ThreadPoolExecutor(4) as threads:
        several = list(
            threads.map(lambda seed: data.cut_random(image, transform, seed), range(200))
        )
    assert all(map(torch.equal, one, several))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_worker_crops_although_a_thread_of_its_parent_was_drawing_as_it_began() -> None:
    """Otherwise it would wait for ever."""
    split = Split(torch.rand(2, 3, 16, 16), torch.zeros(2))
    images = Images(split, Transform(8, (0.5,) * 3, (0.5,) * 3, augment="crop"), train=True)
    with data.DRAWING:
        child = multiprocessing.get_context("fork").Process(target=crop_in_worker, args=(images,))
        child.start()
        child.join(60)
    assert child.exitcode == 0


def crop_in_worker(images: Images) -> None:
    """What a worker of DataLoader does."""
    data.prepare_worker(0)
    images[0, 0]
