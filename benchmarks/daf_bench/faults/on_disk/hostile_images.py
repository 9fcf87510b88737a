"""Images that are too large, cut, something else, or somewhere else."""

from __future__ import annotations

import io
import os
import random
import struct
import zlib
from pathlib import Path

import numpy as np
from PIL import Image

from daf_bench.faults.on_disk.lies import Lie, mutated

_FORMATS = {"png": "PNG", "jpg": "JPEG", "gif": "GIF", "bmp": "BMP", "tif": "TIFF", "ppm": "PPM"}


def _images(folder: Path) -> Path:
    """Write two classes of three images; return a free place among them."""
    for name in ("a", "b"):
        (folder / name).mkdir()
        for number in range(3):
            Image.new("L", (8, 8), 40 * number).save(folder / name / f"{number}.png")
    return folder / "a" / "evil.png"


def _chunk(kind: bytes, content: bytes) -> bytes:
    checksum = zlib.crc32(kind + content)
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", checksum)


def _png(width: int, height: int, rows: int, extra: bytes = b"", colour: int = 0) -> bytes:
    """Return a grey PNG that claims ``height`` rows and holds ``rows``."""
    header = struct.pack(">IIBBBBB", width, height, 8, colour, 0, 0, 0)
    packer = zlib.compressobj(1)
    row = bytes(1 + width * {0: 1, 2: 3, 6: 4}[colour])
    content = b"".join(packer.compress(row) for _ in range(rows)) + packer.flush()
    return (
        b"\x89PNG\r\n\x1a\n"
        + _chunk(b"IHDR", header)
        + extra
        + _chunk(b"IDAT", content)
        + _chunk(b"IEND", b"")
    )


def _large(draw: random.Random, folder: Path) -> str:
    place, side = _images(folder), draw.randrange(9_500, 12_000)
    place.write_bytes(_png(side, side, draw.choice((side, 10)), colour=draw.choice((0, 2, 6))))
    return f"images:{folder}"


def _huge(draw: random.Random, folder: Path) -> str:
    place = _images(folder)
    place.write_bytes(_png(draw.randrange(20_000, 2**31), draw.randrange(20_000, 2**31), 0))
    return f"images:{folder}"


def _text_bomb(draw: random.Random, folder: Path) -> str:
    text = zlib.compress(bytes(draw.randrange(10**8, 3 * 10**8)), 1)
    kind, start = draw.choice(((b"zTXt", b"k\0\0"), (b"iTXt", b"k\0\1\0\0\0"), (b"iCCP", b"k\0\0")))
    place = _images(folder)
    place.write_bytes(_png(8, 8, 8, _chunk(kind, start + text)))
    return f"images:{folder}"


def _other_size(draw: random.Random, folder: Path) -> str:
    """A header of another format that claims a huge image."""
    place, kind = _images(folder), draw.choice(sorted(_FORMATS))
    content = bytearray(_picture(draw, kind))
    offset = {"gif": 6, "bmp": 18, "png": 16, "ppm": 3, "jpg": content.find(b"\xff\xc0") + 5}
    start = offset.get(kind, 30)
    content[start : start + 4] = b"\xff\x7f\xff\x7f" if kind != "ppm" else b"9999"
    place.with_suffix(f".{kind}").write_bytes(content)
    return f"images:{folder}"


def _picture(draw: random.Random, kind: str) -> bytes:
    pixels = np.frombuffer(draw.randbytes(24 * 24 * 3), np.uint8).reshape(24, 24, 3)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, _FORMATS[kind])
    return file.getvalue()


def _mutated_image(draw: random.Random, folder: Path) -> str:
    place, kind = _images(folder), draw.choice(sorted(_FORMATS))
    place.with_suffix(f".{kind}").write_bytes(mutated(draw, _picture(draw, kind)))
    return f"images:{folder}"


def _no_image(draw: random.Random, folder: Path) -> str:
    start = draw.choice(
        (b"", b"GIF89a", b"\x89PNG\r\n\x1a\n", b"BM", b"II*\0", b"%!PS-Adobe", b"P6")
    )
    place = _images(folder)
    place.write_bytes(start + draw.randbytes(draw.randrange(500)))
    return f"images:{folder}"


def _cut_image(draw: random.Random, folder: Path) -> str:
    place, kind = _images(folder), draw.choice(("png", "jpg", "bmp", "ppm"))
    content = _picture(draw, kind)
    place.with_suffix(f".{kind}").write_bytes(content[: draw.randrange(len(content) // 2)])
    return f"images:{folder}"


def _link(draw: random.Random, folder: Path) -> str:
    outside = folder.parent / f"{folder.name}.png"
    target = draw.choice(
        ("/etc/passwd", "/dev/zero", "evil.png", "nowhere", str(outside), "../../..")
    )
    _images(folder).symlink_to(target)
    return f"images:{folder}"


def _no_file(draw: random.Random, folder: Path) -> str:
    place = _images(folder)
    draw.choice((os.mkfifo, os.mkdir))(place)
    return f"images:{folder}"


def _few(draw: random.Random, folder: Path) -> str:
    _images(folder)
    for path in sorted((folder / "b").iterdir())[: draw.choice((2, 3))]:
        path.unlink()
    return f"images:{folder}"


LIES = (
    *(Lie(each) for each in (_large, _huge, _text_bomb, _no_image, _cut_image, _link)),
    *(Lie(each) for each in (_no_file, _few)),
    *(Lie(each, must_be_refused=False) for each in (_mutated_image, _other_size)),
)
