"""Every field of the proto Sampling can be asked for wherever a request is made, and arrives where tokens are
chosen."""

import json
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest
from neap_client.inference.v1 import inference_pb2 as pb
from neap_client.requests import generate_request

from inference_service.convert import to_sampling
from neap_engine.gateway.requests import parse_generation
from neap_engine.gateway.schema import NEUTRAL, CompletionRequest
from neap_engine.hugging_face.options import FILTERS
from shared.errors import InvalidInput
from shared.model.sampling import SamplingParams

DOCS = Path(__file__).parents[3] / "docs"
FIELDS = pb.Sampling.DESCRIPTOR.fields
# Calls of transformers take seeds from torch's generator.
NOT_OF_TRANSFORMERS = {"seed", "presence_penalty", "frequency_penalty"}


# What a call, a flag, a body, the message and the engine have, where these differ.
OTHERS = {
    "logit_bias": ({3: 0.5}, "3=0.5", {"3": 0.5}, {3: 0.5}, {3: 0.5}),
    "bad_words": (["x"], "x", ["x"], [pb.BadWord(text="x")], ((120,), (32, 120))),
}


@pytest.fixture(params=FIELDS, ids=lambda field: field.name)
def given(request):
    """(name, a value that is allowed and not the default: in each of the forms of `OTHERS`)."""
    field = request.param
    value = 0.5 if field.cpp_type == field.CPPTYPE_DOUBLE else 3
    return field.name, *OTHERS.get(field.name, (value,) * 5)


@pytest.fixture
def loaded():
    """Its tokens are the numbers of the characters."""

    def tokenizer(text, **_):
        return {"input_ids": [*map(ord, text)] if isinstance(text, str) else [[*map(ord, one)] for one in text]}

    return SimpleNamespace(tokenizer=tokenizer, context_length=100)


def test_the_engine_has_the_fields_of_the_proto():
    assert [field.name for field in FIELDS] == [field.name for field in fields(SamplingParams)]


def test_the_worker_reads_it(given, loaded):
    name, *_, sent, read = given
    assert getattr(to_sampling(pb.Sampling(**{name: sent}), loaded), name) == read


def test_its_absence_is_the_engines_default(loaded):
    assert to_sampling(pb.Sampling(seed=0), loaded) == SamplingParams()


def test_the_client_sends_it(given):
    name, value, *_, sent, _ = given
    request = generate_request("tiny", "hi", **{name: value})
    assert request.sampling == pb.Sampling(**{name: sent})


def test_the_command_line_sends_it(given, service, neap):
    name, _, value, *_, sent, _ = given
    flag = f"--{name.replace('_', '-')}"
    neap("generate", "hi", "--worker", service.address, flag, str(value))
    assert service.inference.requests[0].sampling == pb.Sampling(**{name: sent})


def test_the_gateway_sends_it(given):
    name, _, _, value, sent, _ = given
    body = {"model": "tiny", "prompt": "hi", "temperature": 0, name: value}
    generation = parse_generation(json.dumps(body).encode(), CompletionRequest, max_choices=1)
    found = pb.GenerateRequest.FromString(generation.calls()[0][0]).sampling
    assert found == pb.Sampling(**{"temperature": 0, name: sent})
    # A field that is honoured is not one that a body may have as long as it asks for nothing.
    assert name not in NEUTRAL


def test_a_processor_of_transformers_stands_for_it(given):
    name, *_ = given
    assert (name in {field for _, _, field in FILTERS}) != (name in NOT_OF_TRANSFORMERS)


def test_the_documents_name_it(given):
    name, *_ = given
    pages = ["clients.md", "openai.md"]
    if name not in NOT_OF_TRANSFORMERS:
        pages.append("library.md")
    for page in pages:
        assert f"`{name}`" in (DOCS / page).read_text(), page


def test_a_priority_is_sent_by_all(service, neap):
    assert generate_request("tiny", "hi", priority=-2).priority == -2
    neap("generate", "hi", "--worker", service.address, "--priority", "-2")
    body = {"model": "tiny", "prompt": "hi", "neap": {"priority": -2}}
    generation = parse_generation(json.dumps(body).encode(), CompletionRequest, max_choices=1)
    sent = pb.GenerateRequest.FromString(generation.calls()[0][0])
    for request in (service.inference.requests[0], sent):
        assert request.priority == -2
    assert not generate_request("tiny", "hi").HasField("priority")


def test_that_nothing_may_be_learned_is_sent_by_all(service, neap):
    neap("generate", "hi", "--worker", service.address, "--learn", "never")
    body = {"model": "tiny", "prompt": "hi", "neap": {"learn": "never"}}
    generation = parse_generation(json.dumps(body).encode(), CompletionRequest, max_choices=1)
    sent = pb.GenerateRequest.FromString(generation.calls()[0][0])
    for request in (generate_request("tiny", "hi", learn="never"), service.inference.requests[0], sent):
        assert request.learn == pb.LEARN_NEVER
    assert generate_request("tiny", "hi").learn == pb.LEARN_UNSPECIFIED
    with pytest.raises(InvalidInput, match="learn"):
        generate_request("tiny", "hi", learn="always")
