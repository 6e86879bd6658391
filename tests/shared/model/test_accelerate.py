import gc
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from shared import ops
from shared.errors import UnsupportedModel
from shared.model.accelerate import accelerate, restore
from shared.model.cache import SlotCache
from shared.ops import hf_attention, reference, substitute
from shared.ops.build import build
from shared.ops.substitute import Unsuitable
from tests.families import FAMILIES, VOCABULARY_SIZE, build_family

# Families whose attention does not go through transformers' interface, and families with experts in one parameter:
# those parts stay as they are, so the whole is not batch-invariant.
OWN_ATTENTION = {"falcon", "falcon-alibi"}
EXPERTS = {"mixtral"}


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    build()


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # models this small lose by a second one
    with torch.no_grad():
        yield
    torch.set_num_threads(threads)


def _ids(*shape: int) -> Tensor:
    return torch.randint(2, VOCABULARY_SIZE, shape)


def _generate(model: PreTrainedModel, ids: Tensor, seen: Tensor) -> Tensor:
    return model.generate(
        ids,
        attention_mask=seen,
        do_sample=False,
        max_new_tokens=12,
        pad_token_id=0,
        eos_token_id=None,
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_generates_the_same_tokens_and_can_be_taken_back(family: str) -> None:
    model = build_family(family)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    implementation = model.config._attn_implementation
    ids, seen = _ids(3, 9), torch.ones(3, 9, dtype=torch.long)
    seen[1, :3] = seen[2, :1] = 0
    alone, padded = _generate(model, ids[:1], seen[:1]), _generate(model, ids, seen)

    report = accelerate(model)
    assert torch.equal(_generate(model, ids[:1], seen[:1]), alone)
    assert torch.equal(_generate(model, ids, seen), padded)
    assert list(model.state_dict()) == list(before)
    assert report.attention == (family not in OWN_ATTENTION)
    assert report.batch_invariant == (family not in OWN_ATTENTION | EXPERTS)
    assert report.linears > 0
    assert report.packed_bytes >= report.freed_bytes > 0

    restore(model)
    assert model.config._attn_implementation == implementation
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert torch.equal(_generate(model, ids, seen), padded)


def test_counts_what_it_substitutes() -> None:
    report = accelerate(build_family("llama"))
    assert (report.linears, report.gated_mlps, report.norms) == (6 * 4 + 1, 6, 13)
    assert report.rotary == ("transformers.models.llama.modeling_llama",)
    assert report.left_alone == {}


@pytest.mark.parametrize(
    ("family", "gated", "norms"),
    [("qwen3", 6, 25), ("gemma3-sliding", 6, 37), ("phi3", 6, 13), ("phi2", 0, 0), ("gpt2", 0, 0)],
)
def test_recognises_parts_by_what_they_compute(family: str, gated: int, norms: int) -> None:
    report = accelerate(build_family(family))
    assert (report.gated_mlps, report.norms) == (gated, norms)


def test_names_what_it_leaves_alone() -> None:
    mixtral = accelerate(build_family("mixtral")).left_alone
    assert "experts" in mixtral["model.layers.0.mlp.experts"]
    falcon = accelerate(build_family("falcon-alibi")).left_alone
    assert "AttentionInterface" in falcon["attention"]
    assert "other parameters" in falcon["transformer.ln_f"]


@pytest.mark.parametrize("family", ["llama", "mistral-sliding", "gemma3-sliding", "opt"])
@pytest.mark.parametrize("tokens", [1, 3, 8])
def test_any_split_of_a_sequence_gives_the_same_bits(family: str, tokens: int) -> None:
    model = build_family(family)
    accelerate(model)
    ids = _ids(1, 24)
    whole = model(input_ids=ids, use_cache=False).logits
    cache, parts = SlotCache(40), []
    for start in range(0, 24, tokens):
        cache.begin(start, tokens)
        part = model(input_ids=ids[:, start : start + tokens], past_key_values=cache)
        parts.append(part.logits)
    assert torch.equal(torch.cat(parts, 1), whole)


def test_threads_do_not_change_the_bits() -> None:
    model = build_family("llama")
    accelerate(model)
    ids = _ids(1, 30)
    one = model(input_ids=ids).logits
    torch.set_num_threads(2)
    assert torch.equal(model(input_ids=ids).logits, one)


def test_weights_are_freed_unless_shared_or_wanted() -> None:
    tied = build_family("llama-tied")
    accelerate(tied)
    assert tied.model.layers[0].self_attn.q_proj.weight.is_meta
    assert not tied.model.embed_tokens.weight.is_meta
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    kept = build_family("llama")
    assert accelerate(kept, keep_weights=True).freed_bytes == 0
    assert not any(parameter.is_meta for parameter in kept.parameters())


def test_a_second_time_training_and_gradients_are_refused() -> None:
    model = build_family("llama")
    with pytest.raises(ValueError, match="eval"):
        accelerate(model.train())
    accelerate(model.eval())
    with pytest.raises(ValueError, match="already"):
        accelerate(model)
    with (
        torch.enable_grad(),
        pytest.raises((RuntimeError, ValueError), match=r"no gradient|no_grad"),
    ):
        model(input_ids=_ids(1, 3))


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"torch.bfloat16 on cpu, want float32"):
        accelerate(build_family("llama").bfloat16())


