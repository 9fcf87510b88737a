"""Codes of tensors on a GPU, in whole steps: on one, or under Triton's interpreter.

Interpreted, kernels of the device code the processor's tensors: they give the bytes of the
processor's own kernels, so whole gradients must agree to the bit. Without a GPU these skip here;
``test_gpu_interpreted`` runs them in a process that interprets.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from daf.capture.capture import Capture
from daf.capture.compress import compress
from daf.codecs.coder import Coder
from daf.core.code_format import header_bytes, plane_bytes
from daf.core.errors import CodecError
from daf.core.policy import (
    Method,
    Need,
    Policy,
    Treatment,
    policy_for,
    with_fused_operators,
    with_host_codes,
)
from daf.core.reports import CaptureStats, SiteReport
from daf.offload.host_codes import HostCodes, HostMemoryWarning, HostOptions
from daf.offload.routing import Route, Sent
from daf.operators import activation as activation_function
from daf.operators import eligibility
from daf.operators.chunked import weight_gradient
from daf.pool import host_planes
from daf.pool.device_pool import DeviceStores
from daf.pool.host_planes import HostStore
from daf.pool.page_size import DEVICE_ENTRY_BYTES
from daf.pool.paged_pool import PagedStore
from daf.pool.store import PlainStore
from daf.saved_tensors import packer
from daf.session.session import Session
from daf.step import gradient as gradient_step

pytest.importorskip("triton", reason="triton is not installed: daf-train[gpu]")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("no CUDA device; test_gpu_interpreted runs these", allow_module_level=True)

from backends import coding_by_triton, coding_natively
from simulated_device import LateTransfers
from waits import without_waiting

from daf.kernels.triton import backend as triton_backend

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
RAW_BYTES = 32 << 20 if not INTERPRETED else 4 * 8192 * 4  # on their way to be packed
interpreted_only = pytest.mark.skipif(not INTERPRETED, reason="compares with the processor's bits")


@pytest.fixture(autouse=True)
def on_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Interpreted, the processor's tensors count as a device's."""
    if INTERPRETED:
        coding_by_triton(monkeypatch)
    with np.errstate(all="ignore"):
        yield


