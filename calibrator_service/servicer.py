"""neap.calibration.v1.CalibrationService over the job store.
Methods raise NeapErrors; an interceptor of shared.rpc maps them."""

from collections.abc import AsyncIterator
from typing import Any

from neap_client.calibration.v1 import calibration_pb2 as pb
from neap_client.calibration.v1 import calibration_pb2_grpc
from neap_client.channel import MAX_MESSAGE_BYTES

from calibrator_service.calibration.spec import CalibrationSpec
from calibrator_service.convert import job_to_proto, listed_job
from calibrator_service.learning.pools import LATEST, pool_of_source
from calibrator_service.lineage import find_parent
from calibrator_service.sources import allowed_source
from calibrator_service.spec_messages import spec_of_request
from calibrator_service.supervisor import Supervisor
from calibrator_service.watchers import Watchers
from shared.blocking import BlockingPool
from shared.errors import InvalidInput, NotFound, PreconditionFailed
from shared.registry.names import check_model_id, check_request_id
from shared.registry.registry import Registry
from shared.rpc.callers import Role, client_key, require_role
from shared.rpc.interceptors import annotate_call
from shared.rpc.pages import MAX_PAGE_BYTES, page_token, read_numbered_page

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["CalibrationService"].full_name
MAX_ALIASES = 16
# Half of the largest message, so that every spec that was accepted can be returned.
MAX_SPEC_BYTES = MAX_MESSAGE_BYTES // 2
# Even these bytes hold millions of short prompts, and each costs some microseconds.
MAX_PROMPTS = 100_000


