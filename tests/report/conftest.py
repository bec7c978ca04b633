from tests.cli.conftest import plain_screen

__all__ = ["plain_screen"]