class Residual(nn.Module):
    """Every kind of site that has a code: norms, ReLU, a sum, pooling, GELU, products, masks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 8, 3, padding=1)
        self.behind = nn.BatchNorm2d(8)
        self.pool = nn.MaxPool2d(2)
        self.rows = nn.LayerNorm(8)
        self.wide = nn.Linear(8, 32)
        self.narrow = nn.Linear(32, 8)
        self.classes = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.first(x)))
        x = self.pool(F.relu(x + self.behind(self.second(x))))
        tokens = self.rows(x.flatten(2).transpose(1, 2).contiguous())
        tokens = self.narrow(F.gelu(self.wide(tokens)))
        weights = (tokens @ tokens.transpose(1, 2)).softmax(-1)
        kept = (weights @ tokens).masked_fill(tokens.detach() > 1, 0.0)
        return self.classes(F.silu(kept).mean(1))


def step(
    bits: int | str | Policy,
    *,
    processor: bool = False,
    channels_last: bool = True,
    steps: int = 1,
    pixels: int = 16,
    host: HostCodes | None = None,
) -> tuple[list[Tensor], tuple[SiteReport, ...], Capture]:
    """Gradients and statistics, sites and the capture: of the last of some steps without updates,
    from the same state whoever codes.
    """
    policy = bits if isinstance(bits, Policy) else policy_for(bits)
    torch.manual_seed(0)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    model = Residual().to(DEVICE, memory_format=layout)
    x = torch.randn(4, 3, pixels, pixels).to(DEVICE, memory_format=layout)
    labels = torch.randint(10, (4,)).to(DEVICE)
    capture = Capture(model, PlainStore(), host=host)
    with pytest.MonkeyPatch.context() as patch:
        if processor:
            coding_natively(patch)
        for index in range(steps):
            model.zero_grad()
            with capture.step(policy, seed=3, step_index=5 + index, batch=(x, labels)):
                loss = F.cross_entropy(model(x), labels)
            sites = capture.sites()
            loss.backward()
    found = [each.grad for each in model.parameters() if each.grad is not None]
    return found + [each.float() for each in model.buffers()], sites, capture


@interpreted_only
@pytest.mark.parametrize(("bits", "channels_last"), [(2, True), (6, False)])
def test_gradients_are_those_of_the_processor_s_codes(
    bits: int | str, channels_last: bool, code_everything: None
) -> None:
    expected, sites, _ = step(bits, processor=True, channels_last=channels_last)
    found, own_sites, _ = step(bits, channels_last=channels_last)
    assert [site.treatment.method for site in own_sites] == [
        site.treatment.method for site in sites
    ]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


def ranged_policy(by_channel: bool) -> Policy:
    """Three bits of the range of the whole tensor or each channel, wherever values are coded."""
    plain = policy_for(3)
    code = Treatment(Method.RANGED, 3, by_channel=by_channel)
    values = dict.fromkeys((Need.LINEAR, Need.NORM, Need.PRODUCT), code)
    return replace(plain, name="ranged", by_need=MappingProxyType(dict(plain.by_need) | values))


@interpreted_only
@pytest.mark.parametrize(("by_channel", "channels_last"), [(True, True), (True, False), (False, 1)])
def test_ranges_of_tensors_and_channels_are_the_processor_s(
    by_channel: bool, channels_last: bool, code_everything: None
) -> None:
    policy = ranged_policy(by_channel)
    expected, sites, _ = step(policy, processor=True, channels_last=channels_last)
    found, own_sites, capture = step(policy, channels_last=channels_last)
    methods = [site.treatment.method for site in own_sites]
    assert methods == [site.treatment.method for site in sites]
    assert methods.count(Method.RANGED) > 5
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))
    assert capture.stats.held_bytes == 0


@pytest.mark.parametrize("bits", [1, "exact"])
def test_codes_lie_on_the_device_and_go_with_backward(
    bits: int | str, code_everything: None
) -> None:
    gradients, sites, capture = step(bits)
    treated = {site.treatment.method for site in sites}
    assert {Method.MASK, Method.PACK, Method.DROP} <= treated
    if bits != "exact":
        assert {Method.DERIVATIVE, Method.REDERIVE} <= treated
        assert capture.stats.held_peak_bytes < 0.6 * capture.stats.plain_peak_bytes
    assert capture.stats.held_bytes == 0
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_errors_shrink_with_bits(code_everything: None) -> None:
    exact = torch.cat([each.flatten() for each in step("plain")[0]])

    def error(bits: int) -> float:
        found = torch.cat([each.flatten() for each in step(bits)[0]])
        return float((found - exact).square().sum() / exact.square().sum())

    coarse, fine = error(1), error(4)
    assert 0 < fine < 0.1 * coarse


def test_the_device_s_bytes_are_those_of_the_format() -> None:
    values = torch.randn(5000, device=DEVICE)
    devices = DeviceStores()
    made = Coder(PlainStore(), devices)
    policy = policy_for(2)
    treatment = next(each for each in policy.by_need.values() if each.method is Method.ROTATED)
    code = made.values(values, treatment, 7, None, weight=1.0, tag=0)
    assert code.in_store
    store = devices.on(values.device)
    account = store.statistics()
    assert account.payload_bytes == plane_bytes(5000, 2) + header_bytes(5000)
    pages, rest = divmod(account.live_bytes, store._numbers.page_bytes)
    assert (code.nbytes, rest) == (account.payload_bytes + pages * DEVICE_ENTRY_BYTES, 0)
    whole, part = torch.empty(5000, device=DEVICE), torch.empty(392, device=DEVICE)
    code.decode(whole)
    code.decode(part, blocks=(18, 20))
    assert torch.equal(part, whole[18 * 256 :])
    with pytest.raises(CodecError, match="asked to decode 5000 elements into a tensor of 4999"):
        code.decode(torch.empty(4999, device=DEVICE))


def test_planes_that_a_lower_cap_takes_are_read_no_more(code_everything: None) -> None:
    """Every plane but the first goes between forward and backward, from codes of three bits."""

    def gradients(*, processor: bool) -> tuple[list[Tensor], CaptureStats]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 128), nn.Linear(128, 8))
        model, x = model.to(DEVICE), torch.randn(128, 64).to(DEVICE)
        capture = Capture(model, PagedStore())
        with pytest.MonkeyPatch.context() as patch:
            if processor:
                coding_natively(patch)
            with capture.step(policy_for(3), seed=3, step_index=5):
                loss = model(x).square().mean()
            whole = capture.stats.held_bytes
            capture.pool_bytes = 1
            assert capture.stats.held_bytes < whole
            if not processor:
                assert capture.devices.on(x.device).statistics().cap_bytes == 1
            loss.backward()
        found = [each.grad for each in model.parameters() if each.grad is not None]
        return found, capture.stats

    found, stats = gradients(processor=False)
    assert stats.evicted_planes == 3 * 2  # of what each layer gives
    assert stats.evicted_bytes == 2 * (2 * plane_bytes(128 * 128, 1) + plane_bytes(128 * 8, 1))
    if INTERPRETED:
        expected, _ = gradients(processor=True)
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


def test_what_is_not_finite_stays_visible_behind_a_smooth_activation() -> None:
    """Nobody waits to look: where one element is not finite, all of the tensor is NaN."""
    model = nn.Sequential(nn.Identity(), nn.GELU())
    for broken in (False, True):
        x = torch.randn(64, 64, device=DEVICE, requires_grad=True)
        with torch.no_grad():
            x[3, 3] = float("inf") if broken else 0.0
        capture = Capture(model, PlainStore())
        with capture.step(policy_for(2), 0, 0):
            out = model(x * 1).sum()
        (site,) = (site for site in capture.sites() if site.treatment.method is Method.DERIVATIVE)
        payload_bytes = capture.devices.on(x.device).statistics().payload_bytes
        assert plane_bytes(64 * 64, 2) == payload_bytes <= site.held_bytes < 1.1 * payload_bytes
        out.backward()
        assert x.grad is not None
        assert bool(x.grad.isnan().all()) == broken


def test_what_only_the_device_knows_is_kept() -> None:
    """The range of integers, and whether noise takes two values: looking would wait."""
    model = nn.Sequential(nn.Identity(), nn.Linear(64, 64), nn.Dropout(0.5)).to(DEVICE)
    x = torch.randn(64, 64, device=DEVICE, requires_grad=True)
    places = torch.randint(0, 9, (64, 64), device=DEVICE)
    capture = Capture(model, PlainStore())
    with capture.step(policy_for(2), 0, 0):
        out = model(x).gather(1, places * 1).sum()
    integers = [site for site in capture.sites() if site.need is Need.INTEGER]
    methods = {Method.KEEP} if INTERPRETED else {Method.KEEP, Method.PACK}
    assert {site.treatment.method for site in integers} == methods
    # A GPU's dropout saves booleans, whose range is known; the processor's saves noise as floats.
    assert len(integers) == len(methods)
    if INTERPRETED:
        (noise,) = (site for site in capture.sites() if site.need is Need.TWO_VALUED)
        assert noise.treatment.method is Method.KEEP
    out.backward()


@pytest.mark.thorough
def test_a_step_waits_for_nothing_before_it_looks_at_its_loss(
    code_everything: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one: in the first, kernels are compiled."""
    torch.manual_seed(0)
    model = Residual().to(DEVICE)
    batch = (torch.randn(4, 3, 16, 16).to(DEVICE), torch.randint(10, (4,)).to(DEVICE))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    quiet, gradients_there = ExitStack(), []

    def loss(module: nn.Module, part: Any) -> Tensor:
        return F.cross_entropy(module(part[0]), part[1])

    def quiet_loss(module: nn.Module, part: Any) -> Tensor:
        quiet.enter_context(without_waiting(DEVICE))
        return loss(module, part)

    class Looking(gradient_step._Losses):
        def read(self) -> None:
            gradients_there.append(all(each.grad is not None for each in model.parameters()))
            quiet.close()
            super().read()

    monkeypatch.setattr(gradient_step, "_Losses", Looking)
    with Session(model, optimizer, None, bits=2) as session, quiet:
        first, second = session.step(batch, loss), session.step(batch, quiet_loss)
        rows = session.explain()
    assert gradients_there == [True, True]
    assert second.loss < first.loss
    assert {"rotated", "mask", "derivative"} <= {row["method"] for row in rows}


