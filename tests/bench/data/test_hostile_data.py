"""Data that lie are refused by name, in bounded memory; images may be left out."""

from __future__ import annotations

import os
import pickle
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from daf_bench.data.array_pickle import UNREADABLE, load_arrays
from daf_bench.data.guarded_files import open_data, read_npz, text_lines
from daf_bench.data.image_file import read_image
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from daf.core.errors import DataError
from daf.training.data import load_data
from daf.training.data.images import ImageData

WHOLE = pickle.dumps({b"data": np.arange(6, dtype=np.uint8).reshape(2, 3), b"labels": [1, 2]}, 2)


@pytest.mark.parametrize("protocol", [2, 3, 4])
@pytest.mark.parametrize("order", ["C", "F"])
def test_a_pickle_of_arrays_and_lists_is_read(protocol: int, order: str) -> None:
    array = np.asarray(np.arange(6, dtype=np.uint8).reshape(2, 3), order=order)  # type: ignore[call-overload]
    found = load_arrays(
        pickle.dumps({b"data": array, b"labels": [1, 2], b"names": [b"a"]}, protocol)
    )
    assert np.array_equal(found[b"data"], array)
    assert found[b"labels"] == [1, 2]
    assert found[b"names"] == [b"a"]


@given(st.integers(0, len(WHOLE) - 1), st.binary(min_size=1, max_size=9))
def test_a_changed_pickle_is_read_or_unreadable(place: int, changed: bytes) -> None:
    with suppress(UNREADABLE):  # and nothing else
        load_arrays(WHOLE[:place] + changed + WHOLE[place + len(changed) :])


@pytest.mark.parametrize(
    ("evil", "words"),
    [
        (WHOLE[:7] + b"\\" + WHOLE[8:], "invalid escape"),
        (b"\x80\x02Nr\xff\xff\xff\x7f.", "place 2147483647"),
        (b"\x80\x02}K\x01\x85" + b"q\x01h\x01\x86" * 60 + b"K\x02s.", "shares tuples"),
        (b"\x80\x02" + b"]" * 2_000_000, "EMPTY_LIST or too much"),
        (b"\x80\x04\x8c\x02os\x8c\x06system\x93.", r"asks to run os\.system"),
        (bytes(50_000_001), "bytes; a batch has at most"),
    ],
)
def test_a_pickle_that_would_fill_memory_or_time_is_refused(evil: bytes, words: str) -> None:
    with pytest.raises(pickle.UnpicklingError, match=words):
        load_arrays(evil)


def test_whoever_reads_a_pickle_says_how_large_it_may_be() -> None:
    assert load_arrays(WHOLE, len(WHOLE))[b"labels"] == [1, 2]
    with pytest.raises(pickle.UnpicklingError, match=f"a batch has at most {len(WHOLE) - 1}"):
        load_arrays(WHOLE, len(WHOLE) - 1)


def test_an_archive_that_inflates_without_measure_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bomb.npz"
    np.savez_compressed(path, a=np.zeros(40 * 10**6, np.uint8))
    with pytest.raises(DataError, match=r"bomb\.npz would inflate to 40000128 bytes"):
        read_npz(path, ["a"])
    np.savez(path, a=np.zeros(40 * 10**6, np.uint8))
    assert read_npz(path, ["a"])["a"].nbytes == 40 * 10**6


