"""Where the graph holds the routing: ids and weights per token, or one weight per expert, found by value."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ortmoe_cli.moe.samples import Samples

Array = NDArray[Any]


@dataclass(frozen=True)
class Pair:
    """ids (T,k) and weights (T,k)."""

    ids: str
    weights: str
    chosen: int


@dataclass(frozen=True)
class Dense:
    """One weight per expert (T,E), or (E,T) if `turned`; `chosen` of them are not zero."""

    weights: str
    chosen: int
    turned: bool = False


@dataclass(frozen=True)
class Routing:
    """A source of the weights. `order[e]` is the body that computes expert e; all weights are to be multiplied by
    `scale`; `error` is the distance from the weights that the output was solved for."""

    source: Pair | Dense
    order: tuple[int, ...]
    scale: float
    error: float


def dense_of_pair(ids: Array, weights: Array, experts: int) -> Array:
    """(T,E) from (T,k) and (T,k)."""
    dense = np.zeros((len(ids), experts))
    np.add.at(dense, (np.arange(len(ids))[:, None], ids.astype(np.int64)), weights.astype(np.float64))
    return dense


def sources(
    samples: Samples, names: Sequence[str], experts: int, counts: Sequence[int]
) -> Iterator[tuple[Pair | Dense, Array]]:
    """Every possible source with its weights as (T,E), the latest in the graph first. `counts`: the k to try."""
    numbers: dict[int, list[tuple[str, Array]]] = {}
    for name in reversed(names):
        value = samples.first(name)
        for chosen in counts:
            if value.dtype.kind in "fi" and value.ndim and value.shape[-1] in (chosen, len(samples.runs[0].hidden)):
                found = _per_token(samples, name, value, chosen)
                if found is not None:
                    numbers.setdefault(chosen, []).append((name, found))
    for chosen in (c for c in counts if c in numbers):
        ids = [(n, v) for n, v in numbers[chosen] if v.dtype.kind == "i" and v.min() >= 0 and v.max() < experts]
        weights = [(n, v) for n, v in numbers[chosen] if v.dtype.kind == "f" and np.isfinite(v).all()]
        for weight_name, w in weights:
            for id_name, i in ids:
                if all(len(set(row)) == chosen for row in i.tolist()):
                    yield Pair(id_name, weight_name, chosen), dense_of_pair(i, w, experts)
    for name in reversed(names):
        yield from _dense(samples, name, experts)


def _per_token(samples: Samples, name: str, value: Array, chosen: int) -> Array | None:
    if value.shape[-1] != chosen and chosen != 1:
        return None
    return samples.per_token(name, chosen)


def _dense(samples: Samples, name: str, experts: int) -> Iterator[tuple[Dense, Array]]:
    value = samples.first(name)
    if value.dtype.kind != "f" or value.ndim < 2:
        return
    tokens = len(samples.runs[0].hidden)
    rows = None
    shape = tuple(d for d in value.shape if d != 1) or (1,)
    turned = shape != (tokens, experts) and value.shape[-1] != experts and shape[0] == experts
    if value.shape[-1] == experts or shape == (tokens, experts):
        rows = samples.per_token(name, experts)
    elif turned and samples.per_token(name, experts) is not None:
        rows = np.concatenate([run.values[name].reshape(experts, -1).T for run in samples.runs])
    if rows is not None and np.isfinite(rows).all():
        yield Dense(name, int((rows != 0).sum(axis=1).max(initial=0)), turned), rows.astype(np.float64)


def match(solved: Array, given: Array, in_order: bool) -> Routing | None:
    """The order and scale by which the solved weights (T,n) of n bodies are the given ones (T,E), the best there is.

    in_order: body e is known to be expert e (weights are stacked).
    """
    if solved.shape != given.shape:
        return None
    power = float((given * given).sum())
    ratio = float(np.sqrt((solved * solved).sum() / power)) if power else 0.0
    order = np.arange(given.shape[1]) if in_order else _order(solved, ratio * given)
    if order is None:
        return None
    ordered = solved[:, order]
    scale = float((given * ordered).sum()) / power if power else 0.0
    if scale <= 0:
        return None
    scale = 1.0 if abs(scale - 1) < 1e-3 else scale
    error = np.abs(ordered - scale * given).max(initial=0.0) / (np.abs(ordered).max(initial=0.0) + 1e-30)
    return Routing(Dense("", 0), tuple(int(b) for b in order), scale, float(error))


def explain(routed: Array, given: Array, each: Array) -> Routing | None:
    """The scale by which the weights (T,E) make of the experts' results (T,E,H) the output (T,H)."""
    made = np.einsum("te,teh->th", given, each)
    size = np.abs(routed).max(axis=1, keepdims=True) + 1e-30  # tokens count the same, whatever their size
    made, wanted = made / size, routed / size
    power = float((made * made).sum())
    scale = float((made * wanted).sum()) / power if power else 0.0
    if scale <= 0:
        return None
    scale = 1.0 if abs(scale - 1) < 1e-3 else scale
    error = float(np.abs(wanted - scale * made).max(initial=0.0))
    return Routing(Dense("", 0), tuple(range(given.shape[1])), scale, error)


def _order(solved: Array, given: Array) -> Array | None:
    """For each expert the body whose column is nearest, if that is one to one."""
    distance = (solved * solved).sum(axis=0)[:, None] - 2 * solved.T @ given
    order = np.asarray(distance.argmin(axis=0))
    return order if len(set(order.tolist())) == len(order) else None


def describe(logits: Array, weights: Array) -> str:
    """What the router does with its logits, for the report: logits (T,E), weights (T,E)."""
    hit = weights != 0
    exponential = np.exp(logits - logits.max(axis=1, keepdims=True))
    softmax = exponential / exponential.sum(axis=1, keepdims=True)
    sigmoid = 1 / (1 + np.exp(-np.clip(logits, -80, 80)))
    kinds = {
        "softmax, renormalised": renormalised(softmax * hit),
        "softmax": softmax * hit,
        "sigmoid, renormalised": renormalised(sigmoid * hit),
        "sigmoid": sigmoid * hit,
    }
    for kind, expected in kinds.items():
        power = float((expected * expected).sum())
        scale = float((expected * weights).sum()) / power if power else 0.0
        if np.abs(expected * scale - weights).max(initial=0.0) < 1e-3 * (np.abs(weights).max(initial=0.0) + 1e-30):
            plain = takes_largest(logits, hit)
            suffix = "" if abs(scale - 1) < 1e-3 else f", scaled by {scale:.4g}"
            return kind + suffix + ("" if plain else ", selection corrected")
    return "other"


def renormalised(weights: Array) -> Array:
    return np.asarray(weights / (weights.sum(axis=1, keepdims=True) + 1e-30))


def takes_largest(logits: Array, hit: Array) -> bool:
    lowest = np.where(hit, logits, np.inf).min(axis=1)
    highest = np.where(hit, -np.inf, logits).max(axis=1)
    return bool((lowest >= highest).all())
