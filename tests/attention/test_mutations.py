"""Decoders with one thing changed, often only for long inputs: reproduced exactly, or refused for a stated reason."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto

from ortmoe_cli.outcome import Fusion
from tests.attention.decoders import Decoder, Writer
from tests.attention.running import LONG, fuse, largest_difference

EXACT = 1e-5
FAR = 20
"""Beyond this many tokens the changes act: the shortest probes do not see them."""
FLOAT = TensorProto.FLOAT
Change = Callable[[Writer, str], str]


def number(w: Writer, tensor: str) -> str:
    return w.op("Cast", tensor, to=FLOAT)


def f(w: Writer, value: object) -> str:
    return w.const(value, np.float32)


def growing(w: Writer, tensor: str) -> str:
    """max(1, x / 20)."""
    return w.op("Max", w.op("Div", number(w, tensor), f(w, FAR)), f(w, 1))


def distance(w: Writer) -> str:
    return w.op("Sub", w.queries, w.keys)


def near(w: Writer, limit: object = FAR) -> str:
    return w.op("Less", distance(w), w.const(limit))


def between(w: Writer, tensor: str, low: int, high: int) -> str:
    return w.op("And", w.op("GreaterOrEqual", tensor, w.const(low)), w.op("Less", tensor, w.const(high)))


def by_position(w: Writer, tensor: str) -> str:
    return w.op("Mul", tensor, growing(w, w.queries))


def by_length(w: Writer, tensor: str) -> str:
    return w.op("Mul", tensor, growing(w, w.total))


def by_real_tokens(w: Writer, tensor: str) -> str:
    return w.op("Mul", tensor, growing(w, w.op("ReduceSum", "attention_mask", keepdims=0)))


def by_key(w: Writer, tensor: str) -> str:
    return w.op("Mul", tensor, w.op("Unsqueeze", growing(w, w.keys), w.const([1])))


def by_flag(w: Writer, tensor: str) -> str:
    return w.op("Mul", tensor, w.op("Add", number(w, "mode"), f(w, 1)))


def negated_by_flag(w: Writer, tensor: str) -> str:
    return w.op("Where", w.op("Cast", "mode", to=TensorProto.BOOL), w.op("Neg", tensor), tensor)


def zeroed_by_flag(w: Writer, tensor: str) -> str:
    return w.op("Where", w.op("Cast", "mode", to=TensorProto.BOOL), f(w, 0), tensor)


def doubled(w: Writer, tensor: str) -> str:
    return w.op("Mul", tensor, f(w, 2))


def last_16(w: Writer, tensor: str) -> str:
    return w.op("Slice", tensor, w.const([-16]), w.const([2**63 - 1]), w.const([2]))


def clipped(w: Writer, tensor: str) -> str:
    return w.op("Clip", tensor, f(w, -300), f(w, 300))


def window_added(w: Writer, scores: str) -> str:
    return w.op("Add", scores, w.op("Where", near(w), f(w, 0), f(w, -3e38)))


def window_chosen(w: Writer, scores: str) -> str:
    return w.op("Where", near(w), scores, f(w, -np.inf))


def soft_window(w: Writer, scores: str) -> str:
    return w.op("Where", near(w), scores, f(w, -3))


def far_slope(w: Writer, scores: str) -> str:
    return w.op("Sub", scores, w.op("Max", w.op("Sub", number(w, distance(w)), f(w, FAR)), f(w, 0)))


def outweighed(w: Writer, scores: str) -> str:
    return w.op("Add", scores, w.op("Mul", number(w, near(w, -FAR)), f(w, np.finfo(np.float32).max)))


def squared(w: Writer, scores: str) -> str:
    return w.op("Add", scores, w.op("Mul", w.op("Mul", scores, scores), f(w, 1e-3)))


def weights_of_far_keys(w: Writer, weights: str) -> str:
    return w.op("Mul", weights, number(w, w.op("Less", w.keys, w.const(FAR))))


def weights_of_near_keys(w: Writer, weights: str) -> str:
    return w.op("Where", w.op("Less", w.keys, w.const(FAR)), weights, f(w, 0))


def context_of_near_tokens(w: Writer, context: str) -> str:
    return w.op("Where", w.op("Less", w.queries, w.const(FAR)), context, f(w, 0))


def open_block(w: Writer, allowed: str) -> str:
    block = w.op("And", between(w, w.keys, FAR, 28), between(w, w.queries, FAR, 28))
    return w.op("Or", allowed, block)


def open_prefix(low: int) -> Change:
    return lambda w, allowed: w.op("Or", allowed, between(w, w.keys, low, low + 8))


def windowed(limit: Callable[[Writer], str]) -> Change:
    return lambda w, allowed: w.op("And", allowed, limit(w))


def fraction(w: Writer) -> str:
    return w.op("Less", number(w, distance(w)), f(w, FAR + 0.5))


def table_of_numbers(w: Writer) -> str:
    return w.op("Less", distance(w), w.const(np.full((1, 4, 1, 1), FAR)))


def length_of_a_table(w: Writer) -> str:
    return w.op("Less", distance(w), w.op("Shape", w.const(np.zeros(FAR), np.float32)))


def scaled_limit(w: Writer) -> str:
    return w.op("Less", w.op("Mul", distance(w), w.const(10**8)), w.const(FAR * 10**8))


def lookup(w: Writer) -> str:
    places = np.arange(512)
    table = w.const(places[:, None] - places[None] < FAR, bool)
    rows = w.op("Gather", table, w.op("Squeeze", w.queries, w.const([1])), axis=0)
    return w.op("Gather", rows, w.keys, axis=1)


def replaced_mask(w: Writer, allowed: str) -> str:
    """Causal for less than 2000 tokens only, by a product of numbers that are harmless alone."""
    return w.op("Or", allowed, w.op("Greater", w.op("Mul", w.keys, w.const(10**6)), w.const(2 * 10**9)))


def new_before_old(w: Writer, parts: str) -> str:
    kind, old, new = parts.split()
    return w.op("Concat", new, old, axis=2, name=f"present.{kind}")


def present_cut(w: Writer, parts: str) -> str:
    kind, old, new = parts.split()
    joined = w.op("Concat", old, new, axis=2)
    w.op("Slice", joined, w.const([-8]), w.const([2**62]), w.const([2]), name=f"present.{kind}")
    return joined


def trained_dropout(w: Writer, weights: str) -> str:
    return w.op("Dropout", weights, f(w, 0.0), w.const(True, bool))


LIMITS = (
    ("a number", near),
    ("a fraction", fraction),
    ("a table of numbers", table_of_numbers),
    ("the length of a table", length_of_a_table),
    ("a product", scaled_limit),
    ("a lookup", lookup),
)
OUTCOMES: dict[str, tuple[Decoder, str]] = {
    # factors
    "queries grow with the position": (Decoder(hooks={"query": by_position}), "fused"),
    "queries grow with the length": (Decoder(hooks={"query": by_length}), "fused"),
    "queries grow with real tokens": (Decoder(hooks={"query": by_real_tokens}), "fused"),
    "queries change by a flag": (Decoder(hooks={"query": by_flag}, flag=True), "fused"),
    "scores grow with the position": (Decoder(hooks={"product": by_position}), "GQA108"),
    "scores grow with the length": (Decoder(hooks={"product": by_length}), "GQA108"),
    "scores change by a flag": (Decoder(hooks={"product": by_flag}, flag=True), "GQA108"),
    "scores are squared a little": (Decoder(hooks={"product": squared}), "GQA108"),
    "scores are clipped": (Decoder(hooks={"product": clipped}), "GQA108"),
    "the scale is an input": (Decoder(overridable=True), "GQA108"),
    "all keys grow": (Decoder(hooks={"keys": by_key}), "GQA113"),
    "all values grow": (Decoder(hooks={"values": by_key}), "GQA113"),
    "all values change by a flag": (Decoder(hooks={"values": by_flag}, flag=True), "GQA113"),
    "all values are doubled": (Decoder(hooks={"values": doubled}), "GQA113"),
    "all keys are doubled": (Decoder(hooks={"keys": doubled}), "fused"),
    "values grow without a cache": (Decoder(hooks={"values": by_key}, cache=False), "fused"),
    "keys grow without a cache": (Decoder(hooks={"keys": by_key}, cache=False), "fused"),
    # several masks
    "a window is added after the mask": (Decoder(hooks={"scores": window_added}), "fused"),
    "a window is chosen after the mask": (Decoder(hooks={"scores": window_chosen}), "fused"),
    "a window is chosen after a chosen mask": (Decoder(hooks={"scores": window_chosen}, mask="where"), "fused"),
    "a slope for far keys only": (Decoder(hooks={"scores": far_slope}), "fused"),
    "a window with low scores instead of none": (Decoder(hooks={"scores": soft_window}), "GQA108"),
    "what blocks is outweighed far away": (Decoder(hooks={"scores": outweighed}), "GQA105"),
    # the future
    "a block far away sees itself": (Decoder(hooks={"allowed": open_block}), "GQA105"),
    "a prefix far away is seen": (Decoder(hooks={"allowed": open_prefix(FAR)}), "GQA105"),
    "a prefix farther away is seen": (Decoder(hooks={"allowed": open_prefix(2_000)}), "GQA105"),
    "a prefix beyond all probes is seen": (Decoder(hooks={"allowed": open_prefix(70_000)}), "GQA105"),
    "the future opens by a product of numbers": (Decoder(hooks={"allowed": replaced_mask}), "GQA105"),
    # windows without a mask input
    **{
        f"a window given as {name}": (Decoder(mask="none", hooks={"allowed": windowed(limit)}), "fused")
        for name, limit in LIMITS
    },
    # after the softmax
    "weights are multiplied far away": (Decoder(hooks={"weights": weights_of_far_keys}), "GQA108"),
    "weights are replaced far away": (Decoder(hooks={"weights": weights_of_near_keys}), "GQA108"),
    "weights change by a flag": (Decoder(hooks={"weights": by_flag}, flag=True), "GQA108"),
    "weights are doubled": (Decoder(hooks={"weights": doubled}), "GQA108"),
    "weights are dropped out in training": (Decoder(hooks={"weights": trained_dropout}), "GQA108"),
    "the context is replaced far away": (Decoder(hooks={"context": context_of_near_tokens}), "fused"),
    "the context changes by a flag": (Decoder(hooks={"context": negated_by_flag}, flag=True), "fused"),
    "the context is zero by a flag": (Decoder(hooks={"context": zeroed_by_flag}, flag=True), "fused"),
    # the cache
    "new tokens before old ones": (Decoder(hooks={"cache": new_before_old}), "refused"),
    "old tokens cut to 16": (Decoder(hooks={"old": last_16}), "GQA113"),
    "all keys cut to 16": (Decoder(hooks={"keys": last_16}), "GQA113"),
    "the returned cache is cut": (Decoder(hooks={"cache": present_cut}), "fused"),
}


@pytest.mark.parametrize("name", OUTCOMES)
def test_a_change_is_reproduced_or_refused(name: str, tmp_path: Path) -> None:
    decoder, expected = OUTCOMES[name]
    proto = decoder.build()
    result = fuse(proto, tmp_path)
    (outcome,) = result.outcomes
    if isinstance(outcome, Fusion):
        differences = largest_difference(result, LONG)
        assert max(differences.values()) <= EXACT, differences
        assert expected == "fused"
    else:
        assert expected in (outcome.code, "refused"), outcome
        assert result.fused.graph.node == result.original.graph.node


@pytest.mark.parametrize("window", [2_000, 300_000])
def test_a_wide_window_needs_no_long_probe(window: int, tmp_path: Path) -> None:
    """What hides the future is a comparison of its own; the window can only hide more."""
    (outcome,) = fuse(Decoder(window=window).build(), tmp_path).outcomes
    assert isinstance(outcome, Fusion)
    assert outcome.facts["bias"] == "add"
