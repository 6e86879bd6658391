"""What an answer that is not sent as a stream has brought so far."""

import json
import sys
from typing import Any

from neap_client.inference.v1 import inference_pb2 as pb

Piece = pb.TokenChunk | pb.Finished
# What a slot in a list takes.
SLOT_BYTES = 8


class Collected:
    """Texts, calls and log-probabilities of one choice, the latter as JSON. `num_bytes`: what they take here."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._texts: list[str] = []
        self._reasoning: list[str] = []
        # By call: id, name, pieces of its arguments.
        self._calls: list[tuple[str, str, list[str]]] = []
        # Items of each list.
        self._logprobs: dict[str, list[bytes]] = {}

    def add_prompt(self, text: str) -> None:
        self._keep(self._texts, text)

    def add(self, piece: Piece, logprobs: dict[str, Any] | None) -> None:
        self._keep(self._texts, piece.text)
        self._keep(self._reasoning, piece.reasoning)
        for call in piece.tool_calls:
            if call.id:
                self._calls.append((call.id, call.name, []))
                self.num_bytes += sys.getsizeof(self._calls[-1]) + len(call.id) + len(call.name)
            self._keep(self._calls[-1][2], call.arguments)
        for name, items in (logprobs or {}).items():
            if items:
                self._keep(self._logprobs.setdefault(name, []), as_json(items)[1:-1])

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def message(self) -> dict[str, Any]:
        """Return the message of a chat."""
        text = self.text
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if self._calls and not text else text,
            "refusal": None,
        }
        if self._reasoning:
            message["reasoning_content"] = "".join(self._reasoning)
        if self._calls:
            message["tool_calls"] = [
                {"id": id, "type": "function", "function": {"name": name, "arguments": "".join(arguments)}}
                for id, name, arguments in self._calls
            ]
        return message

    def logprobs(self) -> bytes:
        """Return the log-probabilities as JSON, null if there are none."""
        if not self._logprobs:
            return b"null"
        lists = [as_json(name) + b":[" + b",".join(items) + b"]" for name, items in self._logprobs.items()]
        refusal = [b'"refusal":null'] if "content" in self._logprobs else []
        return b"{" + b",".join(lists + refusal) + b"}"

    def _keep(self, kept: list[Any], piece: str | bytes) -> None:
        if piece:
            kept.append(piece)
            self.num_bytes += sys.getsizeof(piece) + SLOT_BYTES


def as_event(data: bytes, kind: str = "") -> bytes:
    """Return a server-sent event."""
    name = f"event: {kind}\n".encode() if kind else b""
    return name + b"data: " + data + b"\n\n"


def as_json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
