"""The questions that a policy asks of a model without starting it. Each check is a function that finds reasons."""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import cached_property

from ortmoe_cli.graph.index import Index
from ortmoe_cli.policy import facts
from ortmoe_cli.policy.derive import symbols
from ortmoe_cli.policy.findings import Check, Finding, named, passed_or
from ortmoe_cli.policy.model import Count, Policy
from ortmoe_cli.report.model import Report
from ortmoe_cli.report.words import counted, size
from ortmoe_cli.runtime.capture import Capture, capture
from ortmoe_cli.runtime.settings import CUDA, nearest

_ROTARY_FUSION = "GroupQueryAttentionFusion"


@dataclass(frozen=True, eq=False)
class Subject:
    """A model, the policy that it is held against, and what `audit` found in it (None if nobody asked for that)."""

    index: Index
    policy: Policy
    audit: Report | None

    @property
    def path(self) -> str:
        return str(self.index.model.path)

    @cached_property
    def symbols(self) -> dict[str, str]:
        """The dynamic dimensions of the inputs, with an input that has each."""
        return symbols(self.index)

    @cached_property
    def free(self) -> dict[str, tuple[str, ...]]:
        """For each bucket (or '' without any), the dimensions that stay dynamic in its session."""
        covered = {str(bucket): set(self.policy.overrides(bucket)) for bucket in self.policy.buckets}
        covered = covered or {"": set(self.policy.fixed_dimensions)}
        return {bucket: tuple(name for name in self.symbols if name not in fixed) for bucket, fixed in covered.items()}

    @cached_property
    def capture(self) -> Capture:
        fixed = self.policy.specialise == "sessions" and not any(self.free.values())
        return capture(self.index, fixed or not self.symbols)

    def called(self, nodes: Collection[int]) -> tuple[str, ...]:
        """Names of nodes, with their operator where they have none."""
        return tuple(self.index.node(i).name or f"{self.index.op(i)} → {self.index.outputs(i)[0]}" for i in nodes)


def level(subject: Subject) -> Iterator[Finding]:
    if subject.policy.optimization_level != "all":
        yield Finding(
            "POL101",
            f"the policy asks for optimisation level '{subject.policy.optimization_level}', not 'all'",
            'set optimization_level = "all"',
        )


def tf32(subject: Subject) -> Iterator[Finding]:
    from onnx import TensorProto  # noqa: PLC0415

    options = subject.policy.options_of(CUDA) if subject.policy.cuda else {}
    floats = [w for w in subject.index.model.weights.values() if w.elem_type == TensorProto.FLOAT and len(w.shape) > 1]
    if options.get("use_tf32") == "0" and floats:
        yield Finding(
            "POL102",
            f"TF32 is off, and weights of the model ({len(floats)} of them) are float32",
            "set use_tf32 = true, or store the weights in float16",
        )


def graphs(subject: Subject) -> Iterator[Finding]:
    if subject.policy.cuda and not subject.policy.cuda_graph.enabled:
        yield Finding("POL103", "CUDA graphs are off: every kernel is launched anew", "set cuda_graph.enabled = true")


def control_flow(subject: Subject) -> Iterator[Finding]:
    nodes = subject.called(subject.capture.control_flow)
    if nodes:
        yield Finding(
            "POL104",
            f"{counted(len(nodes), 'node')} with control flow cannot be recorded: {named(nodes)}",
            f"ortmoe fuse {subject.path} -o FUSED, or export without loops",
            nodes,
        )


def data_dependent(subject: Subject) -> Iterator[Finding]:
    nodes = subject.called(subject.capture.data_dependent)
    if nodes:
        yield Finding(
            "POL105",
            f"{counted(len(nodes), 'node')} whose result depends in shape on values must wait for the device, which "
            f"cannot be recorded: {named(nodes)}",
            f"ortmoe fuse {subject.path} -o FUSED, if they belong to experts",
            nodes,
        )


