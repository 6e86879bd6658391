"""Builds OpenAI's response objects from the events of the calls."""

import json
import time
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from neap_client.inference.v1 import inference_pb2 as pb

REPLACEMENT = "\ufffd"
FINISH_REASONS = {pb.FINISH_REASON_LENGTH: "length"}
Piece = pb.TokenChunk | pb.Finished


class Choice:
    """One choice: what its events have brought so far. `logprobs` and the text are kept only if `keeps` is set.
    `resumptions` of its stream, which grow."""

    def __init__(self, index: int, *, is_chat: bool, keeps: bool, resumptions: Sequence[pb.Started] = ()) -> None:
        self.index = index
        self._resumptions = resumptions
        self.finished: pb.Finished | None = None
        self.num_tokens = 0
        self._has_called = False
        self._started: pb.Started | None = None
        self._is_chat = is_chat
        self._keeps = keeps
        self._num_characters = 0
        # Characters of the prompt's tokens that have come.
        self._num_scored = 0
        self._texts: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self._logprobs: list[dict[str, Any]] = []

    def receive(self, event: pb.GenerateResponse) -> list[dict[str, Any]]:
        """Take in an event and return the choices of the chunks that it becomes in a stream."""
        kind = event.WhichOneof("event")
        if kind == "started":
            return self._begin(event.started)
        if kind == "finished":
            self.finished = event.finished
            parts = [self._piece(event.finished)] if _says_something(event.finished) else []
            last: dict[str, Any] = {"delta": {}} if self._is_chat else {"text": ""}
            return [*parts, self._part(last, self._finish_reason(), neap=self._figures())]
        self.num_tokens += len(event.chunk.tokens)
        logprobs = self._logprobs_of(event.chunk)
        if logprobs is None and not _says_something(event.chunk):
            return []
        return [self._piece(event.chunk, logprobs)]

    def _begin(self, started: pb.Started) -> list[dict[str, Any]]:
        """Another Started is that of a call which was repeated before the first token. It may say other facts."""
        said, self._started = self._started, started
        if said is None:
            self._num_characters = len(started.prompt_text)
            if self._keeps:
                self._texts.append(started.prompt_text)
            role = {"role": "assistant", "content": ""}
            first: dict[str, Any] = {"delta": role} if self._is_chat else {"text": started.prompt_text}
            return [self._part(first, neap=self._facts())]
        if said == started:
            return []
        return [self._part({"delta": {}} if self._is_chat else {"text": ""}, neap=self._facts())]

    def whole(self) -> dict[str, Any]:
        """Return the choice of a response that is not a stream. Needs `keeps`, and Finished."""
        text = "".join(self._texts)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if self._calls and not text else text,
            "refusal": None,
        }
        if self._reasoning:
            message["reasoning_content"] = "".join(self._reasoning)
        if self._calls:
            message["tool_calls"] = self._calls
        whole: dict[str, Any] = {"message": message} if self._is_chat else {"text": text}
        whole = self._part(whole, self._finish_reason(), neap=self._facts() | self._figures())
        if self._logprobs:
            whole["logprobs"] = _joined(self._logprobs)
        return whole

    def _piece(self, piece: Piece, logprobs: dict[str, Any] | None = None) -> dict[str, Any]:
        self._num_characters += len(piece.text)
        if self._keeps:
            self._texts.append(piece.text)
            if logprobs is not None:
                self._logprobs.append(logprobs)
        if not self._is_chat:
            return self._part({"text": piece.text}, logprobs=logprobs)
        delta: dict[str, Any] = {}
        if piece.reasoning:
            delta["reasoning_content"] = piece.reasoning
            if self._keeps:
                self._reasoning.append(piece.reasoning)
        if piece.tool_calls:
            delta["tool_calls"] = [self._call(call) for call in piece.tool_calls]
        if piece.text or not delta:
            delta["content"] = piece.text
        return self._part({"delta": delta}, logprobs=logprobs)

    def _call(self, piece: pb.ToolCallChunk) -> dict[str, Any]:
        """What a piece of a call is in a stream."""
        self._has_called = True
        function = {"arguments": piece.arguments}
        if piece.id:
            function = {"name": piece.name, **function}
            call = {"id": piece.id, "type": "function", "function": function}
            if self._keeps:
                self._calls.append(call)
            return {"index": piece.index, **call}
        if self._keeps:
            self._calls[-1]["function"]["arguments"] += piece.arguments
        return {"index": piece.index, "function": function}

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
        facts: dict[str, Any] = {
            "request_id": started.request_id,
            "policy": started.policy,
            "router_version": started.router_version,
            "router_digest": started.router_digest,
            # Text, because JavaScript's numbers are not exact above 2**53.
            "seed": str(started.seed),
            "numerics_id": started.numerics_id,
            "warnings": list(started.warnings),
        }
        for name in ("risk_bound", "risk_bound_tokens"):
            facts[name] = getattr(started, name) if started.HasField(name) else None
        return facts

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
                for resumption in self._resumptions
            ],
        }

    def _logprobs_of(self, chunk: pb.TokenChunk) -> dict[str, Any] | None:
        if chunk.prompt_tokens:
            logprobs, self._num_scored = _text_logprobs(chunk.prompt_tokens, self._num_scored)
            return logprobs
        if not any(token.HasField("logprob") for token in chunk.tokens):
            return None
        if self._is_chat:
            return {"content": [_chat_logprob(token) for token in chunk.tokens], "refusal": None}
        return _text_logprobs(chunk.tokens, self._num_characters)[0]


