"""Made-up reports that look like real ones."""

from typing import Any

from ortmoe_cli.outcome import Check
from ortmoe_cli.report.model import BlockReport, Report

EXPERTS = {"E": 128, "k": 8, "H": 2048, "I": 768, "activation": "silu", "layout": "halves"}
HEADS = {"heads": 32, "kv_heads": 4, "head_size": 128, "cache": True, "form": "safe"}
CONTRACT = ("batch > 1 with several new tokens and a past is refused by the runtime",)
CHECKS = (Check("hidden × 20", 3.1e-07), Check("skew", 4.4e-07))


def moe(layer: int | None, status: Any = "fusable", **fields: Any) -> BlockReport:
    given: dict[str, Any] = {
        "name": f"/layers.{layer}/mlp",
        "code": "MOE001",
        "message": "one node for 1,283",
        "guarantee": "exact",
        "facts": EXPERTS,
        "checks": CHECKS,
        "region": 1283,
    }
    return BlockReport(kind="moe", layer=layer, status=status, **(given | fields))


def gqa(layer: int | None, status: Any = "fusable", **fields: Any) -> BlockReport:
    given: dict[str, Any] = {
        "name": f"/layers.{layer}/attn",
        "code": "GQA003",
        "message": "one node for 60",
        "guarantee": "narrowed",
        "contract": CONTRACT,
        "facts": HEADS,
    }
    return BlockReport(kind="gqa", layer=layer, status=status, **(given | fields))


def refused(layer: int | None, **fields: Any) -> BlockReport:
    given: dict[str, Any] = {
        "status": "refused",
        "code": "MOE101",
        "message": "experts missing: 126 of 128",
        "guarantee": None,
        "nearest": "the 2 experts that are there fit",
        "checks": (),
        "region": 0,
    }
    return moe(layer, **(given | fields))


def report(*blocks: BlockReport, **fields: Any) -> Report:
    given: dict[str, Any] = {
        "model": "qwen.onnx",
        "command": "audit",
        "nodes_before": 41236,
        "weight_bytes": 57_300_000_000,
        "opset": 18,
        "seconds": 12.3456,
        "versions": {"ortmoe": "0.1.0", "onnx": "1.23.2"},
    }
    return Report(blocks=blocks, **(given | fields))
