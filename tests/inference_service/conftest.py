import pytest

from shared.model.loaded import wrap_model
from shared.registry.factory import open_registry
from tests.worker import build_model, build_tokenizer


@pytest.fixture(scope="session")
def loaded():
    return wrap_model(build_model(), build_tokenizer(), model_id="tiny", accelerate=True)


@pytest.fixture
def registry(tmp_path):
    registry = open_registry(str(tmp_path / "registry"))
    yield registry
    registry.close()
