"""Layers of one input are multiplied together, give what they gave, and stay modules of their own."""

from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

from shared.model.substitution.merged_linear import MergedLinear, merge_linears
from tests.families import FAMILIES, VOCABULARY_SIZE, build_family, by_tier


@pytest.fixture(autouse=True)
def _inference():
    with torch.inference_mode():
        yield


def logits(model: nn.Module) -> Tensor:
    ids = torch.randint(2, VOCABULARY_SIZE, (1, 20), generator=torch.Generator().manual_seed(0))
    return model(input_ids=ids, use_cache=False).logits


@pytest.mark.parametrize("family", by_tier(FAMILIES))
def test_the_logits_of_every_family_stay(family):
    model = build_family(family)
    expected = logits(model)
    merge_linears(model)
    torch.testing.assert_close(logits(model), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["llama", "qwen2.5", "gemma3-sliding"])
def test_attention_and_mlp_multiply_once_each(family, monkeypatch):
    model = build_family(family)
    weights = {name: parameter.clone() for name, parameter in model.named_parameters()}
    assert merge_linears(model) == 2 * model.config.num_hidden_layers
    merged = {name.split(".")[-1] for name, module in model.named_modules() if isinstance(module, MergedLinear)}
    assert merged == {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}
    assert weights.keys() == dict(model.named_parameters()).keys()
    assert all(torch.equal(parameter, weights[name]) for name, parameter in model.named_parameters())
    num_products, multiply = [], nn.functional.linear
    monkeypatch.setattr(nn.functional, "linear", lambda *args: num_products.append(1) or multiply(*args))
    logits(model)
    assert len(num_products) == 4 * model.config.num_hidden_layers + 1


def test_compiled_projections_are_one_product_and_share_one_compilation():
    model = build_family("llama")
    inputs = torch.randn(1, 5, model.config.hidden_size)

    def projected(attention: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
        return attention.q_proj(x), attention.k_proj(x), attention.v_proj(x)

    expected = [projected(layer.self_attn, inputs) for layer in model.model.layers]
    merge_linears(model)
    graphs = []
    compiled = torch.compile(
        projected, fullgraph=True, dynamic=False, backend=lambda graph, _: graphs.append(graph) or graph.forward
    )
    for layer, outputs in zip(model.model.layers, expected, strict=True):
        torch.testing.assert_close(compiled(layer.self_attn, inputs), outputs, atol=1e-4, rtol=1e-4)
    [graph] = graphs
    assert sum("linear" in str(node.target) for node in graph.graph.nodes) == 1


def test_layers_asked_alone_or_in_another_order_give_their_own_output():
    model = build_family("llama")
    attention = model.model.layers[0].self_attn
    x = torch.randn(1, 5, model.config.hidden_size)
    names = ("q_proj", "k_proj", "v_proj")
    expected = {name: getattr(attention, name)(x) for name in names}
    merge_linears(model)
    for order in (names, names[::-1], ("k_proj",), ("q_proj", "q_proj"), ("v_proj", "q_proj", "k_proj")):
        for name in order:
            torch.testing.assert_close(getattr(attention, name)(x), expected[name], atol=1e-5, rtol=1e-5)


def test_an_input_that_changed_in_between_is_not_taken_for_the_earlier_one():
    model = build_family("llama")
    attention = model.model.layers[0].self_attn
    plain = deepcopy(attention)
    merge_linears(model)
    one, other = torch.randn(2, 1, 5, model.config.hidden_size)
    attention.q_proj(one)
    torch.testing.assert_close(attention.k_proj(other), plain.k_proj(other), atol=1e-5, rtol=1e-5)


def test_shared_weights_and_layers_with_hooks_stay_as_they_are():
    model = build_family("llama")
    first, second, third = model.model.layers[:3]
    first.self_attn.k_proj.weight = first.self_attn.v_proj.weight
    seen = []
    second.mlp.up_proj.register_forward_hook(lambda *args: seen.append(args))
    third.mlp.gate_proj.register_forward_pre_hook(lambda *args: None)
    third.self_attn.v_proj.forward = third.self_attn.v_proj.forward
    expected = logits(model)
    assert merge_linears(model) == 2 * model.config.num_hidden_layers - 3
    kept = (first.self_attn.q_proj, first.self_attn.k_proj, second.mlp.gate_proj, second.mlp.up_proj)
    kept += (third.mlp.gate_proj, third.mlp.up_proj, third.self_attn.v_proj)
    assert all(type(module) is nn.Linear for module in kept)
    torch.testing.assert_close(logits(model), expected, atol=1e-4, rtol=1e-4)
    assert len(seen) == 3, "the pass that finds the groups calls it, too"
