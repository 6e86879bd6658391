"""A tiny Llama whose `generate` decodes with an engine, and the same model as transformers runs it."""

from collections.abc import Iterator

import pytest
import transformers as hf

from neap_engine.hugging_face.attach import Attached, attach
from shared.engine.engine import Engine
from shared.model.loaded import LoadedModel, wrap_model
from tests.fixed_costs import fixed_cost_engine
from tests.random_ladder import random_ladder
from tests.worker import build_model, build_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> hf.PreTrainedTokenizerFast:
    tokenizer = build_tokenizer()
    tokenizer.padding_side, tokenizer.pad_token = "left", tokenizer.eos_token
    return tokenizer


@pytest.fixture(scope="module")
def plain() -> hf.PreTrainedModel:
    """The model without neap."""
    return build_model()


@pytest.fixture(scope="module")
def loaded(tokenizer: hf.PreTrainedTokenizerFast) -> LoadedModel:
    return wrap_model(build_model(), tokenizer, accelerate=True)


@pytest.fixture(scope="module")
def engine(loaded: LoadedModel) -> Iterator[Engine]:
    with fixed_cost_engine(loaded, random_ladder(loaded, 0, agreement=0.9)) as engine:
        yield engine


@pytest.fixture
def attached(engine: Engine) -> Iterator[Attached]:
    with attach(engine) as attached:
        yield attached


@pytest.fixture
def model(attached: Attached, loaded: LoadedModel) -> hf.PreTrainedModel:
    """The model whose `generate` decodes with the engine."""
    return loaded.model
