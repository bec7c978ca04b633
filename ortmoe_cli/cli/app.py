"""The command `ortmoe`: its subcommands, and how every ending becomes one line and an exit code."""

import os
import signal
import sys
import traceback
import warnings
from collections.abc import Sequence
from contextlib import redirect_stdout
from typing import Annotated

import typer

from ortmoe_cli.cli import policy, screen
from ortmoe_cli.cli.audit import audit
from ortmoe_cli.cli.bench import bench
from ortmoe_cli.cli.check import check
from ortmoe_cli.cli.doctor import doctor
from ortmoe_cli.cli.fuse import fuse
from ortmoe_cli.cli.options import Debug
from ortmoe_cli.cli.rule import rule
from ortmoe_cli.errors import OrtmoeError

_USAGE = 2
_INTERRUPTED = 130
_SIGNALLED = 128

app = typer.Typer(
    name="ortmoe",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(audit)
app.command()(fuse)
app.command()(check)
app.add_typer(policy.app)
app.command()(bench)
app.command()(doctor)
app.command()(rule)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"ortmoe {version('ortmoe')}")
        raise typer.Exit


@app.callback(
    invoke_without_command=True,
    epilog="Exit codes: 0 clean or all fused, 1 findings or refusals, 2 usage or unreadable input, 3 results differ.",
)
def ortmoe(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Find the Mixture-of-Experts blocks and the grouped-query attention that an exporter unrolled, prove what each
    computes, and fuse it into one operator of ONNX Runtime."""
    if context.invoked_subcommand is None:
        with redirect_stdout(sys.stderr):
            context.get_help()  # which prints it
        raise typer.Exit(_USAGE)


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code. Failures become one line on stderr, a traceback if asked for."""
    debug = "--debug" in arguments
    try:
        code = int(app(args=list(arguments), prog_name="ortmoe", standalone_mode=False) or 0)
    except typer.TyperException as error:
        screen.complain(_usage(error))
        return _USAGE
    except Exception as error:
        if debug:
            traceback.print_exception(error)
        screen.complain(_failure(error, debug))
        return error.exit_code if isinstance(error, OrtmoeError) else _USAGE
    if code == _INTERRUPTED:
        screen.complain("interrupted")
    return code


def _failure(error: Exception, debug: bool) -> str:
    if isinstance(error, OrtmoeError):
        return f"{error.message} [{error.code}]" if error.code else error.message
    hint = "" if debug else " (use --debug to see the traceback)"
    return f"unexpected {type(error).__name__}: {error}{hint}"


def _usage(error: typer.TyperException) -> str:
    """A mistake on the command line, and where the right use is described."""
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "ortmoe"
    message = error.format_message().replace("Value error, ", "").rstrip(".")
    return f"{message}; see '{command} --help'"


def main() -> None:
    """Entry point of the installed command."""
    for name in ("SIGTERM", "SIGHUP"):  # so that unfinished output is cleaned up
        if hasattr(signal, name):
            number = getattr(signal, name)
            signal.signal(number, lambda *_, number=number: sys.exit(_SIGNALLED + number))
    if "--debug" not in sys.argv:
        warnings.simplefilter("ignore")  # notes of libraries to programmers
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115  started with a closed stream
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that lacks '→' shows '?' instead of failing
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
