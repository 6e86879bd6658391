"""Builds OpenAI's response objects from the events of the calls."""

import time
from collections.abc import Sequence
from typing import Any

from neap_client.inference.v1 import inference_pb2 as pb

from neap_engine.gateway.collected import Collected, Piece, as_event, as_json
from neap_engine.gateway.merging import EarlyStream
from neap_engine.gateway.requests import RequestedGeneration

FINISH_REASONS = {pb.FINISH_REASON_LENGTH: "length"}


class Choice:
    """One choice: what its events have brought so far. The answer itself is kept only if `keeps` is set.
    `stream` brings its events."""

    def __init__(self, index: int, *, is_chat: bool, keeps: bool, stream: EarlyStream) -> None:
        self.index = index
        self._stream = stream
        self.finished: pb.Finished | None = None
        self.num_tokens = 0
        self._has_called = False
        self._started: pb.Started | None = None
        self._is_chat = is_chat
        self._kept = Collected() if keeps else None
        self._num_characters = 0
        # Characters of the prompt's tokens that have come.
        self._num_scored = 0

    @property
    def num_bytes(self) -> int:
        """What the kept answer takes."""
        return 0 if self._kept is None else self._kept.num_bytes

    def receive(self, event: pb.GenerateResponse) -> list[dict[str, Any]]:
        """Take in an event and return the choices of the chunks that it becomes in a stream."""
        kind = event.WhichOneof("event")
        if kind == "started":
            return self._begin(event.started)
        if kind == "finished":
            self.finished = event.finished
            parts = self._pieces(event.finished) if _says_something(event.finished) else []
            last: dict[str, Any] = {"delta": {}} if self._is_chat else {"text": ""}
            return [*parts, self._part(last, self._finish_reason(), neap=self._figures())]
        self.num_tokens += len(event.chunk.tokens)
        logprobs = self._logprobs_of(event.chunk)
        if logprobs is None and not _says_something(event.chunk):
            return []
        return self._pieces(event.chunk, logprobs)

    def _begin(self, started: pb.Started) -> list[dict[str, Any]]:
        """Another Started is that of a call which was repeated before the first token. It may say other facts."""
        said, self._started = self._started, started
        if said is None:
            self._num_characters = len(started.prompt_text)
            if self._kept is not None:
                self._kept.add_prompt(started.prompt_text)
            role = {"role": "assistant", "content": ""}
            first: dict[str, Any] = {"delta": role} if self._is_chat else {"text": started.prompt_text}
            return [self._part(first, neap=self._facts())]
        if said == started:
            return []
        return [self._part({"delta": {}} if self._is_chat else {"text": ""}, neap=self._facts())]

    @property
    def fingerprint(self) -> str | None:
        """Equal for answers of the same model that were computed in the same way."""
        return (self._started and self._started.numerics_id) or None

    def usage_so_far(self) -> dict[str, int]:
        prompt = 0 if self._started is None else self._started.num_prompt_tokens
        return {"prompt_tokens": prompt, "completion_tokens": self.num_tokens, "total_tokens": prompt + self.num_tokens}

    def whole(self) -> bytes:
        """Return the JSON of the choice of a response that is not a stream. Needs `keeps`, and Finished.
        It is not kept any longer."""
        kept, self._kept = self._kept, None
        assert kept is not None
        content: dict[str, Any] = {"message": kept.message()} if self._is_chat else {"text": kept.text}
        whole = self._part(content, self._finish_reason(), neap=self._facts() | self._figures())
        del whole["logprobs"]
        return as_json(whole)[:-1] + b',"logprobs":' + kept.logprobs() + b"}"

    def _pieces(self, piece: Piece, logprobs: dict[str, Any] | None = None) -> list[dict[str, Any]]:
        """Each part has one thing of a chat, because there are clients that look for no other."""
        self._num_characters += len(piece.text)
        if self._kept is not None:
            self._kept.add(piece, logprobs)
        if not self._is_chat:
            return [self._part({"text": piece.text}, logprobs=logprobs)]
        deltas: list[dict[str, Any]] = [{"reasoning_content": piece.reasoning}] if piece.reasoning else []
        if piece.text or not (deltas or piece.tool_calls):
            deltas.append({"content": piece.text})
        deltas += [{"tool_calls": [self._call(call)]} for call in piece.tool_calls]
        parts = [self._part({"delta": delta}) for delta in deltas]
        parts[0]["logprobs"] = logprobs
        return parts

    def _call(self, piece: pb.ToolCallChunk) -> dict[str, Any]:
        """What a piece of a call is in a stream."""
        self._has_called = True
        function = {"arguments": piece.arguments}
        if not piece.id:
            return {"index": piece.index, "function": function}
        return {"index": piece.index, "id": piece.id, "type": "function", "function": {"name": piece.name, **function}}

    def _part(
        self,
        part: dict[str, Any],
        finish_reason: str | None = None,
        *,
        logprobs: dict[str, Any] | None = None,
        neap: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        part = {"index": self.index, **part, "logprobs": logprobs, "finish_reason": finish_reason}
        return part if neap is None else {**part, "neap": neap}

    def _finish_reason(self) -> str:
        assert self.finished is not None
        if self._has_called and self.finished.reason == pb.FINISH_REASON_EOS:
            return "tool_calls"
        return FINISH_REASONS.get(self.finished.reason, "stop")

    def _facts(self) -> dict[str, Any]:
        """What ran, as `Started` says it."""
        started = self._started
        assert started is not None
        return {
            "request_id": started.request_id,
            "policy": started.policy,
            "router_version": started.router_version,
            "router_digest": started.router_digest,
            # Text, because JavaScript's numbers are not exact above 2**53.
            "seed": str(started.seed),
            "numerics_id": started.numerics_id,
            "warnings": list(started.warnings),
            "lossy": started.lossy,
        }

    def _figures(self) -> dict[str, Any]:
        """What the choice took, as `Finished` says it."""
        assert self.finished is not None
        reason = pb.FinishReason.Name(self.finished.reason).removeprefix("FINISH_REASON_")
        timing = self.finished.timing
        return {
            "finish_reason": reason.lower(),
            "stop_match": self.finished.stop_match or None,
            **depth_figures([self.finished]),
            "queue_s": timing.queue.ToNanoseconds() / 1e9,
            "prefill_s": timing.prefill.ToNanoseconds() / 1e9,
            "decode_s": timing.decode.ToNanoseconds() / 1e9,
            "resumptions": [
                {"token": resumption.num_resumed_tokens, "inexact": resumption.continued_inexactly}
                for resumption in self._stream.resumptions
            ],
        }

    def _logprobs_of(self, chunk: pb.TokenChunk) -> dict[str, Any] | None:
        if chunk.prompt_tokens:
            assert self._started is not None
            text = self._started.prompt_text
            logprobs, self._num_scored = text_logprobs(chunk.prompt_tokens, self._num_scored, text)
            return logprobs
        if not any(token.HasField("logprob") for token in chunk.tokens):
            return None
        if self._is_chat:
            return chat_logprobs(chunk.tokens)
        return text_logprobs(chunk.tokens, self._num_characters)[0]


class Response:
    """The fields that all objects of one response share."""

    def __init__(self, request_id: str, asked: RequestedGeneration) -> None:
        self._is_chat, self._keeps = asked.is_chat, not asked.is_stream
        self._object = "chat.completion" if asked.is_chat else "text_completion"
        self._head = {
            "id": f"{'chatcmpl' if asked.is_chat else 'cmpl'}-{request_id}",
            "created": int(time.time()),
            "model": asked.model,
        }
        self._continues_usage = asked.continues_usage
        # With usage requested, all chunks before the last have a usage of null.
        self._no_usage: dict[str, Any] = {"usage": None} if asked.includes_usage else {}

    def choice(self, index: int, stream: EarlyStream) -> Choice:
        return Choice(index, is_chat=self._is_chat, keeps=self._keeps, stream=stream)

    def chunks(self, parts: Sequence[dict[str, Any]], choice: Choice) -> list[bytes]:
        """Return an event for each part of a choice."""
        usage = {"usage": choice.usage_so_far()} if self._continues_usage else self._no_usage
        head = self._chunk_head(choice)
        return [as_event(as_json({**head, "choices": [part], **usage})) for part in parts]

    def ending(self, choices: Sequence[Choice]) -> list[bytes]:
        """Return the last events: the usage, which has no choice, if it is asked for, and the end."""
        usage = {**self._chunk_head(choices[0]), "choices": [], **totals(choices)}
        return [*([as_event(as_json(usage))] if self._no_usage else []), as_event(b"[DONE]")]

    def error_event(self, error: dict[str, Any]) -> bytes:
        """Return the last event of a stream that fails."""
        return as_event(as_json({"error": error}))

    def whole(self, choices: Sequence[Choice]) -> list[bytes]:
        """Return the JSON of the response in parts."""
        fingerprint = {"system_fingerprint": choices[0].fingerprint}
        head = as_json({**self._head, "object": self._object, **fingerprint, **totals(choices)})
        before = [head[:-1] + b',"choices":['] + [b","] * (len(choices) - 1)
        parts = [text + choice.whole() for text, choice in zip(before, choices, strict=True)]
        parts[-1] += b"]}"
        return parts

    def _chunk_head(self, choice: Choice) -> dict[str, Any]:
        kind = f"{self._object}{'.chunk' if self._is_chat else ''}"
        return {**self._head, "object": kind, "system_fingerprint": choice.fingerprint}


def totals(choices: Sequence[Choice]) -> dict[str, Any]:
    """Return the usage of all choices together, and vLLM's `metrics` if drafts were verified. A prompt counts once for
    each choice that it was run for.

    The metrics follow https://github.com/vllm-project/vllm/pull/48915. Workers count passes, not what each accepted, so
    the histogram is missing, and every pass counts as a step, one without drafts too.
    """
    finished = [choice.finished for choice in choices if choice.finished is not None]

    def total(kind: str) -> int:
        return sum(getattr(finish.usage, f"num_{kind}_tokens") for finish in finished)

    prompt, completion, depth = total("prompt"), total("completion"), depth_figures(finished)
    usage = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": total("cached")},
        "completion_tokens_details": {
            f"{kind}_tokens": total(kind) for kind in ("accepted_prediction", "rejected_prediction", "reasoning")
        },
        "neap": depth,
    }
    drafted, accepted, passes = (depth[name] for name in ("drafted_tokens", "accepted_tokens", "deep_passes"))
    if not (drafted and passes):
        return {"usage": usage}
    speculative = {
        "mean_acceptance_length": 1 + accepted / passes,
        "draft_acceptance_rate": accepted / drafted,
        "num_spec_steps": passes,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafted,
    }
    return {"usage": usage, "metrics": {"speculative_decoding": speculative}}


