"""Every private API of PyTorch that is used: it exists, and only ``torch_compat`` names it."""

from __future__ import annotations

import ast
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import daf

pytestmark = pytest.mark.smoke

FUNCTIONS = {
    "torch._C.DisableTorchFunction",
    "torch._C.DispatchKey.AutocastCPU",
    "torch._C.DispatchKey.AutocastCUDA",
    "torch._C.DispatchKeySet",
    "torch._C._AutoDispatchBelowAutograd",
    "torch._C._DisableTorchDispatch",
    "torch._C._ExcludeDispatchKeyGuard",
    "torch._C._autograd._get_current_graph_task_keep_graph",
    "torch._C._autograd._get_sequence_nr",
    "torch._C._autograd._pop_saved_tensors_default_hooks",
    "torch._C._autograd._saved_tensors_hooks_disable",
    "torch._C._autograd._saved_tensors_hooks_enable",
    "torch._C._autograd._saved_tensors_hooks_get_disabled_error_message",
    "torch._C._autograd._top_saved_tensors_default_hooks",
    "torch._C._current_autograd_node",
    "torch._C._current_graph_task_id",
    "torch._C._functions",
    "torch._C._functorch.get_unwrapped",
    "torch._C._functorch.is_functorch_wrapped_tensor",
    "torch._C._functorch.is_legacy_batchedtensor",
    "torch._C._functorch.maybe_current_level",
    "torch._C._len_torch_dispatch_stack",
    "torch._C._len_torch_function_stack",
    "torch._C._pop_torch_dispatch_stack",
    "torch._C._pop_torch_function_stack",
    "torch._C._push_on_torch_function_stack",
    "torch._C._storage_Use_Count",
    "torch.UntypedStorage._expired",
    "torch.UntypedStorage._free_weak_ref",
    "torch._safe_softmax",
    "torch._softmax_backward_data",
    "torch.autograd._engine_run_backward",
    "torch.autograd.Variable._execution_engine.queue_callback",
    "torch.nn.modules.batchnorm._BatchNorm",
    "torch.optim.optimizer._global_optimizer_post_hooks",
    "torch.optim.optimizer._global_optimizer_pre_hooks",
    "torch.utils._python_dispatch.TorchDispatchMode",
}
SOURCE = Path(daf.__file__).parent


def private_names(path: Path) -> Iterator[str]:
    """Dotted names that begin with ``torch`` and have a private part, imports included."""
    tree = ast.parse(path.read_text())
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Attribute) and id(node) not in inner:
            names = [ast.unparse(node)]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{each.name}" for each in node.names]
        for name in names:
            parts = name.split(".")
            is_private = any(part.startswith("_") and not part.endswith("__") for part in parts)
            if re.fullmatch(r"torch(\.\w+)+", name) and is_private:
                yield name


def test_only_torch_compat_names_private_functions() -> None:
    found = {path: set(private_names(path)) for path in SOURCE.rglob("*.py")}
    apart = SOURCE / "torch_compat"
    assert {
        path: names for path, names in found.items() if names and apart not in path.parents
    } == {}
    assert set().union(*found.values()) == FUNCTIONS


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_they_exist(name: str) -> None:
    assert pkgutil.resolve_name(name) is not None


def test_tensors_nodes_and_modules_have_the_attributes_that_are_read() -> None:
    """Attributes are read where they are needed: a function around each would only cost time."""
    x = torch.ones(3, requires_grad=True)
    power, total = (x**2).grad_fn, x.sum().grad_fn
    layer, optimizer = nn.BatchNorm1d(3), torch.optim.SGD([x], lr=0.1)
    read = {
        x: ("_version", "_use_count", "_backward_hooks", "_post_accumulate_grad_hooks"),
        x.untyped_storage(): ("_cdata",),
        power: ("_sequence_nr", "_saved_exponent", "_saved_self", "_raw_saved_self"),
        total: ("_input_metadata",),
        layer: ("_buffers", "_parameters"),
        optimizer: ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"),
    }
    missing = [each for owner, names in read.items() for each in names if not hasattr(owner, each)]
    assert missing == []
