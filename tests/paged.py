"""Paged runners on a CPU."""

import torch

from shared.model.footprint import kv_token_bytes
from shared.model.loaded import LoadedModel, wrap_model
from shared.model.paged_kv import BLOCK_TOKENS
from shared.model.paged_pass import LayerTransform
from shared.model.paged_runner import PagedRunner
from shared.model.recorder import Recorder
from tests.families import FAMILIES, build_family
from tests.recorders import TracingRecorder

# Falcon does not use transformers' AttentionInterface, and Llama 4 attends in chunks.
NOT_PAGED = {"falcon", "falcon-alibi", "llama4"}
# It compares lengths on the host.
WAITING = {"PhimoeForCausalLM"}
PAGED = sorted(set(FAMILIES) - NOT_PAGED)


def load_family(name: str, dtype: torch.dtype = torch.float32) -> LoadedModel:
    model = build_family(name).to(dtype)
    # With a padding token, transformers would look for padding in GPT-2's input on the host.
    # Real GPT-2 models have none.
    model.config.pad_token_id = None
    return wrap_model(model)


def block_bytes(loaded: LoadedModel) -> int:
    """Of a block's keys and values in all layers."""
    config = loaded.model.config.get_text_config(decoder=True)
    return BLOCK_TOKENS * kv_token_bytes(config, loaded.model.dtype)


def make_runner(
    loaded: LoadedModel,
    kv_budget_bytes: int = 1 << 20,
    *,
    recorder: Recorder | None = None,
    transform: LayerTransform | None = None,
) -> PagedRunner:
    recorder = recorder or TracingRecorder()
    runner = PagedRunner(loaded, kv_budget_bytes=kv_budget_bytes, recorder=recorder, transform=transform)
    assert runner.records == (recorder.records and loaded.architecture not in WAITING)
    return runner
