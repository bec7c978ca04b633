"""The options that quantise experts: what reaches the engine, and what is a usage error."""

import pytest

from ortmoe_cli.cli.app import run
from ortmoe_cli.weights.quantise import Scheme
from tests.cli.conftest import Engine


@pytest.mark.parametrize(
    ("arguments", "scheme", "max_error"),
    [
        (["--experts", "int4"], Scheme(4, 32), None),
        (["--experts", "int8", "--block-size", "0"], Scheme(8, 0), None),
        (["--experts", "int4", "--asymmetric", "--quantiser", "search"], Scheme(4, 32, False, "search"), None),
        (["--experts", "int4", "--block-size", "128", "--max-error", "0.05"], Scheme(4, 128), 0.05),
        ([], None, None),
    ],
)
def test_the_scheme_that_was_asked_for(
    engine: Engine, arguments: list[str], scheme: Scheme | None, max_error: float | None
) -> None:
    run(["fuse", "m.onnx", "-o", "f.onnx", *arguments])
    (call,) = engine.calls
    assert call["options"].rounding == scheme
    assert call["options"].max_error == max_error


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--experts", "int3"], "int3"),
        (["--experts", "int4", "--block-size", "48"], "power of two"),
        (["--experts", "int4", "--block-size", "8"], "power of two"),
        (["--experts", "int4", "--max-error", "-1"], "max-error"),
        (["--asymmetric"], "--experts"),
        (["--max-error", "0.1"], "--experts"),
    ],
)
def test_usage_errors(engine: Engine, arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["fuse", "m.onnx", "-o", "f.onnx", *arguments]) == 2
    assert not engine.calls
    assert says in capsys.readouterr().err


def test_activations_may_be_rounded_where_that_is_accepted(engine: Engine) -> None:
    run(["fuse", "m.onnx", "-o", "f.onnx", "--assume", "rounded-activations"])
    assert engine.calls[0]["options"].assume == {"rounded-activations"}
