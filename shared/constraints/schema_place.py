"""Where in a JSON Schema an error is, because the library does not say it."""

import json
from collections.abc import Callable, Iterator
from typing import Any

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
