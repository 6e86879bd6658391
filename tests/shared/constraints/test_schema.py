"""Schemas as Pydantic and Zod write them: what cannot be enforced is named, and refused only if they are strict."""

import datetime
import decimal
import ipaddress
import json
import pathlib
import re
import uuid
from typing import Annotated, Any, Literal

import pydantic
import pytest
from llguidance import LLMatcher

from shared.constraints.compiler import ConstraintCompiler, grammar_of
from shared.constraints.constraint import Constraint, MessageConstraint
from shared.constraints.schema import FORMATS, UNENFORCED
from shared.errors import InvalidInput
from tests.constrained import build_loaded


class Cat(pydantic.BaseModel):
    kind: Literal["cat"]
    lives: pydantic.PositiveInt = 9


class Dog(pydantic.BaseModel):
    kind: Literal["dog"]
    friends: list["Dog | Cat"] = []


class Owner(pydantic.BaseModel):
    pet: Annotated[Cat | Dog, pydantic.Field(discriminator="kind")]


PYDANTIC = [
    bytes, pathlib.Path, pydantic.FilePath, pydantic.SecretStr, pydantic.Base64Bytes, pydantic.IPvAnyAddress,
    pydantic.AnyUrl, ipaddress.IPv4Network, decimal.Decimal, datetime.datetime, datetime.date, datetime.timedelta,
    re.Pattern, uuid.UUID, dict[str, int], dict[int, list[str]], tuple[int, str], list[int] | None, Any, Owner,
]  # fmt: skip
# With what is left out of them.
ZOD = {
    '{"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "number"}}': [],
    '{"type": "object", "propertyNames": {"enum": ["a"]}, "additionalProperties": {}}': ["#/propertyNames"],
    r'{"type": "string", "format": "email", "pattern": "^(?!.*\\.\\.)[a-z]+@([a-z]+\\.)+[a-z]{2,}$"}': ["#/pattern"],
    '{"type": "string", "format": "base64", "contentEncoding": "base64", "pattern": "^$|^[0-9a-zA-Z+/]{4}$"}': [],
    r'{"type": "string", "format": "emoji", "pattern": "^(\\p{Extended_Pictographic}|\\p{Emoji_Component})+$"}': [],
    '{"not": {}}': ["#/not"],
    '{"type": "array", "uniqueItems": false, "items": {"type": "string", "format": "path"}}': [],
    '{"type": "array", "uniqueItems": true, "items": {"type": "string"}}': ["#/uniqueItems"],
}  # fmt: skip
OTHERS = {
    '{"properties": {"pattern": {"anyOf": [{"if": {}, "then": {}}, {"items": [{"contains": 1}]}]}}}': [
        "#/properties/pattern/anyOf/0/if",
        "#/properties/pattern/anyOf/0/then",
        "#/properties/pattern/anyOf/1/items/0/contains",
    ],
    r'{"patternProperties": {"^(?=a)": {}}, "additionalProperties": false}': ["#/patternProperties/^(?=a)"],
    '{"properties": {"a": {"$ref": "https://example.com/a.json"}}}': ["#/properties/a/$ref"],
    r'{"enum": [{"pattern": "\\b", "uniqueItems": true}], "default": {"not": 1}}': [],
    r'{"type": "string", "pattern": "\\\\b\\/[^b][[:alpha:]-]\\[[\\[]"}': [],
    r'{"type": "string", "pattern": "^[^[\\]]+$"}': ["#/pattern"],
    '{"type": "number", "minimum": -3.4028234663852886e38, "maximum": 1e-99}': ["#/maximum", "#/minimum"],
    '{"properties": {"n": {"$ref": "#", "deprecated": true, "nullable": true, "description": "d"}}}': [],
}


@pytest.fixture(scope="module")
def compiler():
    return ConstraintCompiler(build_loaded())


@pytest.mark.parametrize("kind", PYDANTIC, ids=str)
def test_what_pydantic_writes_is_enforced_and_unknown_formats_are_annotations(compiler, kind):
    schema = json.dumps(pydantic.TypeAdapter(kind).json_schema())
    for strict in (False, True):
        constraint = Constraint(json_schema=schema, strict=strict)
        assert not constraint.unenforced
        assert not compiler.start(constraint).warnings


@pytest.mark.parametrize(("schema", "dropped"), {**ZOD, **OTHERS}.items(), ids=str)
def test_what_cannot_be_enforced_is_named_and_refused_only_if_it_is_strict(compiler, schema, dropped):
    constraint = Constraint(json_schema=schema)
    assert [what.removeprefix("constraint.json_schema: ") for what in constraint.unenforced] == dropped
    assert not compiler.start(constraint).warnings
    tool = MessageConstraint(tools=(("a", schema), ("b", schema)), strict_tools=frozenset("b"))
    assert [what.removeprefix("tools[0].parameters: ") for what in tool.unenforced] == dropped
    strict = Constraint(json_schema=schema, strict=True)
    assert not strict.unenforced
    if dropped:
        with pytest.raises(InvalidInput) as caught:
            compiler.start(strict)
        assert caught.value.reason == "CONSTRAINT_INVALID"
    else:
        compiler.start(strict)


def test_places_take_no_more_than_a_part_of_a_name_each():
    parts = {f"a{i}": {"not": {}} for i in range(1000)}
    for schema in ({"properties": {"K" * 30_000: {"properties": parts}}}, {"patternProperties": {"\\b" * 10_000: {}}}):
        unenforced = Constraint(json_schema=json.dumps(schema)).unenforced
        assert unenforced
        assert max(map(len, unenforced)) <= 300


def test_kinds_that_overlap_are_any_of_them_and_named(compiler):
    schema = '{"oneOf": [{"type": "string"}, {"maxLength": 3}]}'
    [warning] = compiler.start(Constraint(json_schema=schema)).warnings
    assert "oneOf" in warning
    with pytest.raises(InvalidInput, match="oneOf"):
        compiler.start(Constraint(json_schema=schema, strict=True))


def test_the_tables_are_those_of_the_library():
    def refusal(schema):
        return LLMatcher.validate_grammar(grammar_of(Constraint(json_schema=json.dumps(schema), strict=True)))

    def library(schema):
        return LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(json.dumps(schema)))

    for name in UNENFORCED:
        assert library({name: True}) == f'Unimplemented keys: ["{name}"]'
    assert not UNENFORCED.intersection({"properties", "items", "anyOf", "enum", "pattern", "minItems", "minProperties"})
    others = ["byte", "idn-email", "idn-hostname", "iri", "json-pointer", "password", "regex", "uri-reference"]
    known = [name for name in (*FORMATS, *others) if not library({"type": "string", "format": name})]
    assert sorted(known) == sorted(FORMATS)
    assert not any(refusal({"type": "string", "format": name}) for name in others)
