"""The state of a capture's saved tensors, over all its steps."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

from daf.codecs.coder import Coder
from daf.codecs.scratch import Scratch
from daf.saved_tensors.evictions import Evictions
from daf.saved_tensors.ledger import Ledger, Sources
from daf.saved_tensors.packer import Packer
from daf.saved_tensors.provenance import Provenance
from daf.saved_tensors.sites import SiteTracker
from daf.torch_compat.parameter_reads import ParameterReads


class SavedTensorState(NamedTuple):
    """The coder, the ledger, and where and from what saved tensors came."""

    coder: Coder
    packer: Packer
    ledger: Ledger
    sources: Sources
    tracker: SiteTracker
    provenance: Provenance
    evictions: Evictions
    scratch: Scratch
    parameter_reads: ParameterReads
    proven_recipes: dict[Hashable, bool]  # by site and operations: whether they repeat themselves
