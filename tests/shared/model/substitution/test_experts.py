"""Which experts become one op: what they compute is compared, also where it is clamped."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts, GptOssTopKRouter

from shared.model.substitution.experts import experts, router
from shared.model.substitution.match import Unsuitable

Change = Callable[[Tensor], Tensor]


def _experts(width: int = 64, scale: float = 0.1, own: type[GptOssExperts] = GptOssExperts) -> Any:
    config: Any = GptOssConfig(hidden_size=width, intermediate_size=2 * width, num_local_experts=2)
    config._experts_implementation = "eager"
    module = own(config)
    for parameter in module.parameters():
        parameter.data.normal_(0, scale)
    return module


def _beyond(bound: float, factor: float) -> Change:
    """Tokens [T, D] with a number beyond the bound are multiplied by a factor."""
    return lambda x: x * torch.where(x.abs().amax(-1, keepdim=True) > bound, factor, 1.0)


@pytest.mark.parametrize("seed", range(4))
def test_sums_that_lie_between_the_bounds_may_differ_as_rounding_makes_them_differ(seed: int) -> None:
    """By more than other modules' outputs may, with this width and these weights."""
    torch.manual_seed(seed)
    assert experts(_experts(512)).form == ("clamped_swish", True)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, lambda x: x.clamp(-30, 30)),
        (lambda x: x.clamp(-100, 100), None),
        (lambda x: x * (1000 / x.norm(dim=-1, keepdim=True)).clamp(max=1), None),
        (_beyond(1000, 1.2), None),
        (None, _beyond(30, 1.001)),
        (None, lambda x: x + 1e-3),
    ],
    ids=["outputs clamped", "inputs clamped", "norms clamped", "inputs scaled", "outputs scaled", "outputs moved"],
)
@pytest.mark.parametrize("width", [64, 512])
def test_what_experts_do_beside_their_products_is_seen(width: int, before: Change | None, after: Change | None) -> None:
    class Changed(GptOssExperts):
        def forward(self, hidden_states: Tensor, index: Tensor, weights: Tensor) -> Tensor:
            out: Tensor = GptOssExperts.forward(
                self, before(hidden_states) if before else hidden_states, index, weights
            )
            return after(out) if after else out

    with pytest.raises(Unsuitable, match="does more than its experts' products"):
        experts(_experts(width, own=Changed))


@pytest.mark.parametrize(("name", "value"), [("limit", 6.9), ("limit", 50.0), ("alpha", 1.7)])
def test_another_activation_is_not_taken_for_that_of_the_op(name: str, value: float) -> None:
    module = _experts()
    setattr(module, name, value)
    assert experts(module).form == "experts"


@pytest.mark.parametrize(
    ("gated", "form"),
    [
        (
            lambda x: (
                (x[..., 1::2].clamp(-7, 7)) * x[..., ::2].clamp(max=7) * (1.702 * x[..., ::2].clamp(max=7)).sigmoid()
            ),
            "experts",
        ),
        (lambda x: torch.nn.functional.silu(x[..., 1::2]) * x[..., ::2], "experts"),
        (lambda x: torch.nn.functional.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1], "experts"),
        (lambda x: torch.nn.functional.silu(x[..., ::2]) * x[..., 1::2], ("silu", True)),
    ],
    ids=["up without one", "up first", "turned halves", "silu in turn"],
)
def test_gate_and_up_are_told_apart(gated: Change, form: object) -> None:
    module = _experts()
    module._apply_gate = gated
    assert experts(module).form == form


class Scaled(GptOssTopKRouter):
    def __init__(self, config: GptOssConfig) -> None:
        super().__init__(config)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits, shares, index = super().forward(hidden_states)
        return logits, shares * self.scale, index


class Correcting(GptOssTopKRouter):
    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = nn.functional.linear(hidden_states, self.weight)
        index = (logits + self.bias).topk(self.top_k).indices
        return logits, logits.gather(1, index).softmax(-1), index


class OfInputs(GptOssTopKRouter):
    def __init__(self, config: GptOssConfig) -> None:
        super().__init__(config)
        self.bias = nn.Parameter(torch.zeros(self.hidden_dim))

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = nn.functional.linear(hidden_states + self.bias, self.weight)
        shares, index = logits.topk(self.top_k)
        return logits, shares.softmax(-1), index


@pytest.mark.parametrize(
    ("own", "why"),
    [
        (GptOssTopKRouter, None),
        (Scaled, "has other parameters than a matrix"),
        (Correcting, "does more than choose the largest"),
        (OfInputs, "has other parameters than a matrix"),
    ],
)
def test_what_a_routers_vectors_do_is_seen_though_they_have_no_effect(
    own: type[GptOssTopKRouter], why: str | None
) -> None:
    """In the layer that is tried. In others, which get its form, they may have one."""
    module = own(GptOssConfig(hidden_size=64, num_local_experts=4, num_experts_per_tok=2))
    module.weight.data.normal_()
    if why is None:
        assert router(module).form == (2, True)
    else:
        with pytest.raises(Unsuitable, match=why):
            router(module)
