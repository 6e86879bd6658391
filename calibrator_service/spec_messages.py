"""The specs of calibrations as messages of the protos: so clients send them, and so the job store keeps them."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from google.protobuf.duration_pb2 import Duration
from google.protobuf.json_format import MessageToJson, Parse, ParseError
from neap_client.calibration.v1 import calibration_pb2

from calibrator_service.calibration.spec import (
    AnswerFile,
    CalibrationSpec,
    HubDataset,
    ParentRouter,
    SelfGenerated,
    ServedTraffic,
    Source,
    TextFile,
)
from calibrator_service.learning.pools import check_aliases, latest_of, pool_of_source
from shared.digests import DIGEST_PATTERN
from shared.errors import Corrupt, InvalidInput
from shared.plain_text import check_plain_text
from shared.pool_names import DEFAULT_POOL, check_pool
from shared.registry.names import check_alias, only_model, unique_aliases
from shared.rpc.durations import MAX_DURATION_S, seconds_of
from shared.service_settings import CalibratorSettings

MAX_SOURCE_CHARACTERS = 1000
_LABELS = {
    calibration_pb2.LABEL_UNSPECIFIED: "agreement",
    calibration_pb2.LABEL_AGREEMENT: "agreement",
    calibration_pb2.LABEL_COSINE: "cosine",
}
_SOURCES: dict[str, type[Source]] = {
    "self_generated": SelfGenerated,
    "text_file": TextFile,
    "answer_file": AnswerFile,
    "served_traffic": ServedTraffic,
    "hub_dataset": HubDataset,
}


def spec_of_request(
    message: calibration_pb2.CalibrationSpec, settings: CalibratorSettings
) -> tuple[tuple[str, ...], CalibrationSpec]:
    """The aliases and the spec that a request asks for. Writes the id of the only model into `message` if that is left
    open. Raises InvalidInput."""
    message.model_id = only_model(message.model_id, settings.sources)
    spec = spec_from_proto(message, max_time_budget_s=settings.max_time_budget_s)
    pool = pool_of_source(spec.source)
    aliases = unique_aliases(message.aliases or (latest_of(pool),))
    check_aliases(aliases, pool)
    return aliases, spec


def spec_from_proto(
    spec: calibration_pb2.CalibrationSpec, *, max_time_budget_s: float = MAX_DURATION_S
) -> CalibrationSpec:
    """The spec without its aliases, which belong to the job. Raises InvalidInput."""
    if spec.label not in _LABELS:
        raise InvalidInput(
            f"label {spec.label} is not one that this service calibrates",
            reason="BAD_SPEC",
            metadata={"field": "spec.label"},
        )
    # Absent fields get the defaults of CalibrationSpec.
    chosen: dict[str, Any] = {}
    if spec.HasField("cosine_threshold"):
        chosen["cosine_threshold"] = spec.cosine_threshold
    if spec.confidence_width:
        chosen["confidence_width"] = spec.confidence_width
    if spec.ranks:
        chosen["ranks"] = spec.ranks
    if spec.HasField("seed"):
        chosen["seed"] = spec.seed
    if spec.HasField("time_budget"):
        chosen["time_budget_s"] = seconds_of(
            spec.time_budget, "spec.time_budget", at_most_s=max_time_budget_s, reason="BAD_SPEC"
        )
    if spec.HasField("parent"):
        chosen["parent"] = _parent(spec.parent)
    return CalibrationSpec(
        model_id=spec.model_id,
        source=_source(spec),
        max_tokens=spec.max_tokens,
        exit_depths=tuple(spec.exit_depths),
        label=_LABELS[spec.label],  # type: ignore[arg-type]
        draft_vocabulary_size=spec.draft_vocabulary_size,
        **chosen,
    )


def _parent(parent: calibration_pb2.ParentRouter) -> ParentRouter:
    """As asked for: the version of an alias is looked up later. Raises InvalidInput."""
    if not parent.version:
        check_alias(parent.alias)
    if parent.manifest_digest and not DIGEST_PATTERN.fullmatch(parent.manifest_digest):
        raise InvalidInput(
            "parent.manifest_digest is no digest", reason="BAD_SPEC", metadata={"field": "spec.parent.manifest_digest"}
        )
    return ParentRouter(
        version=parent.version,
        alias=parent.alias,
        manifest_digest=parent.manifest_digest,
        share=parent.share if parent.HasField("share") else 1.0,
    )


def _source(spec: calibration_pb2.CalibrationSpec) -> Source:
    """Fields that are empty get the defaults of the source's class. Raises InvalidInput."""
    name = spec.WhichOneof("source")
    if name is None:
        raise InvalidInput(f"the spec names no source: {', '.join(_SOURCES)}", reason="SOURCE_REQUIRED")
    message = getattr(spec, name)
    values = {field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields}
    if name == "self_generated":
        return SelfGenerated(**{**values, "prompts": tuple(values["prompts"])})
    if name == "served_traffic":
        return ServedTraffic(check_pool(values["pool"] or DEFAULT_POOL))
    reason = "BAD_TEXT_FILE" if name in ("text_file", "answer_file") else "BAD_SPEC"
    for field, text in values.items():
        # They are shown to people unchanged, so they must be short plain text.
        check_plain_text(text, field, max_characters=MAX_SOURCE_CHARACTERS, reason=reason, too_long=reason)
    arguments = {field: text for field, text in values.items() if text or field in ("path", "name")}
    return _SOURCES[name](**arguments)


def spec_to_proto(spec: CalibrationSpec, aliases: Iterable[str]) -> calibration_pb2.CalibrationSpec:
    """The spec with all defaults filled in."""
    message = calibration_pb2.CalibrationSpec(
        model_id=spec.model_id,
        max_tokens=spec.max_tokens,
        exit_depths=spec.exit_depths,
        label=f"LABEL_{spec.label.upper()}",
        cosine_threshold=spec.cosine_threshold,
        draft_vocabulary_size=spec.draft_vocabulary_size,
        confidence_width=spec.confidence_width,
        seed=spec.seed,
        aliases=aliases,
        ranks=spec.ranks,
    )
    if spec.time_budget_s is not None:
        budget = Duration()
        budget.FromNanoseconds(round(spec.time_budget_s * 1e9))
        message.time_budget.CopyFrom(budget)
    if spec.parent is not None:
        message.parent.CopyFrom(calibration_pb2.ParentRouter(**asdict(spec.parent)))
    name = next(name for name, kind in _SOURCES.items() if isinstance(spec.source, kind))
    source = {field.name: getattr(spec.source, field.name) for field in getattr(message, name).DESCRIPTOR.fields}
    message.MergeFrom(calibration_pb2.CalibrationSpec(**{name: source}))  # type: ignore[arg-type]
    return message


def stored_spec(spec: CalibrationSpec) -> str:
    """The spec as the job store keeps it, without its prompts: they may have megabytes, and have a table of their
    own."""
    return MessageToJson(spec_to_proto(spec.without_prompts(), ()), indent=None)


def read_stored_spec(text: str, prompts: Sequence[str]) -> CalibrationSpec:
    """Raises Corrupt for a spec that this build does not take: a newer one wrote it, or one with wider limits."""
    try:
        message = Parse(text, calibration_pb2.CalibrationSpec())
        if prompts:
            message.self_generated.prompts.extend(prompts)
        return spec_from_proto(message)
    except ParseError as error:
        raise Corrupt("its spec has fields or values that this build does not know") from error
    except InvalidInput as error:
        raise Corrupt(f"its spec is not one that this build takes: {error.message}") from error
