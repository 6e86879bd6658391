"""Which layers become one op, when the op runs, and that its results are those of the modules."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from shared.model.cache import ContiguousCache
from shared.model.cache_argument import with_cache
from shared.model.contiguous_runner import ContiguousRunner
from shared.model.loaded import wrap_model
from shared.model.ragged import RaggedCache, RaggedSequence
from shared.model.substitution import attention, fused_layers, trace
from shared.model.substitution import plan as plan_module
from shared.model.substitution.apply import AccelerationReport, accelerate, restore
from shared.model.substitution.layer import FusedLayer
from shared.ops.layer import LayerKV, LayerWeights, decoder_layers
from tests.families import NUM_LAYERS, VOCABULARY_SIZE, build_family, by_tier, load_family
from tests.tiers import tiered

FUSED = ["llama", "qwen2.5", "qwen3", "mistral-sliding", "phi3-sliding"]
FUSED += ["gemma3-sliding", "gpt2", "opt", "gpt-neox", "phi2", "mixtral", "qwen3-moe", "ministral3", "gpt-oss-sliding"]
FUSED += ["gemma4", "gemma4-sliding"]
LEFT_ALONE = {"phimoe-longrope": "after attention runs PackedLinear, Norm, Experts, not"}


@pytest.fixture
def fused_calls(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each call of a fused layer, whether the op ran."""
    calls: list[bool] = []
    original = FusedLayer.fused

    def noted(self: FusedLayer, *args: Any) -> Tensor | None:
        out = original(self, *args)
        calls.append(out is not None)
        return out

    monkeypatch.setattr(FusedLayer, "fused", noted)
    return calls


def _ids(*shape: int) -> Tensor:
    return torch.randint(2, VOCABULARY_SIZE, shape)


def _in_parts(model: PreTrainedModel, ids: Tensor, parts: list[int]) -> Tensor:
    cache, logits, base = ContiguousCache(ids.shape[1]), [], 0
    for count in parts:
        cache.begin(base, count)
        own = ids[:, base : base + count]
        logits.append(model(input_ids=own, **with_cache(model, cache)).logits)
        base += count
    return torch.cat(logits, 1)


@pytest.mark.parametrize("family", by_tier(FUSED))
def test_layers_as_one_op_have_the_bits_of_their_modules(family, fused_calls):
    model = build_family(family)
    assert accelerate(model).layers == NUM_LAYERS
    fused_calls.clear()
    for rows in (1, 2):
        ids = _ids(rows, 20)
        together = _in_parts(model, ids, [20])
        assert torch.equal(_in_parts(model, ids, [7, 1, 9, 1, 2]), together)
        assert fused_calls
        assert all(fused_calls)
        fused_calls.clear()
        by_modules = model(input_ids=ids, **with_cache(model, DynamicCache())).logits
        assert torch.equal(by_modules, together)
        assert fused_calls == [False] * NUM_LAYERS
        fused_calls.clear()


@pytest.mark.parametrize("kv_dtype", [torch.float16, torch.bfloat16])
def test_layers_are_one_op_over_16_bit_caches_too(kv_dtype, fused_calls):
    model = build_family("llama")
    assert accelerate(model, kv_dtype).layers == NUM_LAYERS
    fused_calls.clear()
    cache = ContiguousCache(5, kv_dtype)
    cache.begin(0, 5)
    model(input_ids=_ids(1, 5), **with_cache(model, cache))
    assert fused_calls == [True] * NUM_LAYERS
    assert cache.keys[0].dtype == cache.values[0].dtype == kv_dtype


def test_bits_are_compared_over_caches_of_the_dtype_that_will_be_used(monkeypatch):
    def wrong_in_16_bits(*args: Any, kv: LayerKV, **kwargs: Any) -> Tensor:
        return decoder_layers(*args, kv=kv, **kwargs) + (kv.keys[0].tensors[0].dtype == torch.bfloat16)

    monkeypatch.setattr(plan_module, "decoder_layers", wrong_in_16_bits)
    assert accelerate(build_family("llama"), torch.float32).layers == NUM_LAYERS
    assert accelerate(build_family("llama"), torch.bfloat16).layers == 0


def test_bits_are_compared_with_the_rounding_that_will_be_used(monkeypatch, tmp_path: Path):
    def load(**options: Any) -> AccelerationReport:
        report = load_family(tmp_path, "llama", torch.bfloat16, **options).acceleration
        assert report is not None
        return report

    def wrong_if_rounded(*args: Any, weights: LayerWeights, **kwargs: Any) -> Tensor:
        rounds_inputs = weights.packed[0][12]  # see PackedHeader
        return decoder_layers(*args, weights=weights, **kwargs) + rounds_inputs

    monkeypatch.setattr(plan_module, "decoder_layers", wrong_if_rounded)
    assert load().layers == NUM_LAYERS
    assert load(compute_dtype=torch.bfloat16).layers == 0


