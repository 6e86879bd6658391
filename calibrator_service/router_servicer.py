"""neap.router.v1.RouterService over the registry. Methods raise NeapErrors; an interceptor of shared.rpc maps them."""

from collections.abc import AsyncIterator, Callable, Collection
from itertools import islice
from typing import Any

from neap_client.router.v1 import router_pb2 as pb
from neap_client.router.v1 import router_pb2_grpc

from calibrator_service.convert import (
    canary_to_proto,
    change_to_proto,
    event_to_proto,
    judged_to_proto,
    sums_from_proto,
    version_to_proto,
)
from calibrator_service.judge.judge import Judge
from calibrator_service.judge.orders import Order
from calibrator_service.learning.pools import check_aliases, pool_of_version
from calibrator_service.watchers import Watchers
from shared.blocking import BlockingPool
from shared.errors import Corrupt, InvalidInput, PreconditionFailed
from shared.exchange.signatures import Verifier
from shared.ladder.blob_names import served_blobs
from shared.registry.base import AliasChange, Canary, PublishedVersion, RegistryEvent
from shared.registry.contents import version_damaged_error
from shared.registry.names import check_alias_change, only_model
from shared.registry.registry import Registry
from shared.rpc.callers import client_key, recorded_actor
from shared.rpc.pages import MAX_PAGE_BYTES, named_page, page_token, read_numbered_page

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["RouterService"].full_name
WATCH_INTERVAL_S = 0.2
# Each publication among the events costs reading its manifest.
WATCH_PAGE = 16
_ACTIONS = {
    pb.JUDGE_ACTION_HOLD: "hold",
    pb.JUDGE_ACTION_RELEASE: "release",
    pb.JUDGE_ACTION_FORBID: "forbid",
    pb.JUDGE_ACTION_ALLOW: "allow",
}


