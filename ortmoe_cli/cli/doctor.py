def doctor() -> None:
    "x"
