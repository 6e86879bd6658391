"""Lets an engine decode for `model.generate(...)` of transformers, and so for `pipeline(...)`.

transformers' `generate` takes a decoding loop as `custom_generate`: it prepares prompt, options, logits processors and
stopping criteria and then calls the loop. `attach` passes the loop below. transformers 5.17 to 5.24 does not hand the
streamer, the tokenizer and the assistant model to such a loop, so `Attached` takes them from the call itself. See
docs/decisions/001.
"""

import copy
import inspect
import queue
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin
from transformers.generation.stopping_criteria import StoppingCriteriaList, StopStringCriteria
from transformers.generation.utils import GenerateDecoderOnlyOutput

from neap_engine.hugging_face.options import (
    CRITERIA_OF_ONE_SEQUENCE,
    check_cache,
    check_config,
    eos_token_ids,
    prompts_of,
    sampling_of,
    unsupported,
    with_seeds,
)
from shared.engine.engine import Engine
from shared.engine.memory.budget import MAX_RUNNING
from shared.engine.request.handle import EngineEvent, GenerationHandle
from shared.engine.request.request import GeneratedToken, GenerationRequest, StoppingParams, TokenChunk
from shared.errors import Exhausted, NeapError, PreconditionFailed
from shared.ladder.policy import DepthPolicy
from shared.model.cache_argument import CACHE_ARGUMENTS

SIGNATURE = inspect.signature(GenerationMixin.generate)
# Arguments of `generate` that never reach a loop passed as `custom_generate`, that bypass it, or that reach it under
# another name.
REFUSED = ("assistant_model", "assistant_tokenizer", "custom_generate", "cache_params", *CACHE_ARGUMENTS)  # fmt: skip


