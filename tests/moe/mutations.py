"""The table of mutations: what is changed about a block, in which forms, and what has to become of it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
from onnx import ModelProto

from tests.moe import graphs, routers, surgery
from tests.moe.graphs import E, Graph, H, I, Parts
from tests.moe.surgery import Array, Patient

REPRODUCED = "reproduced"
ALL = ("gathered", "static loop", "dense loop", "dense bmm")
LOOPS = ("static loop", "dense loop")
STACKED = ("gathered", "dense bmm")
FORMS: dict[str, Callable[[Graph, Parts], str]] = {
    "gathered": graphs.gathered,
    "static loop": graphs.static_loop,
    "dense loop": graphs.dense_loop,
    "dense bmm": graphs.dense_bmm,
}


@dataclass(frozen=True)
class Mutation:
    """outcome: 'reproduced', or the codes that the refusal may have; parts: how the block is made; change: what is done
    to it then; noise: differences up to this are rounding (clamps take a large number's small rest for the whole)."""

    kind: str
    outcome: str
    forms: tuple[str, ...] = ALL
    parts: Callable[[], Parts] = Parts
    change: Callable[[Patient], None] = lambda p: None
    noise: float = 2e-5

    def model(self, form: str) -> ModelProto:
        g = Graph()
        patient = Patient(g.model(FORMS[form](g, self.parts())))
        self.change(patient)
        return patient.model


def downs(change: Callable[[Patient, str], str]) -> Callable[[Patient], None]:
    """Behind the result of every expert."""
    return lambda p: [p.behind(t, change) for t in p.products("w2")] and None


def one_down(change: Callable[[Patient, str], str]) -> Callable[[Patient], None]:
    """Behind the result of the expert in the middle."""
    return lambda p: p.behind(p.products("w2")[E // 2], change)


def ups(change: Callable[[Patient, str], str]) -> Callable[[Patient], None]:
    return lambda p: [p.behind(t, change) for t in p.products("w1")] and None


def result(change: Callable[[Patient, str], str]) -> Callable[[Patient], None]:
    """Behind the routed sum (T,H), before it takes the shape of the input."""
    return lambda p: p.behind(p.node_of(p.node_of("y").input[0]).input[0], change)


def logits(change: Callable[[Patient, str], str]) -> Callable[[Patient], None]:
    return lambda p: p.behind(p.products("router.weight")[0], change)


def tokens(change: Callable[[Patient, str], str], experts_only: bool) -> Callable[[Patient], None]:
    """Behind the flattened hidden states."""

    def apply(p: Patient) -> None:
        flat = next(n.output[0] for n in p.model.graph.node if n.op_type == "Reshape" and "x" in n.input)
        router = p.products("router.weight")[0]
        p.behind(flat, change, (lambda n: router not in n.output) if experts_only else None)

    return apply


def stack(name: str, change: Callable[[Array], Array]) -> Callable[[Patient], None]:
    return lambda p: p.edit(f"experts.{name}", change)


def _permuted(w1: Array) -> Array:
    w1[2] = w1[2][..., ::-1]
    return w1


def _exchanged(w1: Array) -> Array:
    """[E,2I,H] or [E,H,2I]: gate and up of one expert."""
    axis = 0 if w1.shape[1] == 2 * I and w1.shape[2] == H else 1
    w1[2] = np.concatenate(np.split(w1[2], 2, axis)[::-1], axis)
    return w1


def _twins(w: Array) -> Array:
    w[3] = w[1]
    return w


def _without_third(w: Array) -> Array:
    w[3] = 0
    return w


def _one_body_up_first() -> Parts:
    made: list[int] = []

    def activate(g: Graph, gate: str, up: str) -> str:
        made.append(1)
        return graphs.silu(g, up, gate) if len(made) == 3 else graphs.silu(g, gate, up)

    return Parts(activate=activate)


def _one_gelu() -> Parts:
    made: list[int] = []

    def activate(g: Graph, gate: str, up: str) -> str:
        made.append(1)
        return graphs.gelu(g, gate, up) if len(made) == 3 else graphs.silu(g, gate, up)

    return Parts(activate=activate)


def _one_alpha() -> Parts:
    made: list[int] = []

    def activate(g: Graph, gate: str, up: str) -> str:
        made.append(1)
        return graphs.clamped(1.71 if len(made) == 3 else 1.702)(g, gate, up)

    return Parts(activate=activate)


def _clamped_differently() -> Parts:
    made: list[int] = []

    def activate(g: Graph, gate: str, up: str) -> str:
        made.append(1)
        return graphs.clamped(1.702, 40.0 if len(made) == 3 else 7.0)(g, gate, up)

    return Parts(activate=activate)


def _router(router: routers.Router) -> Callable[[], Parts]:
    return lambda: Parts(router=router)


def _extra_output(p: Patient) -> None:
    p.output(p.products("w2")[0])


def _gated_result(p: Patient, t: str) -> str:
    """Times σ(x·g), which hidden states decide."""
    flat = next(n.output[0] for n in p.model.graph.node if n.op_type == "Reshape" and "x" in n.input)
    gate = p.op("Sigmoid", p.op("MatMul", flat, p.constant(np.linspace(-1, 1, H, dtype=np.float32)[:, None])))
    return p.op("Mul", t, gate)


def _doubled_input(p: Patient) -> None:
    """One expert reads twice the hidden states."""
    up = p.node_of(p.products("w1")[E // 2])
    p.behind(up.input[0], surgery.scale(2), lambda n: n.output[0] == up.output[0])


def _bias_of_one(b: Array) -> Array:
    b[2] += 1
    return b


def _lifted_bias(e: int) -> Callable[[Patient], None]:
    return lambda p: p.edit(f"experts.{e}.b1", lambda b: b + 1)


CODES_ACTIVATION = "MOE105 MOE113"
MUTATIONS: tuple[Mutation, ...] = (
    # the experts' mathematics
    Mutation(
        "activation: other alpha and limit",
        REPRODUCED,
        parts=lambda: Parts(activate=graphs.clamped(1.5, 4.0)),
        noise=2e-3,
    ),
    Mutation("activation: gelu", "MOE105", parts=lambda: Parts(activate=graphs.gelu)),
    Mutation("activation: one expert gelu", CODES_ACTIVATION, LOOPS, _one_gelu),
    Mutation("activation: one expert alpha 1.71 for 1.702", "MOE105 MOE113 MOE109 MOE114", LOOPS, _one_alpha),
    Mutation("activation: one expert clamped at 40 for 7", "MOE105 MOE113 MOE109 MOE114", LOOPS, _clamped_differently),
    Mutation("gate and up exchanged", REPRODUCED, parts=lambda: Parts(up_first=True)),
    Mutation("gate and up exchanged in one body", "MOE113", LOOPS, _one_body_up_first),
    Mutation("gate and up exchanged in one expert's weights", REPRODUCED, STACKED, change=stack("w1", _exchanged)),
    Mutation("one expert's weights permuted", REPRODUCED, STACKED, change=stack("w1", _permuted)),
    Mutation(
        "one expert's weights permuted, own matrix",
        REPRODUCED,
        LOOPS,
        change=lambda p: p.edit("experts.2.w1", lambda w: w[::-1]),
    ),
    Mutation(
        "two experts alike",
        REPRODUCED,
        STACKED,
        change=lambda p: [stack(w, _twins)(p) for w in ("w1", "w2")] and None,
    ),
    Mutation("one expert zero", REPRODUCED, STACKED, change=stack("w2", _without_third)),
    Mutation("bias of one expert changed", REPRODUCED, STACKED, lambda: Parts(bias=True), stack("b1", _bias_of_one)),
    Mutation("bias of one expert changed, own vector", REPRODUCED, LOOPS, lambda: Parts(bias=True), _lifted_bias(2)),
    Mutation("expert output clipped at 50", "MOE109 MOE114", change=downs(surgery.clip(50))),
    Mutation("expert output clipped at 1000", "MOE109 MOE114", change=downs(surgery.clip(1000))),
    Mutation("expert output clipped at 1e6", "MOE114", change=downs(surgery.clip(1e6))),
    Mutation("expert output clipped at 1e12", "MOE114", change=downs(surgery.clip(1e12))),
    Mutation("one expert's output clipped at 1000", "MOE109 MOE114", LOOPS, change=one_down(surgery.clip(1000))),
    Mutation("one expert's output clipped at 1e6", "MOE114", LOOPS, change=one_down(surgery.clip(1e6))),
    Mutation("expert output set to zero below 1e-5", "MOE109 MOE114", change=downs(surgery.dead_zone(1e-5))),
    Mutation("expert output set to zero below 1e-9", "MOE114", change=downs(surgery.dead_zone(1e-9))),
    Mutation("expert output softcapped at 30", "MOE109 MOE114", change=downs(surgery.softcap(30))),
    Mutation("expert output softcapped at 1e5", "MOE109 MOE114", change=downs(surgery.softcap(1e5))),
    Mutation("first product clipped at 1e4", "MOE105 MOE114", change=ups(surgery.clip(1e4))),
    Mutation("first product bent beyond 1e5", "MOE114", change=ups(surgery.nonlinear_beyond(1e5))),
    Mutation("one expert scaled by 1.5", "MOE110", LOOPS, change=one_down(surgery.scale(1.5))),
    Mutation("all experts scaled by 1.5", REPRODUCED, change=downs(surgery.scale(1.5))),
    Mutation("an expert's output is handed out", REPRODUCED, change=_extra_output),
    # what goes in and out
    Mutation("input of router and experts clipped at 3", REPRODUCED, change=tokens(surgery.clip(3), False)),
    Mutation("input of the experts clipped at 3", REPRODUCED, change=tokens(surgery.clip(3), True)),
    Mutation("input of the experts clipped at 1000", REPRODUCED, change=tokens(surgery.clip(1000), True)),
    Mutation("input of one expert doubled", "MOE108", ("dense loop",), change=_doubled_input),
    Mutation("input of one routed body doubled", "MOE108 MOE109 MOE110", ("static loop",), change=_doubled_input),
    Mutation("result scaled by a number", REPRODUCED, change=result(surgery.scale(0.7))),
    Mutation("result gated by hidden states", REPRODUCED, change=result(_gated_result)),
    Mutation("result clipped at 1000", REPRODUCED, change=result(surgery.clip(1000))),
    Mutation(
        "experts scaled by the sequence length",
        "MOE109 MOE114",
        ("dense loop",),
        change=downs(surgery.scaled_by_length),
    ),
    Mutation(
        "experts masked from position 40 on",
        "MOE109 MOE110 MOE114",
        ("dense loop",),
        change=downs(surgery.masked_from(40)),
    ),
    Mutation(
        "experts masked from position 700 on", "MOE114 MOE103", ("dense loop",), change=downs(surgery.masked_from(700))
    ),
    Mutation(
        "experts halved beyond 100 tokens",
        "MOE114 MOE103",
        ("dense loop",),
        change=downs(surgery.halved_when_longer(100)),
    ),
    Mutation(
        "experts halved beyond 1000 tokens",
        "MOE114 MOE103",
        ("dense loop",),
        change=downs(surgery.halved_when_longer(1000)),
    ),
    Mutation(
        "experts growing beyond 1000 tokens", "MOE114 MOE103", ("dense loop",), change=downs(surgery.grows_beyond(1000))
    ),
    Mutation(
        "experts masked by a difference from position 700.5 on",
        "MOE114 MOE103",
        ("dense loop",),
        change=downs(surgery.masked_by_difference(700.5)),
    ),
    # the router
    Mutation("renormalisation dropped", REPRODUCED, parts=_router(partial(graphs.softmax_router, renormalise=False))),
    Mutation("renormalisation by L1 norm", REPRODUCED, parts=_router(routers.l1)),
    Mutation("renormalisation with a large eps", REPRODUCED, parts=_router(routers.with_eps)),
    Mutation("temperature 1.7", REPRODUCED, parts=_router(partial(graphs.softmax_router, temperature=1.7))),
    Mutation("softmax after the selection", REPRODUCED, parts=_router(routers.top_softmax)),
    Mutation("logits softcapped at 2", REPRODUCED, change=logits(surgery.softcap(2))),
    Mutation("logits clipped at 50", REPRODUCED, change=logits(surgery.clip(50))),
    Mutation("the least logits win", REPRODUCED, parts=_router(routers.negated_largest)),
    Mutation("selection corrected by a bias", REPRODUCED, parts=_router(graphs.sigmoid_router)),
    Mutation("ties go to the last", REPRODUCED, parts=_router(routers.last_on_ties)),
    Mutation("negative weights", "MOE106", parts=_router(graphs.tanh_router)),
    Mutation("weight of one expert scaled", REPRODUCED, parts=_router(routers.one_expert_louder)),
    Mutation("experts under other numbers", REPRODUCED, parts=_router(routers.renamed)),
    Mutation("small weights dropped", REPRODUCED, parts=_router(routers.dropped_below)),
    Mutation("weights scaled by the sequence length", REPRODUCED, parts=_router(routers.by_length)),
    Mutation("weights masked from position 40 on", REPRODUCED, parts=_router(routers.masked)),
    Mutation("capacity 40", "MOE103", ("static loop",), lambda: Parts(capacity=40)),
    Mutation("capacity 300", "MOE103", ("static loop",), lambda: Parts(capacity=300)),
    Mutation("an expert missing", "MOE101", LOOPS, lambda: Parts(skip=4)),
)

CASES: Mapping[str, tuple[Mutation, str]] = {f"{m.kind} [{form}]": (m, form) for m in MUTATIONS for form in m.forms}
