"""As in the property tests: compiled before the first time limit runs."""

from tests.property.conftest import compiled_before

__all__ = ["compiled_before"]
