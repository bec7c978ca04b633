"""Which activation an expert uses, and how its gate and up halves are laid out: fitted to values, never guessed.

D (n,I) is what enters the down product, P (n,·) what the first products yield. An expert is D = act(gate) · up with
gate and up being P's halves, its even and odd columns, or two products, or D = act(P) without a gate.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Function = Callable[[Array], Array]


def sigmoid(x: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-np.clip(x, -80, 80))))


_ERF = np.frompyfunc(math.erf, 1, 1)


def _gelu(x: Array) -> Array:
    return np.asarray(0.5 * x * (1 + np.asarray(_ERF(x / math.sqrt(2)), x.dtype)))


def _gelu_tanh(x: Array) -> Array:
    return np.asarray(0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))))


FUNCTIONS: dict[str, Function] = {
    "silu": lambda x: x * sigmoid(x),
    "relu": lambda x: np.maximum(x, 0),
    "identity": lambda x: x,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "quick_gelu": lambda x: x * sigmoid(1.702 * x),
    "relu2": lambda x: np.maximum(x, 0) ** 2,
    "sigmoid": sigmoid,
    "tanh": np.tanh,
    "leaky_relu": lambda x: np.where(x > 0, x, 0.01 * x),
    "mish": lambda x: x * np.tanh(np.logaddexp(0, x)),
    "hard_swish": lambda x: x * np.clip(x / 6 + 0.5, 0, 1),
}


@dataclass(frozen=True)
class Activation:
    """act(gate)·up. 'swiglu' is min(g,limit)·σ(alpha·min(g,limit)) · (clip(u,±limit)+beta), silu its plain case."""

    name: str
    gated: bool
    alpha: float = 1.0
    beta: float = 0.0
    limit: float = math.inf

    def __call__(self, gate: Array, up: Array | None) -> Array:
        if self.name == "swiglu":
            assert up is not None
            gate, up = np.minimum(gate, self.limit), np.clip(up, -self.limit, self.limit)
            return np.asarray(gate * sigmoid(self.alpha * gate) * (up + self.beta))
        value = FUNCTIONS[self.name](gate)
        return value if up is None else np.asarray(value * up)

    def describe(self) -> str:
        if self.name == "swiglu" and (self.alpha, self.beta, self.limit) == (1.0, 0.0, math.inf):
            return "silu with gate"
        if self.name == "swiglu":
            limit = f", limit {self.limit:g}" if math.isfinite(self.limit) else ""
            return f"swiglu(alpha {self.alpha:g}, beta {self.beta:g}{limit})"
        return f"{self.name} with gate" if self.gated else self.name


@dataclass(frozen=True)
class Layout:
    """Where gate and up are in the first products. kind: 'halves', 'interleaved', 'separate' or 'plain' (no gate)."""

    kind: str
    up_first: bool = False

    def split(self, first: Sequence[Array]) -> tuple[Array, Array | None]:
        """(gate, up) of the first products' results (n,·)."""
        if self.kind == "plain":
            return first[0], None
        if self.kind == "separate":
            parts = first[0], first[1]
        elif self.kind == "halves":
            half = first[0].shape[-1] // 2
            parts = first[0][..., :half], first[0][..., half:]
        else:
            parts = first[0][..., ::2], first[0][..., 1::2]
        return (parts[1], parts[0]) if self.up_first else parts


@dataclass(frozen=True)
class Fit:
    """The best activation for some rows. `error` is relative to gate·up, element by element; `scaled`: each row of D
    is a multiple of what the activation gives (routing weights that were applied before the down product)."""

    activation: Activation
    layout: Layout
    error: float
    scaled: bool = False


TOLERANCE = 5e-5
_CERTAIN = 2e-6
"""No other activation needs to be tried."""
_ROWS = 96
_FEW_SCALARS = 8


def fit(down: Array, first: Sequence[Array], scalars: Iterable[float] = (), guess: Fit | None = None) -> Fit:
    """The activation that explains D (n,I) by P. `scalars`: constants of the graph that parameters may snap to;
    `guess`: what explained another expert, tried first."""
    rows = _spread(len(down))
    down = down[rows].astype(np.float64)
    first = [p[rows].astype(np.float64) for p in first]
    if guess is not None and guess.layout in _layouts(down.shape[1], first):
        again = _judge(down, *guess.layout.split(first), guess.activation, guess.layout)
        if again.error <= TOLERANCE:
            return again
    best: Fit | None = None
    for layout in _layouts(down.shape[1], first):
        gate, up = layout.split(first)
        for candidate in _candidates(down, gate, up, tuple(scalars)):
            found = _judge(down, gate, up, candidate, layout)
            if best is None or found.error < best.error:
                best = found
            if best.error <= _CERTAIN:
                return best
    if best is None:
        raise ValueError("no layout suits these widths")
    return best


def _spread(count: int) -> Array:
    return np.arange(count) if count <= _ROWS else np.unique(np.linspace(0, count - 1, _ROWS).astype(int))