def depth_figures(finished: Sequence[pb.Finished]) -> dict[str, Any]:
    """Sum what depth execution did. The mean number of layers is per generated token, while decoding."""
    exits: dict[str, int] = {}
    for finish in finished:
        for count in finish.depth.exits:
            exits[count.proposer] = exits.get(count.proposer, 0) + count.num_tokens
    num_tokens = sum(finish.usage.num_completion_tokens for finish in finished)
    weighted = sum(finish.depth.mean_layers_per_token * finish.usage.num_completion_tokens for finish in finished)
    return {
        "mean_layers_per_token": weighted / max(num_tokens, 1),
        "layer_executions": sum(finish.depth.num_layer_executions for finish in finished),
        "deep_passes": sum(finish.depth.num_deep_passes for finish in finished),
        "drafted_tokens": sum(finish.depth.num_drafted for finish in finished),
        "accepted_tokens": sum(finish.depth.num_accepted for finish in finished),
        "relaxed_tokens": sum(finish.depth.num_relaxed for finish in finished),
        "exits": exits,
    }


def model_object(model: pb.Model) -> dict[str, Any]:
    """Return OpenAI's model object. `created` is 0, because a worker does not know when a model was made."""
    return {
        "id": model.model_id,
        "object": "model",
        "created": 0,
        "owned_by": "neap",
        "neap": {
            "fingerprint": model.fingerprint,
            "architecture": model.architecture,
            "num_layers": model.num_layers,
            "context_length": model.context_length,
            "vocabulary_size": model.vocabulary_size,
            "generation_defaults": _defaults(model.defaults),
            "routers": [
                {"version": router.version, "digest": router.manifest_digest, "proposers": list(router.proposers)}
                for router in model.routers
            ],
        },
    }


