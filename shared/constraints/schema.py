"""JSON Schemas as people and their libraries write them, for llguidance, which enforces a part of what they can say."""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

# Keywords that it refuses, unless it is told to be lenient.
UNENFORCED = frozenset(
    {"$dynamicAnchor", "$dynamicRef", "$recursiveAnchor", "$recursiveRef", "contains", "maxContains", "minContains"}
    | {"dependencies", "dependentRequired", "dependentSchemas", "if", "then", "else", "not"}
    | {"propertyNames", "unevaluatedItems", "unevaluatedProperties", "uniqueItems"}
)
# Where such a keyword asks for nothing: names are texts in any case.
ASKS_NOTHING: tuple[dict[str, Any], ...] = ({"uniqueItems": False}, {"propertyNames": {"type": "string"}})
# Formats that it enforces. Others are annotations, as the specification has them by default.
FORMATS = frozenset(
    {"date", "date-time", "duration", "time", "email", "hostname", "ipv4", "ipv6", "uri", "uuid", "unknown"}
)
# Annotations that it takes for more where a reference to a schema around it has them beside itself.
BESIDE_REFERENCES = frozenset({"$comment", "deprecated", "discriminator", "example", "nullable"})
LIMITS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
# From here on it finds no numbers between two limits.
LARGE, SMALL = 2.0**63, 1e-30
# Names may be as long as the schema, and be repeated in the place of each schema below.
MAX_PLACE_CHARACTERS = 256
# What ECMA's alone have: look-around, references back, borders of words, and what Rust's write differently.
_BEYOND = re.compile(r"(\\[0-9bBcehGkKQRZ]|\(\?<?[=!]|\(\?[>#]|\[(?:\\.|[^\]\\[])*\[(?!:)|\[\^?\])|\\.")


def fitted(schema: str, *, is_strict: bool) -> tuple[str, tuple[str, ...]]:
    """The schema without formats that are not enforced. Unless it is strict, also without what else cannot be, each of
    which is named with its place. Text that is no JSON is left as it is."""
    try:
        root = json.loads(schema)
        dropped = _fit(root, is_strict=is_strict) if isinstance(root, dict) else None
        return (schema, ()) if dropped is None else (json.dumps(root, ensure_ascii=False), dropped)
    except (ValueError, RecursionError):
        return schema, ()


def _fit(root: dict[str, Any], *, is_strict: bool) -> tuple[str, ...]:
    """Changes it, and returns the places of what is dropped."""
    dropped: list[str] = []
    left = [("#", root)]
    while left:
        place, schema = left.pop()
        _drop_annotations(schema)
        if not is_strict:
            dropped += [_within(place, name) for name in _drop(schema)]
        left += [(_within(place, where), inner) for where, inner in inner_schemas(schema)]
    if not is_strict:
        given = root.get("x-guidance")
        root["x-guidance"] = {**(given if isinstance(given, dict) else {}), "lenient": True}
    return tuple(sorted(dropped))


def _within(place: str, name: str) -> str:
    """The place of a part, cut where it is too long."""
    return f"{place}/{name}"[:MAX_PLACE_CHARACTERS]


def _drop_annotations(schema: dict[str, Any]) -> None:
    """Removes what asks for nothing of one schema, without those in it."""
    if isinstance(schema.get("format"), str) and schema["format"] not in FORMATS:
        del schema["format"]
    for name in list(schema):
        if {name: schema[name]} in ASKS_NOTHING or (name in BESIDE_REFERENCES and "$ref" in schema):
            del schema[name]


def _drop(schema: dict[str, Any]) -> list[str]:
    """Removes what of one schema cannot be enforced, and returns its names."""
    dropped = [name for name in schema if name in UNENFORCED or (name == "pattern" and _is_beyond(schema[name]))]
    dropped += [name for name in LIMITS if _is_out_of_range(schema.get(name))]
    for name in dropped:
        del schema[name]
    if isinstance(named := schema.get("patternProperties"), dict):
        beyond = [pattern for pattern in named if _is_beyond(pattern)]
        for pattern in beyond:
            del named[pattern]
            schema.pop("additionalProperties", None)  # it may forbid what the pattern allows
        dropped += [f"patternProperties/{pattern}" for pattern in beyond]
    if isinstance(target := schema.get("$ref"), str) and "://" in target:
        dropped.append("$ref")
        del schema["$ref"]
    return dropped


def _is_out_of_range(limit: Any) -> bool:
    return isinstance(limit, int | float) and limit != 0 and not SMALL <= abs(limit) < LARGE


def _is_beyond(pattern: Any) -> bool:
    return isinstance(pattern, str) and any(match[1] for match in _BEYOND.finditer(pattern))


# Keywords whose value is a schema, a list of schemas, or schemas by name.
ONE = ("items", "additionalItems", "additionalProperties")
SEVERAL = ("anyOf", "oneOf", "allOf", "prefixItems")
NAMED = ("properties", "patternProperties", "$defs", "definitions")
SHARED = ("$defs", "definitions")


def place_of_error(text: str, why: str, error_of: Callable[[str], str]) -> str:
    """The JSON pointer of the innermost schema within `text` that has the error `why`; "#" for the whole.

    `error_of` returns the error of a schema, and empty text if it has none.
    """
    root = schema = json.loads(text)
    place = "#"
    shared = {name: root[name] for name in SHARED if name in root}
    while True:
        for where, inner in inner_schemas(schema):
            if error_of(json.dumps({**inner, **shared})) == why:
                place, schema = f"{place}/{where}", inner
                break
        else:
            return place


def inner_schemas(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The schemas directly within one, with their places in it."""
    for name, value in schema.items():
        if name in ONE and not isinstance(value, list):
            places = [(name, value)]
        elif name in (*ONE, *SEVERAL) and isinstance(value, list):
            places = [(f"{name}/{number}", inner) for number, inner in enumerate(value)]
        elif name in NAMED and isinstance(value, dict):
            places = [(f"{name}/{key}", inner) for key, inner in value.items()]
        else:
            continue
        yield from ((where, inner) for where, inner in places if isinstance(inner, dict))
