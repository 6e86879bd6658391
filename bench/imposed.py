"""Builds a model of any size whose exits agree with the full model at a chosen rate, and the ladder for it.

For measuring speed at sizes that are too large to train a ladder for. The model reads and multiplies the same matrices
as a trained model of its shape, but the rate at which exits are right is set by construction. **It says nothing about
how often real exits are right.**

- The tokens in use form one cycle: the LM head's row of t's successor is t's embedding, so the model answers t with it.
  The draft vocabulary holds the wanted share of it.
- Layers before the last exit have random weights. Their output projections are scaled down so that the embedding
  dominates the state. In deeper layers the output projections are 0: they are read and multiplied as usual but add
  nothing. So the state at the last exit is the final state, and exit and full model differ only where the next token is
  not in the draft vocabulary.
- Each exit's head has the size of a trained one and returns the state that the newest token enters it with. The draft
  vocabulary is a random part of the cycle, so a draft is right with probability `share`, independently at each token.
  The last exit's confidence head gives `share` for every token. Confidence heads of earlier exits give `share` for
  about half of the tokens, selected by the sign of a random direction of the state, and nearly 0 for the others, which
  go on to the next exit.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from shared.ladder.confidence_head import ConfidenceHead
from shared.ladder.exit_head import NUM_STATES, ExitHead, default_mlp_width
from shared.ladder.exits import LayerExit
from shared.ladder.ladder import Ladder, ModelIdentity
from shared.model.loaded import LoadedModel, wrap_model

# Lower token ids are not used: tokenizers reserve them for special tokens.
FIRST_TOKEN = 16
# Probability of an earlier exit for tokens that are to go on to the next one.
UNSURE = 0.02
# Factor of the output projections in layers before the last exit.
OUTPUT_SCALE = 0.1


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama model. `draft_tokens`: size of the draft vocabulary."""

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
            rope_parameters={"rope_type": "default", "rope_theta": 500000.0}, tie_word_embeddings=False,
            eos_token_id=None, bos_token_id=None, )  # fmt: skip


SHAPES = {
    "llama-3.1-8b": Shape(4096, 14336, 32, 32, 8, 128256, 8192, 4096),
    "qwen2.5-1.5b": Shape(1536, 8960, 28, 12, 2, 151936, 8192, 4096),
    "smollm2-135m": Shape(576, 1536, 30, 9, 3, 49152, 4587, 2048),
    "tiny": Shape(64, 128, 6, 4, 2, 1024, 512, 512),
}


@dataclass(frozen=True)
class Imposed:
    """A built model and its ladder. `cycle` [C] int64: the tokens in use; each is followed by the next, and the last by
    the first."""

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
) -> Imposed:
    """A model with exits at `depths` (ascending, 0 <= depth < L) that are right on a `share` in (0, 1] of the tokens.

    The state at the last exit is the final state.
    """
    assert depths[0] >= 0
    assert depths[-1] < shape.num_layers
    torch.manual_seed(0)
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
    for earlier in exits[:-1]:
        _be_sure_of_half(earlier.confidence, share)
    return Ladder(ModelIdentity.of(loaded), exits=tuple(exits), draft_vocabulary=vocabulary)


def _exit(width: int, depth: int, share: float) -> LayerExit:
    """An exit whose head returns the entering state and whose confidence head gives `share` for every token."""
    head = ExitHead(width, default_mlp_width(width))
    confidence = ConfidenceHead(width)
    with torch.no_grad():
        nn.init.zeros_(head.down)
        nothing = torch.zeros(width, NUM_STATES * width)
        head.fuse.copy_(torch.cat([nothing, torch.eye(width), nothing[:, :width], torch.eye(width)], 1))
        nn.init.ones_(head.gain)
        nn.init.zeros_(confidence.output.weight)
        nn.init.zeros_(confidence.output.bias)
        nn.init.zeros_(confidence.skip.weight)
        confidence.shift.fill_(torch.logit(torch.tensor(share), eps=1e-3))
    return LayerExit(depth, head, confidence, agreement=share)


def _be_sure_of_half(confidence: ConfidenceHead, share: float) -> None:
    """Makes the confidence head give `share` on one side of a random hyperplane of the states and UNSURE on the other.

    The log-odds follow the step silu(z) - silu(z - 5), which is 0 for z far below 0 and 5 far above. z is the state's
    component along the hyperplane's normal, times 200, so that the step is steep.
    """
    low, high = (float(torch.logit(torch.tensor(p), eps=1e-3)) for p in (UNSURE, share))
    step = (high - low) / 5
    with torch.no_grad():
        direction = torch.randn(confidence.hidden.in_features)
        confidence.hidden.weight.zero_()
        confidence.hidden.weight[:2] = 200 * direction / direction.norm()
        confidence.hidden.bias.zero_()
        confidence.hidden.bias[1] = -5.0
        confidence.scalars.weight.zero_()
        confidence.output.weight[0, :2] = torch.tensor([step, -step])
        confidence.shift.fill_(low)
