"""What a code means: the text that `ortmoe rule CODE` prints, kept as data beside its family."""

from dataclasses import dataclass, fields
from inspect import cleandoc


@dataclass(frozen=True)
class Rule:
    """One code, explained to the person who has to deploy the model.

    Prose fields hold paragraphs separated by a blank line and `code` in backticks; `example` is preformatted.
    """

    code: str
    title: str
    what: str
    why: str
    example: str
    action: str
    safety: str

    def __post_init__(self) -> None:
        for field in fields(self):
            text = cleandoc(getattr(self, field.name))
            if field.name != "example":
                text = "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))
            object.__setattr__(self, field.name, text)

    @property
    def family(self) -> str:
        """The letters of the code: the area that it belongs to."""
        return self.code.rstrip("0123456789")

    @property
    def refusal(self) -> bool:
        """Codes 1xx say that something was left alone, 0xx that it was recognised, 2xx what is wrong with a node that
        was there."""
        return self.code.removeprefix(self.family).startswith("1")
