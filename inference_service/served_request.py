"""What becomes of a request once its router is known."""

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
    """The request as it will run: counted under the router's version, and a relaxed one with the bound it is held to.

    That is the published one for its threshold, none for a request that no published one covers, and `default_bound` where the
    router publishes none. Relaxed becomes exact for a version that `shadow` has suspended.
    """
    policy = request.policy
    bound: float | None = None
    num_tokens: int | None = None
    if policy.name == "relaxed" and shadow.is_suspended(router.version):
        shadow.served_exact(router.version)
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
    """What is certified of this request; None: it is not relaxed, bolder than anything certified, or not plainly greedy."""
    sampling = request.sampling
    if risk is None or request.policy.name != "relaxed":
        return None
    if not sampling.is_greedy or sampling.repetition_penalty != 1.0:
        return None
    return risk.epsilon_at(request.policy.threshold)
