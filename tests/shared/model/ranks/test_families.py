"""Every family that has a plan: exact over two ranks is full over two ranks, and full is that of one process."""

import pytest
import torch

from shared.engine.request.request import GenerationRequest, StoppingParams
from shared.errors import UnsupportedModel
from shared.ladder.policy import DepthPolicy
from shared.model.loaded import wrap_model
from shared.model.numerics import numerics_of
from shared.model.runners import make_runner
from tests.families import FAMILIES, VOCABULARY_SIZE, build_family, gemma4
from tests.fixed_costs import fixed_cost_engine
from tests.ranks import shared_model
from tests.scripted_ladder import ScriptedLadder
from tests.tiers import tiered

NUM_NEW = 16
PROMPTS = [tuple(range(3, 3 + length)) for length in (40, 6, 3)]
# transformers has no plan for these.
WITHOUT = {"gpt2": "GPT2LMHeadModel", "falcon": "FalconForCausalLM", "opt": "OPTForCausalLM"}
WITH = (
    *("llama", "llama-tied", "deepseek-r1-distill-llama", "deepseek-r1-distill-qwen", "qwen2.5", "qwen2-sliding"),
    *("qwen3", "mistral", "mistral-sliding", "mixtral", "qwen3-moe", "gemma3-sliding", "gemma4", "gemma4-sliding"),
    *(
        "gpt-neox",
        "phi2",
        "phi3",
        "phi3-sliding",
        "phi3-longrope",
        "phimoe-longrope",
        "llama-longrope",
        "ministral3",
        "llama4",
    ),
)
# Their modules multiply by several matrices at once, so that rows matter, as in one process.
NOT_EXACT = {"llama4"}


@pytest.mark.full
@pytest.mark.parametrize("name", WITH)
def test_exact_over_ranks_is_full_and_full_is_that_of_one_process(name, ranks, tmp_path, monkeypatch):
    """Greedy tokens of a random model are no near ties, so rounding in another order does not change them; states
    differ by a part in 100,000 at most. Drafts come from a table and from exits at three depths, some of them wrong,
    one request beside others, and with a prefix that is copied."""
    # The tiny one has one key head in each full layer, which two ranks cannot share; real ones have more.
    monkeypatch.setitem(FAMILIES, "gemma4", lambda: gemma4(2))
    model = build_family(name)
    model.save_pretrained(tmp_path)
    alone = wrap_model(model, accelerate=True)
    runner = make_runner(alone, 1 << 20)
    ids = runner.ids(PROMPTS[0])
    state = runner.run(ids, runner.new_cache(40), first=0, last=alone.num_layers, base=0)
    of_one = numerics_of(runner)
    with fixed_cost_engine(alone) as engine:
        expected = [list(engine.generate(row, policy="full", max_tokens=NUM_NEW).token_ids) for row in PROMPTS]

    def right_but_for_some(context: list[int]) -> tuple[int, float] | None:
        for row, answer in zip(PROMPTS, expected, strict=True):
            if [*row, *answer][: len(context)] == context and len(row) <= len(context):
                token = (*answer, 0)[len(context) - len(row)]
                return (token if len(context) % 5 else (token + 1) % VOCABULARY_SIZE), 0.9
        return None

    ladder = ScriptedLadder(
        lambda context: right_but_for_some(context) if len(context) % 3 else None,
        lambda context: right_but_for_some(context) or (4, 0.9),
        depths=(0, 2, 4),
    )
    exact = DepthPolicy("exact", max_drafts=5)
    with shared_model(ranks, tmp_path) as loaded:
        together = make_runner(loaded, 1 << 20)
        theirs = together.run(ids, together.new_cache(40), first=0, last=loaded.num_layers, base=0)
        assert (theirs - state).abs().max() < 1e-5 * state.abs().max()
        assert loaded.fingerprint == alone.fingerprint, "so routers of one process serve"
        with fixed_cost_engine(loaded, ladder) as engine:
            assert (engine.numerics.is_exact, of_one.is_exact) == (name not in NOT_EXACT,) * 2
            assert engine.numerics.id != of_one.id
            for row, tokens in zip(PROMPTS, expected, strict=True):
                full = engine.generate(row, policy="full", max_tokens=NUM_NEW)
                answer = engine.generate(row, policy=exact, max_tokens=NUM_NEW)
                assert list(answer.token_ids) == list(full.token_ids) == tokens
                assert 0 < answer.stats.num_accepted < answer.stats.num_drafted
            handles = [
                engine.submit(GenerationRequest(row, stopping=StoppingParams(max_tokens=NUM_NEW), policy=exact))
                for row in PROMPTS
            ]
            answers = [[*handle.events()] for handle in handles]
            assert [[t.token_id for e in events[:-1] for t in e.tokens] for events in answers] == expected
            assert answers[0][-1].num_cached_tokens > 0


@pytest.mark.parametrize("name", tiered(WITHOUT, {"gpt2"}))
def test_a_family_without_a_plan_is_refused_before_its_weights_are_read(name, ranks, tmp_path):
    _refused(ranks, tmp_path, name, f"no tensor-parallel plan for {WITHOUT[name]}")


def test_heads_that_cannot_be_divided_are_refused(ranks, tmp_path):
    _refused(ranks, tmp_path, "gemma4", "key heads cannot be divided")
    _refused(ranks, tmp_path, "llama", "has 49 rows or columns to divide", intermediate_size=49)


def test_a_plan_by_which_each_rank_would_have_the_whole_model_is_refused(ranks, tmp_path):
    _refused(ranks, tmp_path, "gpt-oss-sliding", "plan for GptOssForCausalLM divides no weights")


def test_experts_in_mxfp4_are_refused(ranks, tmp_path):
    _refused(ranks, tmp_path, "gpt-oss-sliding", "it is quantised", quantization_config={"quant_method": "mxfp4"})


def _refused(ranks, folder, name, why, **changes):
    build_family(name, **changes).save_pretrained(folder)
    next(folder.glob("*.safetensors")).write_bytes(b"")  # whoever reads it fails
    with pytest.raises(UnsupportedModel, match=why) as caught, shared_model(ranks, folder):
        pass
    assert caught.value.reason == "TENSOR_PARALLEL_NOT_SUPPORTED"
    assert torch.distributed.is_initialized()  # and the ranks go on
