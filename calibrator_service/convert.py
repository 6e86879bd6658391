"""Converts between protobuf messages and the service's own types."""

from collections.abc import Mapping
from typing import Any

from google.protobuf.timestamp_pb2 import Timestamp
from neap_client.calibration.v1 import calibration_pb2
from neap_client.router.v1 import router_pb2

from calibrator_service.job import Job, JobState
from calibrator_service.judge.judge import Judged
from shared.errors import Corrupt, InvalidInput
from shared.registry.base import AliasChange, Canary, PublishedVersion, RegistryEvent
from shared.registry.encoding import canonical_json
from shared.served import Served, ServedKey

_PROPOSER_FIGURES = ("agreement", "confidence_auc", "confidence_brier", "confidence_precision", "coverage")


def job_to_proto(job: Job) -> calibration_pb2.Calibration:
    """The job as clients see it. Raises Corrupt (JOB_UNREADABLE) if this build cannot read its spec."""
    message = calibration_pb2.Calibration(
        calibration_id=job.calibration_id,
        spec=job.message,
        state=_state(job),
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


def listed_job(job: Job) -> calibration_pb2.Calibration | calibration_pb2.UnreadableCalibration:
    """The job as an entry of a list."""
    try:
        return job_to_proto(job)
    except Corrupt as error:
        return calibration_pb2.UnreadableCalibration(
            calibration_id=job.calibration_id, state=_state(job), reason=error.reason, message=error.message
        )


def _state(job: Job) -> Any:
    """Clients see a job that is being published as running."""
    return "STATE_RUNNING" if job.state is JobState.PUBLISHING else f"STATE_{job.state.name}"


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
        proposers=[_proposer(proposer) for proposer in manifest.get("proposers", ())],
        size_bytes=version.size_bytes,
        speed_up=_speed_up(manifest),
        manifest_json=canonical_json(manifest).decode() if with_manifest else "",
        damage=version.damage,
    )


def _speed_up(manifest: Mapping[str, Any]) -> float:
    try:
        return float(manifest["calibration"]["speed"]["speed_up"])
    except (KeyError, TypeError, ValueError):  # not measured, or the manifest of an import says something else there
        return 0.0


def _proposer(proposer: dict[str, Any]) -> router_pb2.Proposer:
    held_out = proposer.get("figures") or {}
    figures = {name: float(held_out.get(name) or 0.0) for name in _PROPOSER_FIGURES}
    return router_pb2.Proposer(name=str(proposer["name"]), depth=int(proposer.get("depth", 0)), **figures)


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


def sums_from_proto(request: router_pb2.ReportServedRequest) -> dict[ServedKey, Served]:
    """The sums of a worker's report.
    Raises InvalidInput (BAD_REPORT) for two entries of one alias, version and load."""
    sums = {
        ServedKey(entry.alias, entry.version, entry.load): Served._make(getattr(entry, name) for name in Served._fields)
        for entry in request.served
    }
    if len(sums) < len(request.served):
        raise InvalidInput("two entries of the report have the same alias, version and load", reason="BAD_REPORT")
    return sums


def judged_to_proto(judged: Judged) -> router_pb2.GetJudgedResponse:
    return router_pb2.GetJudgedResponse(
        aliases=[
            router_pb2.Judged(
                alias=entry.change.alias,
                version=entry.change.to_version,
                canary=canary_to_proto(entry.change.canary),
                state=entry.state,
                figures=entry.figures,
            )
            for entry in judged.aliases
        ],
        forbidden_versions=judged.forbidden,
        is_acting=judged.is_acting,
    )


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
