import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.models.gemma4 import modeling_gemma4
from transformers.models.llama import modeling_llama
from transformers.models.mistral import modeling_mistral

from shared import memory
from shared.errors import UnsupportedModel
from shared.model.cache import ContiguousCache
from shared.model.cache_argument import with_cache
from shared.model.substitution import linear as linear_module
from shared.model.substitution import reversible, rotary
from shared.model.substitution.apply import accelerate, restore
from shared.model.substitution.match import agrees
from shared.model.weights.lazy import lazy
from shared.model.weights.stored import Packed
from shared.ops.build import build
from tests.families import FAMILIES, VOCABULARY_SIZE, build_family
from tests.tiers import tiered

# Families whose attention does not use transformers' interface.
OWN_ATTENTION = {"falcon", "falcon-alibi"}


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    build()


@pytest.fixture
def _alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No model of another test uses the rotary function, and none of this one goes on to use it."""
    gc.collect()
    for module in (modeling_llama, modeling_mistral):
        original = rotary._originals.get(module.__name__, module.apply_rotary_pos_emb)
        monkeypatch.setattr(module, rotary.FUNCTION, original)
    for counts in ("_users", "_originals"):
        monkeypatch.setattr(rotary, counts, {})
    yield
    gc.collect()  # before the others' counts come back
    assert not any(rotary._users.values())


def _ids(*shape: int) -> Tensor:
    return torch.randint(2, VOCABULARY_SIZE, shape)


def _generate(model: PreTrainedModel, ids: Tensor, seen: Tensor) -> Tensor:
    return model.generate(
        ids, attention_mask=seen, do_sample=False, max_new_tokens=12, pad_token_id=0, eos_token_id=None
    )


@pytest.mark.parametrize("family", tiered(FAMILIES, {"llama", "mixtral"}))
def test_generates_the_same_tokens_and_can_be_taken_back(family):
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
    assert report.linears > 0
    assert report.packed_bytes >= report.freed_bytes > 0

    restore(model)
    assert model.config._attn_implementation == implementation
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert torch.equal(_generate(model, ids, seen), padded)


@pytest.mark.parametrize(
    ("family", "gated", "norms"),
    [("qwen3", 6, 25), ("gemma3-sliding", 6, 37), ("phi3", 6, 13), ("phi2", 0, 7), ("gpt2", 0, 13)],
)
def test_recognises_parts_by_what_they_compute(family, gated, norms):
    report = accelerate(build_family(family))
    assert (report.gated_mlps, report.norms) == (gated, norms)


def test_names_what_it_leaves_alone():
    mixtral = build_family("mixtral")
    other = mixtral.model.layers[1].mlp.experts
    other.has_post_expert_norm, other.post_expert_norm = True, torch.nn.Identity()
    report = accelerate(mixtral)
    assert report.experts == 5
    assert report.row_invariant == 0  # their routers are replaced, others run their own forward
    assert accelerate(build_family("phimoe-longrope")).row_invariant >= 6
    assert "interface" in report.left_alone["model.layers.1.mlp.experts"]
    falcon = accelerate(build_family("falcon-alibi")).left_alone
    assert "AttentionInterface" in falcon["attention"]


@pytest.mark.parametrize("family", ["llama", "mistral-sliding", "gemma3-sliding", "opt"])
@pytest.mark.parametrize("tokens", tiered([1, 3, 8], {3}))
def test_any_split_of_a_sequence_gives_the_same_bits(family, tokens):
    model = build_family(family)
    accelerate(model)
    ids = _ids(1, 24)
    whole = model(input_ids=ids, use_cache=False).logits
    cache, parts = ContiguousCache(40), []
    for start in range(0, 24, tokens):
        cache.begin(start, tokens)
        part = model(input_ids=ids[:, start : start + tokens], **with_cache(model, cache))
        parts.append(part.logits)
    assert torch.equal(torch.cat(parts, 1), whole)


def test_threads_do_not_change_the_bits():
    model = build_family("llama")
    accelerate(model)
    ids = _ids(1, 30)
    one = model(input_ids=ids).logits
    torch.set_num_threads(2)
    assert torch.equal(model(input_ids=ids).logits, one)


def test_weights_are_freed() -> None:
    model = build_family("llama")
    weight = model.model.layers[0].self_attn.q_proj.weight
    before = weight.clone()
    is_gone = weakref.ref(weight)
    del weight
    accelerate(model)
    assert is_gone() is None
    assert torch.equal(model.model.layers[0].self_attn.q_proj.weight, before)


def test_an_embedding_and_a_tied_head_share_one_packed_matrix() -> None:
    model, ids = build_family("llama-tied"), _ids(1, 5)
    rows = model.model.embed_tokens(ids)
    report = accelerate(model)
    head, embedding = model.lm_head.weight, model.model.embed_tokens.weight
    assert head is embedding
    assert lazy(head).memory
    assert report.embeddings == 1
    assert report.freed_bytes == 4 * sum(p.numel() for p in model.parameters() if p.dim() == 2)
    assert torch.equal(model.model.embed_tokens(ids), rows)
    restore(model)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_layer_with_other_settings_is_compared_on_its_own() -> None:
    """All layers have the same classes and shapes.
    One norm has another eps, one MLP another activation, one matrix its own forward."""
    model, ids = build_family("llama"), _ids(1, 6)
    first, second, third = model.model.layers[1:4]
    first.input_layernorm.variance_epsilon = 0.05
    second.mlp.act_fn = torch.nn.ReLU()
    own = third.self_attn.q_proj.forward
    third.self_attn.q_proj.forward = lambda x: own(x) * 1.5
    before = model(input_ids=ids).logits
    report = accelerate(model)
    torch.testing.assert_close(model(input_ids=ids).logits, before, rtol=0, atol=1e-4)
    assert report.gated_mlps == 5
    assert report.norms == 13
    assert "model.layers.3.self_attn.q_proj" in report.left_alone
    restore(model)
    assert torch.equal(model(input_ids=ids).logits, before)


def test_all_is_counted_and_modules_that_are_alike_are_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[object] = []

    def count(actual: object, expected: object, *inputs: Tensor) -> bool:
        compared.append(expected)
        return agrees(actual, expected, *inputs)

    monkeypatch.setattr("shared.model.substitution.linear.agrees", count)
    report = accelerate(build_family("llama"))
    assert (report.linears, report.gated_mlps, report.norms, report.left_alone) == (6 * 4 + 1, 6, 13, {})
    assert report.rotary == ("transformers.models.llama.modeling_llama",)
    kinds = {id(module) for module in compared}
    assert len(kinds) == 5  # queries (out has their shape), keys (values), head, MLP, norm


def test_a_second_time_training_and_gradients_are_refused():
    model = build_family("llama")
    with pytest.raises(ValueError, match="eval"):
        accelerate(model.train())
    accelerate(model.eval())
    with pytest.raises(ValueError, match="already"):
        accelerate(model)
    with torch.enable_grad(), pytest.raises((RuntimeError, ValueError), match=r"no gradient|no_grad"):
        model(input_ids=_ids(1, 3))


def test_other_dtypes_are_refused():
    with pytest.raises(ValueError, match=r"torch.bfloat16 on cpu, want float32"):
        accelerate(build_family("llama").bfloat16())


def test_a_model_that_comes_out_different_is_left_as_it_was(monkeypatch):
    model, ids = build_family("llama"), _ids(1, 6)
    before = model(input_ids=ids).logits
    monkeypatch.setattr("shared.model.substitution.apply.MODEL_TOLERANCE", -1.0)
    with pytest.raises(UnsupportedModel, match="differ by"):
        accelerate(model)
    assert torch.equal(model(input_ids=ids).logits, before)
    assert not any(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize("from_last", [2, 3])  # the last one is the head
def test_the_packed_weight_of_a_neighbouring_layer_is_refused(monkeypatch, from_last):
    """Modules that are alike are compared once, so each must show whose weights it has packed."""
    packed, matrices, num_matrices = linear_module.pack_matrix, [], [0]

    def mistaken(weight: Tensor, **options: Any) -> Packed:
        matrices.append(packed(weight, **options))
        alike = [own for own in matrices if own.shape == matrices[-1].shape]
        is_wrong = len(matrices) == num_matrices[0] + 1 - from_last
        return alike[-2] if is_wrong else matrices[-1]

    for module in (linear_module, reversible):
        monkeypatch.setattr(module, "pack_matrix", mistaken)
    accelerate(build_family("llama"))
    num_matrices[0] = len(matrices)
    matrices.clear()
    with pytest.raises(UnsupportedModel, match="has other numbers than the model's"):
        accelerate(build_family("llama"))


@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize("heads_at", [1, 2])
def test_a_rotary_function_of_one_tensor_has_the_same_bits(heads_at, monkeypatch):
    original = modeling_gemma4.apply_rotary_pos_emb
    calls = []
    monkeypatch.setattr(rotary, "_rotate_one", lambda *args, own=rotary._rotate_one: calls.append(args) or own(*args))
    rotary.acquire(modeling_gemma4.__name__)
    tried = len(calls)
    x, (cos, sin) = torch.randn(2, 3, 3, 8), torch.randn(2, 2, 3, 8)
    for states, angles in ((x, (cos, sin)), (x.double(), (cos.double(), sin.double()))):
        turned = modeling_gemma4.apply_rotary_pos_emb(states, *angles, unsqueeze_dim=heads_at)
        assert torch.equal(turned, original(states, *angles, unsqueeze_dim=heads_at))
    assert len(calls) == tried + 1  # not for numbers that the kernel does not take
    rotary.release(modeling_gemma4.__name__)
    assert modeling_gemma4.apply_rotary_pos_emb is original


def test_the_rotary_function_comes_back_with_the_last_user():
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


@pytest.mark.usefixtures("_alone")
def test_a_model_may_be_dropped_while_another_is_accelerated(monkeypatch):
    """The collector may run the finaliser of a dropped model inside the call that replaces the function of the next
    one."""
    own = [module.apply_rotary_pos_emb for module in (modeling_llama, modeling_mistral)]
    find = rotary._forms
    models = [build_family("llama")]
    accelerate(models[0])

    def drop_and_find(function):
        models.clear()
        gc.collect()
        return find(function)

    monkeypatch.setattr(rotary, "_forms", drop_and_find)
    second = build_family("mistral")
    accelerating = threading.Thread(target=accelerate, args=(second,), daemon=True)
    accelerating.start()
    accelerating.join(60)
    assert not accelerating.is_alive(), "it waits for a lock that it holds"
    assert modeling_llama.apply_rotary_pos_emb is own[0]
    assert modeling_mistral.apply_rotary_pos_emb is not own[1]
    restore(second)
    assert modeling_mistral.apply_rotary_pos_emb is own[1]


def test_a_growing_cache_gives_the_bits_of_a_preallocated_one():
    model, ids = build_family("qwen3"), _ids(1, 12)
    accelerate(model)
    growing, preallocated = DynamicCache(), ContiguousCache(20)
    for start in range(0, 12, 4):
        preallocated.begin(start, 4)
        inputs = {"input_ids": ids[:, start : start + 4]}
        one = model(**inputs, **with_cache(model, growing)).logits
        assert torch.equal(model(**inputs, **with_cache(model, preallocated)).logits, one)


@pytest.mark.usefixtures("_alone")
def test_what_was_read_is_given_back_between_matrices(monkeypatch):
    trims = []
    monkeypatch.setattr(memory, "trim_heap", lambda: trims.append(None))
    model = build_family("llama")
    numbers = sum(parameter.numel() for parameter in model.parameters() if parameter.dim() > 1)
    monkeypatch.setattr(memory, "TRIM_NUMBERS", numbers // 8)
    accelerate(model)
    assert 3 < len(trims) <= 8
