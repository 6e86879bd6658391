"""A paged pass does not wait for the device. Tested on the meta device, where tensors hold no numbers and reading one fails."""

import pytest
import torch

from shared.model.gates import Gates
from shared.model.host_syncs import host_syncs
from shared.model.layer_configs import layer_configs
from shared.model.paged_kv import BlockPool, LayerShape
from shared.model.paged_pass import PagedForward, TokenBuffer
from tests.paged import PAGED, load_family

META = torch.device("meta")
NUM_TOKENS = 16


def _shape(config):
    head_dim = getattr(config, "head_dim", None) or 8
    num_heads = getattr(config, "num_key_value_heads", None) or 4
    return LayerShape(num_heads, head_dim, head_dim, torch.bfloat16)


@pytest.mark.parametrize("family", PAGED)
def test_no_pass_reads_a_number_or_moves_one(family):
    # The dtype of GPUs. In others, experts take another path.
    loaded = load_family(family, torch.bfloat16)
    gates = Gates(loaded.model, loaded.parts.layers)
    loaded.model.to(META)
    pool = BlockPool([_shape(c) for c in layer_configs(loaded.model.config)], 4, 128, META)
    forward = PagedForward(loaded, gates, pool)
    tokens = TokenBuffer(NUM_TOKENS, META)
    with torch.inference_mode():
        leaving = torch.empty(NUM_TOKENS, loaded.hidden_size, dtype=torch.bfloat16, device=META)
        first = host_syncs(lambda: leaving.copy_(forward.run(tokens, None, 0, 2)))
        last = loaded.num_layers
        rest = host_syncs(lambda: leaving.copy_(forward.run(tokens, leaving, 2, last)))
    assert first == rest == []
