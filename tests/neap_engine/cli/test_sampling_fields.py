"""Every field of the proto Sampling can be asked for wherever a request is made, and arrives where tokens are
chosen."""

import json
from dataclasses import fields
from types import SimpleNamespace

import pytest
from neap_client.fields import FIELDS
from neap_client.inference.v1 import inference_pb2 as pb
from neap_client.requests import generate_request

from docs.generators.reference import reference_page
from inference_service.convert import to_sampling
from neap_engine.gateway.requests import parse_generation
from neap_engine.gateway.schema import NEUTRAL, CompletionRequest
from neap_engine.hugging_face.options import FILTERS
from shared.errors import InvalidInput
from shared.model.sampling import SamplingParams

# Calls of transformers take seeds from torch's generator.
NOT_OF_TRANSFORMERS = {"seed", "presence_penalty", "frequency_penalty"}


# What a call, a flag, a body, the message and the engine have, where these differ.
OTHERS = {
    "logit_bias": ({3: 0.5}, "3=0.5", {"3": 0.5}, {3: 0.5}, {3: 0.5}),
    "bad_words": (["x"], "x", ["x"], [pb.BadWord(text="x")], ((120,), (32, 120))),
}


@pytest.fixture(scope="module")
def page():
    """Of the fields alone: to collect the reasons of errors takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("docs.generators.reference.collect_reasons", dict)
        return reference_page()


@pytest.fixture(params=pb.Sampling.DESCRIPTOR.fields, ids=lambda field: field.name)
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
    assert [*FIELDS["Sampling"]] == [field.name for field in fields(SamplingParams)]


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


@pytest.mark.parametrize(
    "field", [field for of in FIELDS.values() for field in of.values()], ids=lambda field: field.name
)
def test_the_documents_say_its_limits(field, page):
    assert any(row.startswith(f"| `{field.name}` |") and field.described in row for row in page.splitlines())


@pytest.mark.parametrize(
    "field", [field for field in FIELDS["Sampling"].values() if field.kind != "message"], ids=lambda field: field.name
)
def test_what_is_beyond_its_limits_is_refused(field):
    """And what switches it off is the engine's default."""
    if field.off is not None:
        assert getattr(SamplingParams(), field.name) == field.off
    for limit, beyond in ((field.least, -1), (field.above, 0), (field.most, 1)):
        if limit is not None:
            number = limit + beyond * (1 if field.python_type is int else 1e-9)
            number = field.python_type(number if number != field.off else -1)
            with pytest.raises(InvalidInput, match=rf"{field.name}.* is {number}"):
                SamplingParams(**{field.name: {1: number} if field.is_map else number})
    if field.most_items is not None:
        with pytest.raises(InvalidInput, match=f"at most {field.most_items} are allowed"):
            SamplingParams(**{field.name: dict.fromkeys(range(field.most_items + 1), 0.5)})


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
