from __future__ import annotations

import importlib
import pickle
import tomllib
from pathlib import Path

import numpy as np
import pytest
from daf_bench.data.text import TextData
from PIL import Image

from daf.core.errors import DataError, UnknownNameError
from daf.training.data import load_data
from daf.training.data.images import ImageData

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


def images(name: str, **options: int) -> ImageData:
    data = load_data(name, **options)
    assert isinstance(data, ImageData)
    return data


def cifar_arrays(train: int = 20, test: int = 10, classes: int = 10) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    return {
        "x_train": generator.integers(0, 256, (train, 32, 32, 3), np.uint8),
        "y_train": np.arange(train) % classes,
        "x_test": generator.integers(0, 256, (test, 32, 32, 3), np.uint8),
        "y_test": np.arange(test) % classes,
    }


def test_cifar10_from_npz(tmp_path: Path) -> None:
    arrays = cifar_arrays()
    np.savez(tmp_path / "c.npz", **arrays)
    data = images(f"cifar10:{tmp_path / 'c.npz'}")
    assert np.array_equal(data.train.images, arrays["x_train"])
    assert np.array_equal(data.test.labels, arrays["y_test"])
    assert data.classes[3] == "cat"
    assert data.augment


def batch(pixels: np.ndarray, labels: np.ndarray, key: bytes = b"labels") -> dict[bytes, object]:
    rows = pixels.transpose(0, 3, 1, 2).reshape(len(pixels), -1)
    return {b"data": rows, key: labels.tolist(), b"batch_label": b"x"}


def write_batches(folder: Path, arrays: dict[str, np.ndarray]) -> None:
    parts = zip(np.split(arrays["x_train"], 5), np.split(arrays["y_train"], 5), strict=True)
    for number, part in enumerate(parts, 1):
        (folder / f"data_batch_{number}").write_bytes(pickle.dumps(batch(*part), 2))
    test = batch(arrays["x_test"], arrays["y_test"])
    (folder / "test_batch").write_bytes(pickle.dumps(test, 2))


def test_cifar10_from_its_own_pickled_batches(tmp_path: Path) -> None:
    arrays = cifar_arrays()
    write_batches(tmp_path, arrays)
    data = images(f"cifar10:{tmp_path}")
    assert np.array_equal(data.train.images, arrays["x_train"])
    assert np.array_equal(data.train.labels, arrays["y_train"])
    assert np.array_equal(data.test.images, arrays["x_test"])


class Malicious:
    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return Path.touch, (Path("it_was_run"),)


def test_a_pickle_that_would_run_code_is_refused_and_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_batches(tmp_path, cifar_arrays())
    (tmp_path / "data_batch_3").write_bytes(pickle.dumps({b"data": Malicious()}, 2))
    with pytest.raises(DataError, match=r"data_batch_3.*asks to run"):
        load_data(f"cifar10:{tmp_path}")
    assert not Path("it_was_run").exists()


@pytest.mark.parametrize("kept", [0, 1, 50, 1000, -10, -1])
def test_a_truncated_pickle_is_refused(tmp_path: Path, kept: int) -> None:
    write_batches(tmp_path, cifar_arrays())
    path = tmp_path / "data_batch_2"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(DataError, match="data_batch_2 is not a whole CIFAR-10 file"):
        load_data(f"cifar10:{tmp_path}")


CLASS_NAMES = [f"thing_{number}".encode() for number in range(100)]
META = {b"fine_label_names": CLASS_NAMES, b"coarse_label_names": [b"things"] * 20}


def write_cifar100(folder: Path) -> dict[str, np.ndarray]:
    """Files in the published form; every coarse label is wrong for a fine one."""
    arrays = cifar_arrays(200, 100, 100)
    for part in ("train", "test"):
        content = batch(arrays[f"x_{part}"], arrays[f"y_{part}"], b"fine_labels")
        content[b"coarse_labels"] = [19] * len(arrays[f"y_{part}"])
        (folder / part).write_bytes(pickle.dumps(content, 2))
    (folder / "meta").write_bytes(pickle.dumps(META, 2))
    return arrays


