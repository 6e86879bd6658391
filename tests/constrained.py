"""A tiny model whose tokens cross the borders of JSON's parts, and random schemas."""

import json
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import kubernetes_validate

from shared.constraints.constraint import Constraint
from shared.engine.engine import Engine
from shared.engine.request.prompt import Prompt
from shared.engine.request.request import Generation
from shared.ladder.ladder import Ladder
from shared.ladder.table_confidence import fit_table_confidence
from shared.model.loaded import LoadedModel, wrap_model
from tests.random_ladder import random_ladder
from tests.worker import build_model, build_tokenizer

# Tokens such as `": "` and `"}`, of white space with a quotation mark, and a part of a character. "Ġ" is a space.
MERGES = [
    ('"', ":"),
    ("Ġ", '"'),
    ('":', 'Ġ"'),
    ('"', ","),
    ('",', 'Ġ"'),
    ('"', "}"),
    ('{"', "n"),
    ("{", '"'),
    ("Ã", "©"),
    ("Ã", "¼"),
    ("Ã¼", "Ã"),
    ("ð", "Ł"),
    ("a", "b"),
    ("1", "2"),
]
# Several tokens have no text.
VOCABULARY_SIZE = 300

OBJECT = {
    "type": "object",
    "properties": {
        "hello": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["thing", "thin", "über", "é😀"]},
        "n": {"type": "integer", "minimum": -12, "maximum": 1200},
        "list": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["hello", "kind", "list"],
    "additionalProperties": False,
}
TREE = {
    "$defs": {
        "tree": {
            "type": "object",
            "properties": {
                "name": {"enum": ["ab", "aab"]},
                "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/tree"}]},
            },
            "required": ["name", "next"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/tree",
}
CONSTRAINTS = {
    "object": Constraint(json_schema=json.dumps(OBJECT)),
    "tree": Constraint(json_schema=json.dumps(TREE)),
    "any object": Constraint(json_object=True),
    # After a letter, what may follow depends on the letter.
    "pairs": Constraint(regex=r"(([ab][0-9])|([cd][A-Z])|([ef](é|ü))){6,}"),
    "lark": Constraint(lark='start: pair+\npair: "(" pair* ")" | "[" pair? "]" | '),
    "choice": Constraint(choice=("hello there", "hell", "é😀", 'a "quoted" text\\', "")),
}


def build_loaded(seed: int = 0) -> LoadedModel:
    tokenizer = build_tokenizer(MERGES)
    model = build_model(seed, VOCABULARY_SIZE)
    return wrap_model(model, tokenizer, model_id="tiny", accelerate=True)


def build_random_ladder(loaded: LoadedModel) -> Ladder:
    """It says something at every position: look-up, and exits with any token."""
    ladder = random_ladder(loaded, 3, (0, 2), agreement=0.9)
    return replace(ladder, lookup_confidence=fit_table_confidence([], []))


def answer_of(engine: Engine, prompt: Prompt, **options: Any) -> Generation:
    return engine.generate(prompt, **{"max_tokens": 120, **options})


def kubernetes_schemas(count: int) -> list[dict[str, Any]]:
    """Schemas of the Kubernetes API, evenly spread, each with those that it refers to, which are few."""
    folder = Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema"
    text = (folder / "v1.36.0-local-strict" / "_definitions.json").read_text()
    known = json.loads(text)["$defs"]
    found = []
    for name in sorted(known):
        needed, left = {}, [name]
        while left:
            own = left.pop()
            if own not in needed:
                needed[own] = known[own]
                left += re.findall(r'"#/\$defs/([^"]+)"', json.dumps(known[own]))
        text = json.dumps(needed)
        # What the library takes, and an answer may complete.
        if len(needed) <= 8 and not re.search('"byte"|IntOrString|Quantity', text):
            found.append({**known[name], "$defs": needed})
    return found[:: len(found) // count][:count]


class RandomSchemas:
    """JSON Schemas of all kinds of values, nested, whose answers are short."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def one(self, depth: int = 2) -> dict[str, Any]:
        """A schema with at most `depth` levels of others within it."""
        leaves = [self._string, self._integer, self._number, self._enum]
        inner = [self._array, self._object, self._any_of] if depth else []
        return self._random.choice(leaves + 2 * inner)(depth - 1)

    def _string(self, _: int) -> dict[str, Any]:
        limits = [
            {"maxLength": 4},
            {"minLength": 2, "maxLength": 3},
            {"pattern": "^[a-cé]{1,3}(-[0-9]+)?$", "maxLength": 8},
            {"format": "date"},
        ]
        return {"type": "string", **self._random.choice(limits)}

    def _integer(self, _: int) -> dict[str, Any]:
        low = self._random.randint(-120, 1000)
        return {"type": "integer", "minimum": low, "maximum": low + self._random.randint(0, 300)}

    def _number(self, _: int) -> dict[str, Any]:
        return {"type": "number", "exclusiveMinimum": -2, "maximum": self._random.choice([0, 9.5])}

    def _enum(self, _: int) -> dict[str, Any]:
        values = [None, True, "é😀", "ab", 'a"b', "", 12, -0.5, [1, "hell"], {"n": "hello"}]
        return {"enum": self._random.sample(values, self._random.randint(1, 4))}

    def _array(self, depth: int) -> dict[str, Any]:
        most = self._random.randint(0, 3)
        limits = {"minItems": self._random.randint(0, most), "maxItems": most}
        return {"type": "array", "items": self.one(depth), **limits}

    def _object(self, depth: int) -> dict[str, Any]:
        names = self._random.sample(["name", "n", "hello", "é", "a b", "ab"], 3)
        return {
            "type": "object",
            "properties": {name: self.one(depth) for name in names},
            "required": self._random.sample(names, self._random.randint(0, 3)),
            "additionalProperties": False,
        }

    def _any_of(self, depth: int) -> dict[str, Any]:
        return {"anyOf": [self.one(depth) for _ in range(self._random.randint(1, 3))]}
