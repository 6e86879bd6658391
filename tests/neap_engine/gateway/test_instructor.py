"""The gateway in front of a real worker, as Instructor sees it in the modes that OpenAI's API has."""

import asyncio
from collections.abc import Iterable
from typing import Literal

import openai
import pytest
from pydantic import BaseModel, Field

from tests.chat_gateways import chat_gateway
from tests.chats import HERMES

# It holds back openai, jiter and rich, so no extra of this project has it.
instructor = pytest.importorskip("instructor")
ASKED = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "hello"}],
    "max_retries": 0,
    "max_tokens": 400,
    "seed": 1,
}


class Stay(BaseModel, extra="forbid"):
    """A stay somewhere."""

    city: str = Field(max_length=8)
    kind: Literal["thin", "é😀"]
    days: int = Field(ge=1, le=9)


class Anything(BaseModel, extra="allow"):
    """What a JSON object can be."""


@pytest.fixture(scope="module")
def state(tmp_path_factory):
    with chat_gateway(HERMES, tmp_path_factory.mktemp("registry")) as gateway:
        gateway.given = {"base_url": f"{gateway.url}/v1", "api_key": "unused", "max_retries": 0}
        yield gateway


def completions(state, mode):
    return instructor.from_openai(openai.OpenAI(**state.given), mode=mode).chat.completions


@pytest.mark.parametrize("name", ["TOOLS", "TOOLS_STRICT", "JSON_SCHEMA"])
def test_an_answer_is_what_was_asked_for_whole_and_in_parts(state, name):
    mode = instructor.Mode[name]
    answer = completions(state, mode).create(**ASKED, response_model=Stay)
    assert isinstance(answer, Stay)
    parts = list(completions(state, mode).create_partial(**ASKED, response_model=Stay))
    assert len(parts) > 2
    Stay.model_validate(parts[-1].model_dump())

    async def asynchronously():
        client = instructor.from_openai(openai.AsyncOpenAI(**state.given), mode=mode)
        return await client.chat.completions.create(**ASKED, response_model=Stay)

    assert asyncio.run(asynchronously()).model_dump() == answer.model_dump()


def test_plain_json_is_an_object(state):
    mode = instructor.Mode.JSON
    assert isinstance(completions(state, mode).create(**ASKED, response_model=Anything), Anything)


def test_several_calls_are_several_objects(state):
    mode, bias = instructor.Mode.PARALLEL_TOOLS, {**state.bias, "256": -1}
    given = {**ASKED, "logit_bias": bias, "max_tokens": 1500}
    answers = list(completions(state, mode).create(**given, response_model=Iterable[Stay]))
    assert answers
    assert all(isinstance(answer, Stay) for answer in answers)