class RouterServicer(router_pb2_grpc.RouterServiceServicer):
    """`models`: those that the service is configured with. Where there is one, a request need not name it. With a
    `verifier` an alias is pointed at signed versions only. Without a `judge` nothing is judged."""

    def __init__(
        self,
        registry: Registry,
        *,
        models: Collection[str],
        pool: BlockingPool,
        watchers: Watchers,
        verifier: Verifier | None = None,
        judge: Judge | None = None,
    ) -> None:
        self._registry = registry
        self._models = models
        self._pool = pool
        self._watchers = watchers
        self._verifier = verifier
        self._judge = judge

    async def ListVersions(  # noqa: N802
        self, request: pb.ListVersionsRequest, context: Any
    ) -> pb.ListVersionsResponse:
        request.model_id = only_model(request.model_id, self._models)
        limit, before = read_numbered_page(request)
        versions = await self._pool.call(
            self._registry.list_versions,
            request.model_id,
            before=before,
            limit=limit,
            max_manifest_bytes=MAX_PAGE_BYTES,
        )
        # Numbers have no gaps. The next page may nevertheless be empty.
        has_more = bool(versions) and versions[-1].version > 1
        token = page_token(request, versions[-1].version) if has_more else ""
        return pb.ListVersionsResponse(
            versions=[version_to_proto(version, with_manifest=False) for version in versions], next_page_token=token
        )

    async def GetVersion(  # noqa: N802
        self, request: pb.GetVersionRequest, context: Any
    ) -> pb.GetVersionResponse:
        request.model_id = only_model(request.model_id, self._models)
        version = await self._pool.call(self._get, request)
        return pb.GetVersionResponse(version=version_to_proto(version, with_manifest=True))

    def _get(self, request: pb.GetVersionRequest) -> PublishedVersion:
        selector = request.WhichOneof("selector")
        if selector == "version":
            return self._registry.get(request.model_id, request.version)
        if selector == "alias":
            return self._registry.resolve(request.model_id, request.alias)
        raise InvalidInput("the request names neither version nor alias", reason="BAD_SELECTOR")

    async def ListAliases(  # noqa: N802
        self, request: pb.ListAliasesRequest, context: Any
    ) -> pb.ListAliasesResponse:
        request.model_id = only_model(request.model_id, self._models)
        aliases = await self._pool.call(self._registry.aliases, request.model_id)
        canaries = await self._pool.call(self._registry.canaries, request.model_id)
        names, token = named_page(request, sorted(aliases), str)
        return pb.ListAliasesResponse(
            aliases=[
                pb.Alias(name=name, version=aliases[name], canary=canary_to_proto(canaries.get(name))) for name in names
            ],
            next_page_token=token,
        )

    async def SetAlias(  # noqa: N802
        self, request: pb.SetAliasRequest, context: Any
    ) -> pb.SetAliasResponse:
        request.model_id = only_model(request.model_id, self._models)
        await self._pool.call(self._check_contents, request.model_id, request.alias, request.version)
        return pb.SetAliasResponse(change=await self._change(request, self._registry.set_alias, request.version))

    async def SetCanary(  # noqa: N802
        self, request: pb.SetCanaryRequest, context: Any
    ) -> pb.SetCanaryResponse:
        request.model_id = only_model(request.model_id, self._models)
        canary = None
        if request.HasField("canary"):
            canary = Canary(request.canary.version, request.canary.share_per_mille)
            await self._pool.call(self._check_contents, request.model_id, request.alias, canary.version)
        return pb.SetCanaryResponse(change=await self._change(request, self._registry.set_canary, canary))

    async def PromoteCanary(  # noqa: N802
        self, request: pb.PromoteCanaryRequest, context: Any
    ) -> pb.PromoteCanaryResponse:
        request.model_id = only_model(request.model_id, self._models)
        change = await self._change(request, self._registry.promote_canary, expects="expected_canary")
        return pb.PromoteCanaryResponse(change=change)

    async def _change(
        self, request: Any, method: Callable[..., AliasChange], *target: object, expects: str = "expected_version"
    ) -> pb.AliasChange:
        """Calls a method of the registry that changes the alias of `request`, in the caller's name.
        `expects`: the optional field of `request`, and the argument, that makes it a compare-and-swap."""
        expected = int(getattr(request, expects)) if request.HasField(expects) else None
        change = await self._pool.call(
            method,
            request.model_id,
            request.alias,
            *target,
            **{expects: expected},
            actor=recorded_actor(request.actor),
            reason=request.reason,
        )
        return change_to_proto(change)

    def _check_contents(self, model_id: str, alias: str, version: int) -> None:
        """Reads every byte that workers will load before an alias is set to a version. Raises NotFound, Corrupt
        (VERSION_DAMAGED), InvalidInput, PreconditionFailed (SIGNATURE_MISSING, SIGNATURE_INVALID, OTHER_POOL)."""
        try:
            published = self._registry.get(model_id, version)
            check_aliases([alias], pool_of_version(published.manifest))
            for name in served_blobs(published.manifest.get("blobs", {})):
                self._registry.read_blob(published, name)
            if self._verifier is not None:
                self._verifier.check_version(published, self._registry.read_blob)
        except Corrupt as error:
            raise version_damaged_error(model_id, version, error) from error

    async def RollbackAlias(  # noqa: N802
        self, request: pb.RollbackAliasRequest, context: Any
    ) -> pb.RollbackAliasResponse:
        request.model_id = only_model(request.model_id, self._models)
        return pb.RollbackAliasResponse(change=await self._change(request, self._registry.rollback_alias))

    async def GetAliasHistory(  # noqa: N802
        self, request: pb.GetAliasHistoryRequest, context: Any
    ) -> pb.GetAliasHistoryResponse:
        request.model_id = only_model(request.model_id, self._models)
        limit, num_left = read_numbered_page(request)
        changes = await self._pool.call(self._registry.alias_history, request.model_id, request.alias)
        # Counted from the oldest change, because new ones are added before the newest.
        first = 0 if num_left is None else max(0, len(changes) - num_left)
        num_left = len(changes) - first - limit
        return pb.GetAliasHistoryResponse(
            changes=map(change_to_proto, changes[first : first + limit]),
            next_page_token=page_token(request, num_left) if num_left > 0 else "",
        )

    async def Watch(  # noqa: N802
        self, request: pb.WatchRequest, context: Any
    ) -> AsyncIterator[pb.WatchResponse]:
        """Streams events. The next page is read only after the caller has taken the previous one."""
        request.model_id = only_model(request.model_id, self._models)
        if request.after_event < 0:
            raise InvalidInput("after_event must not be negative", reason="BAD_EVENT")
        with self._watchers.track_stream("routers", client_key(context)):
            cursor = request.after_event
            while True:
                events = await self._pool.call(self._next_events, request.model_id, cursor)
                for event in events:
                    yield event_to_proto(event)
                    cursor = event.event
                if not events:
                    await self._watchers.pause(WATCH_INTERVAL_S)

    @property
    def judge(self) -> Judge:
        """Raises PreconditionFailed (JUDGE_OFF)."""
        if self._judge is None:
            raise PreconditionFailed("this service does not judge versions (--judge)", reason="JUDGE_OFF")
        return self._judge

    async def BeginTrial(  # noqa: N802
        self, request: pb.BeginTrialRequest, context: Any
    ) -> pb.BeginTrialResponse:
        request.model_id = only_model(request.model_id, self._models)
        judge, actor = self.judge, recorded_actor(request.actor)
        check_alias_change(request.alias, actor, request.reason)
        await self._pool.call(self._check_contents, request.model_id, request.alias, request.version)
        why = f"asked by {actor or 'unknown'}" + f": {request.reason}" * bool(request.reason)
        change = await self._pool.call(judge.begin, request.model_id, request.alias, request.version, why)
        return pb.BeginTrialResponse(change=change_to_proto(change))

    async def OrderJudge(  # noqa: N802
        self, request: pb.OrderJudgeRequest, context: Any
    ) -> pb.OrderJudgeResponse:
        request.model_id = only_model(request.model_id, self._models)
        action = _ACTIONS.get(request.action, "")
        order = Order(request.model_id, action, request.alias, request.version)
        await self._pool.call(self.judge.order, order)
        return pb.OrderJudgeResponse()

    async def GetJudged(  # noqa: N802
        self, request: pb.GetJudgedRequest, context: Any
    ) -> pb.GetJudgedResponse:
        request.model_id = only_model(request.model_id, self._models)
        return judged_to_proto(await self._pool.call(self.judge.status, request.model_id))

    async def ReportServed(  # noqa: N802
        self, request: pb.ReportServedRequest, context: Any
    ) -> pb.ReportServedResponse:
        """Asks no registry, so that it waits for none."""
        is_new, suspended = self.judge.report(
            client_key(context), request.worker_id, request.model_id, request.sequence, sums_from_proto(request)
        )
        return pb.ReportServedResponse(is_new=is_new, suspended_aliases=suspended)

    def _next_events(self, model_id: str, after_event: int) -> list[RegistryEvent]:
        return list(islice(self._registry.events(model_id, after_event=after_event), WATCH_PAGE))
