import pytest

from shared.model.loaded import wrap_model
from tests.worker import build_model, build_tokenizer


@pytest.fixture(scope="session")
def loaded():
    return wrap_model(build_model(), build_tokenizer(), model_id="tiny")
