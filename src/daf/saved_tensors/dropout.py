"""What dropout did to a tensor that is known, the operators behind can do again.

They then hold nothing: the code of what was dropped and the one bit of each element that
dropping saves make what they read. Attention whose weights are held has both as well, in the
middle of one operator.
"""

from __future__ import annotations

import torch
from torch import Tensor

from daf.codecs.layout import layout_of
from daf.kernels.normalisation import Channels
from daf.saved_tensors.ledger import Ledger
from daf.saved_tensors.pack_request import PackRequest, result_made_by
from daf.saved_tensors.packed_tensor import Recipe, Rederived, Stored, Term, TwoValues
from daf.saved_tensors.provenance import Provenance
from daf.torch_compat.pytree import tensors_in_batch


class Dropping:
    """Lets ``provenance`` know what dropping made."""

    def __init__(self, provenance: Provenance, ledger: Ledger) -> None:
        self._provenance = provenance
        self._ledger = ledger

    def learn(self, job: PackRequest, held: TwoValues, factor: float) -> None:
        """The job's noise, which ``held`` stands for, is 0 or ``factor``."""
        if job.saved.slot != "other":
            return
        result = result_made_by(job.saved.node, job.call)
        if result is not None:
            recipe, version = self._dropped(job, result), result._version
        else:  # one step of several
            recipe, version = self._dropped_within(job), 0
        if recipe is not None and len(recipe) == 1 and recipe[0].mask is None:
            scaled = self._scaled(recipe[0], factor, job.tensor.device)
            held.recipe = (scaled._replace(mask=held.mask),)
            self._provenance.learn_made(job.saved.node, version, held)

    def _dropped(self, job: PackRequest, result: Tensor) -> Recipe | None:
        x = next(iter(job.call.arguments), None)
        if not isinstance(x, Tensor) or result is x:
            return None
        if not (x.stride() == result.stride() == job.tensor.stride()):
            return None
        return self._provenance.recipe(x, x._version)

    def _dropped_within(self, job: PackRequest) -> Recipe | None:
        """Attention's weights, which its composite drops and multiplies."""
        arguments = tensors_in_batch((job.call.arguments, dict(job.call.keywords)))
        held = self._provenance.made_within(job.saved.node, arguments)
        if not isinstance(held, Rederived) or held.layout[:2] != layout_of(job.tensor)[:2]:
            return None
        return held.recipe

    def _scaled(self, term: Term, factor: float, device: torch.device) -> Term:
        if term.derivation is not None:
            return term._replace(derivation=term.derivation.scaled(factor))
        channels = Channels.times(factor, device)
        if term.channels is not None:
            scale, shift, inner = term.channels.content
            channels = Channels(scale * factor, shift * factor, inner)
        return term._replace(channels=Stored(self._ledger, channels))
