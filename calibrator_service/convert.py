"""Converts between protobuf messages and the service's own types."""

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import structlog
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp
from neap_client.calibration.v1 import calibration_pb2
from neap_client.router.v1 import router_pb2

from calibrator_service.calibration.source_record import shown_manifest
from calibrator_service.calibration.spec import (
    AnswerFile,
    CalibrationSpec,
    HubDataset,
    ParentRouter,
    SelfGenerated,
    Source,
    TextFile,
)
from calibrator_service.job import Job, JobState, unreadable_job_error
from shared.errors import Corrupt, InvalidInput
from shared.plain_text import check_plain_text
from shared.registry.base import AliasChange, Canary, PublishedVersion, RegistryEvent
from shared.registry.canonical import DIGEST_PATTERN, canonical_json
from shared.registry.names import check_alias
from shared.rpc.durations import MAX_DURATION_S, seconds_of

MAX_SOURCE_CHARACTERS = 1000
_RUNG_FIGURES = ("agreement", "router_auc", "router_brier", "router_precision", "coverage")
_LABELS = {
    calibration_pb2.LABEL_UNSPECIFIED: "agreement",
    calibration_pb2.LABEL_AGREEMENT: "agreement",
    calibration_pb2.LABEL_COSINE: "cosine",
}
_SOURCES: dict[str, type[Source]] = {
    "self_generated": SelfGenerated,
    "text_file": TextFile,
    "answer_file": AnswerFile,
    "hub_dataset": HubDataset,
}
_HEAD_FORMS = (calibration_pb2.HEAD_FORM_UNSPECIFIED, calibration_pb2.HEAD_FORM_FUSED)

# Clients see these under another name than the store's.
_STATES: dict[str, str] = {JobState.PUBLISHING: "STATE_RUNNING"}

log = structlog.get_logger("neap.calibration")


def spec_from_proto(
    spec: calibration_pb2.CalibrationSpec, *, max_time_budget_s: float = MAX_DURATION_S
) -> CalibrationSpec:
    """The spec without its aliases, which belong to the job. Raises InvalidInput."""
    for name, known in (("label", _LABELS), ("head_form", _HEAD_FORMS)):
        if getattr(spec, name) not in known:
            raise InvalidInput(
                f"{name} {getattr(spec, name)} is not one that this service calibrates",
                reason="BAD_SPEC",
                metadata={"field": f"spec.{name}"},
            )
    # Absent fields get the defaults of CalibrationSpec.
    chosen: dict[str, Any] = {}
    if spec.HasField("cosine_threshold"):
        chosen["cosine_threshold"] = spec.cosine_threshold
    if spec.router_width:
        chosen["router_width"] = spec.router_width
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
        rung_depths=tuple(spec.rung_depths),
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
        alias="" if parent.version else parent.alias,
        manifest_digest=parent.manifest_digest,
        share=parent.share if parent.HasField("share") else 1.0,
    )


def _source(spec: calibration_pb2.CalibrationSpec) -> Source:
    """Fields that are empty get the defaults of the source's class. Raises InvalidInput."""
    name = spec.WhichOneof("source")
    if name is None:
        raise InvalidInput(
            "the spec names no source: self_generated, text_file, answer_file or hub_dataset", reason="SOURCE_REQUIRED"
        )
    message = getattr(spec, name)
    values = {field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields}
    if name == "self_generated":
        return SelfGenerated(**{**values, "prompts": tuple(values["prompts"])})
    reason = "BAD_SPEC" if name == "hub_dataset" else "BAD_TEXT_FILE"
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
        rung_depths=spec.rung_depths,
        label=f"LABEL_{spec.label.upper()}",
        cosine_threshold=spec.cosine_threshold,
        draft_vocabulary_size=spec.draft_vocabulary_size,
        router_width=spec.router_width,
        seed=spec.seed,
        aliases=aliases,
    )
    if spec.time_budget_s is not None:
        budget = Duration()
        budget.FromNanoseconds(round(spec.time_budget_s * 1e9))
        message.time_budget.CopyFrom(budget)
    if spec.parent is not None:
        message.parent.CopyFrom(calibration_pb2.ParentRouter(**asdict(spec.parent)))
    name = next(name for name, kind in _SOURCES.items() if isinstance(spec.source, kind))
    source = {field: value for field, value in asdict(spec.source).items() if field != "public_only"}
    message.MergeFrom(calibration_pb2.CalibrationSpec(**{name: source}))  # type: ignore[arg-type]
    return message