def _layouts(inner: int, first: Sequence[Array]) -> Iterator[Layout]:
    widths = [p.shape[1] for p in first]
    kinds = {(inner,): ["plain"], (2 * inner,): ["halves", "interleaved"], (inner, inner): ["separate"]}
    for kind in kinds.get(tuple(widths), []):
        yield Layout(kind)
        if kind != "plain":
            yield Layout(kind, up_first=True)


def _candidates(down: Array, gate: Array, up: Array | None, scalars: tuple[float, ...]) -> Iterator[Activation]:
    if up is None:
        yield from (Activation(name, False) for name in FUNCTIONS)
        return
    yield Activation("swiglu", True)
    yield Activation("swiglu", True, 1.702)
    yield from (Activation(name, True) for name in FUNCTIONS if name not in ("silu", "quick_gelu"))
    for beta in dict.fromkeys((0.0, 1.0, *(s for s in scalars if 0 < abs(s) <= 8))):
        alpha = _alpha(down, gate, up, beta)
        if alpha is not None:
            yield from _swiglus(down, gate, up, _snap(alpha, (1.0, 1.702, *scalars), 2e-3), beta, scalars)
        else:  # no small elements: the graph's own numbers are left
            for number in scalars:
                if 0.5 <= number <= 8:
                    yield from _swiglus(down, gate, up, number, beta, scalars)
    few = scalars[:_FEW_SCALARS]  # where the routing scales the values they hide the parameters: the graph's numbers
    for beta in (0.0, 1.0):
        for alpha in dict.fromkeys((1.0, 1.702, *(s for s in few if 0.5 <= s <= 8))):
            for limit in (math.inf, *(s for s in few if 0.1 <= s <= 1e3)):
                yield Activation("swiglu", True, alpha, beta, limit)


def _swiglus(
    down: Array, gate: Array, up: Array, alpha: float, beta: float, scalars: tuple[float, ...]
) -> Iterator[Activation]:
    """With these parameters, with and without limits."""
    yield Activation("swiglu", True, alpha, beta)
    limits = {limit for limit in scalars if 0.1 <= limit <= 1e3}
    estimate = _limit(down, gate, up, alpha, beta)
    if estimate is not None:
        limits.add(_snap(estimate, scalars, 2e-3))
    for limit in sorted(limits, reverse=True):
        yield Activation("swiglu", True, alpha, beta, limit)


def _alpha(down: Array, gate: Array, up: Array, beta: float) -> float | None:
    """From small elements, where no clamp acts: D / (g·(u+beta)) = σ(alpha·g)."""
    scale = gate * (up + beta)
    use = (np.abs(gate) > 0.05) & (np.abs(gate) < 2) & (np.abs(up) < 2) & (np.abs(scale) > 1e-3)
    if use.sum() < 4:
        return None
    share = down[use] / scale[use]
    inside = (share > 1e-3) & (share < 1 - 1e-3)
    if inside.sum() < 0.5 * use.sum():
        return None
    share, g = share[inside], gate[use][inside]
    alpha = float(np.median(np.log(share / (1 - share)) / g))
    return alpha if 1e-2 < alpha < 1e2 else None


def _limit(down: Array, gate: Array, up: Array, alpha: float, beta: float) -> float | None:
    """From elements with a negative gate (never clamped) that the unclamped formula misses: there up was ±limit."""
    plain = gate * sigmoid(alpha * gate)
    off = np.abs(down - plain * (up + beta)) > 1e-3 * np.abs(plain * up)
    use = off & (gate < 0) & (np.abs(plain) > 1e-3)
    return float(np.median(np.abs(down[use] / plain[use] - beta))) if use.any() else None


def _snap(value: float, points: Iterable[float], relative: float) -> float:
    near = [p for p in points if abs(p - value) <= relative * abs(value)]
    return min(near, key=lambda p: abs(p - value)) if near else value


def _judge(down: Array, gate: Array, up: Array | None, activation: Activation, layout: Layout) -> Fit:
    with np.errstate(over="ignore", invalid="ignore"):
        guess = activation(gate, up)
        size = np.abs(gate) if up is None else np.abs(gate) * (np.abs(up) + abs(activation.beta))
        if activation.name == "relu2":
            size = gate**2
        if activation.name in ("sigmoid", "tanh"):
            size = np.ones_like(gate) if up is None else np.abs(up)
        error = _distance(down, guess, size)
        if error <= TOLERANCE:
            return Fit(activation, layout, error)
        power = (guess * guess).sum(1, keepdims=True)
        factor = (down * guess).sum(1, keepdims=True) / np.maximum(power, 1e-30)
        rescaled = _distance(down, guess * factor, size * np.abs(factor))
    if rescaled <= TOLERANCE:
        return Fit(activation, layout, rescaled * 1.01, scaled=True)
    return Fit(activation, layout, min(error, rescaled))


def _distance(down: Array, guess: Array, size: Array) -> float:
    """The worst element, relative to the size of what was multiplied, with a floor at a thousandth of the row's."""
    floor = 1e-3 * size.max(axis=1, keepdims=True) + 1e-12
    error = np.abs(down - guess) / np.maximum(size, floor)
    return float(np.nan_to_num(error, nan=np.inf).max(initial=0.0))
