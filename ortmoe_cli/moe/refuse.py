"""How identification stops: with a reason, never with a guess."""


class Refused(Exception):
    """A block that must be left alone. `code` names the rule, `nearest` says how close it came."""

    def __init__(self, code: str, message: str, nearest: str = "") -> None:
        super().__init__(f"{code}: {message}")
        self.code, self.message, self.nearest = code, message, nearest
