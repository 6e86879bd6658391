"""The gateway in front of a real worker, as LangChain's client of OpenAI's API sees it."""

from typing import Literal

import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class Thing(BaseModel):
    kind: Literal["thin", "thing"]
    is_small: bool


MESSAGES = [SystemMessage("in"), HumanMessage("hello")]


@pytest.fixture(scope="module")
def model(gateway):
    return ChatOpenAI(
        model="tiny",
        base_url=f"{gateway.url}/v1",
        api_key="unused",
        temperature=0,
        max_tokens=8,
        max_retries=0,
        stream_usage=True,
        extra_body={"ignore_eos": True, "neap": {"policy": "exact"}},
    )


def test_an_answer_has_its_text_its_usage_and_why_it_ended(model):
    answer = model.invoke(MESSAGES)
    assert answer.content
    assert answer.usage_metadata["output_tokens"] == 8
    assert answer.response_metadata["finish_reason"] == "length"
    assert answer.response_metadata["model_name"] == "tiny"


def test_a_stream_adds_up_to_the_answer(model):
    *_, last = chunks = list(model.stream(MESSAGES))
    assert len(chunks) > 2
    assert "".join(chunk.content for chunk in chunks) == model.invoke(MESSAGES).content
    assert sum(chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata) == 8  # fmt: skip
    assert last.content == ""


def test_a_conversation_goes_on_with_the_answer(model):
    answer = model.invoke(MESSAGES)
    again = model.invoke([*MESSAGES, answer, HumanMessage("and?")])
    assert again.usage_metadata["input_tokens"] > answer.usage_metadata["input_tokens"] + 8
    made = model.invoke([*MESSAGES, AIMessage(answer.content), HumanMessage("and?")])
    assert made.content == again.content


def test_stop_strings_and_logprobs_can_be_bound(model):
    text = model.invoke(MESSAGES).content
    stopped = model.invoke(MESSAGES, stop=[text[2:4]])
    assert stopped.content == text[: text.index(text[2:4])]
    measured = model.bind(logprobs=True, top_logprobs=2).invoke(MESSAGES)
    assert len(measured.response_metadata["logprobs"]["content"]) == 8


def test_an_answer_has_the_structure_that_was_asked_for(gateway):
    model = ChatOpenAI(model="tiny", base_url=f"{gateway.url}/v1", api_key="unused", seed=3)
    answer = model.with_structured_output(Thing, method="json_schema").invoke(MESSAGES)
    assert isinstance(answer, Thing)


def test_a_model_without_tools_says_so(model):
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    with pytest.raises(Exception, match="chat template does not show them"):
        model.bind_tools([tool]).invoke(MESSAGES)


async def test_many_can_be_asked_at_once(model):
    answers = await model.abatch([MESSAGES] * 4)
    assert len({answer.content for answer in answers}) == 1
