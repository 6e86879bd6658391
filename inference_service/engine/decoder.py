"""One step of one sequence: draft shallow, settle deep, verify."""

import time

import torch
from torch import Tensor

from inference_service.engine.chain import Chain
from inference_service.engine.drafting import Drafter
from inference_service.engine.planner import Reliability
from inference_service.engine.request import GeneratedToken, GenerationRequest, TokenChunk
from inference_service.engine.sequence import Sequence
from shared.ladder.ladder import BoundLadder
from shared.model.runner import DepthRunner
from shared.model.sampling import choose

# Prompt tokens per step, so that a long prompt can be cancelled and does not keep others waiting for long.
PREFILL_TOKENS = 256
DEFAULT_MAX_TOKENS = 256
FULL = "full"


class Decoder:
    """Steps sequences of one model. One thread."""

    def __init__(self, runner: DepthRunner) -> None:
        self.runner = runner

    def start(
        self, request: GenerationRequest, ladder: BoundLadder | None, served: Reliability
    ) -> Sequence:
        """A new sequence; nothing runs yet. The request must have been checked against the model.

        `served`: how the ladder's drafts fared in requests like this one.
        """
        loaded = self.runner.loaded
        room = loaded.context_length - len(request.prompt_ids)
        max_tokens = min(request.stopping.max_tokens or DEFAULT_MAX_TOKENS, room)
        cache = self.runner.new_cache(len(request.prompt_ids) + max_tokens)
        return Sequence(request, loaded, ladder, cache, max_tokens, served)

    def step(self, sequence: Sequence, drafter: Drafter) -> list[TokenChunk]:
        """A chunk of the prompt, or one chain. Returns what became final."""
        if sequence.started_s is None:
            sequence.started_s = time.monotonic()
        if sequence.num_generated == 0:
            return self._prefill(sequence)
        layers_before, token_layers_before = self.runner.counters.snapshot()
        chunks = self._draft_and_settle(sequence, drafter)
        layers, token_layers = self.runner.counters.snapshot()
        sequence.num_layer_executions += layers - layers_before
        sequence.num_token_layers += token_layers - token_layers_before
        return chunks

    def _prefill(self, sequence: Sequence) -> list[TokenChunk]:
        start = sequence.num_settled
        ids = list(sequence.request.prompt_ids[start : start + PREFILL_TOKENS])
        states = self.runner.run(
            torch.tensor([ids], device=self.runner.loaded.device),
            sequence.cache,
            first=0,
            last=self.runner.num_layers,
            base=start,
        )
        sequence.num_settled += len(ids)
        sequence.deep_state = states[0, -1]
        if sequence.num_settled < len(sequence.request.prompt_ids):
            return []
        logits = self.runner.logits(sequence.deep_state[None])
        token = choose(logits[0], sequence.request.sampling, sequence.tokens)
        return sequence.emit([self._full_token(sequence, logits[0], token)])

    def _draft_and_settle(self, sequence: Sequence, drafter: Drafter) -> list[TokenChunk]:
        chain = drafter.build(sequence)
        final = chain.drafts[: chain.num_final]
        chunks = sequence.emit([GeneratedToken(d.token, d.depth, d.rung) for d in final])
        sequence.num_drafted += len(chain.drafts)
        sequence.num_accepted += len(final)
        if sequence.is_finished:
            return chunks
        states = chain.settle(self.runner)
        sequence.num_deep_passes += 1
        confirmed = self._verify(sequence, chain, states)
        num_confirmed = len(confirmed) - 1
        sequence.num_accepted += num_confirmed
        sequence.reliability.record(chain.drafts[chain.num_final :], num_confirmed)
        # Everything but the last token chosen has now been through every layer; rejected drafts are overwritten later.
        num_through = 1 + chain.num_final + num_confirmed
        sequence.num_settled = chain.base + num_through
        sequence.deep_state = states[num_through - 1]
        return chunks + sequence.emit(confirmed)

    def _verify(self, sequence: Sequence, chain: Chain, states: Tensor) -> list[GeneratedToken]:
        """The drafts that the full model would have chosen too, and the token it chooses after them.

        A draft is tested by choosing as the full model would: see `shared.model.sampling`.
        """
        logits = self.runner.logits(states[chain.num_final :])
        drafts = chain.drafts[chain.num_final :]
        sampling = sequence.request.sampling
        simple = sampling.is_greedy and sampling.repetition_penalty == 1.0
        greedy = logits.argmax(-1).tolist() if simple else []
        context = list(sequence.tokens) if not simple else []
        confirmed: list[GeneratedToken] = []
        for index, row in enumerate(logits):
            token = greedy[index] if simple else choose(row, sampling, context)
            if index == len(drafts) or token != drafts[index].token:
                confirmed.append(self._full_token(sequence, row, token))
                break
            draft = drafts[index]
            confirmed.append(
                self._token(sequence, row, token, exit_depth=draft.depth, rung=draft.rung)
            )
            context.append(token)
        return confirmed

    def _full_token(self, sequence: Sequence, logits: Tensor, token: int) -> GeneratedToken:
        return self._token(sequence, logits, token, exit_depth=self.runner.num_layers, rung=FULL)

    def _token(
        self, sequence: Sequence, logits: Tensor, token: int, *, exit_depth: int, rung: str
    ) -> GeneratedToken:
        """`logits` [V] are the full model's at this position."""
        count = sequence.request.logprobs
        if count is None:
            return GeneratedToken(token, exit_depth, rung)
        logprobs = logits.log_softmax(-1)
        top = logprobs.topk(count) if count else None
        alternatives = (
            tuple(zip(top.indices.tolist(), top.values.tolist(), strict=True)) if top else ()
        )
        return GeneratedToken(token, exit_depth, rung, float(logprobs[token]), alternatives)
