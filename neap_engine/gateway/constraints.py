"""Turns the fields that ask for structured answers into the constraint of a call."""

import json
from typing import Any

from neap_client.inference.v1 import inference_pb2 as pb

from neap_engine.gateway.errors import refused
from neap_engine.gateway.schema import ResponseFormat, StructuredOutputs


def constraint(response_format: ResponseFormat | None, outputs: StructuredOutputs | None) -> pb.Constraint | None:
    """Raises InvalidInput."""
    if outputs is None:
        return None if response_format is None else _of_format(response_format)
    if response_format is not None and response_format.type != "text":
        raise refused("structured_outputs and response_format exclude each other", "structured_outputs")
    return _of_outputs(outputs)


def json_text(value: Any) -> str:
    """Empty for nothing, which the worker understands."""
    return "" if value is None else json.dumps(value, ensure_ascii=False)


def _of_format(wanted: ResponseFormat) -> pb.Constraint | None:
    if wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return _of_schema(wanted.schema_, is_strict=False)
    if wanted.json_schema is None:
        field = "response_format.json_schema"
        raise refused(f"the type json_schema needs {field}", field)
    return _of_schema(wanted.json_schema.schema_, is_strict=bool(wanted.json_schema.strict))


def _of_schema(schema: dict[str, Any] | None, *, is_strict: bool) -> pb.Constraint:
    if schema is None:
        return pb.Constraint(json_object=pb.JsonObject())
    return pb.Constraint(json_schema=json_text(schema), strict=is_strict)


def _of_outputs(outputs: StructuredOutputs) -> pb.Constraint | None:
    given = outputs.model_dump(exclude_none=True)
    if not given.get("json_object", True):
        del given["json_object"]
    if len(given) > 1:
        raise refused(f"{' and '.join(given)} exclude each other", "structured_outputs")
    if outputs.regex is not None:
        return pb.Constraint(regex=outputs.regex)
    if outputs.grammar is not None:
        return pb.Constraint(lark=outputs.grammar)
    if outputs.choice is not None:
        return pb.Constraint(choice=pb.Choice(texts=outputs.choice))
    if isinstance(outputs.json_, str):
        return pb.Constraint(json_schema=outputs.json_)
    return _of_schema(outputs.json_, is_strict=False) if given else None
