"""What is known of one saved tensor when its packed form is chosen."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from daf.codecs.layout import content_key
from daf.core.policy import Need, Site, Treatment
from daf.saved_tensors.backward_rules import tensors_in
from daf.saved_tensors.ledger import Source
from daf.saved_tensors.packed_tensor import SavedTensor
from daf.saved_tensors.provenance import Operands, is_made_by


class Call(NamedTuple):
    """The operator call that saves: its function, arguments and result."""

    operator: Any
    arguments: Sequence[Any]
    keywords: Mapping[str, Any]
    result: Any
    operands: Operands | None


class PackRequest(NamedTuple):
    """One saved tensor to treat."""

    saved: SavedTensor
    tensor: Tensor
    need: Need
    treatment: Treatment
    source: Source
    call: Call
    site: Site
    key: int
    weight: float  # of relative error here, beside other sites
    tag: int  # the site's name in the store's reports of evictions
    rederive: bool  # tensors may be derived from others

    @property
    def content_key(self) -> tuple[Any, ...]:
        """The key of the tensor's content among all that was saved of its storage."""
        return content_key(self.tensor, self.saved.version)

    @property
    def is_result(self) -> bool:
        """True if the tensor is (the memory of) what the call returned."""
        results = tensors_in(self.call.result)
        return any(self.tensor.data_ptr() == out.data_ptr() for out in results)

    @property
    def node_result(self) -> Tensor | None:
        """The call's (first) result, unless the saving node was only one of its steps."""
        result = next(iter(tensors_in(self.call.result)), None)
        return result if result is not None and is_made_by(result, self.saved.node) else None
