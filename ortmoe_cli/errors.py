"""Errors that a person can act on. The command line prints the message alone and exits with `exit_code`."""


class OrtmoeError(Exception):
    """Base of every expected failure: one line that says what is wrong, where, and what to do."""

    exit_code = 2

    def __init__(self, message: str, code: str | None = None) -> None:
        """`code` is one that `ortmoe rule` explains."""
        super().__init__(message)
        self.message, self.code = message, code


class ModelError(OrtmoeError):
    """The input cannot be read as a model, or its graph makes no sense."""


class OutputError(OrtmoeError):
    """The output cannot be written; whatever stood there before still does."""


class ParityError(OrtmoeError):
    """The fused model gives other results than the original; nothing was written."""

    exit_code = 3
