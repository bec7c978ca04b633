"""Inputs for a prompt and for the steps after it, with the cache of one run fed to the next."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from onnx import helper

from ortmoe_cli.errors import OrtmoeError
from ortmoe_cli.graph.feeds import Sizes, make_feeds
from ortmoe_cli.graph.index import Index
from ortmoe_cli.graph.roles import Role, roles

Values = dict[str, np.ndarray]


@dataclass(frozen=True, eq=False)
class Loop:
    """A model's way to be called token after token. `caches`: which output holds what each cache input wants next."""

    index: Index
    roles: Mapping[str, Role]
    caches: Mapping[str, str]

    @property
    def decodes(self) -> bool:
        """Whether the model has a cache, so that a step needs new tokens only."""
        return bool(self.caches)

    def inputs(self, batch: int, new: int, past: int = 0, caches: Mapping[str, np.ndarray] | None = None) -> Values:
        """Inputs for S new tokens after P cached ones. Raises OrtmoeError where the model cannot be called so."""
        feeds = make_feeds(self.index, self.roles, Sizes(batch, new, past))
        if feeds.sizes != Sizes(batch, new, past if self.decodes else 0):
            raise OrtmoeError(
                f"{self.index.model.path}: fixed dimensions allow batch {feeds.sizes.batch}, {feeds.sizes.new} new and "
                f"{feeds.sizes.past} cached tokens only; ask for these sizes"
            )
        values = dict(feeds.values) | dict(caches or {})
        for name, info in self.index.graph_inputs.items():
            shape = feeds.shapes[name]
            if name in values:
                values[name] = values[name].astype(helper.tensor_dtype_to_np_dtype(info.elem_type), copy=False)
                continue
            if shape is None:
                raise OrtmoeError(f"{self.index.model.path}: no sizes are known for input '{name}'")
            noise = np.random.default_rng(0).standard_normal(shape, np.float32) * 0.1
            values[name] = noise.astype(helper.tensor_dtype_to_np_dtype(info.elem_type))
        return values

    def kept(self, outputs: Sequence[np.ndarray]) -> Values:
        """The caches for the next step, from the outputs of this one."""
        by_name = dict(zip(self.index.graph_outputs, outputs, strict=True))
        return {name: by_name[output] for name, output in self.caches.items()}


def loop_of(index: Index) -> Loop:
    """How a model is called step by step, read off its graph."""
    found = roles(index)
    past = [name for name, role in found.items() if role is Role.PAST]
    outputs = {name: _grown(index, name) for name in past}
    complete = past and all(outputs.values()) and len(set(outputs.values())) == len(past)
    return Loop(index, found, {name: output for name, output in outputs.items() if output} if complete else {})


def _grown(index: Index, name: str) -> str | None:
    """The graph output that is a cache input with new tokens appended: the first that a walk from it reaches."""
    outputs = set(index.graph_outputs)
    layer, seen = [name], {name}
    for _ in range(6):
        following = []
        for tensor in layer:
            for i in index.consumers(tensor):
                for output in _continues(index, i, tensor):
                    if output in outputs:
                        return output
                    if output and output not in seen:
                        seen.add(output)
                        following.append(output)
        layer = following
    return None


def _continues(index: Index, i: int, tensor: str) -> tuple[str, ...]:
    """Where a cache goes on to: a fused node gives keys and values back in order."""
    op, inputs, outputs = index.op(i), index.inputs(i), index.outputs(i)
    slots = {
        "com.microsoft.GroupQueryAttention": (3, 4),
        "com.microsoft.MultiHeadAttention": (6, 7),
        "Attention": (4, 5),
    }
    if op in slots:
        number = [slot for slot, read in enumerate(inputs) if read == tensor]
        return tuple(outputs[1 + slots[op].index(s)] for s in number if s in slots[op] and len(outputs) > 2)
    return outputs if op in ("Concat", "Identity", "Transpose", "Cast", "ScatterND", "ScatterElements") else ()