def job_to_proto(job: Job) -> calibration_pb2.Calibration:
    """The job as clients see it. Raises Corrupt (JOB_UNREADABLE) for any record that cannot be converted."""
    try:
        message = calibration_pb2.Calibration(
            calibration_id=job.calibration_id,
            spec=spec_to_proto(job.spec, job.aliases),
            state=_STATES.get(job.state, f"STATE_{job.state.name}"),
            phase=f"PHASE_{job.phase.upper()}" if job.phase else "PHASE_UNSPECIFIED",
            fraction=job.fraction,
            figures=job.figures,
            create_time=timestamp(job.create_time_s),
            end_time=None if job.end_time_s is None else timestamp(job.end_time_s),
            router_version=job.router_version,
            manifest_digest=job.manifest_digest,
            num_resumes=job.num_resumes,
            num_prompts=job.num_prompts,
        )
        # A job that is queued or cancelled may have had a problem that is over.
        if job.failure_reason and job.state not in (JobState.QUEUED, JobState.CANCELLED):
            message.failure.reason = job.failure_reason
            message.failure.message = job.failure_message
        return message
    except (ValueError, TypeError, OverflowError) as error:
        log.exception("a record cannot be shown", calibration_id=job.calibration_id)
        raise unreadable_job_error(job, "it holds a value that cannot be shown") from error


def unreadable_to_proto(job: Job, error: Corrupt) -> calibration_pb2.UnreadableCalibration:
    """The entry of a list for a job that `job_to_proto` refused with `error`."""
    name = _STATES.get(job.state_text, f"STATE_{job.state_text}".upper())
    is_known = name in calibration_pb2.State.keys()  # noqa: SIM118
    return calibration_pb2.UnreadableCalibration(
        calibration_id=job.calibration_id,
        state=calibration_pb2.State.Value(name) if is_known else 0,  # type: ignore[arg-type]
        reason=error.reason,
        message=error.message,
    )


def version_to_proto(version: PublishedVersion, *, with_manifest: bool) -> router_pb2.RouterVersion:
    """Figures that are not in the manifest are 0."""
    manifest = version.manifest
    model = manifest.get("model", {})
    return router_pb2.RouterVersion(
        model_id=version.model_id,
        version=version.version,
        manifest_digest=version.manifest_digest,
        model_fingerprint=str(model.get("fingerprint", "")),
        create_time=timestamp(version.create_time_s),
        rungs=[_rung(rung) for rung in manifest.get("rungs", ())],
        size_bytes=version.size_bytes,
        manifest_json=canonical_json(shown_manifest(manifest)).decode() if with_manifest else "",
        damage=version.damage,
    )


def _rung(rung: dict[str, Any]) -> router_pb2.Rung:
    held_out = rung.get("figures") or {}
    figures = {name: float(held_out.get(name) or 0.0) for name in _RUNG_FIGURES}
    return router_pb2.Rung(name=str(rung["name"]), depth=int(rung.get("depth", 0)), **figures)


def change_to_proto(change: AliasChange) -> router_pb2.AliasChange:
    """`from_version` is absent in an alias' first change, `canary` if there is none."""
    return router_pb2.AliasChange(
        alias=change.alias,
        from_version=change.from_version,
        to_version=change.to_version,
        actor=change.actor,
        reason=change.reason,
        change_time=timestamp(change.change_time_s),
        canary=canary_to_proto(change.canary),
    )


def canary_to_proto(canary: Canary | None) -> router_pb2.Canary | None:
    if canary is None:
        return None
    return router_pb2.Canary(version=canary.version, share_per_mille=canary.share_per_mille)


def event_to_proto(event: RegistryEvent) -> router_pb2.WatchResponse:
    """A publication or an alias change."""
    if isinstance(event.change, PublishedVersion):
        published = version_to_proto(event.change, with_manifest=False)
        return router_pb2.WatchResponse(event=event.event, published=published)
    changed = change_to_proto(event.change)
    return router_pb2.WatchResponse(event=event.event, alias_changed=changed)


def timestamp(time_s: float) -> Timestamp:
    """Converts seconds since the epoch."""
    stamp = Timestamp()
    stamp.FromNanoseconds(round(time_s * 1e9))
    return stamp
