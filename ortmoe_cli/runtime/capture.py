"""Whether a model can be recorded as a CUDA graph, from its structure: what the runtime would refuse, by node.

The runtime wants every compute node on CUDA, no copies between host and device, and no control flow. Shape arithmetic
runs on the host; what leaves it for a kernel that reads the device is a copy. With fixed shapes it is folded away.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ortmoe_cli.graph.index import Index
from ortmoe_cli.runtime.kernels import CONTROL_FLOW, DATA_DEPENDENT, HOST_INPUTS, HOST_OUTPUTS, why_not_on_cuda

_SHAPED_LIKE_FIRST = ("ScatterElements", "ScatterND", "Scatter", "CumSum")
"""Operators whose result has the shape of their first input, whatever the others are."""


@dataclass(frozen=True)
class Copy:
    """A tensor that is made in one memory and read in the other."""

    tensor: str
    to_host: bool
    reader: int


@dataclass(frozen=True)
class Capture:
    """What stands in the way of recording a model, as node numbers."""

    control_flow: tuple[int, ...] = ()
    data_dependent: tuple[int, ...] = ()
    without_kernel: dict[int, str] = field(default_factory=dict)
    copies: tuple[Copy, ...] = ()

    @property
    def accepted(self) -> bool:
        """Whether the runtime would make a session; a data-dependent node fails later, when it is recorded."""
        return not (self.control_flow or self.without_kernel or self.copies)


def capture(index: Index, fixed: bool) -> Capture:
    """What stands in the way. `fixed`: every dimension of the inputs has one size, so shapes are constants."""
    without = {i: reason for i in live(index) if (reason := why_not_on_cuda(index, i))}
    host = host_side(index, without, fixed)
    return Capture(
        index.nodes_of(*CONTROL_FLOW),
        index.nodes_of(*DATA_DEPENDENT),
        {i: reason for i, reason in without.items() if i not in host.arithmetic},
        tuple(_copies(index, host, without)),
    )


@dataclass
class Host:
    """What happens in host memory: tensors there, and the nodes of shape arithmetic that make them.

    folded: tensors that become constants; dynamic: tensors whose shape depends on values.
    """

    tensors: set[str] = field(default_factory=set)
    arithmetic: set[int] = field(default_factory=set)
    folded: set[str] = field(default_factory=set)
    dynamic: set[str] = field(default_factory=set)


def live(index: Index) -> Sequence[int]:
    """Nodes that do not fold into a constant."""
    return [i for i in range(len(index)) if not all(index.is_constant(name) for name in index.outputs(i) if name)]


def host_side(index: Index, without: Mapping[int, str], fixed: bool) -> Host:
    """Follow shapes through the graph: what is computed from nothing else runs on the host."""
    host = Host()
    for i in live(index):
        op = index.op(i)
        reads = [name for name in index.reads(i) if not index.is_constant(name)]
        values = _read_on_device(index, i)
        outputs = [name for name in index.outputs(i) if name]
        shaping = reads[:1] if op in _SHAPED_LIKE_FIRST else reads
        if op in DATA_DEPENDENT or any(name in host.dynamic for name in shaping):
            host.dynamic.update(outputs)
        if op in HOST_OUTPUTS:
            known = fixed and not any(name in host.dynamic for name in reads)
            of_shape = any(name in host.tensors for name in reads)  # the length of a shape, which is known
            (host.folded if known or of_shape else host.tensors).update(outputs)
        elif reads and all(name in host.folded for name in reads):
            host.folded.update(outputs)
        elif values and all(name in host.folded or name in host.tensors for name in values):
            host.tensors.update(outputs)
            host.arithmetic.add(i)
        elif i in without:
            host.tensors.update(outputs)
    return host


def _read_on_device(index: Index, i: int) -> list[str]:
    """What a node would read in the memory of its device: a node that takes nothing but sizes stays on CUDA."""
    slots = HOST_INPUTS.get(index.op(i), ())
    found = [name for slot, name in enumerate(index.inputs(i)) if name and slot not in slots]
    return [name for name in found if not index.is_constant(name)]


def _copies(index: Index, host: Host, without: Mapping[int, str]) -> Iterator[Copy]:
    for i in live(index):
        op = index.op(i)
        on_host = i in host.arithmetic or i in without
        slots = HOST_INPUTS.get(op, ())
        for slot, name in enumerate(index.inputs(i)):
            if not name or index.is_constant(name) or name in host.folded or name in index.graph_inputs:
                continue
            made_on_host = name in host.tensors
            if on_host and not made_on_host:
                yield Copy(name, True, i)
            elif not on_host and made_on_host and slot not in slots and op not in HOST_OUTPUTS:
                yield Copy(name, False, i)
            elif not on_host and not made_on_host and slot in slots:
                yield Copy(name, True, i)
