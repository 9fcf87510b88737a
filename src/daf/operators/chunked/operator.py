"""The registry entry of operators that go through their batch a chunk at a time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, update_wrapper
from typing import Any

import torch
import torch.nn.functional as F

from daf.core.policy import CHUNKED
from daf.operators.chunked import attention, products
from daf.operators.protocol import FusedOperator, OperatorCall


class ChunkedOperators(FusedOperator):
    """Operators whose input is several chunks of the policy's ``chunk_bytes``."""

    name = CHUNKED
    functions = frozenset(
        {torch.conv2d, F.linear, F.scaled_dot_product_attention, F.multi_head_attention_forward}
    )

    def replacement(self, call: OperatorCall) -> Callable[[], Any] | None:
        """Return the chunked operator; its own name names its sites."""
        pack, chunk_bytes = self.context.hooks.hook, self.context.policy.chunk_bytes
        chosen = products.chunked_product(call, pack, chunk_bytes)
        if chosen is None and attention.is_chunkable(call, pack, chunk_bytes):
            chosen = attention.attention
        if chosen is not None:
            if chunk_bytes is not None:  # with chunks of that size, by the same name
                chosen = update_wrapper(partial(chosen, chunk_bytes=chunk_bytes), chosen)
        elif attention.is_many_headed(call):
            chosen = attention.multi_head_attention(pack, chunk_bytes)
        else:
            return None
        return partial(self.context.hooks.run, chosen, call.arguments, call.keywords)
