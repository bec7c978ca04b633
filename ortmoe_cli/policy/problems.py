"""What is wrong with a policy, as data; and the error that lists all of it."""

from dataclasses import dataclass
from pathlib import Path

from ortmoe_cli.errors import OrtmoeError


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong: its code, where in the policy, and why."""

    code: str
    where: str
    message: str

    def __str__(self) -> str:
        return f"{self.where}: {self.message}"


class PolicyError(OrtmoeError):
    """A policy that cannot be used. Names everything that is wrong with it at once."""

    def __init__(self, source: str | Path, problems: tuple[Problem, ...]) -> None:
        super().__init__(f"{source}: " + "; ".join(map(str, problems)))
        self.problems = problems
        self.code = problems[0].code if len(problems) == 1 else None
