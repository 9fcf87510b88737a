"""A checkpoint: one file with everything that a run needs to continue to the same result.

One safetensors file, so that replacing it is atomic: the model's tensors under ``model/``, others
under ``state/``, the rest as JSON in the metadata.
"""

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from daf.core.errors import RunFolderError
from daf.files.atomic import PRIVATE, replacing
from daf.files.tensor_file import read_tensors, write_tensors

FORMAT = "daf-checkpoint-3"
_MODEL, _STATE = "model/", "state/"


def write_checkpoint(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
    *,
    kept: Path | None = None,
) -> None:
    """Write model, optimizer, random states and ``state`` to ``path``, atomically.

    ``kept``: where the checkpoint from before stays. Raises RunFolderError on a full disk (the old
    file stays), and for other objects in ``state``.
    """
    whole = {"run": state, "optimizer": optimizer.state_dict(), "random": _random_states()}
    plain, tensors = to_plain(whole)
    named = {_MODEL + name: tensor for name, tensor in model.state_dict().items()}
    metadata = {"format": FORMAT, "state": json.dumps(plain)}
    with replacing(path, mode=PRIVATE, kept=kept) as file:
        write_tensors(file, named | tensors, metadata)


def read_checkpoint(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    """Restore a run, return its ``state``.

    Raises:
        DamagedFileError: the file is missing or damaged; nothing was restored.
        RunFolderError: it is of another model or another version.
    """
    tensors, whole = read_whole(path)
    try:
        _load_model(model, tensors)
        _load_optimizer(optimizer, whole["optimizer"])
        _set_random_states(whole["random"])
        state: dict[str, Any] = whole["run"]
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise RunFolderError(f"{path} does not fit this model: {error}") from error
    return state


def load_model(path: Path, model: nn.Module) -> int:
    """Restore only the model; return its step. Raises as ``read_checkpoint``."""
    tensors, whole = read_whole(path)
    _load_model(model, tensors)
    return int(whole["run"]["step"])


def read_whole(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return a checkpoint's tensors and all else, restoring nothing; raises RunFolderError."""
    tensors, metadata = read_tensors(path)
    if metadata.get("format") != FORMAT:
        raise RunFolderError(
            f"{path} is of format {metadata.get('format')!r}; this version reads {FORMAT!r}"
        )
    return tensors, from_plain(json.loads(metadata["state"]), tensors)


def _load_model(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    own = (name for name in tensors if name.startswith(_MODEL))
    model.load_state_dict({name.removeprefix(_MODEL): tensors[name] for name in own})


def _load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    for index, values in state["state"].items():
        parameter = parameters[index]
        for name, value in values.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                # In the parameter's own layout; another would slow every later step.
                values[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
    optimizer.load_state_dict(state)


def _random_states() -> dict[str, Any]:
    name, keys, *rest = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": [name, keys.tolist(), *rest],  # type: ignore[union-attr]
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],  # type: ignore[no-untyped-call]
    }


def _set_random_states(states: dict[str, Any]) -> None:
    random.setstate(states["python"])
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, np.array(keys, np.uint32), *rest))
    torch.set_rng_state(states["torch"])
    if states.get("cuda"):
        torch.cuda.set_rng_state_all(states["cuda"])


def to_plain(value: Any) -> tuple[Any, dict[str, Tensor]]:
    """Split into JSON's types and the tensors they name, without pickle's code.

    Dicts with simple keys, lists, tuples, numbers (floats exactly), texts, None and tensors
    survive; raises RunFolderError for others.
    """
    tensors: dict[str, Tensor] = {}
    return _plain(value, tensors), tensors


def _plain(item: Any, tensors: dict[str, Tensor]) -> Any:
    """Convert; a recursive closure would be a cycle, and hold the tensors past their time."""
    if item is None or type(item) in (bool, int, float, str):
        return item
    if isinstance(item, Tensor):
        name = f"{_STATE}{len(tensors)}"
        tensors[name] = item
        return {"tensor": name}
    if type(item) in (list, tuple):
        return {type(item).__name__: [_plain(each, tensors) for each in item]}
    if isinstance(item, dict):
        pairs = [[_plain(key, tensors), _plain(each, tensors)] for key, each in item.items()]
        return {"dict": pairs}
    raise RunFolderError(f"a checkpoint cannot hold a {type(item).__name__}: {item!r:.80}")


def from_plain(plain: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Restore what ``to_plain`` split, tensors copied; raises RunFolderError if it is damaged."""
    try:
        return _restored(plain, tensors)
    except (KeyError, TypeError, ValueError) as error:
        raise RunFolderError(f"a checkpoint's state is damaged: {error!r}") from error


def _restored(item: Any, tensors: Mapping[str, Tensor]) -> Any:
    if not isinstance(item, dict):
        return item
    ((kind, content),) = item.items()
    if kind == "tensor":
        return torch.clone(tensors[content])
    if kind == "dict":
        return {_restored(key, tensors): _restored(each, tensors) for key, each in content}
    items = [_restored(each, tensors) for each in content]
    return tuple(items) if kind == "tuple" else items
