"""Files that survive a full disk, a crash, and the trip to disk and back."""

from __future__ import annotations

import errno
import math
import os
import random
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from daf.core.errors import RunFolderError
from daf.files.atomic import replacing
from daf.files.checkpoint import from_plain, read_checkpoint, to_plain, write_checkpoint
from daf.files.records import GrowingFile, read_lines, write_json
from daf.files.tensor_file import read_tensors, write_tensors
from daf.training.run_folder import RunFolder
from daf.training.settings import TrainSettings


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    images = torch.randn(2, 3, 4, 5)
    return {
        "plain": images,
        "channels_last": images.to(memory_format=torch.channels_last),
        "transposed": images.transpose(0, 3),
        "slice": images[:, 1:2, ::2],
        "scalar": torch.tensor(7),
        "empty": torch.empty(0, 3),
        "half": images.half(),
        "bfloat": images.bfloat16(),
        "double": images.double(),
        "bytes": torch.arange(5, dtype=torch.uint8),
        "truth": torch.tensor([True, False, True]),
        "nan": torch.tensor([math.nan, math.inf, -0.0]),
    }


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def test_the_library_reads_what_we_stream(tmp_path: Path) -> None:
    with (tmp_path / "t").open("wb") as file:
        write_tensors(file, tensors(), {"hello": "there"})
    theirs = safetensors.torch.load_file(tmp_path / "t")
    ours, metadata = read_tensors(tmp_path / "t")
    assert metadata == {"hello": "there"}
    for name, original in tensors().items():
        for loaded in (theirs[name], ours[name]):
            assert (loaded.dtype, loaded.shape) == (original.dtype, original.shape)
            assert bits(loaded) == bits(original)


def test_a_type_that_the_format_does_not_know_is_refused(tmp_path: Path) -> None:
    with (
        (tmp_path / "t").open("wb") as file,
        pytest.raises(RunFolderError, match=r"'waves' has type torch.complex64"),
    ):
        write_tensors(file, {"waves": torch.zeros(2, dtype=torch.complex64)}, {})


def test_a_damaged_tensor_file_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "t").open("wb") as file:
        write_tensors(file, tensors(), {})
    whole = (tmp_path / "t").read_bytes()
    for kept in (0, 5, 100, len(whole) - 1):
        (tmp_path / "t").write_bytes(whole[:kept])
        with pytest.raises(RunFolderError, match="cannot read"):
            read_tensors(tmp_path / "t")


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(st.integers() | st.text() | st.tuples(st.integers()), inner)
    ),
    max_leaves=20,
)


@given(PLAIN)
def test_nested_state_survives_json(value: object) -> None:
    import json

    plain, named = to_plain(value)
    # repr tells tuples from lists, -0.0 from 0.0 and gives floats to the last bit
    assert repr(from_plain(json.loads(json.dumps(plain)), named)) == repr(value)


def test_tensors_in_nested_state_come_back_as_copies() -> None:
    weights = torch.randn(3)
    plain, named = to_plain({"a": [weights, (1, weights)]})
    back = from_plain(plain, named)
    assert torch.equal(back["a"][1][1], weights)
    back["a"][0].zero_()
    assert weights.any()


def test_state_of_a_foreign_type_is_refused() -> None:
    with pytest.raises(RunFolderError, match="cannot hold a set"):
        to_plain({"a": {1, 2}})


