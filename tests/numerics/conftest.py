import pytest

from planner.workbench import Workbench
from tests.numerics.exported import Model


@pytest.fixture(scope="session")
def llama() -> Model:
    return Model.llama()


@pytest.fixture(scope="session")
def bench(llama: Model) -> Workbench:
    return llama.bench("dp=2,tp=2")
