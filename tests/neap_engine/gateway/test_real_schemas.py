"""Tools as APIs have them, called and answered in their form: what ends fulfils the schema, and `exact` is `full`."""

import json
from pathlib import Path

import jsonschema
import openai
import pytest

from shared.engine.engine import Engine
from shared.registry.factory import open_registry
from tests.chats import HERMES, build_chat_model
from tests.gateways import gateway_to
from tests.generation import publish
from tests.worker import serving

TOOLS = [json.loads(line) for line in Path(__file__).with_name("tools.jsonl").read_text().splitlines()]
# Every third in every run.
CASES = [
    pytest.param(tool, id=tool["name"], marks=[pytest.mark.full] if place % 3 else [])
    for place, tool in enumerate(TOOLS)
]


@pytest.fixture(scope="module")
def ask(tmp_path_factory):
    registry = open_registry(str(tmp_path_factory.mktemp("registry")))
    loaded = build_chat_model(HERMES, own_tokens=True)
    with Engine(loaded) as engine:
        publish(registry, engine)
        with (
            serving(engine, registry) as worker,
            gateway_to(worker.target) as gateway,
            openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="x", max_retries=0) as client,
        ):
            # A random model hardly ends a text by itself.
            ends = {str(loaded.tokenizer.convert_tokens_to_ids(own)): 8 for own in '"}],'}

            def ask(tool, policy, **fields):
                return client.chat.completions.create(
                    model="tiny",
                    messages=[{"role": "user", "content": tool["prompt"]}],
                    max_tokens=500,
                    seed=1,
                    logit_bias=ends,
                    extra_body={"neap": {"policy": policy}},
                    **fields,
                ).choices[0]

            yield ask
    registry.close()


@pytest.mark.parametrize("tool", CASES)
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
