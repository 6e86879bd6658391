"""A model of any size whose tokens agree early by construction, and the ladder that finds them.

For speed at sizes that nobody trains for a benchmark: what is read and multiplied is what a trained model of the shape would read and
multiply, and how often an exit is right is chosen, not earned. **It says nothing about how often real exits are right.**

- The tokens in use form one cycle: after t comes its successor, as the head's row of the successor is t's embedding. They are as
  many as make the draft vocabulary the wanted share of them.
- Layers before the last exit have random weights, their output projections scaled down so that the embedding stays the largest part.
  From there on, output projections are 0: read and multiplied as any, they add nothing. So the state at that depth is the final
  one, and full model and exit differ only where the exit cannot say the token.
- Each exit's head has the form and rank of a trained one and passes the state on; it draws from the draft vocabulary, which lacks
  the rest of the cycle at random places. So a draft is right with a chance of `share`, drawn anew at each token. The router says
  `share` for every token: it knows no more. Of several exits those before the last are sure only of about half the tokens, picked by a
  random direction of their states, and as good as certain of being wrong about the others, which go on.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from shared.ladder.heads import ExitHead, default_rank
from shared.ladder.ladder import Ladder, LayerExit, ModelIdentity
from shared.ladder.routers import DepthRouter
from shared.model.load import LoadedModel, wrap_model

# Token ids below are left to what tokenizers keep for themselves.
FIRST_TOKEN = 16
# What an exit gives the tokens that it would rather not say.
UNSURE = 0.02
# Of the output projections of layers before the exit.
OUTPUT_SCALE = 0.1


@dataclass(frozen=True)
class Shape:
    """A Llama's sizes. `draft_tokens`: of the draft vocabulary."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_key_heads: int
    vocabulary_size: int
    draft_tokens: int
    context_length: int

    def config(self) -> LlamaConfig:
        return LlamaConfig(
            vocab_size=self.vocabulary_size, hidden_size=self.hidden_size, intermediate_size=self.intermediate_size,
            num_hidden_layers=self.num_layers, num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_key_heads, max_position_embeddings=self.context_length,
            rope_parameters={"rope_type": "default", "rope_theta": 500000.0}, tie_word_embeddings=False, eos_token_id=None, bos_token_id=None,
        )  # fmt: skip


SHAPES = {
    "llama-3.1-8b": Shape(4096, 14336, 32, 32, 8, 128256, 8192, 4096),
    "tiny": Shape(64, 128, 6, 4, 2, 1024, 512, 512),
}


@dataclass(frozen=True)
class Imposed:
    """`cycle` [C] int64: the tokens in use, each followed by the next, the last by the first."""

    loaded: LoadedModel
    ladder: Ladder
    cycle: Tensor

    def prompt(self, start: int, length: int) -> list[int]:
        """`length` tokens of the cycle from its `start`-th on."""
        size = len(self.cycle)
        return [int(self.cycle[(start + offset) % size]) for offset in range(length)]


def impose(
    shape: Shape,
    depths: Sequence[int],
    share: float,
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    accelerate: bool = True,
    seed: int = 0,
) -> Imposed:
    """A model with exits at `depths` (ascending, 1 <= depth < L) that are right at a share of tokens in (0, 1].

    The state at the last of them is the final one.
    """
    assert depths[0] >= 1
    assert depths[-1] < shape.num_layers
    torch.manual_seed(seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = LlamaForCausalLM(shape.config())
    finally:
        torch.set_default_dtype(before)
    size = round(shape.draft_tokens / share)
    assert FIRST_TOKEN + size <= shape.vocabulary_size
    cycle = FIRST_TOKEN + torch.randperm(shape.vocabulary_size - FIRST_TOKEN)[:size]
    with torch.no_grad():
        _shape_weights(model, depths[-1], cycle.to(device))
    loaded = wrap_model(model, model_id="imposed", accelerate=accelerate)
    kept = torch.randperm(size)[: shape.draft_tokens]
    vocabulary = cycle[kept].sort().values
    return Imposed(loaded, _ladder(loaded, depths, share, vocabulary), cycle)


def _shape_weights(model: LlamaForCausalLM, depth: int, cycle: Tensor) -> None:
    embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
    embedding.normal_()
    head.zero_()
    head[cycle.roll(-1)] = embedding[cycle]
    for index, layer in enumerate(model.model.layers):
        for projection in (layer.self_attn.o_proj, layer.mlp.down_proj):
            projection.weight.mul_(OUTPUT_SCALE if index < depth else 0.0)


def _ladder(loaded: LoadedModel, depths: Sequence[int], share: float, vocabulary: Tensor) -> Ladder:
    exits = [_exit(loaded.hidden_size, depth, share) for depth in depths]
    for before in exits[:-1]:
        _leave_half(before.router, share)
    return Ladder(ModelIdentity.of(loaded), exits=tuple(exits), draft_vocabulary=vocabulary)


def _exit(width: int, depth: int, share: float) -> LayerExit:
    """Says what its state says, and `share` of every token."""
    head = ExitHead("gated", width, width, default_rank(width))
    router = DepthRouter(width)
    with torch.no_grad():
        nn.init.zeros_(head.out)
        head.scale.copy_(torch.tensor([[1.0], [0.0]]).expand(2, width))
        nn.init.zeros_(router.output.weight)
        nn.init.zeros_(router.output.bias)
        nn.init.zeros_(router.skip.weight)
        router.shift.fill_(torch.logit(torch.tensor(share), eps=1e-3))
    return LayerExit(depth, head, router, agreement=share)


def _leave_half(router: DepthRouter, share: float) -> None:
    """Log-odds that step from those of UNSURE to those of `share` where a random direction's sign changes: silu(z) - silu(z - 5) is
    0 below and 5 above."""
    low, high = (float(torch.logit(torch.tensor(p), eps=1e-3)) for p in (UNSURE, share))
    step = (high - low) / 5
    with torch.no_grad():
        direction = torch.randn(router.hidden.in_features)
        router.hidden.weight.zero_()
        router.hidden.weight[:2] = 200 * direction / direction.norm()
        router.hidden.bias.zero_()
        router.hidden.bias[1] = -5.0
        router.scalars.weight.zero_()
        router.output.weight[0, :2] = torch.tensor([step, -step])
        router.shift.fill_(low)
