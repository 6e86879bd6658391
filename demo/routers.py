"""The routers of the demo: found if an earlier run has published them, calibrated over gRPC otherwise."""

import json
import time
import uuid
from dataclasses import dataclass

from google.protobuf.duration_pb2 import Duration
from neap_client import NeapClient
from neap_client.calibration.v1 import calibration_pb2 as pb
from neap_client.router.v1 import router_pb2

from neap_engine.cli.console import out, print_line
from neap_engine.cli.job_progress import ENDED, cancel_and_follow, follow
from shared.errors import NeapError, NotFound


@dataclass(frozen=True)
class Catalogue:
    """The calibration service, for one model with this fingerprint."""

    client: NeapClient
    model_id: str
    fingerprint: str

    def published(self, alias: str) -> router_pb2.RouterVersion | None:
        """Return the version that the alias names.
        None if there is none or if it belongs to another revision of the model."""
        try:
            router = self.client.get_version(self.model_id, alias=alias)
        except NotFound:
            return None
        if router.model_fingerprint != self.fingerprint:
            say(f"version {router.version} belongs to another revision of the model")
            return None
        return router

    def calibrated(
        self,
        source: pb.SelfGenerated,
        budget_s: int,
        aliases: tuple[str, ...],
        *,
        parent: router_pb2.RouterVersion | None = None,
    ) -> router_pb2.RouterVersion:
        """Calibrate and publish, with live progress. The first of `aliases` tells the demo's jobs apart.
        `parent`: what is added to.

        Raises NeapError if the job fails, KeyboardInterrupt if it is cancelled.
        """
        started_s = time.monotonic()
        # If an earlier demo was killed, its job resumes when the calibrator starts.
        jobs = self.client.list_calibrations(self.model_id)
        unfinished = [j for j in jobs if j.state not in ENDED and aliases[0] in j.spec.aliases]
        if unfinished:
            job = unfinished[-1]
            say("continuing the unfinished calibration of an earlier run")
        else:
            spec = pb.CalibrationSpec(
                model_id=self.model_id, self_generated=source, time_budget=Duration(seconds=budget_s), aliases=aliases
            )
            if parent is not None:
                spec.parent.version = parent.version
            job = self.client.create_calibration(spec, request_id=f"demo-{uuid.uuid4()}")
        print_line(f"calibration {job.calibration_id}")
        try:
            job = follow(self.client, job.calibration_id)
        except KeyboardInterrupt:
            job = cancel_and_follow(self.client, job.calibration_id, "the next demo continues it")
        if job.state == pb.STATE_CANCELLED:
            raise KeyboardInterrupt
        if job.state != pb.STATE_SUCCEEDED:
            raise NeapError(f"the calibration failed: {job.failure.message}", reason=job.failure.reason or "FAILED")
        say(f"published version {job.router_version} after {time.monotonic() - started_s:.0f} s")
        return self.client.get_version(self.model_id, version=job.router_version)


def parent_digest(router: router_pb2.RouterVersion) -> str:
    """Return the manifest digest of the version that the router was added to; "" if it began from nothing."""
    spec = json.loads(router.manifest_json)["calibration"]["spec"]
    return str((spec.get("parent") or {}).get("manifest_digest", ""))


def say(text: str) -> None:
    out.print(f"   {text}", markup=False)
