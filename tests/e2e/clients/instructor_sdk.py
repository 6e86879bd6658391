"""Instructor: typed answers by every method that it has for OpenAI's API, whole and in parts."""

import json
import sys
from typing import Literal

import instructor
import openai
from pydantic import BaseModel, Field


class Stay(BaseModel, extra="forbid"):
    city: Literal["Rome", "Oslo"]
    days: int = Field(ge=1, le=9)


url, body = sys.argv[1], json.loads(sys.argv[2])
plain = openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0)
for mode in ("TOOLS", "TOOLS_STRICT", "JSON_SCHEMA", "RESPONSES_TOOLS"):
    client = instructor.from_openai(plain, mode=instructor.Mode[mode])
    asked = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hello"}],
        "response_model": Stay,
        "max_retries": 0,
        "temperature": 0,
        "extra_body": body,
        ("max_output_tokens" if mode.startswith("RESPONSES") else "max_tokens"): 200,
    }
    stay, raw = client.create_with_completion(**asked)
    assert Stay.model_validate(stay.model_dump())
    assert raw.usage.total_tokens
    # In parts, all fields are optional.
    *_, last = client.create_partial(**asked)
    assert last.city in (None, "Rome", "Oslo"), mode