def test_cifar100_from_its_own_pickled_files(tmp_path: Path) -> None:
    arrays = write_cifar100(tmp_path)
    data = images(f"cifar100:{tmp_path}", image_size=64)
    for part, found in (("train", data.train), ("test", data.test)):
        assert np.array_equal(found.images, arrays[f"x_{part}"])
        assert np.array_equal(found.labels, arrays[f"y_{part}"])
    assert data.classes == tuple(f"thing_{number}" for number in range(100))
    assert data.facts == {"classes": 100, "channels": 3, "image_size": 64}
    assert (data.name, data.augment) == (f"cifar100:{tmp_path}", True)


def test_each_cifar_is_normalised_by_its_own_mean(tmp_path: Path) -> None:
    np.savez(tmp_path / "c.npz", **cifar_arrays())
    means = {
        name: images(f"{name}:{tmp_path / 'c.npz'}").normalisation.mean
        for name in ("cifar10", "cifar100")
    }
    assert means == {"cifar10": (0.4914, 0.4822, 0.4465), "cifar100": (0.5071, 0.4865, 0.4409)}


def test_cifar100_from_npz(tmp_path: Path) -> None:
    arrays = cifar_arrays(200, 100, 100)
    np.savez(tmp_path / "c.npz", **arrays)
    data = images(f"cifar100:{tmp_path / 'c.npz'}")
    assert np.array_equal(data.train.images, arrays["x_train"])
    assert np.array_equal(data.test.labels, arrays["y_test"])
    assert data.classes == tuple(str(number) for number in range(100))
    np.savez(tmp_path / "c.npz", **arrays, classes=np.array(CLASS_NAMES).astype(str))
    assert images(f"cifar100:{tmp_path / 'c.npz'}").classes[99] == "thing_99"
    np.savez(tmp_path / "c.npz", **(arrays | {"y_test": arrays["y_test"] + 1}))
    with pytest.raises(DataError, match="labels run from 1 to 100, but there are 100 classes"):
        load_data(f"cifar100:{tmp_path / 'c.npz'}")


def test_only_cifar100_has_files_of_more_than_50_mb(tmp_path: Path) -> None:
    write_cifar100(tmp_path)
    write_batches(tmp_path, cifar_arrays())
    rows = np.zeros((16_500, 3072), np.uint8)
    large = pickle.dumps({b"data": rows, b"labels": [7] * 16_500, b"fine_labels": [99] * 16_500}, 4)
    assert len(large) > 50 * 10**6
    (tmp_path / "train").write_bytes(large)
    assert (images(f"cifar100:{tmp_path}").train.labels == 99).all()
    (tmp_path / "data_batch_1").write_bytes(large)
    with pytest.raises(DataError, match=r"data_batch_1 is not.*has 50000001 bytes; .* 50000000"):
        load_data(f"cifar10:{tmp_path}")


@pytest.mark.parametrize("name", ["train", "test", "meta"])
def test_a_file_of_cifar100_that_is_missing_or_damaged_is_named(tmp_path: Path, name: str) -> None:
    write_cifar100(tmp_path)
    path = tmp_path / name
    whole = path.read_bytes()
    for damaged in (b"", whole[:50], whole[:-10], pickle.dumps({b"data": Malicious()}, 2)):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=f"/{name} is not a whole CIFAR-100 file"):
            load_data(f"cifar100:{tmp_path}")
    path.unlink()
    with pytest.raises(DataError, match=f"/{name} is missing; a CIFAR-100 folder holds train, te"):
        load_data(f"cifar100:{tmp_path}")
    (tmp_path.parent / "elsewhere").write_bytes(whole)
    path.symlink_to(tmp_path.parent / "elsewhere")
    with pytest.raises(DataError, match=f"/{name} is a link out of"):
        load_data(f"cifar100:{tmp_path}")


