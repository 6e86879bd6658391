"""A ladder: the rungs of one model, and their use while a sequence is decoded."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shared.errors import RouterMismatch
from shared.ladder.exits import LayerExit, Proposer, bind_exit
from shared.ladder.head_rows import gather_rows
from shared.ladder.joint_weights import DEFAULT_WEIGHTS, JointWeights
from shared.ladder.learned_successors import ClientSuccessors
from shared.ladder.native_chain import HeadDraft
from shared.ladder.recorded_chain import RecordedChain
from shared.ladder.rungs import LEARNED, SUCCESSOR, SUFFIX, Draft
from shared.ladder.successors import MAX_ORDER, SuccessorMatch, SuccessorTable
from shared.ladder.suffix import SuffixIndex, SuffixMatch
from shared.ladder.table_router import AGREES, DIFFERS, SILENT, Evidence, TableRouter
from shared.model.loaded import LoadedModel
from shared.model.runner import Runner, tap_depths
from shared.ops.chains import ChainStart


@dataclass(frozen=True)
class ModelIdentity:
    """The model a ladder was calibrated for."""

    model_id: str
    fingerprint: str
    architecture: str
    num_layers: int
    hidden_size: int
    vocabulary_size: int

    @classmethod
    def of(cls, loaded: LoadedModel) -> "ModelIdentity":
        return cls(
            model_id=loaded.model_id,
            fingerprint=loaded.fingerprint,
            architecture=loaded.architecture,
            num_layers=loaded.num_layers,
            hidden_size=loaded.hidden_size,
            vocabulary_size=loaded.vocabulary_size,
        )


@dataclass(frozen=True)
class Ladder:
    """The rungs of one model. Immutable.

    `exits`: shallowest first. `draft_vocabulary` [Vd] int64: the tokens that exits may propose; None only if there are no exits.
    `joint_weights`: what to make of all that they say of one position.
    """

    model: ModelIdentity
    suffix_router: TableRouter | None = None
    successors: SuccessorTable | None = None
    successor_router: TableRouter | None = None
    exits: tuple[LayerExit, ...] = ()
    draft_vocabulary: Tensor | None = None
    joint_weights: JointWeights = DEFAULT_WEIGHTS

    @property
    def model_fingerprint(self) -> str:
        return self.model.fingerprint

    @property
    def rung_names(self) -> tuple[str, ...]:
        """Names of all rungs, in draft order."""
        names = [SUFFIX] if self.suffix_router else []
        names += [SUCCESSOR] if self.successors and self.successor_router else []
        return (*names, *(layer_exit.name for layer_exit in self.exits))

    def check_model(self, loaded: LoadedModel) -> None:
        """Raises `RouterMismatch` unless `loaded` is the model this ladder was calibrated for."""
        if loaded.fingerprint != self.model.fingerprint:
            raise RouterMismatch(
                f"the router was calibrated for {self.model.model_id}; the loaded model is another one or another revision of it",
                metadata={
                    "router_fingerprint": self.model.fingerprint,
                    "model_fingerprint": loaded.fingerprint,
                },
            )

    def bind(self, runner: Runner) -> "BoundLadder":
        """Prepares the ladder for a model in memory. Raises `RouterMismatch` if it was calibrated for another model."""
        self.check_model(runner.loaded)
        return BoundLadder(self, runner)


class BoundLadder:
    """A ladder ready for use with its model: head rows gathered once, heads and routers in float32 on the model's device."""

    def __init__(self, ladder: Ladder, runner: Runner) -> None:
        self.ladder = ladder
        self.depths = tuple(layer_exit.depth for layer_exit in ladder.exits)
        self.agreements = tuple(layer_exit.agreement for layer_exit in ladder.exits)
        self.joint_weights = ladder.joint_weights
        # Everything that the time of an exit depends on: ladders with equal layouts share measured costs.
        vocabulary = ladder.draft_vocabulary
        self.layout: object = (
            0 if vocabulary is None else len(vocabulary),
            *(e.layout for e in ladder.exits),
        )
        # The depths below L whose settled states chains begin with.
        self.kept_depths = tap_depths(runner.num_layers) if ladder.exits else ()
        self._bound: list[Proposer] = []
        if ladder.exits:
            assert ladder.draft_vocabulary is not None
            device = runner.loaded.device
            self._vocabulary = ladder.draft_vocabulary.to(device)
            for layer_exit in ladder.exits:
                layer_exit.head.to(device).requires_grad_(False)
                layer_exit.router.to(device).requires_grad_(False)
            rows, bias = gather_rows(runner.loaded.parts.head, self._vocabulary)
            self._bound = [
                bind_exit(one, rows, bias, self._vocabulary, runner) for one in ladder.exits
            ]
        # The depths of exits that read the states with which tokens enter them.
        bound = zip(self.depths, self._bound, strict=True)
        self.state_depths = tuple(depth for depth, one in bound if one.reads_states)

    def prepare(self) -> Iterator[None]:
        """Records what drafting would otherwise record at first use. Yields between steps, so that other work can run."""
        for one in self._bound:
            if isinstance(one, RecordedChain):
                yield from one.prepare()

    def new_sequence(
        self, prompt: Sequence[int], learned: ClientSuccessors | None = None
    ) -> "SequenceDrafter":
        return SequenceDrafter(self.ladder, prompt, learned)

    @torch.inference_mode()
    def propose(
        self, index: int, begins: Sequence[Tensor], starts: Sequence[ChainStart]
    ) -> list[list[HeadDraft]]:
        """The drafts of `exits[index]`, of all chains in one call. See `NativeChain.propose`.

        An exit at one of the `state_depths` reads `entering` of `starts`.
        """
        return self._bound[index].propose(begins, starts)


