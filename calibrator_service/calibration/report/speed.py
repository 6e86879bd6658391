"""How much faster the policy `exact` answers held-out prompts than full depth, on the machine that calibrates.

One request at a time, greedily, by the engine's own steps. Both policies answer each prompt, in an order that changes
from prompt to prompt, so that what disturbs the machine meets both.
"""

import statistics
import time
from collections.abc import Sequence

from calibrator_service.calibration.report.relaxed import held_out_prompts
from calibrator_service.calibration.report.worth import measured_costs
from calibrator_service.calibration.run import SPEED_SHARE, CalibrationRun
from calibrator_service.calibration.states.collect import LabelledSequence
from shared.engine.drafting.costs import MAX_PASS_TOKENS
from shared.engine.drafting.drafter import Drafter
from shared.engine.request.request import DepthStatistics, GenerationRequest, StoppingParams
from shared.engine.step import Decoder
from shared.ladder.ladder import Ladder
from shared.ladder.policy import DepthPolicy
from shared.model.contiguous_runner import ContiguousRunner
from shared.model.inference import inference

# Prompts, and the tokens of an answer, at most. A shorter answer than LEAST_TOKENS says nothing.
MAX_ANSWERS, ANSWER_TOKENS, LEAST_TOKENS = 24, 64, 8
# Fewer prompts give no median. They may take so many times the time that there is.
LEAST_ANSWERS, MOST_TIMES = 4, 3
POLICIES = DepthPolicy("full"), DepthPolicy("exact")


def speed_figures(
    run: CalibrationRun, runner: ContiguousRunner, ladder: Ladder, held_out: Sequence[LabelledSequence]
) -> dict[str, float]:
    """The median over "num_answers" prompts of the seconds per token at full depth over those by `exact` ("speed_up"),
    its quartiles ("low", "high"), and "tokens_per_pass" by `exact`. Without the prompt's passes.

    As many prompts as there is time for. Only "num_answers" if they are too few, and on a GPU, where a worker's passes
    are recorded and these are not. Raises `Cancelled`.
    """
    if runner.loaded.device.type != "cpu":
        return {"num_answers": 0}
    num_tokens = min(run.plan.max_new_tokens, ANSWER_TOKENS, runner.loaded.context_length // 2)
    prompts = held_out_prompts(held_out, runner.loaded.context_length - num_tokens)
    costs = measured_costs(run, runner, ladder, most_tokens=MAX_PASS_TOKENS)
    decoder, drafter = Decoder(runner), Drafter(runner, costs, ladder.bind(runner))
    begun_s, share_s = run.elapsed_s(), SPEED_SHARE * run.plan.budget_s
    ratios: list[float] = []
    num_decoded = num_passes = 0
    for number, prompt in enumerate(prompts):
        times = 1 if len(ratios) >= LEAST_ANSWERS else MOST_TIMES
        if len(ratios) == MAX_ANSWERS or run.elapsed_s() - begun_s >= times * share_s:
            break
        seconds: dict[str, float] = {}
        counts: dict[str, DepthStatistics] = {}
        for policy in POLICIES if number % 2 else POLICIES[::-1]:
            request = GenerationRequest(prompt, stopping=StoppingParams(num_tokens), policy=policy)
            seconds[policy.name], counts[policy.name] = timed(run, decoder, drafter, request)
        answer = counts["exact"]
        if answer.num_tokens >= LEAST_TOKENS:
            ratios.append(seconds["full"] / seconds["exact"])
            num_decoded, num_passes = num_decoded + answer.num_tokens - 1, num_passes + answer.num_verify_passes
    if len(ratios) < LEAST_ANSWERS:
        return {"num_answers": len(ratios)}
    low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
    run.figures["speed_up"] = median
    return {
        "num_answers": len(ratios), "speed_up": median, "low": low, "high": high,
        "tokens_per_pass": num_decoded / max(num_passes, 1),
    }  # fmt: skip


@inference
def timed(
    run: CalibrationRun, decoder: Decoder, drafter: Drafter, request: GenerationRequest
) -> tuple[float, DepthStatistics]:
    """The seconds from the first token of an answer to its last, and the counts of the answer. Raises `Cancelled`."""
    sequence = decoder.admit(request, drafter)
    begun_s = time.perf_counter()
    while not sequence.is_finished:
        run.report("evaluating", 0.99)
        was_reading = sequence.num_generated == 0
        decoder.step([sequence])
        if sequence.failure is not None:
            raise sequence.failure
        if was_reading:
            begun_s = time.perf_counter()
    return time.perf_counter() - begun_s, sequence.statistics()