@pytest.mark.parametrize(
    ("meta", "found"),
    [
        ([], "a list of names 'fine_label_names'"),
        ({b"coarse_label_names": CLASS_NAMES}, "a list of names 'fine_label_names'"),
        ({b"fine_label_names": b"things"}, "a list of names 'fine_label_names'"),
        ({b"fine_label_names": [*CLASS_NAMES[1:], 7]}, "a list of names 'fine_label_names'"),
        ({b"fine_label_names": CLASS_NAMES[1:]}, "found 99, of which 99 differ"),
        ({b"fine_label_names": [*CLASS_NAMES, b"x"]}, "found 101, of which 101 differ"),
        ({b"fine_label_names": [*CLASS_NAMES[1:], b"thing_1 "]}, "found 100, of which 99 differ"),
        ({b"fine_label_names": [*CLASS_NAMES[1:], b" "]}, "found 100, of which 99 differ"),
        ({b"fine_label_names": [*CLASS_NAMES[1:], b"\xff"]}, "names of classes in UTF-8"),
        ({b"fine_label_names": CLASS_NAMES, b"more": b"x" * 10**6}, "a batch has at most 1000000"),
    ],
)
def test_cifar100_needs_a_hundred_names(tmp_path: Path, meta: object, found: str) -> None:
    write_cifar100(tmp_path)
    (tmp_path / "meta").write_bytes(pickle.dumps(meta, 2))
    with pytest.raises(DataError, match=f"/meta.*{found}"):
        load_data(f"cifar100:{tmp_path}")


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ({b"fine_labels": [100] * 100}, "labels run from 100 to 100, but there are 100 classes"),
        ({b"fine_labels": [b"1"] * 100}, "whole numbers as labels"),
        ({b"fine_labels": [1] * 99}, "expected 100 whole-number labels"),
        ({b"fine_labels": None}, "a list 'fine_labels', as CIFAR-100 has"),
        ({b"data": np.zeros((100, 3071), np.uint8)}, "expected rows of 3072 pixels, found 3071"),
    ],
)
def test_cifar100_of_something_else_is_refused(
    tmp_path: Path, changed: dict[bytes, object], found: str
) -> None:
    arrays = write_cifar100(tmp_path)
    content = batch(arrays["x_test"], arrays["y_test"], b"fine_labels")
    (tmp_path / "test").write_bytes(pickle.dumps(content | changed, 2))
    with pytest.raises(DataError, match=f"/test.*{found}"):
        load_data(f"cifar100:{tmp_path}")


def test_missing_data_are_named(tmp_path: Path) -> None:
    absent = tmp_path / "nowhere"
    for name in (f"cifar10:{absent}.npz", f"images:{absent}", f"text:{absent}"):
        with pytest.raises(DataError, match="nowhere"):
            load_data(name)
    with pytest.raises(DataError, match=r"cifar100:.*nowhere.*unpacked folder cifar-100-python"):
        load_data(f"cifar100:{absent}")
    with pytest.raises(DataError, match="data_batch_1 is missing"):
        load_data(f"cifar10:{tmp_path}")


@pytest.mark.parametrize("kept", [0, 10, 500, -200])
def test_a_truncated_npz_is_refused(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "c.npz"
    np.savez_compressed(path, **cifar_arrays())
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(DataError, match=r"not a whole \.npz file.*truncated"):
        load_data(f"cifar10:{path}")


def test_a_damaged_npz_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.npz"
    np.savez_compressed(path, **cifar_arrays())
    content = bytearray(path.read_bytes())
    content[5000:5100] = bytes(100)
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"not a whole \.npz file"):
        load_data(f"cifar10:{path}")


def test_an_npz_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.npz"
    np.savez(path, x_train=np.zeros(3), other=np.zeros(3))
    with pytest.raises(DataError, match="missing y_train, x_test, y_test; found x_train, other"):
        load_data(f"cifar10:{path}")


@pytest.mark.parametrize(
    ("name", "value", "found"),
    [
        ("y_train", np.arange(20), "labels run from 0 to 19"),
        ("y_train", np.zeros(7, int), "expected 20 whole-number labels"),
        ("x_test", np.zeros((10, 32, 32, 3)), "float64"),
        ("x_test", np.zeros((10, 32, 30, 3), np.uint8), "square"),
    ],
)
def test_arrays_that_do_not_belong_together_are_refused(
    tmp_path: Path, name: str, value: np.ndarray, found: str
) -> None:
    np.savez(tmp_path / "c.npz", **(cifar_arrays() | {name: value}))
    with pytest.raises(DataError, match=found):
        load_data(f"cifar10:{tmp_path / 'c.npz'}")


