"""Prints results for programs: one line of JSON each."""

import json
from collections.abc import Mapping
from typing import Any

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from shared.plain_text import printable


def print_message(message: Message, **more: object) -> None:
    """Print a message, and `more` fields, as one line of JSON, in protobuf's JSON mapping with the field names of the
    proto."""
    print_json(MessageToDict(message, preserving_proto_field_name=True) | more)


def print_json(document: Mapping[str, Any]) -> None:
    print(printable(json.dumps(document, ensure_ascii=False)), flush=True)