def kernels(subject: Subject) -> Iterator[Finding]:
    by_reason: dict[str, list[int]] = {}
    for i, reason in subject.capture.without_kernel.items():
        by_reason.setdefault(f"{subject.index.op(i)}: {reason}", []).append(i)
    for reason, found in by_reason.items():
        nodes = subject.called(found)
        yield Finding(
            "POL106",
            f"{counted(len(nodes), 'node')} would run on the CPU ({reason}): {named(nodes)}",
            "export in float16, or at an opset that the provider has kernels for",
            nodes,
        )


def copies(subject: Subject) -> Iterator[Finding]:
    without = subject.capture.without_kernel  # what they read and make is copied because of them
    found = [
        copy
        for copy in subject.capture.copies
        if copy.reader not in without and subject.index.producer(copy.tensor) not in without
    ]
    if found:
        tensors = tuple(dict.fromkeys(copy.tensor for copy in found))
        readers = subject.called(tuple(dict.fromkeys(copy.reader for copy in found)))
        yield Finding(
            "POL107",
            f"{counted(len(tensors), 'tensor')} must be copied between host and device, mostly sizes computed from "
            f"dynamic shapes: {named(tensors)}, read by {named(readers)}",
            "fix all dimensions in buckets, so that sizes become constants",
            readers,
        )


def uncovered(subject: Subject) -> Iterator[Finding]:
    names = [name for name in subject.symbols if name not in subject.policy.dimensions]
    if names and (subject.policy.buckets or subject.policy.dimensions):
        yield Finding(
            "POL108",
            f"{counted(len(names), 'dynamic dimension')} of the inputs not covered by the policy: {named(names)}",
            f"ortmoe policy init {subject.path} lists them all with their meaning",
            tuple(subject.symbols[name] for name in names),
        )


def unknown(subject: Subject) -> Iterator[Finding]:
    names = [name for name in subject.policy.dimensions if name not in subject.symbols]
    if names:
        hints = [f"'{name}' → '{near}'" for name in names if (near := nearest(name, subject.symbols))]
        hint = f" (meant: {', '.join(hints)})" if hints else ""
        yield Finding(
            "POL109",
            f"the model has no dimension called {named(names)}{hint}; the runtime would ignore it silently",
            f"use the names of the model: {named(list(subject.symbols), 8)}",
        )


def dynamic(subject: Subject) -> Iterator[Finding]:
    for bucket, names in subject.free.items():
        wanted = [name for name in names if name in subject.policy.dimensions or not bucket]
        if wanted:
            where = f"bucket {bucket}" if bucket else "without buckets"
            yield Finding(
                "POL110",
                f"{where}: {named(wanted)} stay dynamic, and a graph replays one shape only",
                "give the bucket a past length, and each dimension a role",
            )


def moe(subject: Subject) -> Iterator[Finding]:
    held = facts.counts(subject.index)
    wanted = subject.policy.fusions
    yield from _missing(subject, "moe", "MoE", wanted.moe, held["moe"] + held["qmoe"])
    yield from _missing(subject, "moe", "QMoE", wanted.qmoe, held["qmoe"])


def gqa(subject: Subject) -> Iterator[Finding]:
    held = facts.counts(subject.index)["gqa"]
    yield from _missing(subject, "gqa", "GroupQueryAttention", subject.policy.fusions.gqa, held)


def _missing(subject: Subject, kind: str, label: str, wanted: Count, held: int) -> Iterator[Finding]:
    if wanted is None:
        return
    left = [b for b in subject.audit.of(kind) if b.status in ("fusable", "refused")] if subject.audit else []
    names = tuple(block.name for block in left)
    fusable = any(block.status == "fusable" for block in left)
    action = f"ortmoe fuse {subject.path} -o FUSED" if fusable or not left else f"ortmoe rule {left[0].code}"
    expected = held + len(left) if wanted == "all" else wanted
    if held and held < expected:
        text = f"{held} of {expected} blocks are {label} nodes"
        yield Finding("POL112", f"{text}; left: {named(names)}" if names else text, action, names)
    elif not held and (expected or wanted == "all"):
        text = (
            f"no {label} node, {expected} expected" if expected else f"no {label} node, and no block that could be one"
        )
        yield Finding("POL111", f"{text}: {named(names)}" if names else text, action, names)