# --- fused operators ------------------------------------------------------------------------


@pytest.fixture
def fuse_everything(code_everything: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """No operator is too small to be fused, and few elements are a part or a chunk."""
    monkeypatch.setattr(eligibility, "SMALL_BYTES", 1)
    monkeypatch.setattr(weight_gradient, "CHUNK_BYTES", 2500)
    monkeypatch.setattr(activation_function, "_BLOCKS_AT_A_TIME", 3)
    monkeypatch.setattr(triton_backend, "PART_BYTES", 4 << 10)


@interpreted_only
@pytest.mark.parametrize(
    ("bits", "channels_last"),
    [
        pytest.param(2, True, marks=pytest.mark.thorough),
        (3, False),
        pytest.param("exact", True, marks=pytest.mark.thorough),
    ],
)
def test_fused_operators_give_the_gradients_of_the_processor_s(
    bits: int | str, channels_last: bool, fuse_everything: None
) -> None:
    """Bit for bit, statistics too; the second step on normalisations wait for their ReLU."""
    policy = with_fused_operators(policy_for(bits))
    layout = {"channels_last": channels_last, "steps": 2, "pixels": 8}
    expected, sites, theirs = step(policy, processor=True, **layout)
    found, own_sites, ours = step(policy, **layout)
    assert ours.fusions() == theirs.fusions()
    patterns = {report.pattern for report in ours.fusions()}
    assert {"batch_norm + relu", "batch_norm + add + relu", "layer_norm"} <= patterns
    assert "gelu + layer behind" in patterns
    assert [site.treatment for site in own_sites] == [site.treatment for site in sites]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))
    assert ours.stats.held_bytes == 0


