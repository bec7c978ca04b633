import json
import math

import numpy as np

from ortmoe_cli.report.json import document, render
from tests.report.samples import CONTRACT, gqa, moe, refused, report


def test_document_holds_the_contract_of_the_command_line() -> None:
    found = document(report(refused(1), moe(0, "fused"), gqa(0, "fused"), command="fuse", output="out.onnx"))
    assert found["schema_version"] == 1
    assert found["model"] == "qwen.onnx"
    assert found["blocks"][0] == {
        "kind": "moe",
        "name": "/layers.0/mlp",
        "layer": 0,
        "status": "fused",
        "code": "MOE001",
        "message": "one node for 1,283",
        "guarantee": "exact",
        "contract": [],
        "nearest": "",
        "region": 1283,
        "facts": {"E": 128, "k": 8, "H": 2048, "I": 768, "activation": "silu", "layout": "halves"},
        "checks": [{"regime": "hidden × 20", "error": 3.1e-07}, {"regime": "skew", "error": 4.4e-07}],
    }
    assert [(b["layer"], b["status"], b["guarantee"]) for b in found["blocks"]] == [
        (0, "fused", "exact"),
        (1, "refused", None),
        (0, "fused", "narrowed"),
    ]
    assert found["contract"] == found["blocks"][2]["contract"] == list(CONTRACT)


def test_keys_and_their_order_are_fixed() -> None:
    assert list(document(report(versions={"b": "2", "a": "1"}))) == [
        "schema_version",
        "command",
        "model",
        "input_sha256",
        "output",
        "dry_run",
        "summary",
        "contract",
        "notes",
        "nodes_before",
        "nodes_after",
        "weight_bytes",
        "output_bytes",
        "opset",
        "seconds",
        "versions",
        "launches",
        "blocks",
    ]
    assert list(document(report(versions={"b": "2", "a": "1"}))["versions"]) == ["a", "b"]
    assert render(report(moe(1), gqa(0), moe(0))) == render(report(gqa(0), moe(0), moe(1)))


def test_summary_counts_what_is_there_and_leaves_out_the_rest() -> None:
    blocks = (moe(0, "fused"), moe(1, "fused"), refused(2), gqa(0, "already-fused"))
    assert document(report(*blocks))["summary"] == {"moe": {"fused": 2, "refused": 1}, "gqa": {"already-fused": 1}}


def test_numbers_that_json_lacks_become_words() -> None:
    facts = {"limit": math.inf, "alpha": math.nan, "k": np.int64(2), "scale": np.float32(0.5), "flag": np.bool_(True)}
    found = json.loads(render(report(moe(0, facts=facts))))["blocks"][0]["facts"]
    assert found == {"limit": "inf", "alpha": "nan", "k": 2, "scale": 0.5, "flag": True}