@pytest.mark.parametrize("kind", ["<U3", "<f4", ">i2", "|b1"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_arrays_of_every_kind_come_as_numpy_reads_them(
    tmp_path: Path, kind: str, order: str
) -> None:
    array = np.asarray(np.arange(6).reshape(2, 3).astype(kind), order=order)  # type: ignore[call-overload]
    np.savez_compressed(tmp_path / "a.npz", a=array, empty=array[:0])
    found = read_npz(tmp_path / "a.npz", ["a"], ["empty", "absent"])
    assert set(found) == {"a", "empty"}
    assert found["a"].dtype == array.dtype
    assert np.array_equal(found["a"], array)
    assert found["empty"].shape == (0, 3)


def test_pipes_devices_folders_holes_and_links_out_are_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with (tmp_path / "holes").open("wb") as file:
        file.truncate(10**11)
    for path in (tmp_path / "pipe", Path("/dev/zero"), tmp_path, tmp_path / "absent"):
        with pytest.raises(DataError, match=f"{path} cannot be read"):
            open_data(path)
    with pytest.raises(DataError, match="holes claims 100000000000 bytes"):
        open_data(tmp_path / "holes")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "out").symlink_to(tmp_path / "holes")
    with pytest.raises(DataError, match="out is a link out of"):
        open_data(tmp_path / "data" / "out", tmp_path / "data")


def test_a_text_without_ends_of_lines_or_of_other_bytes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes("a\r\nb\x85c\n\nd".encode())
    assert list(text_lines(path, tmp_path)) == ["a", "b\x85c", "", "d"]
    path.write_bytes(b"a" * 2_000_000)
    with pytest.raises(DataError, match="line of 1000000 characters"):
        list(text_lines(path, tmp_path))
    path.write_bytes(b"a\n\xff\n")
    with pytest.raises(DataError, match="text is no UTF-8 text"):
        list(text_lines(path, tmp_path))


def write_images(folder: Path) -> Path:
    for name in ("a", "b"):
        (folder / name).mkdir(parents=True)
        for number in range(5):
            Image.new("RGB", (9, 9), (10 * number, 0, 0)).save(folder / name / f"{number}.png")
    return folder


def test_images_that_cannot_be_read_are_listed_and_may_be_left_out(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "images")
    whole = load_data(f"images:{folder}", image_size=4)
    (folder / "a" / "0.png").write_bytes(b"\x89PNG")
    (folder / "b" / "1.png").unlink()
    (folder / "b" / "1.png").symlink_to(tmp_path / "elsewhere.png")
    with pytest.raises(DataError, match=r"2 of 10 images.*a/0\.png.*b/1\.png.*--leave-out") as told:
        load_data(f"images:{folder}", image_size=4)
    assert "is a link out of" in str(told.value)
    rest = load_data(f"images:{folder}", image_size=4, leave_out_unreadable=True)
    assert isinstance(rest, ImageData)
    assert isinstance(whole, ImageData)
    assert len(rest.train) + len(rest.test) == len(whole.train) + len(whole.test) - 2
    assert [Path(text.split(" ")[0]).name for text in rest.left_out] == ["0.png", "1.png"]
    reds = sorted(int(image[0, 0, 0]) for part in (rest.train, rest.test) for image in part.images)
    assert reds == [0, 10, 20, 20, 30, 30, 40, 40]


def test_a_class_without_one_image_that_can_be_read_is_refused(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "images")
    for path in (folder / "b").iterdir():
        path.write_bytes(b"")
    with pytest.raises(DataError, match="no image of b can be read"):
        load_data(f"images:{folder}", image_size=4, leave_out_unreadable=True)


@pytest.mark.parametrize("mode", ["RGB", "L", "P", "RGBA", "1", "LA", "CMYK", "I;16"])
def test_an_image_of_any_mode_comes_as_pillow_converts_it(tmp_path: Path, mode: str) -> None:
    image = Image.effect_noise((30, 20), 50).convert("RGB" if mode == "CMYK" else "L").convert(mode)
    path = tmp_path / ("a.tif" if mode == "CMYK" else "a.png")
    image.save(path)
    with Image.open(path) as opened:
        expected = opened.convert("RGB").resize((8, 8), Image.Resampling.BILINEAR)
    assert np.array_equal(read_image(tmp_path, path, 8), np.asarray(expected))


def test_an_image_too_large_to_decode_is_refused_before_it_is(tmp_path: Path) -> None:
    path = tmp_path / "large.png"
    Image.new("1", (8000, 4000)).save(path)
    with pytest.raises(DataError, match=r"large\.png of 8000 x 4000 pixels would take"):
        read_image(tmp_path, path, 8)


@pytest.mark.parametrize("bad", [10, -7, 10**9, 0.5, float("nan")])
def test_spoken_labels_are_digits(tmp_path: Path, bad: float) -> None:
    path = tmp_path / "s.npz"
    np.savez(
        path,
        audio=np.zeros((4, 8000), np.int16),
        label=np.array([0, bad, 1, 3]),
        speaker=np.array([0, 0, 1, 1]),
    )
    with pytest.raises(DataError, match=r"s\.npz: (labels run from|expected whole numbers)"):
        load_data(f"spoken:{path}")
