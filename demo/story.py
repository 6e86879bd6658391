"""What the demo asks of a running system, act by act, and what it shows of the answers."""

import json
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import cycle, islice
from typing import Any, Protocol, cast

from neap_client import NeapClient, generate_request
from neap_client.calibration.v1 import calibration_pb2
from neap_client.requests import Policy
from rich.table import Table

from demo.answers import Measured, Pair, ask, median_speed_up
from demo.requests import LEARNED, MEASURED, PROMPTS
from neap_engine.cli.console import out
from neap_engine.cli.evaluate_view import COLOURS
from neap_engine.cli.generate import NO_CHAT_TEMPLATE, PLAIN_TEXT_NOTE, DepthView
from neap_engine.cli.job_progress import problem_text
from neap_engine.cli.learned_view import learned_lines
from neap_engine.cli.learning_picture import Line, router_name
from neap_engine.cli.up import LATEST
from shared.errors import NeapError, Unavailable
from shared.registry.contents import failed_checks

# A router comes at most so much later than its calibration takes: answers are written after half a minute, and the
# calibration's process loads the model.
LATE_S = 240.0
# Between requests while a router is learned, which needs a machine that is not always busy.
PAUSE_S = 5.0
ROUNDS = 2
# Of an answer while a version is on trial: eight answers of each version are one comparison.
TRIAL_TOKENS = 24
POLICIES: tuple[Policy, Policy] = ("full", "exact")
EXACT: Policy = "exact"
FAILED = (calibration_pb2.STATE_FAILED, calibration_pb2.STATE_CANCELLED, calibration_pb2.STATE_WAITING)


class Checked(Protocol):
    def check(self) -> None:
        """Raises NeapError if the system has ended."""


class Story:
    """What the demo asks and shows. `pairs`: all answers; `of_kind`: those to MEASURED; `on_trial`: those by `exact`
    alone, while a version was on trial."""

    def __init__(
        self, system: Checked, worker: NeapClient, calibrator: NeapClient, model_id: str, max_tokens: int
    ) -> None:
        self._system, self._worker, self._calibrator = system, worker, calibrator
        self._model_id, self._max_tokens = model_id, max_tokens
        self._measured = cycle(MEASURED)
        self._is_chat = True
        self.pairs: list[Pair] = []
        self.of_kind: list[Pair] = []
        self.on_trial: list[Measured] = []

    def day_0(self) -> None:
        """Look-up alone. Answers have colours for what was drafted."""
        step("1. day 0: there is no router, so drafts are looked up in the text before them")
        self._is_chat = self._has_chat_template()
        self._compare("Hello")  # what a first request waits for is not counted
        self.pairs.clear()
        view = DepthView(out, self._worker.get_model(self._model_id).num_layers, True)
        for name, prompt in PROMPTS.items():
            self._system.check()
            out.print(f"\n[bold]{name}[/]")
            self._compare(prompt, view)
            out.print()
        out.print(view.legend())
        say(f"exact over full: {median_speed_up(self.pairs):.2f}x, the median of {len(self.pairs)}")

    def first_router(self, budget_s: int) -> None:
        """The router that `neap up` learns from text of the model's own, measured on requests of the kind."""
        step("2. meanwhile neap up learns a router from text of the model's own, and takes it up while it serves")
        version = self._wait_for_router(0, budget_s)
        self._show_learned(version)

    def one_kind(self, budget_s: int, trial_s: float) -> None:
        """What comes of requests of one kind, without anybody's doing. The trial is waited for so long."""
        before = self.of_kind[-1].exact.version
        step(f"3. {len(LEARNED)} requests of one kind come in: the facts of a passage as JSON")
        for prompt in MEASURED:
            self._compare_measured(prompt)
        for prompt in LEARNED:
            self._compare(prompt, is_kept=True)
        kept = self.pairs[-len(LEARNED) :]
        num_tokens = sum(p.exact.num_prompt_tokens + len(p.exact.token_ids) for p in kept)
        say(f"exact over full: {median_speed_up(kept):.2f}x; {num_tokens:,} tokens are kept. The rest is unattended")
        version = self._wait_for_router(before, budget_s)
        self._show_learned(version)
        self._until_judged(trial_s)
        say(f"{len(MEASURED)} other requests of the kind, which are never learned from, {ROUNDS} times")
        for prompt in MEASURED * ROUNDS:
            self._compare_measured(prompt)

    def _wait_for_router(self, before: int, budget_s: int) -> int:
        """Sends a request now and then until another router answers. Returns its version."""
        deadline_s = time.monotonic() + budget_s + LATE_S
        while (version := (pair := self._compare_measured(next(self._measured))).exact.version) == before:
            self._check_jobs()
            if pair.has_speed:
                say(f"a request of the kind, {router_name(version)}: exact {pair.speed_up:.2f}x full")
            if time.monotonic() > deadline_s:
                raise Unavailable(f"no router came within {budget_s + LATE_S:.0f} s", reason="NOT_READY")
            pause_until_s = time.monotonic() + PAUSE_S
            while time.monotonic() < pause_until_s:
                self._system.check()
                time.sleep(0.2)
        self._system.check()
        return version

    def _until_judged(self, trial_s: float) -> None:
        """Sends requests, of which a part is answered with the version on trial, until the judge has decided."""
        say("it is on trial: the judge gives it a share of the requests, and compares it with the version before")
        deadline_s = time.monotonic() + trial_s
        while (change := self._calibrator.alias_history(self._model_id, LATEST)[0]).HasField("canary"):
            if time.monotonic() > deadline_s:
                (judged,) = self._calibrator.get_judged(self._model_id).aliases
                say(f"undecided after {len(self.on_trial)} requests; the trial goes on: {judged.figures}")
                return
            for prompt in MEASURED:
                self._system.check()
                self.on_trial.append(self._ask(prompt, EXACT, max_tokens=min(TRIAL_TOKENS, self._max_tokens)))
        say(f"after {len(self.on_trial)} requests: {change.reason}")

    def _check_jobs(self) -> None:
        """Raises Unavailable (CALIBRATION_FAILED) if one has failed, or if no alias may name what it made."""
        jobs, wrong = [], []
        with suppress(NeapError):  # a calibrator that has died ends the system, which says why
            jobs = list(self._calibrator.list_calibrations(self._model_id))
            newest = max((job.router_version for job in jobs), default=0)
            wrong = failed_checks(self._manifest(newest)) if newest else []
        problem = next((problem_text(job) for job in jobs if job.state in FAILED), "")
        if wrong:
            problem = f"router {newest} did not pass its checks ({', '.join(wrong)})"
        if problem:
            raise Unavailable(
                f"no router was learned: {problem}; --budget gives it more time", reason="CALIBRATION_FAILED"
            )

    def _manifest(self, version: int) -> dict[str, Any]:
        router = self._calibrator.get_version(self._model_id, version=version)
        return cast(dict[str, Any], json.loads(router.manifest_json))

    def _show_learned(self, version: int) -> None:
        for line in islice(learned_lines(self._manifest(version)), 2):
            say(f"router {version} {line}")

    def _compare_measured(self, prompt: str) -> Pair:
        pair = self._compare(prompt)
        self.of_kind.append(pair)
        return pair

    def _compare(self, prompt: str, view: DepthView | None = None, *, is_kept: bool = False) -> Pair:
        """Answers a prompt at full depth and by `exact`, the first of them in turn. `is_kept`: it may be learned
        from."""
        self._system.check()
        found = {}
        for policy in POLICIES if len(self.pairs) % 2 else reversed(POLICIES):
            is_exact = policy == EXACT
            found[policy] = self._ask(prompt, policy, view if is_exact else None, is_kept=is_kept and is_exact)
        pair = Pair(*map(found.__getitem__, POLICIES))
        self.pairs.append(pair)
        return pair

    def _ask(
        self,
        prompt: str,
        policy: Policy,
        view: DepthView | None = None,
        *,
        is_kept: bool = False,
        max_tokens: int = 0,
    ) -> Measured:
        request = generate_request(
            self._model_id,
            prompt,
            raw=not self._is_chat,
            policy=policy,
            max_tokens=max_tokens or self._max_tokens,
            temperature=0.0,
            learn=None if is_kept else "never",
        )
        return ask(self._worker, request, view.show if view else lambda event: None)

    def _has_chat_template(self) -> bool:
        """Prints a note if the model has none, as a base model may."""
        try:
            ask(self._worker, generate_request(self._model_id, "Hi", max_tokens=1, learn="never"))
        except NeapError as error:
            if error.reason != NO_CHAT_TEMPLATE:
                raise
            say(PLAIN_TEXT_NOTE)
            return False
        return True


