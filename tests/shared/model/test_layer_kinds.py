"""Which layers count as alike, and that nothing runs deeper than to where there have been layers of all kinds."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shared.model.contiguous_runner import ContiguousRunner
from shared.model.layer_kinds import LayerKinds, layer_kinds, only_first_layers
from shared.model.load import load_model
from shared.model.loaded import wrap_model
from shared.model.numerics import promise_of
from shared.model.substitution import fused_layers
from shared.model.substitution import plan as plan_module
from shared.model.substitution.apply import accelerate
from shared.ops.layer import LayerWeights, decoder_layers
from tests.families import FAMILIES, NUM_LAYERS, build_family
from tests.gguf_files import Kind, write_llama
from tests.tiers import tiered


def kinds_of(model: Any) -> LayerKinds:
    found = layer_kinds(model)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("kinds", "depth"),
    [("aaaaaa", 2), ("abbbbb", 2), ("ababab", 2), ("aaaaab", 6), ("aabaca", 5), ("a", 1), ("ab", 2), ("abc", 3)],
)
def test_the_depth_is_that_of_the_last_new_kind(kinds, depth):
    assert LayerKinds("layers", tuple(kinds)).depth == depth


def test_modules_are_alike_in_layers_of_a_kind():
    kinds = LayerKinds("model.layers", ("a", "b", "a"))
    assert kinds.alike("model.layers.0.mlp.up") == ["model.layers.0.mlp.up", "model.layers.2.mlp.up"]
    assert kinds.alike("model.layers.1") == ["model.layers.1"]
    assert kinds.alike("model.norm") == ["model.norm"]
    assert kinds.alike("lm_head") == ["lm_head"]


@pytest.mark.parametrize(
    ("family", "pattern"),
    [("llama", "aaaaaa"), ("qwen2.5", "aaaaaa"), ("gemma3-sliding", None), ("gemma4", "ababcd"), ("llama4", "ababab")],
)
def test_layers_differ_in_what_they_are_told(family, pattern):
    model = build_family(family)
    kinds = kinds_of(model).kinds
    if pattern is None:
        pattern = "".join("ab"[kind != model.config.layer_types[0]] for kind in model.config.layer_types)
    assert [kinds.index(kind) for kind in kinds] == [pattern.index(letter) for letter in pattern]


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: setattr(layer.self_attn, "scaling", 0.5),
        lambda layer: setattr(layer.self_attn, "o_proj", nn.Linear(32, 32, bias=True)),
        lambda layer: layer.register_forward_hook(lambda *_: None),
        lambda layer: setattr(layer.mlp, "act_fn", nn.GELU()),
        lambda layer: setattr(layer, "forward", lambda hidden_states, **_: hidden_states),
    ],
)
def test_one_layer_that_is_different_is_tried(change):
    model = build_family("llama")
    change(model.model.layers[4])
    assert kinds_of(model).depth == 5


@pytest.mark.parametrize(("other", "num_kinds"), [(Kind.Q8_0, 1), (Kind.Q4_1, 2)])
def test_layers_differ_in_the_formats_of_their_file(other, num_kinds, tmp_path: Path):
    loaded = load_model(write_llama(tmp_path / "tiny.gguf", {"blk.1.ffn_down.weight": other}))
    assert len(set(kinds_of(loaded.model).kinds)) == num_kinds


def test_the_configuration_may_tell_layers_apart():
    model = build_family("llama")
    model.config.of_each = [0, 0, 0, 1, 0, 0]
    assert kinds_of(model).depth == 4


def test_a_model_ends_early_and_is_whole_again():
    model = build_family("llama")
    ids = torch.arange(5)[None]
    whole = model(input_ids=ids).logits
    with only_first_layers(model, kinds_of(model)):
        assert not torch.equal(model(input_ids=ids).logits, whole)
        assert len(model.model.layers) == 2
    with pytest.raises(KeyError), only_first_layers(model, kinds_of(model)):
        raise KeyError
    assert len(model.model.layers) == NUM_LAYERS
    assert torch.equal(model(input_ids=ids).logits, whole)


@pytest.mark.parametrize("family", tiered(sorted(FAMILIES), {"llama", "gemma3-sliding", "gpt2", "mixtral"}))
def test_what_is_tried_goes_no_deeper_than_the_kinds(family, monkeypatch):
    """Of each check a pass at most goes through all layers: it shows what layers are called with."""
    model = build_family(family)
    depth = kinds_of(model).depth
    seen: list[int] = []
    run = ContiguousRunner.run

    def watched(self: ContiguousRunner, *args: Any, last: int, **options: Any) -> Tensor:
        seen.append(last)
        return run(self, *args, last=last, **options)

    monkeypatch.setattr(ContiguousRunner, "run", watched)
    loaded = wrap_model(model, accelerate=True)
    runner = ContiguousRunner(loaded)
    promise_of(runner)
    assert runner.tried_depth == depth
    assert sum(last > depth for last in seen) <= 2, "one token's keys and values, and a few tokens' bits"
    assert sum(last <= depth for last in seen) > 10


def test_an_op_that_is_wrong_is_wrong_for_all_layers_of_its_kind(monkeypatch):
    def wrong(hidden: Tensor, *args: Any, weights: LayerWeights, **options: Any) -> Tensor:
        out = decoder_layers(hidden, *args, weights=weights, **options)
        return out + (40 in weights.intermediates)

    monkeypatch.setattr(plan_module, "decoder_layers", wrong)
    model = build_family("llama")
    for index in (1, 3, 5):
        mlp = model.model.layers[index].mlp
        for name in ("gate_proj", "up_proj"):
            setattr(mlp, name, nn.Linear(32, 40, bias=False))
        mlp.down_proj = nn.Linear(40, 32, bias=False)
    report = accelerate(model)
    assert report.layers == 3
    assert {name: "something else" in why for name, why in report.left_alone.items()} == {
        f"model.layers.{index}": True for index in (1, 3, 5)
    }


def test_ops_of_another_form_are_tried_though_their_layers_are_alike(monkeypatch):
    planned = []

    def other_in_the_last(*args: Any) -> plan_module.LayerPlan:
        plan = plan_module.plan(*args)
        planned.append(plan)
        if len(planned) < NUM_LAYERS:
            return plan
        return replace(plan, weights=replace(plan.weights, scaling=2 * plan.weights.scaling))

    monkeypatch.setattr(fused_layers, "plan", other_in_the_last)
    report = accelerate(build_family("llama"))
    assert report.layers == NUM_LAYERS - 1
    assert "something else" in report.left_alone[f"model.layers.{NUM_LAYERS - 1}"]
