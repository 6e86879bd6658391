"""What one sequence puts into a step: the tokens that share a verify pass, the depth that each has reached, and what
became of them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shared.engine.request.request import TokenChunk
from shared.engine.request.sequence import DecodingSequence, PassedStates
from shared.engine.verification import Verdict
from shared.model.ragged import RaggedSequence
from shared.model.runner import CapturedStates, Runner
from shared.model.sampling import Trial


@dataclass
class Speculation:
    """Tokens of one sequence from position `base` on: its last final token and a chain of drafts after it, or a piece
    of its prompt.

    `proposers`: of the drafts, by number, and `probabilities`, as the proposers gave them. `tokens[i]` has been through
    `reached[i]` layers before the verify pass; `states[i]` [D] is its state there, None at depth 0. `captured[depth]`
    are the states [D] of the first tokens at a depth that they have reached, for the depths that are its keys.
    `passed`: the states of the verify pass, of which those of the tokens begin at `offset`. The counts are of the
    layers that ran for these tokens. `read_length` as in `RaggedSequence`.

    `num_logits`: how many of the states, from the last, need logits; 0 for a piece of a prompt that is not the last
    piece. `verdict`: what the full model says of them, after the pass. `chunks`: the tokens that became final in this
    step.
    """

    sequence: DecodingSequence
    base: int
    tokens: list[int]
    reached: list[int]
    states: list[Tensor | None]
    is_prefill: bool = False
    num_logits: int = 1
    proposers: list[int] = field(default_factory=list)
    probabilities: list[float] = field(default_factory=list)
    captured: dict[int, list[Tensor]] = field(default_factory=dict)
    passed: PassedStates = field(init=False)
    offset: int = 0
    verdict: Verdict | None = None
    num_layer_executions: int = 0
    num_token_layers: int = 0
    read_length: int | None = None
    chunks: list[TokenChunk] = field(default_factory=list)

    @property
    def drafts(self) -> list[int]:
        return [] if self.is_prefill else self.tokens[1:]

    def follow(self, drafts: Sequence[int]) -> None:
        """Makes these the drafts of the chain. What has been computed of the first of them holds as far as they are the
        same. The keys and values of others are overwritten by later tokens."""
        same, most = 0, min(len(self.tokens) - 1, len(drafts))
        while same < most and self.tokens[same + 1] == drafts[same]:
            same += 1
        del self.tokens[same + 1 :], self.reached[same + 1 :], self.states[same + 1 :]
        for captured in self.captured.values():
            del captured[same + 1 :]
        num_new = len(drafts) - same
        self.tokens += drafts[same:]
        self.reached += [0] * num_new
        self.states += [None] * num_new
        self.num_logits = len(self.tokens)

    # The pass.

    def part_of_pass(self, part: slice) -> RaggedSequence:
        """A range of the tokens as part of a pass."""
        return RaggedSequence(self.sequence.cache, self.base + part.start, part.stop - part.start, self.read_length)

    def tokens_below(self, depth: int) -> tuple[slice, int]:
        """(tokens, first): the tokens that have not reached `depth`. All of them have reached depth `first`.

        They are one group, because drafting takes later tokens no deeper than earlier ones and takes tokens deeper
        together.
        """
        end = len(self.tokens)
        start = next((i for i, d in enumerate(self.reached) if d < depth), end)
        firsts = set(self.reached[start:end])
        assert len(firsts) <= 1
        return slice(start, end), firsts.pop() if firsts else depth

    def state(self, depth: int, index: int) -> Tensor:
        """The state [D] of a token at one of the depths in `captured`, once it has been through the verify pass."""
        passed = self.passed.by_depth.get(depth)
        return self.captured[depth][index] if passed is None else passed[0, self.offset + index]

    def kept(self, depths: tuple[int, ...], index: int) -> tuple[PassedStates, int]:
        """A pass that has a token's states at several depths, and the token's place in it."""
        # Not of a long piece of a prompt: the sequence goes on to hold the states of the whole pass.
        if not self.is_prefill and self.passed.by_depth.keys() >= set(depths):
            return self.passed, self.offset + index
        copied = torch.stack([self.state(depth, index) for depth in depths])
        return PassedStates({depth: state[None, None] for depth, state in zip(depths, copied, strict=True)}), 0

    # Verification.

    def trial(self) -> Trial:
        """That of the drafts."""
        sequence, request = self.sequence, self.sequence.request
        drafts = self.drafts
        constraint = sequence.answer.constraint
        return Trial(
            request.sampling,
            sequence.tokens,
            drafts,
            request.policy.margin,
            sequence.num_prompt_tokens,
            sequence.answer.end_token_ids,
            constraint.rows(drafts) if constraint else None,
            sequence.counts,
            request.policy.threshold,
            () if request.policy.threshold is None else self._calibrated(),
        )

    def _calibrated(self) -> list[float]:
        """The probabilities of the drafts, 0 of a proposer that no calibration has measured."""
        are_calibrated = self.sequence.drafter.are_calibrated
        pairs = zip(self.proposers, self.probabilities, strict=True)
        return [probability if are_calibrated[number] else 0.0 for number, probability in pairs]


# What a pass runs: a range of the tokens of each.
_Part = tuple[Speculation, slice]


def advance_to(depth: int, speculations: Sequence[Speculation], runner: Runner) -> None:
    """Takes all tokens that have not reached `depth` there.
    There may be several sequences only if the runner supports ragged batches.

    Tokens at different depths are first brought to the deepest of these depths, so that each layer runs once for all of
    them.
    """
    depths = {d for speculation in speculations for d in speculation.reached if 0 < d < depth}
    for last in (*sorted(depths), depth):
        by_first: dict[int, list[_Part]] = {}
        for speculation in speculations:
            part, first = speculation.tokens_below(last)
            if first < last:
                by_first.setdefault(first, []).append((speculation, part))
        for first, parts in by_first.items():
            passed = _run(parts, first, last, runner)
            start = 0
            for speculation, part in parts:
                end = start + part.stop - part.start
                speculation.reached[part] = [last] * (end - start)
                speculation.states[part] = passed[last][0, start:end].unbind(0)
                for captured_depth in passed.keys() & speculation.captured.keys():
                    speculation.captured[captured_depth] += passed[captured_depth][0, start:end].unbind(0)
                start = end


def settle(speculations: Sequence[Speculation], runner: Runner) -> Tensor:
    """Takes all tokens through the remaining layers. Returns their states at depth L [T, D], sequence after sequence.

    No token may have reached depth L before. All are first brought to the depth of the deepest, so the last pass has
    all of them.
    """
    deepest = max(max(speculation.reached) for speculation in speculations)
    if deepest:
        advance_to(deepest, speculations, runner)
    parts = [(speculation, slice(0, len(speculation.tokens))) for speculation in speculations]
    passed = PassedStates(_run(parts, deepest, runner.num_layers, runner))
    start = 0
    for speculation in speculations:
        speculation.passed, speculation.offset = passed, start
        start += len(speculation.tokens)
    return passed.by_depth[runner.num_layers][0]


def have_passed(speculations: Sequence[Speculation], states: CapturedStates, num_layers: int) -> None:
    """Notes that a pass has taken all tokens through all layers. `states` [1, T, D] by depth: sequence after
    sequence."""
    passed, start = PassedStates(states), 0
    for speculation in speculations:
        speculation.passed, speculation.offset = passed, start
        start += len(speculation.tokens)
        speculation.num_layer_executions += num_layers
        speculation.num_token_layers += num_layers * len(speculation.tokens)


def _run(parts: Sequence[_Part], first: int, last: int, runner: Runner) -> CapturedStates:
    """One pass. Returns the states [1, T, D] of all parts at `last` and at the captured depths before it."""
    tokens = [token for speculation, part in parts for token in speculation.tokens[part]]
    ids, hidden = runner.ids(tokens), None
    if first:
        entering = [s for speculation, part in parts for s in speculation.states[part] if s is not None]
        hidden = torch.stack(entering)[None]
    wants = any(first < depth < last for speculation, _ in parts for depth in speculation.captured)
    captured: CapturedStates = {}
    if len(parts) == 1:
        [(speculation, part)] = parts
        states = runner.run(
            ids,
            speculation.sequence.cache,
            first=first,
            last=last,
            base=speculation.base + part.start,
            hidden=hidden,
            captured=captured if wants else None,
            read_length=speculation.read_length,
        )
    else:
        sequences = [speculation.part_of_pass(part) for speculation, part in parts]
        states = runner.run_ragged(
            ids, sequences, first=first, last=last, hidden=hidden, captured=captured if wants else None
        )
    for speculation, part in parts:
        speculation.num_layer_executions += last - first
        speculation.num_token_layers += (part.stop - part.start) * (last - first)
    captured[last] = states
    return captured
