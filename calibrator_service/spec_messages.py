"""The specs of calibrations as messages of the protos: so clients send them, the job store keeps them and jobs get
them."""

from typing import Any

from google.protobuf.message import DecodeError
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
from shared.calibrator_settings import CalibratorSettings
from shared.digests import DIGEST_PATTERN
from shared.errors import Corrupt, InvalidInput
from shared.plain_text import check_plain_text
from shared.pool_names import DEFAULT_POOL, check_pool
from shared.registry.names import check_alias, only_model, unique_aliases
from shared.rpc.durations import MAX_DURATION_S, seconds_of

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


def spec_of_request(message: calibration_pb2.CalibrationSpec, settings: CalibratorSettings) -> CalibrationSpec:
    """What a request asks for. Makes of `message` what is stored: the only model and the aliases that are left open are
    written into it. Raises InvalidInput."""
    message.DiscardUnknownFields()
    message.model_id = only_model(message.model_id, settings.sources)
    spec = spec_from_proto(message, max_time_budget_s=settings.max_time_budget_s)
    pool = pool_of_source(spec.source)
    aliases = unique_aliases(message.aliases or (latest_of(pool),))
    check_aliases(aliases, pool)
    message.aliases[:] = aliases
    return spec


def spec_from_proto(
    spec: calibration_pb2.CalibrationSpec, *, max_time_budget_s: float = MAX_DURATION_S
) -> CalibrationSpec:
    """The spec for the calibration, which knows neither protobuf nor aliases. Raises InvalidInput."""
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


def read_spec(data: bytes, calibration_id: str) -> tuple[calibration_pb2.CalibrationSpec, CalibrationSpec]:
    """A stored spec, as message and for the calibration. Raises Corrupt (JOB_UNREADABLE) for one that this build does
    not take: a newer one wrote it, or one with wider limits."""
    try:
        message = calibration_pb2.CalibrationSpec.FromString(data)
        num_bytes = message.ByteSize()
        message.DiscardUnknownFields()
        if message.ByteSize() < num_bytes:
            raise InvalidInput("it has fields that this build does not know")
        return message, spec_from_proto(message)
    except (DecodeError, InvalidInput) as error:
        why = error.message if isinstance(error, InvalidInput) else "its bytes are damaged"
        raise Corrupt(
            f"the record of calibration {calibration_id} cannot be read by this build: {why}",
            reason="JOB_UNREADABLE",
            metadata={"calibration_id": calibration_id},
        ) from error


def stored_spec(message: calibration_pb2.CalibrationSpec) -> tuple[bytes, bytes]:
    """The spec as the job store keeps it, and its prompts, which may have megabytes; joined they are the whole."""
    bare, prompts = calibration_pb2.CalibrationSpec(), calibration_pb2.CalibrationSpec()
    bare.CopyFrom(message)
    if message.self_generated.prompts:
        prompts.self_generated.prompts.extend(message.self_generated.prompts)
        bare.self_generated.ClearField("prompts")
    return bare.SerializeToString(), prompts.SerializeToString()


def as_asked(data: bytes) -> bytes:
    """A stored spec as its caller wrote it, without what was looked up since: an alias may name another version at the
    next call."""
    try:
        message = calibration_pb2.CalibrationSpec.FromString(data)
    except DecodeError:  # as nobody asks
        return data
    if message.HasField("parent"):
        message.parent.ClearField("manifest_digest")
        if message.parent.alias:
            message.parent.ClearField("version")
    return message.SerializeToString(deterministic=True)
