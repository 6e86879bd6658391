"""Answers of /v1/responses: the parts that a chat has, as items of an output."""

import secrets
import sys
import time
from collections.abc import Sequence
from typing import Any

from neap_client.inference.v1 import inference_pb2 as pb

from neap_engine.gateway.answers import Choice, Response, totals
from neap_engine.gateway.collected import SLOT_BYTES, as_event, as_json
from neap_engine.gateway.merging import EarlyStream
from neap_engine.gateway.requests import RequestedGeneration

# Kind of an item -> (how its ids begin, the type of its content, what its events are called).
KINDS = {
    "message": ("msg", "output_text", "output_text"),
    "reasoning": ("rs", "reasoning_text", "reasoning_text"),
    "function_call": ("fc", "", "function_call_arguments"),
}


class OutputItem:
    """One item as it is written. `place`: in the output. `num_bytes`: what it takes here."""

    def __init__(self, kind: str, place: int, **fields: Any) -> None:
        begin, self._type, self._events = KINDS[kind]
        self.kind, self.num_bytes = kind, sys.getsizeof(fields)
        self._fields = {"id": f"{begin}_{secrets.token_hex(12)}", "type": kind, **fields}
        self._where = {"item_id": self._fields["id"], "output_index": place}
        if self._type:
            self._where["content_index"] = 0
        self._texts: list[str] = []
        self._logprobs: list[bytes] = []

    def begin(self) -> list[dict[str, Any]]:
        """Return the first events."""
        empty = b"[]" if self._type else b'""'
        item = self._json("in_progress", empty)
        added = {"type": "response.output_item.added", "output_index": self._where["output_index"], "item": item}
        return [added, *self._of_part("added", self._part(b""))]

    def add(self, text: str, logprobs: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
        """Take a piece in, and return its event."""
        self._texts.append(text)
        self.num_bytes += sys.getsizeof(text) + SLOT_BYTES
        if logprobs:
            self._logprobs.append(as_json(logprobs)[1:-1])
            self.num_bytes += sys.getsizeof(self._logprobs[-1]) + SLOT_BYTES
        more = {"logprobs": logprobs} if self.kind == "message" else {}
        return {"type": f"response.{self._events}.delta", **self._where, "delta": text, **more}

    def end(self, status: str) -> tuple[bytes, list[dict[str, Any]]]:
        """Return the whole item in JSON, and its last events. Log-probabilities are in their pieces and in the item."""
        text, part = "".join(self._texts), self._part(b",".join(self._logprobs))
        whole = self._json(status, b"[" + part + b"]" if self._type else as_json(text))
        named = {"text": text} if self._type else {"arguments": text, "name": self._fields["name"]}
        more: dict[str, Any] = {"logprobs": []} if self.kind == "message" else {}
        done = {"type": f"response.{self._events}.done", **self._where, **named, **more}
        last = {"type": "response.output_item.done", "output_index": self._where["output_index"], "item": whole}
        return whole, [done, *self._of_part("done", self._part(b"")), last]

    def _of_part(self, what: str, part: bytes) -> list[dict[str, Any]]:
        return [{"type": f"response.content_part.{what}", **self._where, "part": part}] if self._type else []

    def _part(self, logprobs: bytes) -> bytes:
        """Return the content so far in JSON."""
        part: dict[str, Any] = {"type": self._type, "text": "".join(self._texts)}
        if self.kind == "message":
            part |= {"annotations": [], "logprobs": b"[" + logprobs + b"]"}
        return _json(part)

    def _json(self, status: str, content: bytes) -> bytes:
        return _json({**self._fields, "status": status, "content" if self._type else "arguments": content})


class ItemChoice(Choice):
    """The answer of a response. What it brings are the events of a stream, with their types, without their numbers."""

    def __init__(self, request_id: str, asked: RequestedGeneration, stream: EarlyStream) -> None:
        super().__init__(0, is_chat=True, keeps=False, stream=stream)
        self._head = {"id": f"resp_{request_id}", "object": "response", "created_at": int(time.time())}
        self._head |= {"model": asked.model, "background": False, "previous_response_id": None, "store": False}
        self._head |= {"truncation": "disabled", "error": None}
        self._echo = asked.echo
        self._neap: dict[str, Any] = {}
        self._item: OutputItem | None = None
        self._num_kept = 0
        # Items that have ended, in JSON, and the log-probabilities of tokens that have brought no text yet.
        self._ended: list[bytes] = []
        self._waiting: list[dict[str, Any]] = []
        self.answer = b""

    @property
    def num_bytes(self) -> int:
        return len(self._echo) + self._num_kept + (self._item.num_bytes if self._item else 0)

    def receive(self, event: pb.GenerateResponse) -> list[dict[str, Any]]:
        return [each for part in super().receive(event) for each in self._of_part(part)]

    def _of_part(self, part: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the events that a part of a chat becomes."""
        self._neap |= part.get("neap", {})
        delta, reason, events = part["delta"], part["finish_reason"], list[dict[str, Any]]()
        if "role" in delta:
            begun = self._json("in_progress")
            return [{"type": f"response.{name}", "response": begun} for name in ("created", "in_progress")]
        if reasoning := delta.get("reasoning_content"):
            events += self._add("reasoning", reasoning, summary=[])
        if "content" in delta:
            self._waiting += (part["logprobs"] or {}).get("content", ())
            if delta["content"] or (self._item and self._item.kind == "message"):
                events += self._add("message", delta["content"], self._waiting, role="assistant")
                self._waiting = []
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                events += self._begin_item("function_call", call_id=call["id"], name=call["function"]["name"])
            if call["function"]["arguments"]:
                events += self._add("function_call", call["function"]["arguments"])
        return events + self._end(reason) if reason else events

    def _add(
        self, kind: str, text: str, logprobs: Sequence[dict[str, Any]] = (), **fields: Any
    ) -> list[dict[str, Any]]:
        is_new = self._item is None or self._item.kind != kind
        events = self._begin_item(kind, **fields) if is_new else []
        assert self._item is not None
        return [*events, self._item.add(text, logprobs)]

    def _begin_item(self, kind: str, **fields: Any) -> list[dict[str, Any]]:
        self._waiting = []
        events = self._end_item("completed")
        self._item = OutputItem(kind, len(self._ended), **fields)
        return events + self._item.begin()

    def _end_item(self, status: str) -> list[dict[str, Any]]:
        if self._item is None:
            return []
        whole, events = self._item.end(status)
        self._item = None
        self._ended.append(whole)
        self._num_kept += sys.getsizeof(whole)
        return events

    def _end(self, reason: str) -> list[dict[str, Any]]:
        status = "incomplete" if reason == "length" else "completed"
        # An answer without anything is an empty message.
        events = [] if self._item else self._begin_item("message", role="assistant")
        events += self._end_item(status)
        self.answer = self._json(status)
        return [*events, {"type": f"response.{status}", "response": self.answer}]

    def _json(self, status: str) -> bytes:
        """Return the response so far."""
        usage: dict[str, Any] = {"usage": None}
        if self.finished is not None:
            usage = totals([self])
            of_chat = usage["usage"]
            usage["usage"] = {
                "input_tokens": of_chat["prompt_tokens"],
                "input_tokens_details": {**of_chat["prompt_tokens_details"], "cache_write_tokens": 0},
                "output_tokens": of_chat["completion_tokens"],
                "output_tokens_details": of_chat["completion_tokens_details"],
                "total_tokens": of_chat["total_tokens"],
                "neap": of_chat["neap"],
            }
        said = {
            **self._head,
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            **usage,
            "neap": self._neap,
            "output": b"[" + b",".join(self._ended) + b"]",
        }
        return _json(said)[:-1] + b"," + self._echo[1:]


class ItemResponse(Response):
    """What `Response` is to chats. It has one choice."""

    def __init__(self, request_id: str, asked: RequestedGeneration) -> None:
        super().__init__(request_id, asked)
        self._request_id, self._asked, self._num_events = request_id, asked, 0

    def choice(self, index: int, stream: EarlyStream) -> Choice:
        return ItemChoice(self._request_id, self._asked, stream)

    def chunks(self, parts: Sequence[dict[str, Any]], choice: Choice) -> list[bytes]:
        return [self._event(part) for part in parts]

    def ending(self, choices: Sequence[Choice]) -> list[bytes]:
        return []

    def error_event(self, error: dict[str, Any]) -> bytes:
        """OpenAI's clients read the fields, other ones, and those that raise an exception, the error object."""
        said = {name: error[name] for name in ("code", "message", "param")}
        return self._event({"type": "error", **said, "error": error})

    def whole(self, choices: Sequence[Choice]) -> list[bytes]:
        return [choice.answer for choice in choices if isinstance(choice, ItemChoice)]

    def _event(self, fields: dict[str, Any]) -> bytes:
        self._num_events += 1
        return as_event(_json({"sequence_number": self._num_events - 1, **fields}), fields["type"])


def _json(fields: dict[str, Any]) -> bytes:
    """The same as `as_json`, but values in bytes are JSON already."""
    plain = as_json({name: value for name, value in fields.items() if not isinstance(value, bytes)})
    raw = [b"," + as_json(name) + b":" + value for name, value in fields.items() if isinstance(value, bytes)]
    return plain[:-1] + b"".join(raw) + b"}"