@pytest.mark.parametrize("bits", ["exact", 4])
def test_half_types_are_fused_on_a_device(bits: int | str, fuse_everything: None) -> None:
    """As plain PyTorch's gradients, up to the type's own rounding and, coded, the code's noise."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3))
    model = model.to(DEVICE, dtype=torch.bfloat16)
    model[1].float()  # as mixed precision has it
    x = torch.randn(4, 3, 10, 10).to(DEVICE, dtype=torch.bfloat16)

    def gradients(policy: Policy | None) -> Tensor:
        capture = Capture(model, PlainStore())
        for index in range(2):
            model.zero_grad()
            if policy is None:
                model(x).float().square().mean().backward()
                continue
            with capture.step(policy, seed=3, step_index=index, batch=x):
                loss = model(x).float().square().mean()
            loss.backward()
        if policy is not None:
            assert capture.fusions()[0].pattern == "batch_norm + relu"
        return torch.cat([each.grad.float().flatten() for each in model.parameters()])  # type: ignore[union-attr]

    plain = gradients(None)
    found = gradients(with_fused_operators(policy_for(bits)))
    error = float((found - plain).square().sum() / plain.square().sum())
    assert 0 < error < (1e-4 if bits == "exact" else 1e-2)


def test_while_work_is_recorded_nothing_is_fused_or_coded(
    fuse_everything: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is run again later would write pages again that have become someone else's."""
    for module in (eligibility, packer):
        monkeypatch.setattr(module, "is_recorded", lambda _: True)
    _, sites, capture = step(with_fused_operators(policy_for(2)), steps=2, pixels=8)
    assert {site.treatment.method for site in sites} == {Method.KEEP}
    assert {report.pattern for report in capture.fusions()} == {""}


@interpreted_only
def test_backward_decodes_a_part_at_a_time(fuse_everything: None) -> None:
    """Neither a fused normalisation nor a layer behind has its whole input at once."""
    largest: list[int] = []
    empty = torch.empty

    def noted(*arguments: Any, **keywords: Any) -> Tensor:
        found = empty(*arguments, **keywords)
        if found.dtype is torch.float32:
            largest.append(found.numel())
        return found

    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3))
    x = torch.randn(4, 3, 18, 18)
    capture = Capture(model, PlainStore())
    for index in range(2):
        with capture.step(with_fused_operators(policy_for(2)), 0, index, batch=x):
            loss = model(x).square().mean()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "empty", noted)
            largest.clear()
            loss.backward()
    # A span of 8 channels has 4096 elements, an image that is a chunk 2048.
    assert 0 < max(largest) <= 4096 < 4 * 8 * 16 * 16


# --- on the host ----------------------------------------------------------------------------


class Fixed:
    """Every second tensor that either could pack is the processor's."""

    is_watching = False

    def __init__(self) -> None:
        self.taken: list[Route] = []

    def begin_pass(self, most_raw_bytes: float) -> None: ...

    def take(self) -> Route:
        self.taken.append(list(Route)[len(self.taken) % 2])
        return self.taken[-1]

    def note(self, sent: Sent) -> None: ...
    def end_forward(self) -> None: ...
    def processor_took(self, raw_bytes: int, taken_ms: float) -> None: ...


def host_codes(staging_bytes: int, **options: Any) -> tuple[HostCodes, Fixed, LateTransfers | None]:
    """Some on the simulated device, or on the real one."""
    late, routes = LateTransfers() if INTERPRETED else None, Fixed()

    def store(device: torch.device, nbytes: int) -> HostStore:
        return HostStore(device, nbytes, transfers=late)

    made = HostOptions(1 << 40, staging_bytes, **options)
    return HostCodes(made, make_store=store, make_routes=lambda _: routes), routes, late


