"""Passes without the model's own forward: the same bits, and only where nothing is left out."""

from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from shared.model.contiguous_runner import ContiguousRunner
from shared.model.direct_pass import AngleTable
from shared.model.loaded import LoadedModel, wrap_model
from shared.model.ragged import RaggedSequence
from shared.model.substitution.apply import restore
from shared.model.substitution.match import Unsuitable
from shared.model.substitution.ragged import Span
from tests.families import NUM_LAYERS, VOCABULARY_SIZE, build_family, by_tier

DIRECT = ["llama", "llama-tied", "deepseek-r1-distill-llama", "qwen2.5", "qwen3", "mistral", "phi3"]
DIRECT += ["gpt2", "opt", "gpt-neox", "phi2", "mixtral", "qwen3-moe", "ministral3"]
# Their windows have 5 tokens.
DIRECT += ["mistral-sliding", "qwen2-sliding", "phi3-sliding", "gemma3-sliding", "gemma4", "gemma4-sliding"]
# Without a projection of its embedding.
CHANGES = {"opt": {"word_embed_proj_dim": 32}}


def _loaded(family: str = "llama", **changes: object) -> LoadedModel:
    torch.manual_seed(3)
    return wrap_model(build_family(family, **changes), accelerate=True)


def _count_forwards(runner: ContiguousRunner) -> list[int]:
    """Grows by 1 with each call of the model's own forward. (A hook would be seen.)"""
    calls: list[int] = []
    base = runner.loaded.model.base_model
    own = base.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return own(*args, **kwargs)

    base.forward = forward
    return calls


def _by_the_model(runner: ContiguousRunner) -> ContiguousRunner:
    """A runner of the same model that makes no direct pass."""
    other = ContiguousRunner(runner.loaded)
    other.direct = None
    return other


