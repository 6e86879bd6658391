"""Completes a request once its router is known."""

from dataclasses import replace

from inference_service.engine.quality.shadow import Shadow
from inference_service.engine.request.request import GenerationRequest
from inference_service.router_loader import LoadedRouter
from shared.ladder.policy import DepthPolicy
from shared.ladder.risk import PublishedRisk


def with_router(
    request: GenerationRequest,
    router: LoadedRouter,
    shadow: Shadow,
    default_bound: float | None = None,
) -> GenerationRequest:
    """The request with its router's version and, for policy relaxed, with the bound that shadow checks hold the router to.

    The bound is the published one for the request's threshold, None if the published ones do not cover the request, and
    `default_bound` if the router publishes none. If `shadow` has suspended the version, relaxed becomes exact.
    """
    policy = request.policy
    bound: float | None = None
    num_tokens: int | None = None
    if policy.name == "relaxed" and shadow.is_suspended(router.version):
        shadow.count_served_exact(router.version)
        policy = DepthPolicy("exact", min_layers=policy.min_layers)
    elif policy.name == "relaxed":
        bound = default_bound
        if router.risk is not None:
            bound = published_bound(request, router.risk)
            num_tokens = router.risk.num_tokens
    return replace(
        request,
        policy=policy,
        router_version=router.version,
        risk_bound=bound,
        risk_bound_tokens=num_tokens,
    )


def published_bound(request: GenerationRequest, risk: PublishedRisk | None) -> float | None:
    """The published bound for this request. None if it is not relaxed, its threshold is below all published ones, it samples, or it has
    a repetition penalty."""
    sampling = request.sampling
    if risk is None or request.policy.name != "relaxed":
        return None
    if not sampling.is_greedy or sampling.repetition_penalty != 1.0:
        return None
    return risk.epsilon_at(request.policy.threshold)