@pytest.mark.thorough
def test_codes_that_wait_on_the_host_are_the_device_s(fuse_everything: None) -> None:
    """Gradients to the bit, whoever packed; nothing is left on the device but what passes.

    The first step has PyTorch's own operators, the second fused ones.
    """
    policy, steps = with_fused_operators(policy_for(2)), 2
    expected, sites, there = step(policy, steps=steps, pixels=8)
    host, routes, late = host_codes(staging_bytes=1000)
    found, own_sites, capture = step(with_host_codes(policy), steps=steps, pixels=8, host=host)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))
    assert set(routes.taken) == set(Route)
    for own, site in zip(own_sites, sites, strict=True):
        assert (own.site, own.treatment.method) == (site.site, site.treatment.method)
        assert own.plain_bytes == site.plain_bytes
    coded = sum(site.spilled_bytes for site in own_sites)
    stats = capture.stats
    assert stats.spilled_peak_bytes == coded > 2 * 1000
    assert (stats.spilled_bytes, host.device_bytes) == (0, 0)
    largest = max(site.spilled_bytes for site in own_sites)
    kept = sum(site.held_bytes for site in own_sites)
    assert there.stats.held_peak_bytes > coded
    assert stats.held_peak_bytes <= kept + max(1000, largest) + RAW_BYTES
    if late is not None:
        assert late.copied_bytes > coded  # out, and back again what had no room to stay


@pytest.mark.thorough
def test_codes_of_wide_ranges_wait_on_the_host_too(code_everything: None) -> None:
    policy = ranged_policy(True)
    expected, sites, _ = step(policy, pixels=8)
    host, _, _ = host_codes(staging_bytes=1000)
    found, own_sites, capture = step(with_host_codes(policy), pixels=8, host=host)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))
    ranged = [site for site in own_sites if site.treatment.method is Method.RANGED]
    assert len(ranged) == sum(site.treatment.method is Method.RANGED for site in sites)
    assert all(site.spilled_bytes for site in ranged if site.plain_bytes)
    assert (capture.stats.spilled_bytes, host.device_bytes) == (0, 0)


@pytest.mark.thorough
def test_what_has_no_room_on_a_host_stays_on_the_device(code_everything: None) -> None:
    """Because it is full, or because there is none."""
    expected, _, there = step(2, pixels=8)
    full = HostCodes(HostOptions(0), make_store=refused)
    for host in (full, None):
        told = pytest.warns(HostMemoryWarning, match="more of them stay on the device")
        with told if host else nullcontext():
            found, sites, capture = step(with_host_codes(policy_for(2)), pixels=8, host=host)
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))
        assert sum(site.spilled_bytes for site in sites) == capture.stats.spilled_peak_bytes == 0
        assert capture.stats.held_peak_bytes == there.stats.held_peak_bytes


def refused(device: torch.device, nbytes: int) -> HostStore:
    raise AssertionError("nothing may go to the host")


@interpreted_only
def test_a_session_and_compress_send_all_codes(
    code_everything: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a budget; the session decides who packs from what its own passes took."""
    monkeypatch.setattr(host_planes, "Transfers", lambda _device: LateTransfers(0.0))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    batch = (torch.randn(32, 64), torch.randint(8, (32,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    plain = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    plain.load_state_dict(model.state_dict())

    def loss(module: nn.Module, part: Any) -> Tensor:
        return F.cross_entropy(module(part[0]), part[1])

    with Session(model, optimizer, None, bits=8, host_bytes="1MB") as session:
        for _ in range(4):
            report = session.step(batch, loss)
        rows = session.explain()
    assert report.loss == pytest.approx(loss(plain, batch).item(), rel=1e-6)
    assert sum(row["spilled_bytes"] for row in rows) > 64 * 32
    assert sum(row["held_bytes"] for row in rows if row["method"] != "keep") == 0
    with compress(plain, bits=8, host_bytes=1_000_000) as capture:
        value = loss(plain, batch)
    assert capture.stats.spilled_bytes > 64 * 32
    value.backward()
    assert capture.stats.spilled_bytes == 0
    exact = torch.autograd.grad(loss(plain, batch), list(plain.parameters()))
    for ours, theirs in zip(plain.parameters(), exact, strict=True):
        assert ours.grad is not None
        assert torch.allclose(ours.grad, theirs, atol=0.02 * float(theirs.abs().max()))


# --- no kernels -----------------------------------------------------------------------------


@pytest.mark.thorough
def test_without_triton_tensors_on_a_device_are_kept() -> None:
    program = """
        import sys
        sys.modules["triton"] = None
        import torch
        from daf.kernels.devices import can_code_on
        print(can_code_on(torch.device("cuda")), can_code_on(torch.device("cpu")))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "False True\n", "")
