"""Completes a request once its router is known."""

from dataclasses import replace

from inference_service.router_loader import LoadedRouter
from shared.engine.request.request import GenerationRequest
from shared.errors import PreconditionFailed


def with_router(request: GenerationRequest, router: LoadedRouter | None, alias: str = "") -> GenerationRequest:
    """The request with its router's version, and the alias that named it. Exact without a router is served by what
    needs none.

    Raises `PreconditionFailed` (ROUTER_REQUIRED) for relaxed without a router.
    """
    if router is not None:
        return replace(request, router_version=router.version, router_alias=alias)
    if request.policy.name == "exact":
        return request
    raise PreconditionFailed(
        f"the policy {request.policy.name} needs a router, and none is published for this model: calibrate one with "
        "`neap calibrate`, or ask for the policy exact or full",
        reason="ROUTER_REQUIRED",
    )