def test_a_model_that_comes_out_different_is_left_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, ids = build_family("llama"), _ids(1, 6)
    before = model(input_ids=ids).logits
    monkeypatch.setattr("shared.model.accelerate.MODEL_TOLERANCE", -1.0)
    with pytest.raises(UnsupportedModel, match="differ by"):
        accelerate(model)
    assert torch.equal(model(input_ids=ids).logits, before)
    assert not any(parameter.is_meta for parameter in model.parameters())


def test_the_rotary_function_comes_back_with_the_last_user() -> None:
    from transformers.models.mistral import modeling_mistral

    gc.collect()  # models of other tests may still use it
    original = modeling_mistral.apply_rotary_pos_emb
    first, second = build_family("mistral"), build_family("mistral-sliding")
    accelerate(first)
    accelerate(second)
    assert modeling_mistral.apply_rotary_pos_emb is not original
    restore(first)
    assert modeling_mistral.apply_rotary_pos_emb is not original
    del second
    gc.collect()
    assert modeling_mistral.apply_rotary_pos_emb is original


class _Scaled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 1.001


class _CentredNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(8)), 1e-5

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.layer_norm(x, (8,), self.weight, None, self.eps)


class _Mlp(nn.Module):
    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 12), nn.Linear(8, 12, bias=False), nn.Linear(12, 8)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.a(x) * self.act(self.b(x)))


def test_eps_is_found_among_other_small_numbers() -> None:
    norm = _CentredNorm()
    norm.dropout, norm.eps = 1e-7, 1e-6
    norm.forward = lambda x: reference.rms_norm(x, norm.weight, norm.eps)
    x = torch.randn(2, 8) * 1e-2
    torch.testing.assert_close(substitute.rms_norm(norm).forward(x), norm(x))


def test_look_alikes_are_not_substituted() -> None:
    with pytest.raises(Unsuitable, match="does more"):
        substitute.linear(_Scaled(8, 4))
    with pytest.raises(Unsuitable, match="not an RMS norm"):
        substitute.rms_norm(_CentredNorm())
    with pytest.raises(Unsuitable, match="is not down"):
        substitute.gated_mlp(_Mlp(nn.ReLU()))
    with pytest.raises(Unsuitable, match="float64"):
        substitute.linear(nn.Linear(8, 4).double())


@pytest.mark.parametrize("act", [nn.SiLU(), nn.GELU(approximate="tanh")])
def test_a_gated_mlp_is_found_whatever_its_layers_are_called(act: nn.Module) -> None:
    module, x = _Mlp(act), torch.randn(5, 8)
    found = substitute.gated_mlp(module)
    torch.testing.assert_close(found.forward(x), module(x))
    for source, weight in zip(found.sources, found.unpack(), strict=True):
        assert torch.equal(source.get_parameter("weight"), weight)


def test_hooks_on_a_layer_keep_it_from_being_fused() -> None:
    module = _Mlp(nn.SiLU())
    module.a.register_forward_hook(lambda *_: None)
    with pytest.raises(Unsuitable, match="hooks"):
        substitute.gated_mlp(module)


def _mask(q: int, kv: int, **changes: object) -> Tensor | None:
    return hf_attention.attention_mask(1, q, kv, **{"q_offset": kv - q, **changes})


def test_masks_are_left_out_only_where_plainly_causal() -> None:
    assert _mask(3, 9) is None
    assert _mask(3, 9, attention_mask=torch.ones(1, 9, dtype=torch.bool)) is None
    assert _mask(3, 9, local_size=10) is None
    hidden = torch.tensor([[False, True, True]])
    for changes in (
        {"q_offset": 0},
        {"kv_offset": 2},
        {"local_size": 9},
        {"allow_is_causal_skip": False},
        {"attention_mask": torch.nn.functional.pad(hidden, (0, 6), value=True)},
        {"attention_mask": torch.ones(1, 8, dtype=torch.bool)},
        {"q_offset": torch.tensor(6)},
    ):
        mask = _mask(3, 9, **changes)
        assert mask is not None
        assert mask.dtype == torch.bool
        assert mask.shape == (1, 1, 3, 9)


def test_attention_takes_additive_masks_that_hide_and_refuses_the_rest() -> None:
    module, q, (k, v) = nn.Module(), torch.randn(1, 2, 3, 8), torch.randn(2, 1, 1, 5, 8).unbind()
    visible = torch.ones(1, 1, 3, 5, dtype=torch.bool).tril(2)
    additive = torch.where(visible, 0.0, torch.finfo(torch.float32).min)
    out, weights = hf_attention.attention(module, q, k, v, additive)
    assert weights is None
    assert torch.equal(out, ops.slot_attention(q, k, v, 5))
    with pytest.raises(NotImplementedError, match="not biases"):
        hf_attention.attention(module, q, k, v, additive / 1e38)
    for refused in ({"s_aux": torch.ones(2)}, {"dropout": 0.1}, {"output_attentions": True}):
        with pytest.raises(NotImplementedError, match=next(iter(refused))):
            hf_attention.attention(module, q, k, v, None, **refused)


def test_a_growing_cache_gives_the_bits_of_a_preallocated_one() -> None:
    model, ids = build_family("qwen3"), _ids(1, 12)
    accelerate(model)
    growing, slots = DynamicCache(), SlotCache(20)
    for start in range(0, 12, 4):
        slots.begin(start, 4)
        inputs = {"input_ids": ids[:, start : start + 4]}
        one = model(**inputs, past_key_values=growing).logits
        assert torch.equal(model(**inputs, past_key_values=slots).logits, one)
