"""Which tokens come to which body of the graph, by the rows that its first product is fed.

Solving for the routing weights takes as many equations as there are experts, and a token gives one for each of its
hidden numbers. Where experts outnumber these, it helps to know that a body has no part in tokens that it never sees.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ortmoe_cli.moe.experts import Expert
from ortmoe_cli.moe.products import Product
from ortmoe_cli.moe.samples import Samples

Array = NDArray[Any]


def seen_by(samples: Samples, products: Sequence[Product], members: Sequence[Expert], x: Array) -> Array | None:
    """Whether a body sees a token, (T,n), X being (T,H); None if its rows are not just rows of X."""
    tokens = {row.tobytes(): t for t, row in enumerate(np.ascontiguousarray(x, np.float32))}
    by_weight = {p.base: p for p in products}
    seen = np.zeros((len(x), len(members)), bool)
    for b, member in enumerate(members):
        product = by_weight.get(member.first[0].tensor)
        if product is None:
            return None
        for row in np.ascontiguousarray(samples.data(product), np.float32):
            t = tokens.get(row.tobytes())
            if t is None:
                return None
            seen[t, b] = True
    return seen
