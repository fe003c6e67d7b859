"""As in the property tests: compiled before the first time limit runs."""

from tests.property.conftest import compiled

__all__ = ["compiled"]
