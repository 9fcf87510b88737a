"""What only a GPU can show of codes: streams that race for pages, graphs that are recorded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from daf.execution.capture import Capture
from daf.plan import Method, Treatment, plain_policy, policy_for, with_fused_operators
from daf.store import coder
from daf.store.buffers import PlainStore
from daf.store.device_stores import DeviceStores

pytest.importorskip("triton", reason="triton is not installed: daf-train[gpu]")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

DEVICE = torch.device("cuda")


def test_codes_of_one_stream_are_read_on_another() -> None:
    """While other streams take the pages that fall free; the host waits for none of it."""
    devices, streams = DeviceStores(), [torch.cuda.Stream() for _ in range(4)]
    made, treatment = coder.Coder(PlainStore(), devices), Treatment(Method.ROTATED, 4)
    codes: list[tuple[Tensor, Any, torch.cuda.Event]] = []
    errors: list[Tensor] = []
    for turn in range(400):
        writer, reader = streams[turn % 4], streams[(turn + turn // 7) % 4]
        with torch.cuda.stream(writer):
            values = torch.randn(2**20 + turn, device=DEVICE)
            code = made.values(values, treatment, turn, None, weight=1.0, tag=0)
            codes.append((values, code, writer.record_event()))
        if len(codes) > 4:
            values, code, is_made = codes.pop(0)
            with torch.cuda.stream(reader):
                reader.wait_event(is_made)
                values.record_stream(reader)
                out = torch.empty_like(values)
                code.decode(out)
                errors.append((out - values).square().mean() / values.square().mean())
        del code
    torch.cuda.synchronize()
    assert max(float(error) for error in errors) < 0.02


def test_what_a_graph_records_is_kept() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).to(DEVICE)
    x = torch.randn(128, 64, device=DEVICE)
    capture = Capture(model, PlainStore())

    def step() -> None:
        model.zero_grad(set_to_none=False)
        with capture.step(policy_for(2), 0, 0):
            loss = model(x).square().mean()
        loss.backward()

    model(x).sum().backward()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    assert {site.treatment.method for site in capture.sites()} == {Method.KEEP}
    graph.replay()
    recorded = [each.grad.clone() for each in model.parameters() if each.grad is not None]
    model.zero_grad(set_to_none=False)
    model(x).square().mean().backward()
    for ours, each in zip(recorded, model.parameters(), strict=True):
        assert each.grad is not None
        assert torch.allclose(ours, each.grad, rtol=1e-4, atol=1e-6)


def test_rows_are_normalised_under_autocast_as_pytorch_has_it() -> None:
    """What is float32 stays so: a residual stream behind layers that autocast makes half."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(256), nn.Linear(256, 256)).to(DEVICE)
    x = torch.randn(512, 256, device=DEVICE)
    weight = torch.randn(512, 256, device=DEVICE)
    capture, found = Capture(model, PlainStore()), []
    for policy in (plain_policy(), with_fused_operators(plain_policy())):
        for step_index in range(2):
            given = x.clone().requires_grad_()
            with capture.step(policy, 0, step_index), torch.autocast("cuda", torch.bfloat16):
                hidden = model(given * 1)
                loss = (hidden.float() * weight).sum()
            (gradient,) = torch.autograd.grad(loss, given)
        found.append((hidden.dtype, gradient))
    assert any(report.pattern for report in capture.fusions() if report.operator == "layer_norm")
    assert found[0][0] == found[1][0] == torch.bfloat16
    assert torch.allclose(found[0][1], found[1][1], rtol=1e-3, atol=1e-4)
