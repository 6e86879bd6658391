"""A paged pass does not wait for the device. Tested on the meta device, where tensors hold no numbers and reading one
fails."""

import pytest
import torch

from shared.model.gates import Gates
from shared.model.paged_kv import BlockPool, LayerShape
from shared.model.paged_pass import PagedForward, TokenBuffer
from shared.model.parts import layer_configs
from shared.model.recorder import host_syncs
from shared.model.regimes import find_regimes
from tests.families import by_tier
from tests.paged import PAGED, load_family

META = torch.device("meta")
NUM_TOKENS = 16


def _shape(config):
    head_dim = getattr(config, "head_dim", None) or 8
    num_heads = getattr(config, "num_key_value_heads", None) or 4
    return LayerShape(num_heads, head_dim, head_dim, torch.bfloat16)


# Transformers' own code for longrope compares the largest position of a pass on the host, so such passes are not
# recorded.
@pytest.mark.parametrize("family", by_tier(name for name in PAGED if not name.endswith("-longrope")))
def test_no_pass_reads_a_number_or_moves_one(family):
    # The dtype of GPUs. In others, experts take another path.
    loaded = load_family(family, torch.bfloat16)
    gates = Gates(loaded.model, loaded.parts.layers)
    regimes = find_regimes(loaded.model, loaded.context_length)
    loaded.model.to(META)
    pool = BlockPool([_shape(c) for c in layer_configs(loaded.model.config)], 4, 128, META)
    forward = PagedForward(loaded, gates, pool)
    tokens = TokenBuffer(NUM_TOKENS, META)
    with torch.inference_mode():
        leaving = torch.empty(NUM_TOKENS, loaded.hidden_size, dtype=torch.bfloat16, device=META)
        last = loaded.num_layers

        def run(entering: torch.Tensor | None, begin: int, end: int) -> None:
            leaving.copy_(forward.run(tokens, entering, begin, end, regimes=regimes))

        first = host_syncs(lambda: run(None, 0, 2))
        rest = host_syncs(lambda: run(leaving, 2, last))
    assert first == rest == []