def kind_table(pairs: Sequence[Pair]) -> Table:
    """What each router made of the requests of the kind. Speeds are medians; the third is that of the pairs."""
    table = Table("", "answers", "full,\ntokens/s", "exact,\ntokens/s", "exact / full", "tokens\nper pass")
    for version in sorted({pair.exact.version for pair in pairs}):
        own = [pair for pair in pairs if pair.exact.version == version]
        timed = [pair for pair in own if pair.has_speed]
        speeds = [
            f"{statistics.median(getattr(pair, side).tokens_per_s for pair in timed):.0f}" if timed else ""
            for side in POLICIES
        ]
        per_pass = statistics.mean(pair.exact.tokens_per_pass for pair in own)
        table.add_row(router_name(version), str(len(own)), *speeds, f"{median_speed_up(own):.2f}x", f"{per_pass:.2f}")
    return table


def lines_of(pairs: Sequence[Pair], on_trial: Sequence[Measured]) -> list[Line]:
    """For the picture: speeds at full depth, and of each router."""
    timed = [pair for pair in pairs if pair.has_speed]
    lines = [Line("full", COLOURS["full"], _points(pair.full for pair in timed))]
    answers = [*(pair.exact for pair in timed), *(answer for answer in on_trial if answer.has_speed)]
    for version in dict.fromkeys(answer.version for answer in answers):
        own = sorted((each for each in answers if each.version == version), key=lambda each: each.ended_s)
        lines.append(Line(EXACT, COLOURS[EXACT], _points(own)))
    return lines


def _points(answers: Iterable[Measured]) -> list[tuple[float, float]]:
    return [(answer.ended_s, answer.tokens_per_s) for answer in answers]


def words_beside(pairs: Sequence[Pair]) -> Callable[[int], str]:
    """Beside the mark of a router: its name and its speed."""

    def words(version: int) -> str:
        own = [pair for pair in pairs if pair.has_speed and pair.exact.version == version]
        return f" {router_name(version)}" + (f"\n exact {median_speed_up(own):.2f}x full" if own else "")

    return words


def step(text: str) -> None:
    out.print(f"\n[bold]==[/] {text}")


def say(text: str) -> None:
    out.print(f"   {text}", markup=False)