class CalibrationServicer(calibration_pb2_grpc.CalibrationServiceServicer):
    """`registry`: where parents are looked up, in `registry_pool`, so that a registry that hangs holds up no other
    call. `watchers` must be told of each change of a job.

    A request for a job whose spec this build cannot read fails with DATA_LOSS (JOB_UNREADABLE); a list has it under
    `unreadable`.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        *,
        pool: BlockingPool,
        watchers: Watchers,
        registry: Registry,
        registry_pool: BlockingPool,
    ) -> None:
        self._supervisor = supervisor
        self._store, self._settings = supervisor.store, supervisor.settings
        self._pool = pool
        self._watchers = watchers
        self._registry = registry
        self._registry_pool = registry_pool

    async def CreateCalibration(  # noqa: N802
        self, request: pb.CreateCalibrationRequest, context: Any
    ) -> pb.CreateCalibrationResponse:
        # Aliases decide which version every client is served with, as in RouterService.SetAlias.
        # "latest" is there for calibrations.
        if len(request.spec.aliases) > MAX_ALIASES:
            raise InvalidInput(f"at most {MAX_ALIASES} aliases", reason="BAD_SPEC")
        if any(alias != LATEST for alias in request.spec.aliases) or request.spec.HasField("served_traffic"):
            require_role(Role.ADMIN, "served traffic, or an alias other than latest")
        spec = await self._pool.call(self._checked, request)
        # A repeated request returns its job, whatever its parent's alias names now.
        if spec.parent is not None and not await self._pool.call(self._store.has_request, request.request_id):
            parent = await self._registry_pool.call(
                find_parent, self._registry, spec.model_id, spec.parent, pool_of_source(spec.source)
            )
            request.spec.parent.version = parent.version
            request.spec.parent.manifest_digest = parent.manifest_digest
        job = await self._pool.call(
            self._store.create, request.request_id, request.spec, max_queued=self._settings.max_queued_jobs
        )
        annotate_call(calibration_id=job.calibration_id)
        self._supervisor.queue.wake()
        return pb.CreateCalibrationResponse(calibration=job_to_proto(job))

    def _checked(self, request: pb.CreateCalibrationRequest) -> CalibrationSpec:
        """What a request asks for, which has what it left open from now on.
        Raises InvalidInput, NotFound, PermissionDenied."""
        check_request_id(request.request_id)
        if not request.HasField("spec"):
            raise InvalidInput("the request has no spec", reason="BAD_SPEC")
        if (num_bytes := request.spec.ByteSize()) > MAX_SPEC_BYTES:
            raise InvalidInput(
                f"the spec has {num_bytes} bytes; at most {MAX_SPEC_BYTES} are allowed. Give fewer prompts, or answers "
                "in a file",
                reason="SPEC_TOO_LARGE",
                metadata={"field": "spec", "max_bytes": str(MAX_SPEC_BYTES)},
            )
        if (num_prompts := len(request.spec.self_generated.prompts)) > MAX_PROMPTS:
            raise InvalidInput(
                f"the spec has {num_prompts} prompts; at most {MAX_PROMPTS} are allowed. Give answers in a file",
                reason="SPEC_TOO_LARGE",
                metadata={"field": "spec.self_generated.prompts", "max_prompts": str(MAX_PROMPTS)},
            )
        if request.spec.parent.version:
            # Beside a version an alias is ignored. In a stored spec both stand: what was asked for, and what it named.
            request.spec.parent.ClearField("alias")
        spec = spec_of_request(request.spec, self._settings)
        check_model_id(spec.model_id)
        if spec.model_id not in self._settings.sources:
            names = ", ".join(sorted(self._settings.sources)) or "none"
            raise NotFound(
                f"this service has no model {spec.model_id!r}; it has: {names}",
                reason="MODEL_NOT_FOUND",
                metadata={"model_id": spec.model_id, "models": names},
            )
        allowed_source(spec.source, self._settings)
        if spec.uses_workers and not self._settings.text_workers:
            raise PreconditionFailed(
                "this service is configured with no workers that write text (--text-worker)", reason="NO_TEXT_WORKERS"
            )
        return spec

    async def GetCalibration(  # noqa: N802
        self, request: pb.GetCalibrationRequest, context: Any
    ) -> pb.GetCalibrationResponse:
        return await self._pool.call(self._get, request.calibration_id)

    def _get(self, calibration_id: str) -> pb.GetCalibrationResponse:
        # In the pool: there may be many prompts.
        job = self._store.get(calibration_id, with_prompts=True)
        return pb.GetCalibrationResponse(calibration=job_to_proto(job))

    async def ListCalibrations(  # noqa: N802
        self, request: pb.ListCalibrationsRequest, context: Any
    ) -> pb.ListCalibrationsResponse:
        limit, before = read_numbered_page(request)
        jobs = await self._pool.call(self._store.list, request.model_id, before=before, limit=limit + 1)
        response = pb.ListCalibrationsResponse()
        num_bytes = 0
        for place, job in enumerate(jobs):
            entry = listed_job(job)
            num_bytes += entry.ByteSize()
            if place == limit or (place and num_bytes > MAX_PAGE_BYTES):
                response.next_page_token = page_token(request, jobs[place - 1].number)
                break
            if isinstance(entry, pb.Calibration):
                response.calibrations.append(entry)
            else:
                response.unreadable.append(entry)
        return response

    async def CancelCalibration(  # noqa: N802
        self, request: pb.CancelCalibrationRequest, context: Any
    ) -> pb.CancelCalibrationResponse:
        job = await self._pool.call(self._supervisor.cancel, request.calibration_id)
        return pb.CancelCalibrationResponse(calibration=job_to_proto(job))

    async def RetryCalibration(  # noqa: N802
        self, request: pb.RetryCalibrationRequest, context: Any
    ) -> pb.RetryCalibrationResponse:
        job = await self._pool.call(self._supervisor.retry, request.calibration_id)
        return pb.RetryCalibrationResponse(calibration=job_to_proto(job))

    async def WatchCalibration(  # noqa: N802
        self, request: pb.WatchCalibrationRequest, context: Any
    ) -> AsyncIterator[pb.WatchCalibrationResponse]:
        """Streams the job's state at each change. Changes while the caller does not read are merged."""
        with self._watchers.track_stream("jobs", client_key(context)):
            revision = 0
            while True:
                change = self._watchers.change
                job = await self._pool.call(self._store.get, request.calibration_id)
                if job.revision != revision:
                    revision = job.revision
                    yield pb.WatchCalibrationResponse(calibration=job_to_proto(job))
                if job.state.has_ended:
                    return
                await self._watchers.wait_for(change)
