"""Tensors that wait on disk give plain PyTorch's gradients, bit for bit, and count rightly."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from exactness import Case, assert_exact
from module_cases import CASES
from torch import Tensor, nn

from daf.capture.capture import Capture
from daf.capture.compress import compress
from daf.core.errors import SavedTensorError, SpillError
from daf.core.policy import Method, Need, Policy, Treatment
from daf.offload.spill import SpillOptions, SpillStore, SpillWarning
from daf.offload.spill_file import SpillFile
from daf.saved_tensors import packer
from daf.session.session import Session

SPILL = Policy(
    "spill", MappingProxyType({need: Treatment(Method.SPILL) for need in Need}), rederive=False
)
MIB = 2**20


@pytest.fixture
def options(tmp_path: Path) -> SpillOptions:
    return SpillOptions(directory=tmp_path, allow_memory=True)


def layers(count: int = 6, width: int = 256) -> nn.Sequential:
    torch.manual_seed(0)
    parts = [
        part
        for _ in range(count)
        for part in (nn.Linear(width, width), nn.LayerNorm(width), nn.GELU(), nn.Dropout(0.3))
    ]
    return nn.Sequential(*parts)


def batch(rows: int = 1024, width: int = 256) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(rows, width)


def gradients(model: nn.Module) -> list[Tensor]:
    found = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    return [each for each in found if each is not None]


def plain_gradients(model: nn.Module, inputs: Tensor) -> list[Tensor]:
    torch.manual_seed(2)
    model(inputs).square().sum().backward()
    return gradients(model)


# --- exactness ------------------------------------------------------------------------------

NUMBERED = [
    pytest.param(case, id=f"{name}-{place}")
    for name, cases in CASES.items()
    for place, case in enumerate(cases)
]


@pytest.mark.usefixtures("code_everything")
@pytest.mark.parametrize("case", NUMBERED)
def test_every_module_s_gradients_equal_plain_bit_for_bit(case: Case) -> None:
    assert_exact(case, how=SPILL)


@pytest.mark.usefixtures("code_everything")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["Conv2d", "BatchNorm2d", "GELU", "MultiheadAttention"])
def test_every_float_type_comes_back(name: str, dtype: torch.dtype) -> None:
    reports = assert_exact(CASES[name][0], dtype, SPILL).sites
    assert Method.SPILL in {report.treatment.method for report in reports}


def test_dropout_and_all_through_a_real_file_twice(options: SpillOptions) -> None:
    model, inputs = layers(), batch()
    expected = plain_gradients(model, inputs)
    capture = compress(model, policy=SPILL, spill=options)
    torch.manual_seed(2)
    with capture:
        loss = model(inputs).square().sum()
    loss.backward(retain_graph=True)
    first = gradients(model)
    loss.backward()
    second = gradients(model)
    assert all(map(torch.equal, first, expected))
    assert all(map(torch.equal, second, expected))


def test_views_keep_strides_offsets_and_overlap(options: SpillOptions) -> None:
    base = torch.randn(64, 96).requires_grad_()

    def loss_of(whole: Tensor) -> Tensor:
        moved = whole.exp()  # an activation, saved by what follows in three geometries
        wide = moved[3:4].expand(64, 96)
        return (moved.t() @ moved * 2).sum() + (moved[:, 5:40] ** 2).sum() + (wide * moved).sum()

    loss_of(base).backward()
    expected, base.grad = base.grad, None
    capture = compress(nn.Identity(), policy=SPILL, spill=options)
    with capture:
        loss = loss_of(base)
    loss.backward()
    assert torch.equal(base.grad, expected)


# --- the account ----------------------------------------------------------------------------


def test_bytes_on_disk_are_not_held_and_a_storage_goes_there_once(options: SpillOptions) -> None:
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256), nn.Tanh())
    inputs = batch(4096)
    small = SpillOptions(
        options.directory, allow_memory=True, in_flight_bytes=0, read_ahead_bytes=0
    )
    capture = compress(model, policy=SPILL, spill=small)
    with capture:
        loss = model(inputs).sum()
    stats = capture.stats
    # ReLU's result, saved by itself and by the layer behind it, and tanh's.
    assert stats.plain_bytes == stats.spilled_bytes == 2 * inputs.nbytes
    assert stats.held_bytes == 0
    assert stats.held_peak_bytes == inputs.nbytes  # while one was on its way
    reports = {report.site.operator: report for report in capture.sites()}
    methods = {name: report.treatment.method for name, report in reports.items()}
    assert methods == dict.fromkeys(("relu", "linear", "tanh"), Method.SPILL)
    told = {name: report.spilled_bytes for name, report in reports.items()}
    assert told == {"relu": inputs.nbytes, "linear": 0, "tanh": inputs.nbytes}
    assert sum(report.held_bytes for report in reports.values()) == 0
    loss.backward()
    stats = capture.stats
    assert stats.spilled_bytes == 0
    assert stats.spilled_peak_bytes == 2 * inputs.nbytes
    assert stats.held_bytes == 0


def test_a_storage_that_is_kept_anyway_is_not_spilled(options: SpillOptions) -> None:
    by_need = dict(SPILL.by_need) | {Need.SIGN: Treatment(Method.KEEP)}
    policy = Policy("mixed", MappingProxyType(by_need), rederive=False)
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256))
    capture = compress(model, policy=policy, spill=options)
    with capture:
        loss = model(batch()).sum()
    assert capture.stats.held_bytes == batch().nbytes
    assert capture.stats.spilled_bytes == 0
    loss.backward()


def test_small_tensors_stay(options: SpillOptions) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    capture = compress(model, policy=SPILL, spill=options)
    with capture:
        model(torch.randn(4, 8)).sum()
    assert {report.treatment.method for report in capture.sites()} == {Method.KEEP}
    assert packer.SMALL_BYTES > 4 * 8 * 4


# --- trouble --------------------------------------------------------------------------------


def test_beyond_the_quota_tensors_are_kept_and_gradients_stay_exact(options: SpillOptions) -> None:
    model, inputs = layers(), batch()
    expected = plain_gradients(model, inputs)
    little = SpillOptions(options.directory, quota_bytes=5 * MIB, allow_memory=True)
    capture = compress(model, policy=SPILL, spill=little)
    torch.manual_seed(2)
    with pytest.warns(SpillWarning, match=r"its 5\.24 MB are full"), capture:
        loss = model(inputs).square().sum()
    stats = capture.stats
    assert stats.spilled_bytes <= 5 * MIB
    assert stats.held_bytes + stats.spilled_bytes >= stats.plain_bytes
    methods = [report.treatment.method for report in capture.sites()]
    assert Method.KEEP in methods
    assert Method.SPILL in methods
    loss.backward()
    assert all(map(torch.equal, gradients(model), expected))


def test_a_corrupted_file_names_the_site(options: SpillOptions) -> None:
    model = nn.Sequential(nn.Linear(256, 256), nn.Tanh())
    capture = compress(model, policy=SPILL, spill=options)
    with capture:
        loss = model(batch()).sum()
    _corrupt(capture._capture.spill)
    with pytest.raises(SpillError, match=r"saved at 1:tanh#0\[0\], 1\.05 MB at offset 0 .*checks"):
        loss.backward()


def _corrupt(store: SpillStore) -> None:
    while store._in_flight:
        store._wait_for_room()
        record = store._oldest()
        if record is not None and record.writing is not None:
            record.writing.result(30)
        store.reap()
    assert store._space is not None
    store._space.file.write(memoryview(b"\xff\xff\xff\xff"), 4096)


def test_a_change_in_place_before_the_disk_has_it_is_reported_as_pytorch_does(
    options: SpillOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = threading.Event()

    def write_later(self: SpillFile, content: memoryview, offset: int) -> int:
        changed.wait(30)
        return write(self, content, offset)

    write = SpillFile.write
    monkeypatch.setattr(SpillFile, "write", write_later)
    model = nn.Sequential(nn.Linear(256, 256), nn.Tanh())
    capture = compress(model, policy=SPILL, spill=options)
    with capture:
        outputs = model(batch())
        with torch.no_grad():
            outputs.add_(1)
        changed.set()
    with pytest.raises(SavedTensorError, match="modified by an inplace operation"):
        outputs.sum().backward()


def test_a_directory_in_memory_is_refused_in_the_forward_pass() -> None:
    shared = Path("/dev/shm")
    if not shared.is_dir():
        pytest.skip("no file system in memory here")
    model = nn.Sequential(nn.Linear(256, 256), nn.Tanh())
    capture = compress(model, policy=SPILL, spill=SpillOptions(directory=shared))
    with pytest.raises(SpillError, match="lies in memory"), capture:
        model(batch())


def test_a_session_hands_on_where_to_spill(options: SpillOptions) -> None:
    model, twin, inputs = layers(2), layers(2), batch(128)
    session = Session(model, torch.optim.SGD(model.parameters(), lr=0.1), None, spill=options)
    assert session._capture.spill._options is options
    session._plan_controller.fixed_policy = SPILL

    def loss_fn(model: nn.Module, inputs: Tensor) -> Tensor:
        return model(inputs).square().mean()

    torch.manual_seed(2)
    report = session.step(inputs, loss_fn)
    assert Method.SPILL.value in json.dumps(session.explain())
    torch.manual_seed(2)
    loss = loss_fn(twin, inputs)
    loss.backward()
    assert report.loss == loss.item()
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)


def test_two_captures_have_files_of_their_own(options: SpillOptions) -> None:
    first, second = Capture(nn.Identity(), spill=options), Capture(nn.Identity(), spill=options)
    assert first.spill is not second.spill
