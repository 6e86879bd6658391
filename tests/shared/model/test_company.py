"""What `exact` may promise of a paged runner: its products and norms do not depend on a token's company, which is tried
at every size of pass, head and chunk."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shared.model.loaded import LoadedModel, wrap_model
from shared.model.numerics import numerics_of
from shared.model.recorder import NoRecorder
from shared.model.runners import LayerCompiler
from shared.model.substitution.invariant import InvariantLinear, InvariantNorm, make_invariant
from shared.model.substitution.merged_linear import merge_linears
from tests.families import build_family
from tests.paged import make_runner
from tests.tiers import tiered

EXPERTS = ("mixtral", "qwen3-moe", "phimoe-longrope", "gpt-oss-sliding")


def invariant(family: str = "llama", **config: Any) -> LoadedModel:
    """A family's model as it is on a GPU."""
    model = build_family(family)
    for name, value in config.items():
        setattr(model.config, name, value)
    model.config.pad_token_id = None
    merge_linears(model)
    return replace(wrap_model(model), invariance=make_invariant(model))


@pytest.mark.parametrize(
    ("family", "linears"), tiered((("llama", 7), ("qwen3", 7), ("gemma3-sliding", 7), ("gpt2", 4)), {("gpt2", 4)})
)
def test_a_model_with_products_of_its_own_is_promised(family: str, linears: int) -> None:
    loaded = invariant(family)
    assert loaded.invariance is not None
    assert loaded.invariance.linears > linears * loaded.num_layers
    assert loaded.invariance.norms > 2 * loaded.num_layers
    assert not loaded.invariance.left_alone
    runner = make_runner(loaded)
    found = numerics_of(runner)
    assert found.is_exact, found.why_not
    assert not runner._lane, "what the trial has recorded is dropped"


@pytest.mark.full
@pytest.mark.parametrize("family", ["llama", "mixtral", "qwen3-moe"])
def test_compiled_layers_keep_the_promise(family: str) -> None:
    runner = make_runner(invariant(family), recorder=NoRecorder(), transform=LayerCompiler("aot_eager"))
    assert runner.compiles, runner.why_not_compiled
    found = numerics_of(runner)
    assert found.is_exact, found.why_not


# Rows of what is multiplied otherwise, whether the head is, and what the trial says of it.
PLANTED = {
    "a size of pass": (48, False, "bits differ in passes of 48 tokens"),
    "a size of head": (128, True, "logits of a token differ beside those of 127 others"),
    "a size of chunk": (512, False, "keys and values differ in chunks of 512 tokens"),
}


@pytest.mark.parametrize("where", tiered(PLANTED, {"a size of pass"}))
def test_a_product_that_rounds_by_the_number_of_tokens_is_found(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    count, of_head, why = PLANTED[where]
    loaded = invariant(max_position_embeddings=512)
    multiply = InvariantLinear.forward

    def rounding(module: InvariantLinear, x: Tensor) -> Tensor:
        is_planted = x.shape[-2] == count and of_head == (module is loaded.parts.head)
        return multiply(module, x) * (1 + 2**-20 * is_planted)

    monkeypatch.setattr(InvariantLinear, "forward", rounding)
    found = numerics_of(make_runner(loaded))
    assert not found.is_exact
    assert why in found.why_not


def test_the_vendors_products_promise_nothing() -> None:
    """Also where a few passes happen to agree: their order of sums is their own business."""
    loaded = invariant()
    assert loaded.invariance is not None
    plain = replace(loaded, invariance=None, acceleration=None)
    assert not numerics_of(make_runner(plain)).is_exact


def test_a_gpt2_is_what_it_was() -> None:
    ids, plain = torch.arange(3, 20)[None], build_family("gpt2")
    wanted = plain(input_ids=ids).logits
    torch.testing.assert_close(invariant("gpt2").model(input_ids=ids).logits, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("family", EXPERTS)
def test_experts_are_promised_and_what_they_were(family: str) -> None:
    ids = torch.arange(3, 20)[None]
    wanted = build_family(family)(input_ids=ids).logits
    loaded = invariant(family)
    assert loaded.invariance is not None
    assert loaded.invariance.experts == loaded.num_layers
    assert loaded.invariance.linears == 5 * loaded.num_layers + 1
    assert not loaded.invariance.left_alone
    torch.testing.assert_close(loaded.model(input_ids=ids).logits, wanted, atol=1e-4, rtol=1e-4)
    found = numerics_of(make_runner(loaded))
    assert found.is_exact, found.why_not


@pytest.mark.parametrize("kind", tiered(["Experts", "TopKRouter"], {"Experts"}))
def test_products_of_a_models_own_code_promise_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that computes something else keeps its own."""
    module = type(next(m for m in build_family("mixtral").modules() if type(m).__name__ == f"Mixtral{kind}"))
    forward = module.forward

    def other(self: nn.Module, *args: Any, **options: Any) -> Any:
        made = forward(self, *args, **options)
        return made * 1.1 if kind == "Experts" else (made[0], made[1] * 1.1, made[2])

    monkeypatch.setattr(module, "forward", other)
    loaded = invariant("mixtral")
    assert loaded.invariance is not None
    assert len(loaded.invariance.left_alone) == loaded.num_layers
    assert all(type(m) is module for m in loaded.model.modules() if isinstance(m, module))
    found = numerics_of(make_runner(loaded))
    assert found.why_not.endswith(next(iter(loaded.invariance.left_alone.values())))


def test_a_kernel_that_computes_something_else_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "shared.model.substitution.invariant.invariant_linear", lambda x, weight, bias: x @ weight.T * 1.1
    )
    model = build_family("llama")
    report = make_invariant(model)
    assert not report.linears
    assert "by neap's kernel" in report.left_alone["lm_head"]
    assert type(model.lm_head) is nn.Linear
    assert isinstance(model.model.norm, InvariantNorm)
