"""A pass on a GPU waits for nothing: asked of fake tensors on a device "cuda", so that no GPU is needed."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from shared.model.gates import Gates
from shared.model.host_syncs import host_syncs
from shared.model.paged_kv import LayerShape, PagePool
from shared.model.paged_pass import PagedForward, PassTokens
from tests.paged import PAGED, load_family

NUM_TOKENS = 16


@pytest.mark.parametrize("family", PAGED)
def test_no_pass_waits_for_the_device(family: str) -> None:
    loaded = load_family(family)
    gates = Gates(loaded.model, loaded.parts.layers)
    cuda = torch.device("cuda")
    head_dim = getattr(loaded.model.config, "head_dim", None) or 8
    num_heads = getattr(loaded.model.config, "num_key_value_heads", None) or 4
    with FakeTensorMode(allow_non_fake_inputs=True):
        for module in loaded.model.modules():
            for name, tensor in [*module._parameters.items()]:
                if tensor is not None:
                    fake = torch.empty_like(tensor, device=cuda)
                    module._parameters[name] = torch.nn.Parameter(fake, requires_grad=False)
            for name, tensor in [*module._buffers.items()]:
                if tensor is not None:
                    module._buffers[name] = torch.empty_like(tensor, device=cuda)
        shape = LayerShape(num_heads, head_dim, head_dim, torch.float32)
        pool = PagePool([shape] * loaded.num_layers, 4, 128, cuda)
        forward = PagedForward(loaded, gates, pool)
        tokens = PassTokens(NUM_TOKENS, cuda)
        leaving = torch.empty(NUM_TOKENS, loaded.hidden_size, device=cuda)

        def run() -> None:
            leaving.copy_(forward.run(tokens, None, 0, loaded.num_layers))

        with torch.inference_mode():
            assert host_syncs(run) == []
