"""A run's folder: one process at a time, damage that is always told, logs that never stand in."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import zlib
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from daf.core.errors import DamagedFileError, RunFolderError
from daf.files.atomic import replacing
from daf.files.folder_lock import holder_of
from daf.files.records import (
    GrowingFile,
    begins_with,
    cut_log,
    read_json,
    read_lines,
    unsealed,
    write_json,
    write_lines,
)
from daf.files.tensor_file import read_tensors, write_tensors
from daf.training.run_folder import RunFolder

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
OBJECTS = st.dictionaries(
    st.text(),
    st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)),
)
PER_FUNCTION = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@settings(PER_FUNCTION, max_examples=30)
@given(OBJECTS)
def test_a_sealed_object_comes_back_as_it_was(tmp_path: Path, value: dict[str, Any]) -> None:
    value.pop("crc32", None)
    write_json(tmp_path / "object", value)
    assert repr(read_json(tmp_path / "object")) == repr(value)


@PER_FUNCTION
@given(st.data())
def test_a_flipped_bit_of_an_object_is_seen_or_changes_nothing(
    tmp_path: Path, data: st.DataObject
) -> None:
    value = {"loss": 2.25, "steps": 40, "names": ["a", "\u00e9"], "none": None}
    write_json(tmp_path / "object", value)
    text = bytearray((tmp_path / "object").read_bytes())
    bit = data.draw(st.integers(0, 8 * len(text) - 1))
    text[bit // 8] ^= 1 << bit % 8
    try:
        found = unsealed(bytes(text), "object")
    except ValueError:
        return
    assert found == value


@pytest.mark.parametrize(
    "text", ["", "[]", "7", "null", '{"a": 1}', "[" * 100_000, '{"crc32": "00000000"}', "\x00"]
)
def test_what_was_never_sealed_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        unsealed(text.encode(), "object")


@PER_FUNCTION
@given(st.data())
def test_a_flipped_bit_or_a_cut_of_a_tensor_file_is_seen_or_changes_nothing(
    tmp_path: Path, data: st.DataObject
) -> None:
    tensors = {"a": torch.arange(6.0), "b": torch.tensor([True, False]), "c": torch.empty(0)}
    with (tmp_path / "t").open("wb") as file:
        write_tensors(file, tensors, {"state": "7"})
    whole = bytearray((tmp_path / "t").read_bytes())
    bit = data.draw(st.integers(0, 8 * len(whole) - 1))
    if data.draw(st.booleans()):
        whole[bit // 8] ^= 1 << bit % 8
    else:
        del whole[bit // 8 :]
    (tmp_path / "t").write_bytes(whole)
    try:
        found, metadata = read_tensors(tmp_path / "t")
    except DamagedFileError:
        return
    assert metadata == {"state": "7"}
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


@PER_FUNCTION
@given(st.lists(st.text(max_size=5), max_size=8), st.integers(0, 400))
def test_a_log_is_cut_to_the_whole_lines_within_so_many_bytes(
    tmp_path: Path, texts: list[str], nbytes: int
) -> None:
    path = tmp_path / "log"
    lines = [{"text": text} for text in texts]
    write_lines(path, lines)
    size = path.stat().st_size
    ends = [0]
    for line in path.read_bytes().splitlines(keepends=True):
        ends.append(ends[-1] + len(line))
    extent = (nbytes, zlib.crc32(path.read_bytes()[:nbytes]))
    assert begins_with(path, extent) == (nbytes <= size)
    cut_log(path, nbytes)
    kept = max(end for end in ends if end <= nbytes)
    assert path.stat().st_size == kept
    assert list(read_lines(path)) == lines[: ends.index(kept)]


def test_damaged_lines_of_a_log_are_counted_and_left_out(tmp_path: Path) -> None:
    path = tmp_path / "log"
    write_lines(path, [{"step": step} for step in (1, 2, 3)])
    path.write_bytes(path.read_bytes().replace(b'"step": 2', b'"step": 7') + b'{"step": 4, "cr')
    damaged: list[int] = []
    assert [line["step"] for line in read_lines(path, damaged)] == [1, 3]
    assert damaged == [2, 4]


def test_a_log_on_a_full_disk_keeps_its_lines_and_no_half_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import resource

    path = tmp_path / "log"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with closing(GrowingFile(path)) as log:
        log.append([{"step": 1}])
        size = path.stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, before[1]))
        try:
            with pytest.raises(RunFolderError, match="lines so far"):
                log.append([{"step": 2}])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert path.stat().st_size == size
        log.append([{"step": 3}])
    assert [line["step"] for line in read_lines(path)] == [1, 3]


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    for name in ("object", "log"):
        (tmp_path / name).symlink_to(victim)
    write_json(tmp_path / "object", {"a": 1})
    with pytest.raises(RunFolderError, match="cannot write"):
        GrowingFile(tmp_path / "log")
    assert victim.read_text() == "precious"
    assert read_json(tmp_path / "object") == {"a": 1}


@pytest.mark.parametrize("use", [read_json, lambda path: list(read_lines(path)), GrowingFile])
def test_a_pipe_in_a_file_s_place_is_refused_at_once(
    tmp_path: Path, use: Callable[[Path], Any]
) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match=r"no regular file|cannot write|No such device"):
        use(tmp_path / "pipe")


def test_a_temporary_file_has_another_name_each_time(tmp_path: Path) -> None:
    names = set()
    for _ in range(3):
        with replacing(tmp_path / "file") as file:
            names |= {path.name for path in tmp_path.iterdir()} - {"file"}
            file.write(b"x")
    assert len(names) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(3, 2)
    return model, torch.optim.SGD(model.parameters(), 0.1)


def folder_of_two_checkpoints(path: Path) -> RunFolder:
    folder = RunFolder(path)
    folder.checkpoint.parent.mkdir()
    model, optimizer = model_and_optimizer()
    for step in (1, 2):
        nn.init.constant_(model.get_parameter("weight"), float(step))
        folder.write_state(model, optimizer, {"step": step})
    return folder


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-3] ^= 4
    path.write_bytes(content)


def test_a_damaged_checkpoint_falls_back_to_the_one_before_with_a_word(tmp_path: Path) -> None:
    folder = folder_of_two_checkpoints(tmp_path)
    model, optimizer = model_and_optimizer()
    assert folder.read_state(model, optimizer) == ({"step": 2}, "")
    damage(folder.checkpoint)
    state, trouble = folder.read_state(model, optimizer)
    assert state == {"step": 1}
    assert "state.safetensors: tensor" in trouble
    assert "the checkpoint before it" in trouble
    assert model.get_parameter("weight").unique().tolist() == [1.0]
    # The next one must not take the good one's place with the damaged one.
    folder.write_state(model, optimizer, {"step": 5})
    folder.checkpoint.unlink()
    assert folder.read_state(model, optimizer)[0] == {"step": 1}


def test_two_damaged_checkpoints_are_an_error_that_names_both(tmp_path: Path) -> None:
    folder = folder_of_two_checkpoints(tmp_path)
    damage(folder.checkpoint)
    damage(folder.previous)
    with pytest.raises(DamagedFileError, match=r"state\.safetensors.*previous\.safetensors"):
        folder.read_state(*model_and_optimizer())


def test_a_whole_checkpoint_of_another_model_is_no_damage(tmp_path: Path) -> None:
    folder = folder_of_two_checkpoints(tmp_path)
    other = nn.Linear(4, 2)
    with pytest.raises(RunFolderError, match="does not fit this model"):
        folder.read_state(other, torch.optim.SGD(other.parameters(), 0.1))
    assert folder.checkpoint.exists()


def test_the_one_before_is_kept_without_hard_links_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "link", refused)
    folder = folder_of_two_checkpoints(tmp_path)
    folder.checkpoint.unlink()
    assert folder.read_state(*model_and_optimizer())[0] == {"step": 1}


def test_weights_are_for_their_owner_only(tmp_path: Path) -> None:
    folder = folder_of_two_checkpoints(tmp_path)
    folder.write_weights(nn.Linear(2, 2))
    for path in (folder.checkpoint, folder.previous, folder.weights):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_second_run_in_a_folder_is_refused_by_name_and_pid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/daf/__main__.py"])  # as ``python -m daf`` has it
    first, second = RunFolder(tmp_path / "run"), RunFolder(tmp_path / "run")
    with first.held(resumes=False):
        for resumes in (False, True):
            words = f"daf \\(process {os.getpid()}\\) is training in"
            with pytest.raises(RunFolderError, match=words), second.held(resumes=resumes):
                pass
        assert str(os.getpid()) in (holder_of(tmp_path / "run") or "")
        (tmp_path / "run" / "kept").touch()
    assert holder_of(tmp_path / "run") is None
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["kept"]


def test_what_a_killed_process_leaves_holds_nobody_up(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path\n"
        "from daf.files.atomic import replacing\n"
        "from daf.training.run_folder import RunFolder\n"
        "folder = RunFolder(Path(sys.argv[1]))\n"
        "with folder.held(resumes=False), replacing(folder.weights) as file:\n"
        "    file.write(b'half'); file.flush(); os.kill(os.getpid(), 9)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "run")], check=False)
    left = sorted(path.name for path in (tmp_path / "run").iterdir())
    assert [name.endswith(".part") for name in left] == [True, False]
    with RunFolder(tmp_path / "run").held(resumes=True):
        assert [path.name for path in (tmp_path / "run").iterdir()] == ["lock"]
    assert not (tmp_path / "run").exists()
