import subprocess
import sys
from typing import Any, cast

import pytest

from ortmoe_cli.outcome import Already, Fusion, Refusal
from ortmoe_cli.report.model import BlockReport
from tests.report.samples import CHECKS, CONTRACT, gqa, moe, refused, report


@pytest.mark.parametrize("status", ["fused", "fusable"])
def test_a_fusion_gets_the_status_of_the_command(status: Any) -> None:
    island = cast(Any, None)
    fusion = Fusion(
        "moe", "n", 3, "MOE001", "m", "exact", island, contract=CONTRACT, region=7, facts={"E": 4}, checks=CHECKS
    )
    assert BlockReport.from_outcome(fusion, status) == BlockReport(
        "moe", "n", 3, status, "MOE001", "m", "exact", CONTRACT, region=7, facts={"E": 4}, checks=CHECKS
    )


def test_a_refusal_keeps_its_nearest_miss() -> None:
    refusal = Refusal("gqa", "n", None, "GQA101", "m", nearest="close", facts={"heads": 4})
    assert BlockReport.from_outcome(refusal, "fused") == BlockReport(
        "gqa", "n", None, "refused", "GQA101", "m", nearest="close", facts={"heads": 4}
    )


def test_a_fused_node_of_the_input_is_already_fused() -> None:
    already = Already("gqa", "n", 0, "GQA002", "m", {"heads": 4})
    assert BlockReport.from_outcome(already, "fused") == BlockReport(
        "gqa", "n", 0, "already-fused", "GQA002", "m", facts={"heads": 4}
    )


def test_blocks_are_put_in_order_whatever_order_they_come_in() -> None:
    found = report(gqa(1), moe(None), moe(10), gqa(0), moe(2)).blocks
    assert [(b.kind, b.layer) for b in found] == [("moe", 2), ("moe", 10), ("moe", None), ("gqa", 0), ("gqa", 1)]


@pytest.mark.parametrize(
    ("command", "blocks", "code"),
    [
        ("audit", (), 0),
        ("audit", (moe(0, "already-fused"),), 0),
        ("audit", (moe(0, "already-fused"), gqa(0, "fusable")), 1),
        ("audit", (refused(0),), 1),
        ("fuse", (), 0),
        ("fuse", (moe(0, "fused"), gqa(0, "already-fused")), 0),
        ("fuse", (moe(0, "fusable"),), 0),
        ("fuse", (moe(0, "fused"), refused(1)), 1),
    ],
)
def test_exit_code(command: str, blocks: tuple[BlockReport, ...], code: int) -> None:
    assert report(*blocks, command=command).exit_code == code


def test_contract_lists_each_sentence_once() -> None:
    assert report(gqa(0), gqa(1), gqa(2, contract=("b", *CONTRACT)), moe(0)).contract == (*CONTRACT, "b")


def test_a_report_can_be_rendered_without_the_runtime() -> None:
    code = (
        "import sys; from ortmoe_cli.report import json, text; from ortmoe_cli.report.model import Report;"
        "r = Report('m', 'audit', (), 1); json.render(r); text.render(r);"
        "sys.exit(any(name in sys.modules for name in ('onnx', 'onnxruntime', 'numpy')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
