"""The report for programs: one JSON object, always with the same keys in the same order."""

import json
import math
from dataclasses import asdict
from typing import Any

from ortmoe_cli.report.model import KINDS, SCHEMA_VERSION, STATUSES, BlockReport, Report


def render(report: Report) -> str:
    """The report as one JSON document, without a line feed at its end."""
    return json.dumps(document(report), indent=2, allow_nan=False)


def document(report: Report) -> dict[str, Any]:
    """The report in terms of JSON. Keys are only ever added; a change of meaning counts up `schema_version`."""
    return {
        "schema_version": SCHEMA_VERSION,
        "command": report.command,
        "model": report.model,
        "input_sha256": report.input_sha256,
        "output": report.output,
        "dry_run": report.dry_run,
        "summary": {
            kind: {status: len(report.of(kind, status)) for status in STATUSES if report.of(kind, status)}
            for kind in KINDS
        },
        "contract": list(report.contract),
        "notes": list(report.notes),
        "nodes_before": report.nodes_before,
        "nodes_after": report.nodes_after,
        "weight_bytes": report.weight_bytes,
        "output_bytes": report.output_bytes,
        "opset": report.opset,
        "seconds": round(report.seconds, 3),
        "versions": dict(sorted(report.versions.items())),
        "launches": [asdict(launches) for launches in report.launches],
        "blocks": [_block(block) for block in report.blocks],
    }


def _block(block: BlockReport) -> dict[str, Any]:
    return {
        "kind": block.kind,
        "name": block.name,
        "layer": block.layer,
        "status": block.status,
        "code": block.code,
        "message": block.message,
        "guarantee": block.guarantee,
        "contract": list(block.contract),
        "nearest": block.nearest,
        "region": block.region,
        "facts": {key: _number(value) for key, value in block.facts.items()},
        "checks": [{"regime": check.regime, "error": _number(check.error)} for check in block.checks],
    }


def _number(value: Any) -> Any:
    """JSON knows neither infinity nor NaN, nor numpy's numbers: a clamp that is absent has an infinite limit."""
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
