"""Each simpler way to go faster does what it is said to do, and answers are judged by the full model."""

from decimal import Decimal

import pytest
import torch

from neap_engine.evaluate import transformers_sides as module
from neap_engine.evaluate.figures import ScoredAnswer, final_number, is_right, lost, row
from neap_engine.evaluate.sides import TimedAnswer, in_process
from neap_engine.evaluate.transformers_sides import (
    EARLY_EXIT,
    GENERATE,
    TIDE,
    Score,
    TransformersSides,
    transformers_sides,
)
from shared.model.load import load_model
from shared.model.loaded import wrap_model
from tests.families import build_family
from tests.worker import save_model

PROMPT = [5, 9, 40, 7, 5, 9]
NUM_NEW = 10


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


def plain(source, kept=(0, 1, 2, 3)):
    """The model as transformers runs it, with these layers only."""
    loaded = load_model(source, accelerate=False)
    model = loaded.model
    layers = [model.model.layers[index] for index in kept]
    for number, layer in enumerate(layers):
        layer.self_attn.layer_idx = number
    model.model.layers = torch.nn.ModuleList(layers)
    model.config.num_hidden_layers = len(kept)
    return model


def greedy(model) -> list[int]:
    tokens = list(PROMPT)
    with torch.inference_mode():
        for _ in range(NUM_NEW):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(PROMPT) :]


@pytest.fixture
def sides(source):
    return TransformersSides(load_model(source, accelerate=False), NUM_NEW)


@pytest.mark.parametrize(("converged", "layers"), [(2.0, (0, 1, 2, 3)), (-2.0, (0,))], ids=["never", "at once"])
def test_tide_answers_from_the_first_state_that_has_converged(source, sides, monkeypatch, converged, layers):
    monkeypatch.setattr(module, "CHECKPOINT_INTERVAL", 1)
    monkeypatch.setattr(module, "CONVERGED", converged)
    run = sides((TIDE, PROMPT, []))
    assert list(run.token_ids) == greedy(plain(source, layers))
    assert run.layer_executions == 4 * run.num_decoded, "it runs all layers"
    again = sides((GENERATE, PROMPT, []))
    assert list(again.token_ids) == greedy(plain(source)), "nothing of it is left behind"


def test_a_score_is_that_of_each_token_after_what_precedes_it(source, sides):
    answer = greedy(plain(source))
    assert sides.score(PROMPT, answer).num_chosen == NUM_NEW
    other = [*answer[:4], answer[4] + 1, *answer[5:]]
    score = sides.score(PROMPT, other)
    with torch.inference_mode():
        logits = plain(source)(torch.tensor([[*PROMPT, *other]])).logits[0].log_softmax(-1)
    expected = [-float(logits[len(PROMPT) - 1 + place, t]) for place, t in enumerate(other)]
    assert score.nats == pytest.approx(expected, abs=1e-4)
    assert score.num_chosen < NUM_NEW


def test_early_exit_is_refused_where_the_models_forward_cannot_stop(sides, monkeypatch):
    assert sides.refusals() == {}
    base = sides._model.base_model
    layers, run = list(base.layers), base.forward

    def all_layers(*args, **kwargs):
        base.config.num_hidden_layers = len(layers)
        return run(*args, **kwargs)

    monkeypatch.setattr(base, "forward", all_layers)
    assert list(sides.refusals()) == [EARLY_EXIT]


def test_early_exit_is_refused_where_the_models_forward_fails_with_fewer_layers():
    """Gemma 4 E2B divides what its layers are given by their number."""
    sides = TransformersSides(wrap_model(build_family("gemma4-sliding")), NUM_NEW)
    assert "fails with fewer layers (RuntimeError)" in sides.refusals()[EARLY_EXIT]
    assert sides((GENERATE, PROMPT, [])).num_decoded == NUM_NEW - 1


@pytest.mark.full
def test_a_process_of_its_own_leaves_standard_output_to_its_parent(source, capfd):
    """The parent's lines there are read by `neap evaluate`."""
    with in_process(transformers_sides, str(source), {}, NUM_NEW) as run:
        assert run("refusals") == {}
        assert run((GENERATE, PROMPT, [])).num_decoded == NUM_NEW - 1
    assert capfd.readouterr().out == ""


def test_figures_are_sums_over_prompts():
    full = [ScoredAnswer(TimedAnswer((1, 2, 3), 0.2, 1.0, 8), Score((0.5, 0.5, 0.5), 3), True)] * 2
    own = [full[0], ScoredAnswer(TimedAnswer((1, 2, 4, 5, 6), 0.2, 1.0, 4, num_first=3), Score((0.5,) * 5, 1), False)]
    found = row("own", own, full)
    assert (found.num_answers, found.num_identical) == (2, 1)
    assert (found.num_right, found.num_checkable) == (1, 2)
    assert found.chosen_share == 4 / 8
    assert found.perplexity == pytest.approx(torch.tensor(0.5).exp().item())
    assert found.tokens_per_s == pytest.approx(4 / 0.4)
    assert found.layers_per_token == 12 / 4
    # .1 seconds per token and .1: four tokens, of which the first step gave three, took .2.
    assert (found.speed_low, found.speed_up, found.speed_high) == (1.0, 1.0, 1.0)
    fast = ScoredAnswer(TimedAnswer((1, 2, 3), 0.05, 1.0, 8), Score((0.5,) * 3, 3), True)
    some = row("some", [fast, fast, full[0], full[0], full[0]], [full[0]] * 5)
    assert (some.speed_low, some.speed_up, some.speed_high) == pytest.approx((1.0, 1.0, 4.0))
    assert (found.lost_low, found.lost_high) == (0.0, 1.0)
    assert lost(full, full) == (0.0, 0.0)
    assert lost(full, [own[1]] * 2) == (-1.0, -1.0), "gained"


def test_the_last_number_counts():
    assert final_number("48/2 = <<48/2=24>>24.\n#### 1,072") == Decimal(1072)
    assert final_number("It costs $12.50.") == Decimal("12.50")
    assert final_number("none") is None
    assert is_right("so there are 72 clips", "#### 72") is True
    assert is_right("72 of 100", "#### 72") is False
    assert is_right("72", None) is None
    assert is_right("72", "no number") is None