@pytest.mark.parametrize("family", tiered(["gemma3-sliding", "gpt2", "gpt-neox", "mixtral"], {"gpt2"}))
def test_layers_are_one_op_with_rounded_inputs_too(family, tmp_path: Path):
    report = load_family(tmp_path, family, torch.bfloat16, compute_dtype=torch.bfloat16).acceleration
    assert report is not None
    assert report.layers == NUM_LAYERS


def test_a_layer_with_the_weights_of_its_neighbour_keeps_its_modules(monkeypatch):
    planned = []

    def mistaken(*args: Any) -> plan_module.LayerPlan:
        planned.append(plan_module.plan(*args))
        return replace(planned[-1], weights=planned[max(len(planned) - 2, 0)].weights)

    monkeypatch.setattr(fused_layers, "plan", mistaken)
    report = accelerate(build_family("llama"))
    assert report.layers == 1
    assert len([why for why in report.left_alone.values() if "something else" in why]) == (NUM_LAYERS - 1)


def test_a_ragged_batch_runs_as_one_op_with_the_bits_of_each_sequence_alone(fused_calls):
    model = build_family("mistral-sliding")
    accelerate(model)
    rows, held = [_ids(1, 12), _ids(1, 9)], (8, 6)
    alone, sequences = [], []
    for ids, base in zip(rows, held, strict=True):
        count = ids.shape[1] - base
        alone.append(_in_parts(model, ids, [base, count])[:, base:])
        cache = ContiguousCache(16)
        cache.begin(0, base)
        model(input_ids=ids[:, :base], **with_cache(model, cache))
        sequences.append(RaggedSequence(cache, base, count))
    fused_calls.clear()
    positions = torch.cat([torch.arange(s.base, s.base + s.num_tokens) for s in sequences])
    out = model(
        input_ids=torch.cat([row[:, base:] for row, base in zip(rows, held, strict=True)], 1),
        position_ids=positions[None],
        **with_cache(model, RaggedCache(sequences)),
    )
    assert fused_calls == [True] * NUM_LAYERS
    assert torch.equal(out.logits, torch.cat(alone, 1))


@pytest.mark.parametrize("family", LEFT_ALONE)
def test_other_forms_keep_their_modules_and_say_why(family):
    report = accelerate(build_family(family))
    assert report.layers == 0
    reasons = [why for why in report.left_alone.values() if why.startswith("not one op")]
    assert len(reasons) == NUM_LAYERS
    assert all(LEFT_ALONE[family] in why for why in reasons)


def test_a_layer_that_only_looks_alike_keeps_its_modules():
    model = build_family("llama")
    scaled, idle = model.model.layers[2:4]
    own, other = scaled.forward, idle.forward
    scaled.forward = lambda *args, **kwargs: own(*args, **kwargs) * 1.0

    def run_for_nothing(state: Tensor, **kwargs: Any) -> Tensor:
        other(state, **kwargs)
        return state.clone()

    idle.forward = run_for_nothing
    report = accelerate(model)
    assert report.layers == NUM_LAYERS - 2
    assert report.left_alone == {
        "model.layers.2": "not one op: beside its modules runs mul",
        "model.layers.3": "not one op: the op computes something else at positions from 0 on",
    }


def test_what_has_no_effect_on_the_compared_tokens_is_seen():
    model = build_family("llama")
    layer = model.model.layers[2]
    own = layer.forward
    layer.forward = lambda *args, **kwargs: own(*args, **kwargs).clamp(-1e6, 1e6)
    assert accelerate(model).left_alone == {"model.layers.2": "not one op: beside its modules runs clamp"}


@pytest.mark.parametrize("are_parameters", [False, True])
def test_sinks_are_seen_also_where_they_have_no_effect_on_the_compared_tokens(are_parameters):
    model, ids = build_family("llama"), _ids(1, 5)
    attended = model.model.layers[2].self_attn
    sinks = torch.full((4,), -1e4)
    attended.forward = partial(attended.forward, s_aux=sinks)
    if are_parameters:
        attended.sinks = torch.nn.Parameter(sinks)
    foreign = {"model.layers.2": "not one op: the op reads something else than its weights"}
    assert accelerate(model).left_alone == ({} if are_parameters else foreign)
    before = model(input_ids=ids).logits
    sinks.fill_(1.0)
    assert not torch.equal(model(input_ids=ids).logits, before)


def test_layers_whose_angles_are_given_otherwise_keep_their_modules():
    model = build_family("llama")
    for layer in model.model.layers:
        own = layer.forward

        def unwrapped(state: Tensor, *, position_embeddings: Any, own: Any = own, **kwargs: Any) -> Any:
            return own(state, position_embeddings=tuple(of for (of,) in position_embeddings), **kwargs)

        layer.forward = unwrapped
    rotary = model.model.rotary_emb
    given = rotary.forward
    rotary.forward = lambda *args, **kwargs: tuple((of,) for of in given(*args, **kwargs))
    report = accelerate(model)
    assert report.layers == 0
    assert "the op refuses it" in report.left_alone["model.layers.0"]