def fail_with_full_disk(_: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_leaves_the_old_file_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "kept"
    path.write_text("old")
    monkeypatch.setattr(os, "fsync", fail_with_full_disk)
    with (
        pytest.raises(RunFolderError, match=r"disk is full.*version from before"),
        replacing(path) as file,
    ):
        file.write(b"new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_an_error_while_writing_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "kept"
    path.write_text("old")
    with pytest.raises(ZeroDivisionError), replacing(path) as file:
        file.write(b"half of it" * (1 // 0))
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    place = tmp_path / "disk"
    place.mkdir()
    if os.name != "posix" or os.geteuid() != 0:
        pytest.skip("a small file system can only be mounted by root on Linux")
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(place)]
    mounted = subprocess.run(command, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"no small file system can be mounted: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_checkpoint_survives_a_disk_that_really_fills_up(small_disk: Path) -> None:
    path = small_disk / "state.safetensors"
    model = nn.Linear(100, 100)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    write_checkpoint(path, model, optimizer, {"step": 1})
    before = path.read_bytes()
    model(torch.ones(1, 100)).sum().backward()
    optimizer.step()  # momentum: the next checkpoint has twice the size
    (small_disk / "filler").write_bytes(bytes(150_000))
    with pytest.raises(RunFolderError, match=r"disk is full.*version from before"):
        write_checkpoint(path, model, optimizer, {"step": 2})
    assert path.read_bytes() == before
    assert not list(small_disk.glob("*.part"))
    with (
        closing(GrowingFile(small_disk / "log")) as log,
        pytest.raises(RunFolderError, match="lines so far"),
    ):
        log.append([{"text": "x" * 300_000}])


def trained(
    seed: int, kind: type[torch.optim.Optimizer]
) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Dropout(0.5), nn.Flatten())
    model.to(memory_format=torch.channels_last)
    optimizer = kind(model.parameters(), lr=0.01)
    for _ in range(2):
        step(model, optimizer)
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    optimizer.zero_grad()
    loss = model(torch.rand(4, 3, 6, 6)).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
def test_training_goes_on_from_a_checkpoint_to_the_same_bits(
    tmp_path: Path, kind: type[torch.optim.Optimizer]
) -> None:
    path = tmp_path / "state"
    model, optimizer = trained(1, kind)
    write_checkpoint(path, model, optimizer, {"step": 2, "tuple": (1, 2.5)})
    expected = step(model, optimizer), random.random(), np.random.rand()

    other, other_optimizer = trained(2, kind)
    state = read_checkpoint(path, other, other_optimizer)
    assert state == {"step": 2, "tuple": (1, 2.5)}
    assert (step(other, other_optimizer), random.random(), np.random.rand()) == expected
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs)
        state_of = other_optimizer.state[theirs]
        layouts = {v.stride() for v in state_of.values() if v.shape == theirs.shape}
        assert layouts <= {theirs.stride()}


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    model, optimizer = trained(0, torch.optim.SGD)
    write_checkpoint(tmp_path / "state", model, optimizer, {})
    other = nn.Linear(2, 2)
    with pytest.raises(RunFolderError, match="does not fit this model"):
        read_checkpoint(tmp_path / "state", other, torch.optim.SGD(other.parameters()))


def test_what_a_crash_logged_after_the_checkpoint_is_dropped(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    with closing(GrowingFile(folder.metrics)) as metrics:
        metrics.append({"step": number} for number in range(1, 6))
    with folder.metrics.open("a") as metrics:
        metrics.write('{"step": 6, "lo')  # the crash
    folder.keep_metrics_until(3)
    assert [line["step"] for line in read_lines(folder.metrics)] == [1, 2, 3]


def test_settings_survive_and_may_only_be_lengthened(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    settings = TrainSettings("resnet20", epochs=2, bits="exact", budget=7)
    folder.begin(settings)
    assert folder.read_settings() == settings
    assert settings.resumed_with({"epochs": 3, "bits": "exact"}).epochs == 3
    with pytest.raises(RunFolderError, match="budget = 8, but the run was begun with 7"):
        settings.resumed_with({"budget": 8})


def test_settings_of_another_version_are_refused(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    write_json(folder.settings, {"model": "resnet20", "colour": "blue"})
    with pytest.raises(RunFolderError, match="colour"):
        folder.read_settings()


def test_a_folder_with_other_things_in_it_is_not_taken(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(RunFolderError, match="not empty"):
        RunFolder(tmp_path).held(resumes=False).__enter__()
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.txt"]
