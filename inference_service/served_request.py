"""Completes a request once its router is known."""

from dataclasses import replace

from inference_service.router_loader import LoadedRouter
from shared.engine.quality.shadow import Shadow
from shared.engine.request.request import GenerationRequest
from shared.errors import PreconditionFailed
from shared.ladder.policy import DepthPolicy


def with_router(
    request: GenerationRequest, router: LoadedRouter | None, shadow: Shadow, default_bound: float | None = None
) -> GenerationRequest:
    """The request with its router's version and, for policy relaxed, with the bound that shadow checks hold the router
    to.

    The bound is the published one for the request's threshold or margin, and `default_bound` if the router publishes
    none. A threshold that the published bounds do not cover has no bound. A margin that they do not cover has
    `default_bound`. If `shadow` has suspended the version, relaxed becomes exact. Exact without a
    router is served by what needs none. Raises `PreconditionFailed`: MARGIN_NOT_CERTIFIED for a margin without a bound,
    ROUTER_REQUIRED for relaxed without a router.
    """
    policy = request.policy
    if router is None and policy.name == "exact":
        return request
    if router is None:
        raise PreconditionFailed(
            f"the policy {policy.name} needs a router, and none is published for this model: calibrate one with `neap "
            "calibrate`, or ask for the policy exact or full",
            reason="ROUTER_REQUIRED",
        )
    bound: float | None = None
    num_tokens: int | None = None
    if policy.name == "relaxed" and shadow.is_suspended(router.version):
        shadow.count_served_exact(router.version)
        policy = DepthPolicy("exact", min_layers=policy.min_layers)
    elif policy.name == "relaxed":
        bound, num_tokens = published_bound(request, router)
        if bound is None and (policy.margin is not None or policy.setting not in router.risks):
            bound, num_tokens = default_bound, None
        if bound is None and policy.margin is not None:
            raise _not_certified(policy.margin, router)
    return replace(
        request, policy=policy, router_version=router.version, risk_bound=bound, risk_bound_tokens=num_tokens
    )


def published_bound(request: GenerationRequest, router: LoadedRouter) -> tuple[float | None, int | None]:
    """(published bound for this request, number of tokens for which it holds). The bound is None if the request is not
    relaxed, its threshold or margin is bolder than all published ones, it samples, it changes scores, or it has a
    constraint."""
    policy = request.policy
    risk = router.risks.get(policy.setting)
    if risk is None or policy.name != "relaxed":
        return None, None
    if not request.sampling.is_plain_greedy or request.constraint is not None:
        return None, risk.num_tokens
    value = policy.threshold if policy.margin is None else policy.margin
    return risk.epsilon_at(value), risk.num_tokens


def _not_certified(margin: float, router: LoadedRouter) -> PreconditionFailed:
    risk = router.risks.get("margin")
    certified = f"up to {max(bound.value for bound in risk.bounds):g}" if risk is not None else "for none"
    return PreconditionFailed(
        f"router version {router.version} has no bound for the margin {margin:g}; it has bounds {certified} here",
        reason="MARGIN_NOT_CERTIFIED",
        metadata={"router_version": str(router.version)},
    )