def write_image(path: Path, grey: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", (20, 10), grey).save(path)


def test_images_in_folders(tmp_path: Path) -> None:
    for number in range(10):
        write_image(tmp_path / "bright" / f"{number}.png", 200 + number)
        write_image(tmp_path / "dark" / f"{number}.png", number)
    data = images(f"images:{tmp_path}", image_size=8)
    assert data.classes == ("bright", "dark")
    assert (len(data.train), len(data.test)) == (16, 4)
    everything = np.concatenate([data.train.images, data.test.images])
    labels = np.concatenate([data.train.labels, data.test.labels])
    assert everything.shape == (20, 8, 8, 3)
    assert np.array_equal(everything.mean((1, 2, 3)) < 100, labels == 1)
    assert sorted(everything[:, 0, 0, 0]) == [*range(10), *range(200, 210)]


def test_images_with_folders_for_training_and_testing_are_not_split_again(tmp_path: Path) -> None:
    for part, count in (("train", 3), ("val", 2)):
        for number in range(count):
            write_image(tmp_path / part / "a" / f"{number}.png", 10)
            write_image(tmp_path / part / "b" / f"{number}.png", 20)
    data = images(f"images:{tmp_path}", image_size=4)
    assert data.classes == ("a", "b")
    assert (len(data.train), len(data.test)) == (6, 4)


def test_a_truncated_image_is_named(tmp_path: Path) -> None:
    for number in range(3):
        write_image(tmp_path / "a" / f"{number}.png", 1)
        write_image(tmp_path / "b" / f"{number}.png", 2)
    broken = tmp_path / "b" / "1.png"
    broken.write_bytes(broken.read_bytes()[:40])
    with pytest.raises(DataError, match=r"1\.png is not a whole image"):
        load_data(f"images:{tmp_path}", image_size=4)


def test_text_keeps_its_last_tenth_for_testing(tmp_path: Path) -> None:
    content = bytes(range(256)) * 10
    (tmp_path / "t").write_bytes(content)
    data = load_data(f"text:{tmp_path / 't'}", context=16)
    assert isinstance(data, TextData)
    assert bytes(data.train) + bytes(data.test) == content
    assert len(data.test) == 256


def test_a_text_too_short_for_one_window_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t").write_text("short")
    with pytest.raises(DataError, match=r"has 5 bytes.*at least 1290 bytes"):
        load_data(f"text:{tmp_path / 't'}")


@pytest.mark.parametrize(
    ("asked", "meant"), [("digit", "digits"), ("cifar:x", "cifar10"), ("image:x", "images")]
)
def test_unknown_data_are_answered_with_the_nearest_known(asked: str, meant: str) -> None:
    with pytest.raises(UnknownNameError, match=f"did you mean '{meant}'"):
        load_data(asked)


def test_an_option_that_would_be_ignored_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(bytes(5000))
    with pytest.raises(DataError, match="--context 5, which it does not take"):
        load_data("digits", context=5)
    with pytest.raises(DataError, match="--image-size 5, which it does not take"):
        load_data(f"text:{tmp_path / 't'}", image_size=5)
    with pytest.raises(DataError, match="multiple of 8"):
        load_data("digits", image_size=30)
    with pytest.raises(DataError, match="path somewhere, which it does not take"):
        load_data("digits:somewhere")
    with pytest.raises(DataError, match="without saying where; give cifar10:PATH"):
        load_data("cifar10")


def test_every_loader_that_the_benchmarks_announce_is_there() -> None:
    project = tomllib.loads((BENCHMARKS / "pyproject.toml").read_text())["project"]
    places = project["entry-points"]["daf.data"]
    assert {"cifar10", "cifar100", "webnlg"} <= places.keys()
    for place in places.values():
        module, _, name = place.partition(":")
        assert callable(getattr(importlib.import_module(module), name))