def experts(subject: Subject) -> Iterator[Finding]:
    wanted, index = subject.policy.experts, subject.index
    if wanted is None:
        return
    floats, every = facts.float_expert_bytes(index)
    nodes = subject.called(index.nodes_of(facts.FUSED["moe"]))
    if floats:
        share = f"{size(floats)} of {size(every)} of expert weights are in floats"
        yield Finding("POL113", f"{share}: {named(nodes)}", "quantise the experts", nodes)
    elif not every:
        blocks = [b.name for b in subject.audit.of("moe")] if subject.audit else []
        yield Finding("POL113", "no quantised experts: there is no QMoE node", "fuse, then quantise", tuple(blocks))
    for i, (bits, block) in facts.expert_bits(index).items():
        if bits != wanted.bits or (wanted.block_size and block != wanted.block_size):
            (name,) = subject.called([i])
            have = f"{bits} bits in blocks of {block}" if block else f"{bits} bits with one scale for each row"
            ask = f"{wanted.bits} bits" + (f" in blocks of {wanted.block_size}" if wanted.block_size else "")
            yield Finding("POL114", f"'{name}' has {have}, not {ask}", "quantise again", (name,))


def assumptions(subject: Subject) -> Iterator[Finding]:
    for name in facts.assumed(subject.index):
        if name not in subject.policy.assume:
            yield Finding(
                "POL115",
                f"the model was fused under the assumption '{name}', which the policy does not grant",
                f'add assume = ["{name}"] to the policy if it holds, or fuse again without it',
            )


def rotary(subject: Subject) -> Iterator[Finding]:
    index, policy = subject.index, subject.policy
    off = str(policy.session_config.get("optimization.disable_specified_optimizers", ""))
    if not policy.cuda or _ROTARY_FUSION in off.split(";"):
        return
    found = [i for i in index.nodes_of(facts.FUSED["gqa"]) if _breaks(index, i)]
    if found:
        nodes = subject.called(found)
        yield Finding(
            "POL116",
            f"{counted(len(nodes), 'GroupQueryAttention node')} behind a RotaryEmbedding: {named(nodes)}",
            f'set session_config."optimization.disable_specified_optimizers" = "{_ROTARY_FUSION}"',
            nodes,
        )


def _breaks(index: Index, i: int) -> bool:
    """Whether the runtime's fusion of a rotation with this node ends badly on CUDA."""
    inputs = (*index.inputs(i), *[""] * 11)
    makers = [index.producer(name) for name in inputs[:2] if name]
    rotated = any(m is not None and index.op(m) == "com.microsoft.RotaryEmbedding" for m in makers)
    return rotated and not index.attribute(i, "do_rotary", 0) and (bool(inputs[10]) or not inputs[3])


Question = Callable[[Subject], Iterator[Finding]]

STATIC: tuple[tuple[str, str, Question, bool], ...] = (
    ("level", "all graph optimisations are on", level, False),
    ("tf32", "TF32 is on for float32 weights", tf32, False),
    ("moe", "experts are single nodes", moe, False),
    ("gqa", "attention is single nodes", gqa, False),
    ("experts", "experts are quantised as asked for", experts, False),
    ("assumptions", "fused under no other assumptions than granted", assumptions, False),
    ("dimensions", "every dynamic dimension is covered", uncovered, False),
    ("names", "every dimension of the policy exists", unknown, False),
    ("rotary", "no optimiser of the runtime breaks the attention", rotary, False),
    ("cuda-graphs", "CUDA graphs are on", graphs, False),
    ("capture-shapes", "shapes are fixed for recording", dynamic, True),
    ("capture-control-flow", "no control flow", control_flow, True),
    ("capture-sync", "no shape depends on values", data_dependent, True),
    ("capture-kernels", "every node has a CUDA kernel", kernels, True),
    ("capture-copies", "no copies between host and device", copies, True),
)
"""(name, what holds when it passes, the question, whether it is about recording a CUDA graph)."""


def ask(subject: Subject) -> tuple[Check, ...]:
    """The answers to all questions."""
    off = not subject.policy.cuda_graph.enabled
    return tuple(
        Check(name, title, note="no CUDA graphs in the policy", skipped=True)
        if capturing and off
        else passed_or(question(subject), name, title)
        for name, title, question, capturing in STATIC
    )