class Response:
    """The fields that all objects of one response share."""

    def __init__(self, request_id: str, model: str, *, is_chat: bool, includes_usage: bool) -> None:
        self._is_chat = is_chat
        self._object = "chat.completion" if is_chat else "text_completion"
        self._head = {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{request_id}",
            "created": int(time.time()),
            "model": model,
        }
        # With usage requested, all chunks before the last have a usage of null.
        self._no_usage: dict[str, Any] = {"usage": None} if includes_usage else {}

    def chunk(self, part: dict[str, Any]) -> str:
        """Return the JSON text of a chunk with one part."""
        return _json({**self._chunk_head(), "choices": [part], **self._no_usage})

    def usage_chunk(self, choices: Sequence[Choice]) -> str:
        """Return the JSON text of the last chunk, which has no choice."""
        return _json({**self._chunk_head(), "choices": [], "usage": usage(choices)})

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        return {
            **self._head,
            "object": self._object,
            "choices": [choice.whole() for choice in choices],
            "usage": usage(choices),
        }

    def _chunk_head(self) -> dict[str, Any]:
        return {**self._head, "object": f"{self._object}{'.chunk' if self._is_chat else ''}"}


def usage(choices: Sequence[Choice]) -> dict[str, Any]:
    """Sum the usage of the choices. A prompt counts once for each choice that it was run for."""
    finished = [choice.finished for choice in choices if choice.finished is not None]

    def total(kind: str) -> int:
        return sum(getattr(finish.usage, f"num_{kind}_tokens") for finish in finished)

    prompt, completion = total("prompt"), total("completion")
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": total("cached")},
        "completion_tokens_details": {
            f"{kind}_tokens": total(kind) for kind in ("accepted_prediction", "rejected_prediction", "reasoning")
        },
        "neap": depth_figures(finished),
    }


def depth_figures(finished: Sequence[pb.Finished]) -> dict[str, Any]:
    """Sum what depth execution did. The mean number of layers is per generated token, while decoding."""
    exits: dict[str, int] = {}
    for finish in finished:
        for count in finish.depth.exits:
            exits[count.rung] = exits.get(count.rung, 0) + count.num_tokens
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
            "routers": [
                {"version": router.version, "digest": router.manifest_digest, "rungs": list(router.rungs)}
                for router in model.routers
            ],
        },
    }


def _text_logprobs(tokens: Sequence[pb.Token], offset: int) -> tuple[dict[str, Any], int]:
    """The log-probabilities of tokens of a text from `offset` on, and where it goes on. The first token of a prompt has
    none."""
    ends = list(accumulate((len(token.text) for token in tokens), initial=offset))
    logprobs = {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [token.logprob if token.HasField("logprob") else None for token in tokens],
        "top_logprobs": [
            {other.text: other.logprob for other in token.alternatives} if token.HasField("logprob") else None
            for token in tokens
        ],
        "text_offset": ends[:-1],
    }
    return logprobs, ends[-1]


def _chat_logprob(token: pb.Token) -> dict[str, Any]:
    return {
        **_logprob(token.text, token.logprob),
        "top_logprobs": [_logprob(other.text, other.logprob) for other in token.alternatives],
    }


def _logprob(text: str, logprob: float) -> dict[str, Any]:
    # The bytes of a part of a character are not known here.
    encoded = None if REPLACEMENT in text else list(text.encode())
    return {"token": text, "logprob": logprob, "bytes": encoded}


def _joined(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Join log-probabilities: lists are concatenated, other values are those of the last part."""
    joined: dict[str, Any] = {}
    for part in parts:
        for name, value in part.items():
            joined[name] = joined.get(name, []) + value if isinstance(value, list) else value
    return joined


def _says_something(piece: Piece) -> bool:
    return bool(piece.text or piece.reasoning or piece.tool_calls)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
