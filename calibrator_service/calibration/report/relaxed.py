"""How often answers by the policy `relaxed` differ from those of the full model, counted on held-out prompts.

The engine's own steps answer the prompts of the report split, greedily and at several settings. A token differs if the
full model chose another one after the same text. An answer differs from that of `full` exactly if one of its tokens
does. Where a worker drafts depends on what drafts cost it; here every pass has as many as are found, up to MAX_DRAFTS,
so a worker that drafts less differs less often.
"""

from collections.abc import Sequence
from typing import Any

from calibrator_service.calibration.report.held_out import wilson_interval
from calibrator_service.calibration.run import RELAXED_SHARE, CalibrationRun
from calibrator_service.calibration.states.collect import LabelledSequence
from shared.engine.drafting.drafter import Drafter
from shared.engine.drafting.pass_costs import ExitCost, PassCosts
from shared.engine.request.request import DepthStatistics, GenerationRequest, StoppingParams
from shared.engine.step import Decoder
from shared.ladder.ladder import BoundLadder, Ladder
from shared.ladder.policy import DepthPolicy
from shared.model.contiguous_runner import ContiguousRunner
from shared.model.dtypes import dtype_name
from shared.model.inference import inference
from shared.model.numerics import numerics_of

MAX_DRAFTS = 4
POLICIES = (
    *(DepthPolicy("relaxed", margin=margin, max_drafts=MAX_DRAFTS) for margin in (0.1, 0.5, 1.0)),
    *(DepthPolicy("relaxed", threshold=threshold, max_drafts=MAX_DRAFTS) for threshold in (0.99, 0.95, 0.85)),
)
# Prompts, and the tokens of an answer, at most.
MAX_ANSWERS, ANSWER_TOKENS = 100, 64
# Prompts that are answered together, at every setting.
PROMPTS_TOGETHER = 2
# Given text has no prompts: a continuation of so many tokens of it is the answer.
TEXT_TOKENS = 32
# Two-sided confidence of the intervals, and its quantile of the normal distribution.
CONFIDENCE, CONFIDENCE_Z = 0.95, 1.96


def relaxed_figures(
    run: CalibrationRun, runner: ContiguousRunner, ladder: Ladder, held_out: Sequence[LabelledSequence]
) -> dict[str, Any]:
    """Per setting: of "num_answers" answers "num_differing" differ, a share in the interval "low" to "high", and of
    "num_tokens" tokens "num_tokens_differing". Intervals are Wilson's. Those of tokens are too narrow, because the
    tokens of an answer depend on each other.

    As many prompts as there is time for, and no more than MAX_ANSWERS. Raises `Cancelled`.
    """
    num_tokens = min(run.plan.max_new_tokens, ANSWER_TOKENS, runner.loaded.context_length // 2)
    prompts = held_out_prompts(held_out, runner.loaded.context_length - num_tokens)
    # In all no more text than the spec asks for.
    most = min(MAX_ANSWERS, max(run.plan.max_tokens / (num_tokens * len(POLICIES)), PROMPTS_TOGETHER))
    end_s = run.elapsed_s() + RELAXED_SHARE * run.plan.budget_s
    bound, answers = ladder.bind(runner), list[list[DepthStatistics]]()
    for start in range(0, min(int(most), len(prompts)), PROMPTS_TOGETHER):
        answers += answered(run, runner, bound, prompts[start : start + PROMPTS_TOGETHER], num_tokens)
        if run.elapsed_s() >= end_s:
            break
    return {
        "num_answers": len(answers),
        "max_new_tokens": num_tokens,
        "max_drafts": MAX_DRAFTS,
        # Where numbers are rounded otherwise, answers may differ otherwise.
        "engine": {
            "dtype": dtype_name(runner.loaded.kv_dtype),
            "compute_dtype": dtype_name(runner.loaded.compute_dtype),
            "device": runner.loaded.device.type,
            "numerics_id": numerics_of(runner).id,
        },
        "interval": "wilson",
        "confidence": CONFIDENCE,
        "settings": [
            setting_figures(policy, [of_prompt[number] for of_prompt in answers])
            for number, policy in enumerate(POLICIES)
        ],
    }


def held_out_prompts(sequences: Sequence[LabelledSequence], max_tokens: int) -> list[tuple[int, ...]]:
    """The prompts of the report split, each of them once, their last `max_tokens` tokens."""
    prompts: dict[tuple[int, ...], None] = {}
    for sequence in sequences:
        size = sequence.first + 1 if sequence.first else min(TEXT_TOKENS, len(sequence.tokens))
        prompts[tuple(sequence.tokens[:size].tolist()[-max_tokens:])] = None
    return list(prompts)


@inference
def answered(
    run: CalibrationRun,
    runner: ContiguousRunner,
    bound: BoundLadder,
    prompts: Sequence[tuple[int, ...]],
    max_tokens: int,
) -> list[list[DepthStatistics]]:
    """Per prompt the counts of its answers, one per policy. All answers share passes. Raises `Cancelled`."""
    free = PassCosts((1.0,) * (1 + MAX_DRAFTS), exits=(ExitCost(0.0, 0.0),) * len(bound.depths))
    decoder, stopping = Decoder(runner), StoppingParams(max_tokens=max_tokens)
    # Each setting has a drafter of its own, because drafters learn from what is accepted.
    drafters = [Drafter(runner, free, bound) for _ in POLICIES]
    sequences = [
        [
            decoder.admit(GenerationRequest(prompt, stopping=stopping, policy=policy), drafter)
            for policy, drafter in zip(POLICIES, drafters, strict=True)
        ]
        for prompt in prompts
    ]
    going = [sequence for of_prompt in sequences for sequence in of_prompt]
    while going:
        run.report("evaluating", 0.99)
        decoder.step(going)
        for sequence in going:
            if sequence.failure is not None:
                raise sequence.failure
        going = [sequence for sequence in going if not sequence.is_finished]
    return [[sequence.statistics() for sequence in of_prompt] for of_prompt in sequences]


def setting_figures(policy: DepthPolicy, answers: Sequence[DepthStatistics]) -> dict[str, float]:
    """See `relaxed_figures`."""
    num_differing = sum(answer.num_relaxed > 0 for answer in answers)
    num_tokens, num_other = (sum(getattr(a, name) for a in answers) for name in ("num_tokens", "num_relaxed"))
    low, high = wilson_interval(num_differing, len(answers), CONFIDENCE_Z)
    token_low, token_high = wilson_interval(num_other, num_tokens, CONFIDENCE_Z)
    setting = {"margin": policy.margin, "threshold": policy.threshold}
    return {
        **{name: value for name, value in setting.items() if value is not None},
        "num_differing": num_differing,
        "low": low,
        "high": high,
        "num_tokens": num_tokens,
        "num_tokens_differing": num_other,
        "token_low": token_low,
        "token_high": token_high,
    }
