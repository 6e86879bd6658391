"""Decodes a few tokens with a new ladder before it serves requests.
A failure while serving could fail a pass that requests share."""

import math

from shared.engine.background import Slices
from shared.engine.drafting.drafter import Drafter
from shared.engine.drafting.pass_costs import PassCosts
from shared.engine.request.request import GenerationRequest, StoppingParams
from shared.engine.step import Decoder
from shared.errors import Corrupt, NeapError
from shared.ladder.ladder import BoundLadder
from shared.ladder.policy import DepthPolicy
from shared.model.runner import Runner
from shared.ops.chains import Chains

PROMPT_TOKENS, NEW_TOKENS, MAX_DRAFTS = 16, 4, 3


def check_drafts(ladder: BoundLadder, index: int, drafted: Chains, vocabulary_size: int) -> None:
    """Raises `Corrupt` (reason SELF_TEST_FAILED) if a draft of an exit is not a token of the model, or its probability
    is not in [0, 1]."""
    rows = zip(drafted.tokens.tolist(), drafted.probabilities.tolist(), drafted.lengths.tolist(), strict=True)
    for tokens, probabilities, length in rows:
        for token, probability in zip(tokens[:length], probabilities, strict=False):
            if not (0 <= token < vocabulary_size and 0.0 <= probability <= 1.0):
                shown = "NaN" if math.isnan(probability) else f"{probability:g}"
                raise _failed(f"proposer {ladder.names[index]} gave token {token} the probability {shown}")


def self_test(runner: Runner, ladder: BoundLadder, costs: PassCosts) -> Slices:
    """Decodes by the policy exact and drafts at every step. One step per slice.
    The engine's statistics do not count it.

    Raises `Corrupt` (reason SELF_TEST_FAILED).
    """
    loaded = runner.loaded
    num_prompt = min(PROMPT_TOKENS, loaded.context_length // 2)
    num_new = min(NEW_TOKENS, loaded.context_length - num_prompt)
    # The same tokens twice, so that prompt look-up finds a match.
    half = [1 + number % (loaded.vocabulary_size - 1) for number in range((num_prompt + 1) // 2)]
    request = GenerationRequest(
        prompt_ids=tuple((half + half)[:num_prompt]),
        stopping=StoppingParams(max_tokens=num_new, ignore_eos=True),
        policy=DepthPolicy("exact", max_drafts=MAX_DRAFTS),
    )
    try:
        decoder = Decoder(runner)
        sequence = decoder.admit(request, Drafter(runner, costs, ladder))
        while not sequence.is_finished:
            decoder.step([sequence])
            if sequence.failure is not None:
                raise sequence.failure
            yield
    except NeapError as error:
        if type(error) is not NeapError and error.reason != "DRAFT_OUT_OF_RANGE":
            raise
        raise _failed("decoding with it failed, and the log says why") from error
    except Exception as error:
        raise _failed(f"{type(error).__name__} while decoding with it") from error


def _failed(what: str) -> Corrupt:
    return Corrupt(f"the router did not pass its self-test: {what}", reason="SELF_TEST_FAILED")
