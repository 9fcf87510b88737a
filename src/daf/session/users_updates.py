"""Updates of a user's loop within the budget: hooks see every optimizer's step, whoever calls."""

import weakref
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.optim import optimizer as optimizers

from daf.session.step_runner import StepRunner
from daf.torch_compat.modules import parameters_of


class UsersUpdates:
    """Makes room before optimizers step parameters of a model, and refuses them nothing then."""

    def __init__(self, model: nn.Module, runner: StepRunner) -> None:
        self._model, self._runner = model, runner
        self._hooks = ExitStack()
        self._begun = ExitStack()
        self._is_watching = False

    def watch(self) -> None:
        """Bound from now on every such update, until ``close`` or the end of this object."""
        self._begun.close()  # of an update that failed, or whose closure calls this
        if self._is_watching:
            return
        self._is_watching = True
        begun, own = self._begun, weakref.ref(self)
        outermost: list[torch.optim.Optimizer] = []  # an optimizer's step may call another's

        def before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            updates = own()
            if optimizer in outermost:
                begun.close()  # the one before failed
            if updates is not None and updates._is_concerned(optimizer):
                begun.enter_context(updates._runner.users_update(optimizer))
                outermost.append(optimizer)
                begun.callback(outermost.clear)

        def after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            if optimizer in outermost:
                begun.close()

        self._hooks.enter_context(optimizers.register_optimizer_step_pre_hook(before))
        self._hooks.enter_context(optimizers.register_optimizer_step_post_hook(after))
        weakref.finalize(self, self._hooks.close).atexit = False

    def close(self) -> None:
        """Leave updates to the user again."""
        self._begun.close()
        self._hooks.close()

    def _is_concerned(self, optimizer: torch.optim.Optimizer) -> bool:
        if self._runner.is_updating:
            return False
        own = {id(each) for each in parameters_of(self._model)}
        return any(id(each) in own for group in optimizer.param_groups for each in group["params"])
