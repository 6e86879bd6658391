"""Tools as APIs have them, called and answered in their form: what ends fulfils the schema, and `exact` is `full`."""

import json
from pathlib import Path

import jsonschema
import openai
import pytest

from tests.chat_gateways import chat_gateway
from tests.chats import HERMES
from tests.tiers import tiered
from tests.worker import build_tokenizer

TOOLS = [json.loads(line) for line in Path(__file__).with_name("tools.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def ask(tmp_path_factory):
    # A random model hardly ends a text by itself.
    ends = {str(token): 8 for token in build_tokenizer().convert_tokens_to_ids(list('"}],'))}
    with (
        chat_gateway(HERMES, tmp_path_factory.mktemp("registry")) as gateway,
        openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="x", max_retries=0) as client,
    ):

        def ask(tool, policy, **fields):
            asked = [{"role": "user", "content": tool["prompt"]}]
            fields |= {"max_tokens": 500, "seed": 1, "logit_bias": ends, "extra_body": {"neap": {"policy": policy}}}
            return client.chat.completions.create(model="tiny", messages=asked, **fields).choices[0]

        yield ask


@pytest.mark.parametrize("tool", tiered(TOOLS, TOOLS[:1]), ids=lambda tool: tool["name"])
def test_arguments_and_answers_fulfil_the_schema(ask, tool):
    name, schema = tool["name"], tool["parameters"]
    function = {"name": name, "parameters": schema, "strict": True}
    called = {
        "tools": [{"type": "function", "function": function}],
        "tool_choice": {"type": "function", "function": {"name": name}},
    }
    full, exact = (ask(tool, policy, **called) for policy in ("full", "exact"))
    [call] = full.message.tool_calls
    assert exact.message.tool_calls[0].function == call.function
    assert (call.function.name, full.finish_reason) == (name, "tool_calls")
    jsonschema.validate(json.loads(call.function.arguments), schema)

    kind = {"type": "json_schema", "json_schema": {"name": name, "schema": schema, "strict": True}}
    full, exact = (ask(tool, policy, response_format=kind) for policy in ("full", "exact"))
    assert exact.message.content == full.message.content
    assert full.finish_reason == "stop"
    jsonschema.validate(json.loads(full.message.content), schema)
