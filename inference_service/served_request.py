"""What becomes of a request once its router is known."""

from dataclasses import replace

from inference_service.engine.request import GenerationRequest
from inference_service.engine.shadow import Shadow
from inference_service.router_loader import LoadedRouter
from shared.ladder.policy import DepthPolicy


def with_router(
    request: GenerationRequest,
    router: LoadedRouter,
    shadow: Shadow,
    default_bound: float | None = None,
) -> GenerationRequest:
    """The request as it will run: counted under the router's version, and a relaxed one with the bound it is held to.

    That is the published one for its threshold, none for a threshold bolder than what was certified, and `default_bound` where
    the router publishes none. Relaxed becomes exact for a version that `shadow` has suspended.
    """
    policy = request.policy
    bound: float | None = None
    if policy.name == "relaxed" and shadow.is_suspended(router.version):
        shadow.served_exact(router.version)
        policy = DepthPolicy("exact", min_layers=policy.min_layers)
    elif policy.name == "relaxed":
        bound = default_bound
        if router.risk is not None:
            bound = router.risk.epsilon_at(policy.threshold)
    return replace(request, policy=policy, router_version=router.version, risk_bound=bound)
