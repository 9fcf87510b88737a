"""Dropout's results, derived from the code of its input and its saved bits.

The operators behind then hold nothing of their own. Attention whose weights are held has both as
well, in the middle of one operator.
"""

import torch
from torch import Tensor

from daf.codecs.layout import layout_of
from daf.kernels.normalisation import Channels
from daf.saved_tensors.ledger import Ledger
from daf.saved_tensors.pack_request import PackRequest
from daf.saved_tensors.packed_tensor import Decoded, Recipe, Rederived, Stored, Term
from daf.saved_tensors.provenance import Provenance
from daf.torch_compat.pytree import tensors_in_batch


class Dropping:
    """Adds the results of dropout to ``provenance``."""

    def __init__(self, provenance: Provenance, ledger: Ledger) -> None:
        self._provenance, self._ledger = provenance, ledger

    def learn(self, job: PackRequest, held: Decoded, factor: float) -> None:
        """Learn from a mask, ``held``, of noise that is 0 or ``factor``."""
        if job.saved.slot != "other":
            return
        if (result := job.node_result) is not None:
            recipe, version = self._dropped(job, result), result._version
        else:  # one step of several
            recipe, version = self._dropped_within(job), 0
        if recipe is not None and len(recipe) == 1 and recipe[0].mask is None:
            scaled = self._scaled(recipe[0], factor, job.tensor.device)
            held.recipe = (scaled._replace(mask=held.code),)
            self._provenance.learn_made(job.saved.node, version, held)

    def _dropped(self, job: PackRequest, result: Tensor) -> Recipe | None:
        x = next(iter(job.call.arguments), None)
        if not isinstance(x, Tensor) or result is x:
            return None
        if not (x.stride() == result.stride() == job.tensor.stride()):
            return None
        return self._provenance.recipe(x, x._version)

    def _dropped_within(self, job: PackRequest) -> Recipe | None:
        """Return the recipe of attention's weights, which its composite drops and multiplies."""
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