def _defaults(stated: pb.GenerationDefaults) -> dict[str, Any]:
    defaults = {descriptor.name: value for descriptor, value in stated.sampling.ListFields()}
    return defaults | ({"max_tokens": stated.max_tokens} if stated.HasField("max_tokens") else {})


def _says_something(piece: Piece) -> bool:
    return bool(piece.text or piece.reasoning or piece.tool_calls)


REPLACEMENT = "\ufffd"
# A character has at most four bytes, and each may be a token.
MAX_SKIPPED = 4


def text_logprobs(tokens: Sequence[pb.Token], offset: int, text: str | None = None) -> tuple[dict[str, Any], int]:
    """The log-probabilities of tokens of a completion, and where its text goes on after them.

    The tokens begin at `offset` of `text`, which is that of a prompt; None: at `offset`, one after the other. The first
    token of a prompt has no log-probability.
    """
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset = offset + len(token.text) if text is None else _after(text, offset, token.text)
    logprobs = {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [token.logprob if token.HasField("logprob") else None for token in tokens],
        "top_logprobs": [_by_text(token) if token.HasField("logprob") else None for token in tokens],
        "text_offset": offsets,
    }
    return logprobs, offset


def chat_logprobs(tokens: Sequence[pb.Token]) -> dict[str, Any]:
    return {
        "content": [
            {
                **_entry(token.text, token.logprob),
                "top_logprobs": [_entry(other.text, other.logprob) for other in token.alternatives],
            }
            for token in tokens
        ],
        "refusal": None,
    }


def _by_text(token: pb.Token) -> dict[str, float]:
    """The alternatives and the token itself. The most probable one of tokens with the same text."""
    found: dict[str, float] = {}
    for text, logprob in [*((other.text, other.logprob) for other in token.alternatives), (token.text, token.logprob)]:
        found[text] = max(logprob, found.get(text, logprob))
    return found


def _after(text: str, offset: int, token: str) -> int:
    """Where `text` goes on after a token. Special tokens and parts of characters take nothing of it. The first token
    may have a blank that the text has not."""
    for shown in (token, token.removeprefix(" ")):
        begin = text.find(shown, offset, offset + len(shown) + MAX_SKIPPED)
        if begin >= 0 and REPLACEMENT not in shown:
            return begin + len(shown)
    return offset


def _entry(text: str, logprob: float) -> dict[str, Any]:
    # The bytes of a part of a character are not known here.
    encoded = None if REPLACEMENT in text else list(text.encode())
    return {"token": text, "logprob": logprob, "bytes": encoded}