class Attached:
    """A model whose `generate` decodes with an engine, until `detach`. A context manager, which detaches.

    `last_stats`: where the tokens of the last finished call left the model; None before the first one. Calls from
    several threads at once are safe; each sets `last_stats` when it ends.
    """

    def __init__(self, engine: Engine, policy: DepthPolicy) -> None:
        self.last_stats: ExitStats | None = None
        self._engine = engine
        self._policy = policy
        self._model = engine.loaded.model
        if "generate" in vars(self._model):
            raise PreconditionFailed(
                "the model's generate has been replaced already; call detach first", reason="ALREADY_ATTACHED"
            )
        # transformers itself replaces `generate` in this way when a repository brings a decoding method of its own.
        self._plain: Callable[..., Any] = cast(Any, self._model).generate
        vars(self._model)["generate"] = self._generate

    def detach(self) -> None:
        """Gives the model its own `generate` back. Idempotent."""
        vars(self._model).pop("generate", None)

    def __enter__(self) -> "Attached":
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        call = SIGNATURE.bind(self._model, *args, **kwargs).arguments
        del call["self"]
        extra = dict(call.pop("kwargs", {}))
        for name in REFUSED:
            if call.get(name) is not None or extra.get(name) is not None:
                raise unsupported(name)
        if call.get("synced_gpus"):
            raise unsupported("synced_gpus", "an engine runs on one device")
        check_cache(extra.get("cache_implementation"))
        policy = _policy(extra.pop("policy", self._policy))
        streamer = call.get("streamer")
        _move_stop_strings(call, extra)

        def loop(model: Any, input_ids: Tensor, **prepared: Any) -> Any:
            return self._decode(input_ids, policy, streamer, **prepared)

        return self._plain(**call, **extra, custom_generate=loop)

    def _decode(
        self,
        input_ids: Tensor,
        policy: DepthPolicy,
        streamer: Any,
        *,
        logits_processor: Any,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> Any:
        """The decoding loop. input_ids [B, S] -> [B, S + N], of which N is the length of the longest answer."""
        model_kwargs.pop("streamer", None)  # later versions of transformers may pass it
        check_config(generation_config, model_kwargs)
        num_rows, num_given = input_ids.shape
        eos = eos_token_ids(generation_config)
        pad = generation_config.pad_token_id
        if pad is None:
            pad = eos[0] if eos else None
        if num_rows > 1:
            _check_several(stopping_criteria, streamer, pad)
        prompts = prompts_of(input_ids, model_kwargs.get("attention_mask"), model_kwargs.get("position_ids"))
        stopping = StoppingParams(
            max_tokens=generation_config.max_length - num_given,
            # The stopping criteria end an answer at other tokens than the model's own.
            ignore_eos=not self._engine.loaded.eos_token_ids <= set(eos),
        )
        fields = sampling_of(
            logits_processor,
            do_sample=bool(generation_config.do_sample),
            num_given=num_given,
            num_padding=[num_given - len(prompt) for prompt in prompts],
            end_token_ids=stopping.end_token_ids(self._engine.loaded.eos_token_ids),
        )
        requests = [
            GenerationRequest(prompt, sampling, stopping, policy)
            for prompt, sampling in zip(prompts, with_seeds(fields, num_rows), strict=True)
        ]
        sequences = input_ids.new_full((num_rows, generation_config.max_length), pad or 0)
        sequences[:, :num_given] = input_ids
        lengths = [num_given] * num_rows
        tokens: list[GeneratedToken] = []

        def on_token(row: int, token: GeneratedToken) -> bool:
            tokens.append(token)
            sequences[row, lengths[row]] = token.token_id
            lengths[row] += 1
            if streamer is not None:
                streamer.put(torch.tensor([token.token_id]))
            ended: Any = stopping_criteria(sequences[row : row + 1, : lengths[row]], None)
            return bool(torch.as_tensor(ended).all())

        decode_rows(self._engine, requests, on_token)
        self.last_stats = ExitStats.of(tokens, self._engine.loaded.num_layers)
        if streamer is not None:
            streamer.end()
        sequences = sequences[:, : max(lengths)]
        if generation_config.return_dict_in_generate:
            return GenerateDecoderOnlyOutput(sequences=sequences)  # type: ignore[arg-type]
        return sequences


def attach(engine: Engine, policy: DepthPolicy | str = "exact") -> Attached:
    """Makes `engine.loaded.model.generate(...)`, and every pipeline on that model, decode with `engine`.

    Calls keep their shape: batches padded on the left, `generation_config`, sampling options, stopping criteria,
    streamers, `num_return_sequences`. One keyword is new: `policy`, for a single call. Greedy answers under `full` and
    `exact` are those of transformers. Sampled answers follow the same distribution, but their random numbers are
    neap's: they are seeded from torch's global generator. What an engine cannot do, such as beam search, raises
    `InvalidInput` (reason UNSUPPORTED_OPTION, `metadata["option"]`).

    Raises `PreconditionFailed` (ALREADY_ATTACHED), and in calls what `Engine.submit` raises.
    """
    return Attached(engine, _policy(policy))


def _policy(policy: DepthPolicy | str) -> DepthPolicy:
    return DepthPolicy(policy) if isinstance(policy, str) else policy  # type: ignore[arg-type]


def _move_stop_strings(call: dict[str, Any], extra: dict[str, Any]) -> None:
    """Makes a stopping criterion of the call's stop strings, as transformers would if it had the tokenizer.
    Changes both arguments."""
    tokenizer, config = extra.pop("tokenizer", None), call.get("generation_config")
    strings = extra.get("stop_strings") or (config.stop_strings if config is not None else None)
    if tokenizer is None or not strings:
        return
    extra.pop("stop_strings", None)
    if config is not None:
        call["generation_config"] = config = copy.deepcopy(config)
        config.stop_strings = None
    criterion = StopStringCriteria(tokenizer=tokenizer, stop_strings=strings)
    call["stopping_criteria"] = StoppingCriteriaList([*(call.get("stopping_criteria") or ()), criterion])


def _check_several(criteria: StoppingCriteriaList, streamer: Any, pad: int | None) -> None:
    """Raises `InvalidInput` (UNSUPPORTED_OPTION) for what needs all sequences of a batch in step with each other."""
    if streamer is not None:
        raise unsupported("streamer", "it takes one sequence, and there are several")
    if pad is None:
        raise unsupported("pad_token_id", "several sequences need one, and there is none")
    for criterion in criteria:
        if type(criterion) not in CRITERIA_OF_ONE_SEQUENCE:
            raise unsupported(
                type(criterion).__name__, "it is asked about one sequence at a time, and there are several"
            )  # fmt: skip


# Called with a row and its next token. Returns whether that token ends the row.
OnToken = Callable[[int, GeneratedToken], bool]


def decode_rows(engine: Engine, requests: Sequence[GenerationRequest], on_token: OnToken) -> None:
    """Generates all requests, at most MAX_RUNNING at a time.
    Calls `on_token` in the calling thread, in each row's order.

    A row ends when `on_token` returns true or when its request ends. An error or an interrupt ends all rows. Raises as
    `Engine.submit`, but waits for rows of its own if the engine's queue is full.
    """
    events: queue.SimpleQueue[tuple[int, EngineEvent]] = queue.SimpleQueue()
    running: dict[int, GenerationHandle] = {}
    waiting = deque(enumerate(requests))

    def deliver(row: int, event: EngineEvent) -> None:
        events.put((row, event))

    def submit_waiting() -> None:
        while waiting and len(running) < MAX_RUNNING:
            row, request = waiting[0]
            try:
                running[row] = engine.submit(request, on_event=partial(deliver, row))
            except Exhausted as error:
                if running and error.retry_after_s is not None:
                    return
                raise
            waiting.popleft()

    try:
        submit_waiting()
        while running:
            row, event = events.get()
            if row not in running:  # it has ended; its last events were on their way
                continue
            if isinstance(event, NeapError):
                raise event
            if isinstance(event, TokenChunk):
                if not any(on_token(row, token) for token in event.tokens):
                    continue
                running[row].cancel()
            del running[row]
            submit_waiting()
    finally:
        for handle in running.values():
            handle.cancel()


@dataclass(frozen=True)
class ExitStats:
    """Counts of all answers of one call. `exits_per_layer` maps a depth, the number of layers that ran before the token
    left, to tokens.

    Under policy exact, a token that left early was a draft that the full model accepted.
    """

    total_tokens: int
    exits_per_layer: Mapping[int, int]

    @classmethod
    def of(cls, tokens: Iterable[GeneratedToken], num_layers: int) -> "ExitStats":
        """Counts `tokens` of a model with `num_layers` layers."""
        depths = Counter(token.exit_depth for token in tokens)
        exits = {depth: depths[depth] for depth in sorted(depths) if depth < num_layers}
        return cls(depths.total(), exits)

    @property
    def total_exited(self) -> int:
        return sum(self.exits_per_layer.values())

    @property
    def remaining_tokens(self) -> int:
        """Tokens that the full model chose."""
        return self.total_tokens - self.total_exited

    @property
    def exit_rate(self) -> float:
        """Share of the tokens that left early, in [0, 1]."""
        return self.total_exited / max(self.total_tokens, 1)

    def summary(self) -> str:
        """A summary of a few lines for people to read."""
        lines = [f"{self.total_tokens} tokens, {self.total_exited} left early ({self.exit_rate:.1%})"]
        lines += [
            f"  after {depth} layers: {count} tokens ({count / self.total_tokens:.1%})"
            for depth, count in self.exits_per_layer.items()
        ]
        return "\n".join([*lines, f"  after all layers: {self.remaining_tokens} tokens"])