def test_what_positions_scale_beside_queries_is_seen():
    """This scale is 1 for the positions that are compared."""
    model = build_family("llama")
    for layer in model.model.layers[2:4]:
        own = layer.forward

        def scaled(state: Tensor, own: Any = own, **kwargs: Any) -> Tensor:
            out: Tensor = own(state, **kwargs)
            return out * (1 + torch.floor(kwargs["position_ids"] / 1e6))[..., None]

        layer.forward = scaled
    report = accelerate(model)
    assert report.layers == NUM_LAYERS - 2
    assert report.left_alone["model.layers.2"] == "not one op: scales more than its queries by their positions"


def test_layers_are_compared_across_borders(monkeypatch):
    """Were queries scaled as at the first position, the first eight would not show it."""
    monkeypatch.setattr(trace.OfPositions, "of", lambda self, positions: torch.ones(positions.shape))
    report = accelerate(build_family("ministral3"))
    assert report.layers == 0
    assert report.left_alone["model.layers.0"].endswith("something else at positions from 8 on")


def test_a_layer_attends_to_the_keys_that_it_is_handed(monkeypatch):
    """Were they those of an earlier layer of the same form, it would be seen."""
    own = trace.watch

    def watched(layer: nn.Module, *args: Any) -> trace.Trace:
        found = own(layer, *args)
        # The first two layers seem to hand on theirs, too, and the ones that do seem not to.
        kinds = {0: "sliding_attention", 1: "full_attention"}
        found.hands_on = frozenset({kinds[layer.layer_idx]} if layer.layer_idx in kinds else ())
        return found

    report = accelerate(build_family("gemma4-sliding"))
    assert report.layers == NUM_LAYERS
    monkeypatch.setattr(fused_layers, "watch", watched)
    report = accelerate(build_family("gemma4-sliding"))
    assert report.layers == NUM_LAYERS - 2
    assert all("computes something else" in report.left_alone[f"model.layers.{n}"] for n in (4, 5))


def test_settings_of_a_family_are_seen_in_what_its_layers_read():
    sequential = accelerate(build_family("gpt-neox", use_parallel_residual=False))
    assert sequential.layers == NUM_LAYERS
    normed_after = accelerate(build_family("opt", do_layer_norm_before=False))
    assert normed_after.layers == 0
    assert "not norm, 1 to 3 linears" in normed_after.left_alone["model.decoder.layers.0"]


def test_other_scaling_is_seen_not_assumed():
    model = build_family("llama")
    for layer in model.model.layers:
        layer.self_attn.scaling = 0.7
    assert accelerate(model).layers == NUM_LAYERS


def test_what_the_op_cannot_do_is_left_to_the_modules(fused_calls):
    model, ids = build_family("llama"), _ids(1, 4)
    accelerate(model)
    cache = ContiguousCache(4)
    cache.begin(0, 4)
    expected = model(input_ids=ids, **with_cache(model, cache))
    fused_calls.clear()
    for changes in (
        {"attention_mask": torch.zeros(1, 1, 4, 4).masked_fill(~torch.ones(4, 4).tril().bool(), -3e38)},
        {"something": 1},
    ):
        cache.begin(0, 4)
        out = model(input_ids=ids, **with_cache(model, cache), **changes)
        assert torch.equal(out.logits, expected.logits)
    seen: list[object] = []
    hook = model.model.layers[0].mlp.register_forward_hook(lambda *_: seen.append(1))
    cache.begin(0, 4)
    model(input_ids=ids, **with_cache(model, cache))
    hook.remove()
    assert fused_calls == [False] * (2 * NUM_LAYERS + 1) + [True] * (NUM_LAYERS - 1)
    assert seen == [1]


def test_restored_layers_are_the_models_own_again_also_behind_gates():
    model, ids = build_family("llama"), _ids(1, 5)
    expected = model(input_ids=ids).logits
    accelerate(model)
    restore(model)
    assert not any("forward" in vars(layer) for layer in model.model.layers)
    assert torch.equal(model(input_ids=ids).logits, expected)

    loaded = wrap_model(model, accelerate=True)
    runner = ContiguousRunner(loaded)
    cache = runner.new_cache(5)
    runner.run(ids, cache, first=0, last=NUM_LAYERS, base=0)
    restore(model)
    state = runner.run(ids, cache, first=0, last=NUM_LAYERS, base=0)
    assert torch.equal(runner.logits(state), expected)
    assert runner.counters.layer_executions == 2 * NUM_LAYERS


def test_watching_leaves_no_trace():
    from transformers import AttentionInterface

    model = build_family("llama")
    accelerate(model)
    assert AttentionInterface()[attention.NAME] is attention.attention
    for layer in model.model.layers:
        assert not layer._forward_hooks
        assert not layer._forward_pre_hooks
