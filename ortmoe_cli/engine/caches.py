"""A decode loop: what a model returns as its cache goes in again with the next token, as generation does it."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from ortmoe_cli.graph.feeds import Feeds, Sizes, make_feeds
from ortmoe_cli.graph.index import Index
from ortmoe_cli.graph.roles import Role, cache_axis

_BATCH, _PROMPT, _STEPS = 2, 6, 3


def cache_outputs(index: Index, found: Mapping[str, Role]) -> dict[str, str]:
    """For each cached input the output that continues it: the one that something is appended to it for.

    Empty if that cannot be told of one of them.
    """
    outputs = set(index.graph_outputs)
    pairs: dict[str, str] = {}
    for name in (name for name, role in found.items() if role is Role.PAST):
        made = {o for i in index.consumers(name) for o in index.outputs(i) if o in outputs}
        if len(made) > 1:  # an operator with two caches gives both
            made = set(sorted(made, key=index.graph_outputs.index)[_rank(index, found, name) :][:1])
        if len(made) != 1:
            return {}
        pairs[name] = made.pop()
    return pairs if len(set(pairs.values())) == len(pairs) else {}


def _rank(index: Index, found: Mapping[str, Role], name: str) -> int:
    """Whether a cached input is the first or the second that its operator reads."""
    reader = index.consumers(name)[0]
    caches = [read for read in index.inputs(reader) if found.get(read) is Role.PAST]
    return caches.index(name)


def loop_feeds(index: Index, found: Mapping[str, Role]) -> Iterator[Feeds]:
    """The inputs of a prompt and of the steps after it, but for the caches."""
    past = 0
    for step in range(1 + _STEPS):
        sizes = Sizes(_BATCH, 1 if step else _PROMPT, past)
        feeds = make_feeds(index, found, sizes, seed=step)
        if feeds.sizes != sizes:
            return
        yield feeds
        past = sizes.total


def empty_caches(index: Index, pasts: Sequence[str]) -> dict[str, np.ndarray] | None:
    """The caches before the first prompt; None if their sizes are not in the file."""
    made = {}
    for name in pasts:
        dims = index.graph_inputs[name].dims or ()
        axis = cache_axis(index, name)
        shape = [_BATCH if k == 0 else 0 if k == axis else dim for k, dim in enumerate(dims)]
        if not all(isinstance(size, int) for size in shape):
            return None
        made[name] = np.zeros([int(size or 0) for size in shape], np.float32)
    return made
