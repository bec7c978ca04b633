"""Why a block that looks like attention is left alone."""


class Refused(Exception):
    """The block cannot be replaced. `nearest` says how close it came."""

    def __init__(self, code: str, message: str, nearest: str = "") -> None:
        super().__init__(f"{code}: {message}")
        self.code, self.message, self.nearest = code, message, nearest
