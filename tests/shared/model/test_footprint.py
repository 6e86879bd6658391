"""What headers say of a model is what it takes when it is loaded."""

import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from shared.engine.memory import budget
from shared.errors import NotFound
from shared.model.contiguous_runner import ContiguousRunner
from shared.model.footprint import footprint, kv_token_bytes
from shared.model.load import load_model
from shared.model.loaded import wrap_model
from tests.families import FAMILIES, build_family, by_tier
from tests.gguf_files import write_llama
from tests.reasons import raises
from tests.tiers import tiered
from tests.worker import save_model

CPU = torch.device("cpu")
# Norms, and the headers of packed matrices.
MARGIN = 0.05


@pytest.mark.parametrize("family", by_tier(FAMILIES))
def test_keys_and_values_of_a_token_are_those_of_the_cache(family):
    loaded = wrap_model(build_family(family))
    config = loaded.model.config.get_text_config(decoder=True)
    assert kv_token_bytes(config, torch.float32) == budget.kv_token_bytes(ContiguousRunner(loaded))
    assert kv_token_bytes(config, torch.bfloat16) == kv_token_bytes(config, torch.float32) // 2


@pytest.mark.parametrize("tied", tiered([True, False], {False}))
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("kind", tiered([Kind.Q8_0, Kind.Q4_K, Kind.F16], {Kind.Q4_K}))
def test_weights_of_a_file_are_those_that_are_packed(tmp_path, kind, dtype, tied):
    file = write_llama(tmp_path / "tiny.gguf", kind, width=512, inner=1024, tied=tied)
    found = footprint(file, CPU, dtype=dtype, context_length=100)
    loaded = load_model(file, dtype=dtype)
    assert found.weights == pytest.approx(loaded.acceleration.packed_bytes, rel=MARGIN)
    assert found.context_length == 100
    assert found.head_row == 4 * loaded.vocabulary_size
    runner = ContiguousRunner(loaded)
    assert found.kv_token == budget.kv_token_bytes(runner)


@pytest.mark.parametrize("kv_dtype", [None, torch.float16])
def test_a_folder_is_read_by_its_headers(tmp_path, kv_dtype):
    save_model(tmp_path / "model")
    found = footprint(tmp_path / "model", CPU, kv_dtype=kv_dtype)
    loaded = load_model(tmp_path / "model", kv_dtype=kv_dtype)
    assert found.weights == pytest.approx(4 * loaded.model.num_parameters(), rel=MARGIN)
    assert found.kv_token == budget.kv_token_bytes(ContiguousRunner(loaded))


def test_what_is_no_model_is_refused_as_when_it_is_loaded(tmp_path):
    with raises(NotFound, "MODEL_NOT_FOUND"):
        footprint(tmp_path, CPU)