class SequenceDrafter:
    """The suffix and successor rungs of one sequence. Only final tokens are appended; drafts are passed to `table_draft`.

    `learned` drafts too, with the probabilities of the successor rung's router.
    """

    def __init__(
        self, ladder: Ladder, prompt: Sequence[int], learned: ClientSuccessors | None = None
    ) -> None:
        self._suffix_router = ladder.suffix_router
        self._successor_router = ladder.successor_router
        self._successors = ladder.successors if ladder.successor_router else None
        self._index = SuffixIndex(prompt) if self._suffix_router else None
        self._learned = learned if ladder.successor_router else None
        self._tail = tuple(prompt[-MAX_ORDER:])

    def append(self, tokens: Sequence[int]) -> None:
        """Appends final tokens to the sequence."""
        self._tail = (*self._tail, *tokens)[-MAX_ORDER:]
        if self._index is not None:
            for token in tokens:
                self._index.append(token)

    def table_draft(self, drafted: Sequence[int] = ()) -> Draft | None:
        """The draft for the token after the sequence + `drafted`, from suffix lookup, successor table or learned table, whichever
        gives the highest probability. None if none knows the context. No layer runs."""
        return max(self.table_drafts(drafted), key=lambda draft: draft.probability, default=None)

    def table_drafts(self, drafted: Sequence[int] = ()) -> list[Draft]:
        """All drafts that `table_draft` chooses from. Several may be the same token."""
        suffix, successors = self.table_matches(drafted)
        found: list[Draft] = []
        chained = len(drafted)
        if suffix is not None and self._suffix_router is not None:
            evidence = suffix_evidence(suffix, successors, chained)
            found.append(Draft(suffix.token, self._suffix_router.probability(evidence), SUFFIX, 0))
        if self._successor_router is not None:
            learned = (
                self._learned.matches(self._tail_with(drafted)) if self._learned is not None else []
            )
            for rung, matches in ((SUCCESSOR, successors), (LEARNED, learned)):
                for match in matches:
                    evidence = successor_evidence(match, suffix, chained)
                    probability = self._successor_router.probability(evidence)
                    found.append(Draft(match.token, probability, rung, 0))
        return found

    def table_matches(
        self, drafted: Sequence[int]
    ) -> tuple[SuffixMatch | None, list[SuccessorMatch]]:
        """The matches of both rungs without probabilities, for `table_draft` and for training the routers."""
        suffix = self._index.propose(drafted) if self._index is not None else None
        if self._successors is None:
            return suffix, []
        return suffix, self._successors.matches(self._tail_with(drafted))

    def _tail_with(self, drafted: Sequence[int]) -> tuple[int, ...]:
        return (*self._tail, *drafted)[-MAX_ORDER:] if drafted else self._tail


def suffix_evidence(match: SuffixMatch, others: Sequence[SuccessorMatch], chained: int) -> Evidence:
    """The router's features of a suffix match. `other` compares it with the table's match of the longest context, `others[0]`."""
    other = SILENT if not others else AGREES if others[0].token == match.token else DIFFERS
    return Evidence(match.match_length, match.count, match.share, chained, other)


def successor_evidence(match: SuccessorMatch, other: SuffixMatch | None, chained: int) -> Evidence:
    """The router's features of a successor match, compared with the suffix match `other`."""
    verdict = SILENT if other is None else AGREES if other.token == match.token else DIFFERS
    return Evidence(match.order, match.count, match.share, chained, verdict)
