import io
import shlex
from inspect import cleandoc

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from ortmoe_cli.outcome import Check
from ortmoe_cli.report.model import Report
from ortmoe_cli.report.text import render
from tests.report.samples import HEADS, gqa, moe, refused, report


def printed(found: Report, verbose: bool = False, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(render(found, verbose), crop=False)
    output = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in output.splitlines())


def test_audit_collapses_layers_and_expands_exceptions() -> None:
    blocks = [moe(i) for i in range(47)] + [refused(47)]
    blocks += [gqa(i, facts={**HEADS, "window": 4096} if i % 2 else HEADS) for i in range(48)]
    assert printed(report(*blocks)) == cleandoc("""
        qwen.onnx
        41,236 nodes · 57.3 GB of weights · opset 18 · in 12 s

             fusable  refused
        MoE       47        1
        GQA       48

        layers 0–46         47 × MoE  E=128 k=8 H=2048 I=768 silu                      → fusable, exact
        layer 47             1 × MoE  E=128 k=8 H=2048 I=768 silu                      → refused MOE101
            experts missing: 126 of 128
            nearest: the 2 experts that are there fit
            ortmoe rule MOE101
        layers 0, 2, …, 46  24 × GQA  heads=32 kv_heads=4 head_size=128 cache          → fusable, narrowed
        layers 1, 3, …, 47  24 × GQA  heads=32 kv_heads=4 head_size=128 cache          → fusable, narrowed
                                      window=4096

        contract  what the fused model no longer accepts, or rests on
          • batch > 1 with several new tokens and a past is refused by the runtime

        next: ortmoe fuse qwen.onnx -o qwen.fused.onnx
    """)


def test_fuse_says_where_the_output_is_and_what_became_of_the_nodes() -> None:
    found = report(moe(0, "fused"), command="fuse", output="out/f.onnx", nodes_after=310, notes=("slow on CPUs",))
    assert printed(found) == cleandoc("""
        qwen.onnx → out/f.onnx
        41,236 → 310 nodes · 57.3 GB of weights · opset 18 · in 12 s

             fused
        MoE      1

        layer 0  1 × MoE  E=128 k=8 H=2048 I=768 silu  → fused, exact

        notes
          • slow on CPUs

        next: ortmoe audit out/f.onnx
    """)


def test_a_model_without_blocks() -> None:
    lines = printed(report()).splitlines()
    assert lines[-1] == "No Mixture-of-Experts block and no attention found."


def test_a_model_that_is_fused_already() -> None:
    assert printed(report(moe(0, "already-fused"))).splitlines()[-1] == "Every block is fused already, nothing to do."


def test_a_dry_run_says_so_and_how_to_do_it() -> None:
    lines = printed(report(moe(0), command="fuse", dry_run=True, nodes_after=9)).splitlines()
    assert lines[0] == "qwen.onnx  dry run, nothing is written"
    assert lines[-1] == "next: ortmoe fuse qwen.onnx -o qwen.fused.onnx"


def test_refusals_lead_to_their_explanation() -> None:
    assert printed(report(moe(0, "fused"), refused(1), command="fuse", output="f")).endswith("next: ortmoe rule MOE101")


def test_different_reasons_of_one_code_are_told_apart_and_limited() -> None:
    text = printed(report(*(refused(i, message=f"experts missing: {i} of 8", nearest="") for i in range(1, 8))))
    assert "layers 1–7  7 × MoE" in text
    assert "    layer 1: experts missing: 1 of 8\n    layer 2: experts missing: 2 of 8\n" in text
    assert "… 3 more messages; -v shows every block" in text
    assert "7 of 8" not in text
    assert text.count("    ortmoe rule MOE101") == 1


def test_blocks_that_differ_in_a_detail_only_are_alike() -> None:
    text = printed(report(gqa(0, facts={**HEADS, "scale": 0.1}), gqa(1, facts={**HEADS, "scale": 0.2})))
    assert "layers 0, 1  2 × GQA  heads=32 kv_heads=4 head_size=128 cache  → fusable" in text


def test_blocks_without_a_layer_go_by_their_name() -> None:
    text = printed(report(refused(None, name="/encoder/moe"), moe(None), moe(None)))
    assert "/encoder/moe  1 × MoE" in text
    assert "2 blocks" in text


def test_verbose_shows_every_block_with_facts_and_checks() -> None:
    text = printed(report(moe(0), moe(1), refused(2)), verbose=True)
    assert (
        cleandoc("""
        MoE  layer 1  → fusable, exact  MOE001
            name      /layers.1/mlp
            message   one node for 1,283
            facts     E=128 k=8 H=2048 I=768 silu layout=halves
            replaces  1,283 nodes
            checks    hidden × 20 3.1e-07   skew 4.4e-07

        MoE  layer 2  → refused MOE101
            name      /layers.2/mlp
            message   experts missing: 126 of 128
            nearest   the 2 experts that are there fit
    """)
        in text
    )
    assert "/layers.0/mlp" in text


def test_names_are_printed_as_they_are() -> None:
    odd = "layers.0[bold]:smile:[/]"
    block = refused(
        None, name=odd, message=odd, nearest=odd, facts={odd: 1}, checks=(Check(odd, 1.0),), contract=(odd,)
    )
    text = printed(report(block, model=odd, output=odd, notes=(odd,)), verbose=True)
    assert text.count(odd) == 10  # model, output, name, message, nearest, fact, contract twice, check, note


def test_the_next_command_can_be_copied_whole() -> None:
    folder = "a folder with blanks/" + "deep/" * 30
    line = printed(report(moe(0), model=f"{folder}m.onnx"), width=60).splitlines()[-1]
    assert shlex.split(line.removeprefix("next: "))[1:] == ["fuse", f"{folder}m.onnx", "-o", f"{folder}m.fused.onnx"]


@given(
    width=st.integers(20, 200),
    layers=st.lists(st.none() | st.integers(0, 99), max_size=6),
    text=st.text(st.characters(blacklist_categories=["Cs", "Cc"]), max_size=120),
    verbose=st.booleans(),
)
def test_any_report_fits_any_width(width: int, layers: list[int | None], text: str, verbose: bool) -> None:
    blocks = [refused(layer, name=text, message=text) for layer in layers] + [moe(layer) for layer in layers]
    printed(report(*blocks, notes=(text,)), verbose, width)