def _ids(*shape: int) -> Tensor:
    return torch.randint(2, VOCABULARY_SIZE, shape, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("family", by_tier(DIRECT))
def test_passes_have_the_bits_of_the_models_own_forward_and_do_not_call_it(family):
    runner = ContiguousRunner(_loaded(family, **CHANGES.get(family, {})))
    other = _by_the_model(runner)
    ids = _ids(1, 40)
    caches = runner.new_cache(40), runner.new_cache(40)
    calls = _count_forwards(runner)
    # A prompt, single tokens, a rollback to position 20, and a pass in two parts with captured states.
    for base, count in ((0, 23), (23, 1), (24, 5), (20, 9), (29, 11)):
        part = ids[:, base : base + count]
        captured: tuple[dict[int, Tensor], dict[int, Tensor]] = {}, {}
        del calls[:]
        states = []
        for own, cache, seen in zip((runner, other), caches, captured, strict=True):
            middle = own.run(part, cache, first=0, last=3, base=base)
            states.append(own.run(part, cache, first=3, last=NUM_LAYERS, base=base, hidden=middle, captured=seen))
        assert len(calls) == 2  # both by `other`
        assert torch.equal(*states)
        assert captured[0].keys() == captured[1].keys() == {4}
        assert torch.equal(captured[0][4], captured[1][4])
    assert set(caches[0].keys) == set(caches[1].keys)
    for layer in caches[0].keys:
        assert torch.equal(caches[0].keys[layer], caches[1].keys[layer])
        assert torch.equal(caches[0].values[layer], caches[1].values[layer])


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3-sliding"])
def test_several_rows_and_ragged_batches_have_the_same_bits(family):
    runner = ContiguousRunner(_loaded(family, **CHANGES.get(family, {})))
    other = _by_the_model(runner)
    ids = _ids(3, 12)
    rows = [own.run(ids, own.new_cache(12), first=0, last=NUM_LAYERS, base=0) for own in (runner, other)]
    assert torch.equal(*rows)
    states = []
    calls = _count_forwards(runner)
    for own in (runner, other):
        first, second = own.new_cache(12), own.new_cache(12)
        own.run(ids[:1, :7], first, first=0, last=NUM_LAYERS, base=0)
        sequences = [RaggedSequence(first, 7, 2), RaggedSequence(second, 0, 3)]
        states.append(own.run_ragged(ids[1:2, :5], sequences, first=0, last=NUM_LAYERS))
    assert torch.equal(*states)
    assert len(calls) == 2


def test_layers_are_counted_as_by_the_models_own_forward():
    runner = ContiguousRunner(_loaded())
    runner.counters.reset()
    hidden = runner.run(_ids(1, 5), cache := runner.new_cache(5), first=0, last=2, base=0)
    runner.run(_ids(1, 5), cache, first=2, last=4, base=0, hidden=hidden)
    assert runner.counters.per_layer == [1, 1, 1, 1, 0, 0]
    assert runner.counters.token_layers == 20


def _hidden_module(loaded: LoadedModel, name: str) -> nn.Module:
    base = loaded.model.base_model
    return {"model": base, "norm": base.norm, "layer": base.layers[2], "part": base.layers[2].mlp}[name]


@pytest.mark.parametrize("place", ["model", "norm", "layer", "part"])
def test_hooks_are_called(place):
    runner = ContiguousRunner(_loaded())
    expected = runner.run(_ids(1, 5), runner.new_cache(5), first=0, last=NUM_LAYERS, base=0)
    seen: list[nn.Module] = []
    module = _hidden_module(runner.loaded, place)
    hook = module.register_forward_hook(lambda module, *_: seen.append(module))
    out = runner.run(_ids(1, 5), runner.new_cache(5), first=0, last=NUM_LAYERS, base=0)
    assert seen == [module]
    assert torch.equal(out, expected)
    hook.remove()
    runner.run(_ids(1, 5), runner.new_cache(5), first=0, last=NUM_LAYERS, base=0)
    assert len(seen) == 1


def test_a_restored_model_runs_its_own_forward():
    runner = ContiguousRunner(_loaded())
    restore(runner.loaded.model)
    calls = _count_forwards(runner)
    runner.run(_ids(1, 5), runner.new_cache(5), first=0, last=NUM_LAYERS, base=0)
    assert calls


@pytest.mark.parametrize("family", ["gemma4-experts", "phimoe-longrope"])
def test_models_that_are_not_one_op_have_no_direct_pass(family):
    runner = ContiguousRunner(_loaded(family))
    assert runner.direct is None
    assert runner.why_not_direct


def test_a_model_within_another_one_has_the_bits_of_it_alone():
    """As Gemma 4 is published: beside parts for pictures and sound, which look up a row of the packed embedding."""
    torch.manual_seed(3)
    alone = build_family("gemma4-sliding")
    tokens = dict.fromkeys(("image", "audio", "video", "boi", "eoi", "boa"), 90)
    config = hf.Gemma4Config(
        text_config=alone.config.to_dict(),
        vision_config=None,
        audio_config=None,
        eoa_token_index=90,
        **{f"{name}_token_id": token for name, token in tokens.items()},
    )
    whole = hf.AutoModelForCausalLM.from_config(config).eval().float()
    whole.model.language_model.load_state_dict(alone.model.state_dict())
    runners = [ContiguousRunner(wrap_model(model, accelerate=True)) for model in (alone, whole)]
    other = _by_the_model(runners[1])
    states = [own.run(_ids(1, 9), own.new_cache(9), first=0, last=NUM_LAYERS, base=0) for own in (*runners, other)]
    assert all(runner.direct is not None for runner in runners)
    assert torch.equal(states[0], states[1])
    assert torch.equal(states[1], states[2])


def test_a_model_that_projects_its_embedding_has_no_direct_pass():
    assert "embedding" in ContiguousRunner(_loaded("opt")).why_not_direct


class _Rotary(nn.Module):
    """Angles that `longest`, the largest position of a pass, may change."""

    def __init__(self, switch: int) -> None:
        super().__init__()
        self._switch = switch

    def forward(self, state: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        scale = 0.1 if int(position_ids.max()) < self._switch else 0.07
        angles = position_ids[..., None].float() * torch.tensor([scale, scale / 3])
        return angles.cos(), angles.sin()


def test_angles_that_depend_on_the_length_are_refused():
    with pytest.raises(Unsuitable, match="depend"):
        AngleTable(_Rotary(switch=500), torch.zeros(1, 3, 4), context_length=1000)


@pytest.mark.parametrize("context", [1, 2, 100, 5000])
def test_a_table_of_angles_grows_and_stays_the_same(context):
    rotary = _Rotary(switch=10**6)
    table = AngleTable(rotary, torch.zeros(1, 1, 4), context)
    before = table.of([Span(0, 1)])[0].clone()
    spans = [Span(context - 1, context), Span(0, 1)]
    cos, sin = table.of(spans)
    own = rotary(torch.zeros(1, 1, 4), torch.tensor([[context - 1, 0]]))
    assert torch.equal(cos, own[0])
    assert torch.equal(sin, own[1])
    assert torch.equal(table.of([Span(0, 1)])[0], before)
