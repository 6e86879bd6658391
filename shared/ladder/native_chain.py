"""An exit head at depth 0, its draft rows and its confidence head as the native op of whole chains. CPU only."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Self

import gguf
import torch
from torch import Tensor

from shared import ops
from shared.ladder.confidence_head import HIGHEST, LOWEST, ConfidenceHead
from shared.ladder.draws import confidence_weights, is_supported, kernel_weight
from shared.ladder.exit_head import NUM_STATES, ExitHead
from shared.model.contiguous_runner import ContiguousRunner
from shared.model.runner import Runner
from shared.model.weights.lazy import lazy
from shared.ops.chains import Chains, ChainStart, ChainWeights, ConfidenceWeights, draft_chains

FORMAT = "Q8_0"
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class NativeChain:
    """An exit that drafts whole chains in one call. Holds its matrices in the format that FORMAT names.

    `rows` [Vd, W] and `bias` [Vd] are the LM head's for `vocabulary` [Vd] int64; `embedding` is from `embedding_rows`.
    """

    reads_states = False

    def __init__(
        self,
        head: ExitHead,
        confidence: ConfidenceHead,
        rows: Tensor,
        bias: Tensor | None,
        vocabulary: Tensor,
        embedding: Tensor,
    ) -> None:
        self._hidden_size = head.hidden_size
        fuse, further = head.steps
        parts = _confidence_parts(confidence)
        self._weights = ChainWeights(
            fuse=packed_small(fuse),
            next=packed_small(further),
            gate=packed_small(head.gate),
            up=packed_small(head.up),
            down=packed_small(head.down),
            rows=packed_small(rows),
            hidden=parts.hidden,
            embedding=embedding,
            vocabulary=vocabulary,
            norm=head.norm.detach(),
            gain=head.gain.detach(),
            bias=bias,
            confidence=parts,
        )

    def with_confidence(self, confidence: ConfidenceHead) -> Self:
        """As `ExitProposer.with_confidence`."""
        other, parts = copy.copy(self), _confidence_parts(confidence)
        other._weights = replace(self._weights, hidden=parts.hidden, confidence=parts)
        return other

    def held(self) -> list[Tensor | None]:
        """As `ExitProposer.held`. The embedding is the model's."""
        return self._weights.held()

    def propose(self, starts: Sequence[ChainStart]) -> Chains:
        """As `ExitProposer.propose`, of whole chains."""
        # The op takes the chains first that its head has seen nothing of.
        new, begun, states, outputs = list[int](), list[int](), list[Tensor](), list[Tensor]()
        for number, start in enumerate(starts):
            assert start.begin is not None
            (begun if start.has_begun else new).append(number)
            (outputs if start.has_begun else states).append(start.begin)
        chains = draft_chains(
            torch.stack(states).float() if states else torch.empty(0, NUM_STATES, self._hidden_size),
            torch.stack(outputs) if outputs else torch.empty(0, self._hidden_size),
            [starts[number] for number in new + begun],
            self._weights,
            LOWEST,
            HIGHEST,
            max(start.room for start in starts),
        )
        if new and begun:
            back = torch.tensor(new + begun).argsort()
            chains = Chains(*(part[back] for part in chains))
        return chains._replace(probabilities=chains.probabilities.double())


def embedding_rows(runner: Runner, draft_vocabulary_size: int) -> Tensor | None:
    """The model's embedding as the op takes it. None if the op does not run on this device, or states at depth 0 are
    not its rows."""
    device = runner.loaded.device
    if device.type != "cpu" or not is_supported(device, draft_vocabulary_size):
        return None
    if not isinstance(runner, ContiguousRunner) or not runner.embedding_is_direct:
        return None
    weight = runner.loaded.parts.embedding.get_parameter("weight")
    stored = lazy(weight)
    return weight.detach().contiguous() if stored is None else stored.pack()


def _confidence_parts(confidence: ConfidenceHead) -> ConfidenceWeights:
    """With its matrix as the op reads it, and not as other kernels do."""
    return replace(confidence_weights(confidence), hidden=packed_small(confidence.hidden.weight))


def packed_small(weight: Tensor) -> Tensor:
    """A matrix in FORMAT; in 16 bits if its inputs do not divide into blocks, or in float32 if 16 bits cannot hold a
    number."""
    block, _ = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[FORMAT]]
    if weight.shape[1] % block:
        return ops.pack_linear(kernel_weight(weight))
    return packed_as(weight.detach(), FORMAT)


def packed_as(weight: Tensor, form: str) -> Tensor:
    """A matrix [N, K], packed in a format by its name in GGUF. K must divide into the format's blocks."""
    if form in DTYPES:
        return ops.pack_linear(weight.to(DTYPES[form]))
    kind = gguf.GGMLQuantizationType[form]
    blocks = gguf.quants.quantize(weight.float().numpy(), kind)
    return ops.pack_blocks(torch.from_numpy(blocks), form, weight.shape[1])
