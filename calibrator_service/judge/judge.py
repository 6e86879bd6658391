"""The judge: a thread that takes canaries from step to step, promotes them or ends them, and watches what serves.

What it is to do stands in the registry alone: a canary whose last change was made by ACTOR is on trial, and an operator
who changes the alias ends the trial. The evidence is a note of the registry, written before each step, so whichever
calibrator goes on, after whatever end of the one before, takes the same step or has it behind it: each is a
compare-and-swap. Of several calibrators the one that holds the lease acts; the others refuse reports.
"""

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import structlog

from calibrator_service.judge.orders import Order, Orders
from calibrator_service.judge.reports import ReportBook, Sums
from calibrator_service.judge.trial import SHARES, Outcome, Trial, Verdict
from calibrator_service.judge.watch import Alarm, Watch
from calibrator_service.metrics import CalibratorMetrics
from calibrator_service.service_thread import ServiceThread
from shared.errors import Conflict, Corrupt, InvalidInput, NeapError, PreconditionFailed, Unavailable
from shared.registry.base import AliasChange, Canary
from shared.registry.marks import elapsed_s
from shared.registry.registry import Registry
from shared.registry.speeds import Speeds, kept_speeds

# Who changes an alias in its history, and the name of the lease and of the note.
ACTOR = "judge"
STEP_S = 1.0
# How often evidence is written while nothing is decided, and how often a canary's version is read again.
KEEP_S, CHECK_S = 10.0, 30.0
# How often speeds over time are written, which decide nothing.
KEEP_SPEEDS_S = 60.0
MAX_MODELS, MAX_ALIASES = 64, 256
MAX_REASON_CHARACTERS = 1000

log = structlog.get_logger("neap.judge")

Place = tuple[str, str]  # model and alias


@dataclass(frozen=True)
class JudgedAlias:
    """An alias by its last change. `state` and `figures` are for people."""

    change: AliasChange
    state: str
    figures: str


@dataclass(frozen=True)
class Judged:
    """The aliases of a model and the versions that are not to be tried. `is_acting`: whether this calibrator judges;
    otherwise it has no figures."""

    aliases: Sequence[JudgedAlias]
    forbidden: Sequence[int]
    is_acting: bool


class Judge:
    """`report`, `order` and `status` may be called from any thread; `thread` does the rest. `models`: those that are
    judged from the start; others are once a worker reports them, if the registry has them."""

    def __init__(
        self,
        registry: Registry,
        models: Sequence[str],
        *,
        metrics: CalibratorMetrics,
        first_share: float = SHARES[0] / 1000,
        step_s: float = STEP_S,
    ) -> None:
        self._registry, self._metrics, self._step_s = registry, metrics, step_s
        self._first_share = round(1000 * first_share)
        self._models = set(models)
        self._lease = registry.lease(ACTOR)
        self._orders = Orders(registry)
        self._lock = threading.Lock()
        self._book = ReportBook()
        self._trials: dict[Place, Trial] = {}
        self._watches: dict[Place, Watch] = {}
        # Of the aliases that are known, and those of which there is more than is kept.
        self._speeds: dict[Place, Speeds] = {}
        self._unkept: set[Place] = set()
        # Aliases whose version is accepted less often than it was.
        self._lost: set[Place] = set()
        # Why no router drafts behind an alias, by the version that it names.
        self._suspended: dict[Place, tuple[int, str]] = {}
        self._acts = self._has_changed = False
        self._renew_at_s = self._kept_s = self._speeds_kept_s = self._checked_s = float("-inf")
        self.thread = ServiceThread(ACTOR, self._step)

    # Any thread.

    def report(self, sender: str, worker_id: str, model_id: str, sequence: int, sums: Sums) -> tuple[bool, list[str]]:
        """Takes a worker's report. Returns whether it was new, and the aliases behind which no router is to draft.
        Raises InvalidInput (BAD_REPORT), Unavailable (NOT_ACTING: another calibrator judges)."""
        with self._lock:
            if not self._acts:
                raise Unavailable("another calibrator of this registry judges", reason="NOT_ACTING")
            now_s = elapsed_s()
            try:
                new = self._book.take(sender, worker_id, model_id, sequence, sums, now_s)
            except InvalidInput:
                self._metrics.served_reports.labels("refused").inc()
                raise
            for key, served in new or ():
                place = model_id, key.alias
                if (trial := self._trials.get(place)) is not None:
                    trial.observe(worker_id, key.load, key.version, served, now_s)
                watch = self._watches.get(place)
                if watch is not None and watch.version == key.version:
                    watch.observe(worker_id, key.load, served, now_s)
                if (speeds := self._speeds.get(place)) is not None:
                    speeds.observe(key.version, served, time.time())
                    self._unkept.add(place)
                self._has_changed = True
            suspended = [alias for (model, alias) in self._suspended if model == model_id]
        self._metrics.served_reports.labels("late" if new is None else "taken").inc()
        return new is not None, suspended

    def begin(self, model_id: str, alias: str, version: int, why: str) -> AliasChange:
        """Puts a version on trial: makes it the canary of the alias, which must exist. Any calibrator may do so.
        Raises what `Registry.set_canary` raises, and PreconditionFailed (FORBIDDEN_VERSION; CANARY_RUNS: the alias has
        another canary)."""
        if version in self._orders.read().forbidden(model_id):
            raise PreconditionFailed(f"version {version} is forbidden to the judge", reason="FORBIDDEN_VERSION")
        last = self._registry.last_changes(model_id).get(alias)
        if last is not None and last.canary is not None:
            if on_trial(last) and last.canary.version == version:
                return last
            raise PreconditionFailed(
                f"alias {alias!r} has version {last.canary.version} as its canary; end that first", reason="CANARY_RUNS"
            )
        return self._registry.set_canary(
            model_id,
            alias,
            Canary(version, self._first_share),
            actor=ACTOR,
            reason=f"trial begins: {why}"[:MAX_REASON_CHARACTERS],
        )

    def order(self, order: Order) -> None:
        """Records what an operator wants. Any calibrator may do so."""
        self._orders.give(order)
        self.thread.wake()

    def status(self, model_id: str) -> Judged:
        """What is known of the aliases of a model here."""
        changes = self._registry.last_changes(model_id)
        orders = self._orders.read()
        with self._lock:
            aliases = [self._described((model_id, alias), change, orders) for alias, change in changes.items()]
            return Judged(aliases[:MAX_ALIASES], sorted(orders.forbidden(model_id)), self._acts)

    def _described(self, place: Place, change: AliasChange, orders: Orders) -> JudgedAlias:
        trial, watch, suspended = self._trials.get(place), self._watches.get(place), self._suspended.get(place)
        state, figures = "watched", watch.figures() if watch is not None else ""
        if suspended is not None:
            state, figures = "suspended", suspended[1]
        if on_trial(change):
            state, figures = "on trial", trial.figures() if trial is not None else ""
        elif change.canary is not None:
            state = "canary of an operator"
        return JudgedAlias(
            change, state + ", held" * orders.holds(place), figures if self._acts else "another calibrator judges"
        )

    def has_lost(self, model_id: str, alias: str) -> bool:
        """Whether drafts by the version that an alias names are accepted less often than they were."""
        with self._lock:
            return (model_id, alias) in self._lost

    # The judge's thread.

    def stop(self, timeout_s: float | None = None) -> None:
        """Ends the thread, writes the evidence, and lets the next calibrator act at once."""
        self.thread.stop(timeout_s)
        try:
            if self._acts and self._lease.is_held:
                self._keep()
                self._keep_speeds()
                self._lease.give_up()
        except NeapError as error:
            log.warning("the lease is not given up", reason=error.reason)

    def _step(self) -> float:
        self._hold()
        if self._acts:
            orders = self._orders.read()
            checks = elapsed_s() - self._checked_s >= CHECK_S
            if checks:
                self._checked_s = elapsed_s()
                self._models.update(self._registry.models()[:MAX_MODELS])
            for model_id in sorted(self._models):
                try:
                    for change in list(self._registry.last_changes(model_id).values())[:MAX_ALIASES]:
                        self._judge(model_id, change, orders, checks)
                except NeapError as error:  # of one model; the others go on
                    log.warning("a model cannot be judged now", model_id=model_id, reason=error.reason)
            if self._has_changed and elapsed_s() - self._kept_s >= KEEP_S:
                self._keep()
            if elapsed_s() - self._speeds_kept_s >= KEEP_SPEEDS_S:
                self._keep_speeds()
        return self._step_s

    def _hold(self) -> None:
        """Takes or renews the lease. Begins with what the last one to act has written."""
        if self._lease.is_held and elapsed_s() < self._renew_at_s:
            return
        try:
            holds = self._lease.hold()
        finally:
            if not self._lease.is_held:
                self._acts = False
        self._renew_at_s = elapsed_s() + self._lease.renew_after_s
        if holds and not self._acts:
            self._load()
            log.info("this calibrator judges")
        with self._lock:
            self._acts = holds
        self._metrics.judge_acts.set(holds)

    def _judge(self, model_id: str, change: AliasChange, orders: Orders, checks: bool) -> None:
        place = model_id, change.alias
        speeds = self._speeds.get(place) or kept_speeds(self._registry, *place)
        now_s = elapsed_s()
        with self._lock:
            self._speeds[place] = speeds
            watch = self._watches.get(place)
            if watch is None or watch.version != change.to_version:
                watch = self._watches[place] = Watch(change.to_version)
                self._lost.discard(place)
            if self._suspended.get(place, (0, ""))[0] not in (0, change.to_version) or orders.holds(place):
                self._suspended.pop(place, None)  # the alias has moved, or an operator wants it to serve
            trial, verdict = self._trials.get(place), None
            if not on_trial(change):
                self._trials.pop(place, None)
                trial = None
            else:
                assert change.canary is not None
                versions = change.to_version, change.canary.version
                if trial is None or (trial.incumbent, trial.canary) != versions:
                    trial = self._trials[place] = Trial(*versions, now_s)
                verdict = trial.verdict(change.canary.share_per_mille, now_s)
            alarm = watch.alarm(now_s)
        if orders.holds(place):
            return
        if trial is not None:
            if trial.canary in orders.forbidden(model_id):
                verdict = Verdict(Outcome.ROLL_BACK, "an operator forbids this version")
            elif checks and (damage := self._damage_of(model_id, trial.canary)):
                verdict = Verdict(Outcome.ROLL_BACK, f"its version cannot be read: {damage}")
        if trial is not None and verdict is not None:
            self._carry_out(model_id, change, trial, verdict)
        elif alarm is not None:
            self._answer(place, change, watch, alarm, orders)

    def _damage_of(self, model_id: str, version: int) -> str:
        try:
            self._registry.get(model_id, version)
        except Corrupt as error:
            return error.reason
        return ""

    def _carry_out(self, model_id: str, change: AliasChange, trial: Trial, verdict: Verdict) -> None:
        """Takes a step. What another has done meanwhile to the alias is left as it is."""
        self._keep()
        if not self._lease.is_held:
            return
        alias, why = change.alias, f"{verdict.outcome}: {verdict.why}"[:MAX_REASON_CHARACTERS]
        try:
            if verdict.outcome is Outcome.PROMOTE:
                self._registry.promote_canary(model_id, alias, expected_canary=trial.canary, actor=ACTOR, reason=why)
            else:
                grows = verdict.outcome is Outcome.GROW
                self._registry.set_canary(
                    model_id,
                    alias,
                    Canary(trial.canary, verdict.share_per_mille) if grows else None,
                    expected_version=trial.incumbent,
                    actor=ACTOR,
                    reason=why,
                )
        except (Conflict, PreconditionFailed, Corrupt) as error:
            log.warning("the alias is not as it was, or its version cannot be read", alias=alias, reason=error.reason)
            return
        self._metrics.verdicts.labels(model_id, verdict.outcome.value).inc()
        log.info("verdict", model_id=model_id, alias=alias, outcome=verdict.outcome, why=verdict.why)

    def _answer(self, place: Place, change: AliasChange, watch: Watch, alarm: Alarm, orders: Orders) -> None:
        """What serves is not what it was. The version before it comes back: at once where full depth would be faster,
        and on trial where it may be as slow on the new traffic. Without one the router is suspended, or it is said."""
        model_id, alias = place
        why = f"{alarm}: {watch.figures()}"[:MAX_REASON_CHARACTERS]
        before = self._before(place, change)
        may_return = before is not None and before not in orders.forbidden(model_id) and change.canary is None
        self._keep()
        if not self._lease.is_held:
            return
        done = "said"
        try:
            if alarm is Alarm.LOST_ACCEPTANCE and may_return and before is not None:
                self.begin(model_id, alias, before, why)
                done = "version before on trial"
            elif alarm is Alarm.SLOWER_THAN_FULL and may_return and before is not None:
                self._registry.set_alias(
                    model_id, alias, before, expected_version=watch.version, actor=ACTOR, reason=why
                )
                self._orders.give(Order(model_id, "forbid", version=watch.version))  # it would only come back
                done = "rolled back"
            elif alarm is Alarm.SLOWER_THAN_FULL:
                with self._lock:
                    self._suspended[place] = watch.version, why
                done = "suspended"
        except (Conflict, PreconditionFailed, Corrupt, InvalidInput) as error:
            log.warning("the version before cannot come back", alias=alias, reason=error.reason)
        with self._lock:
            watch.begin_again()
            self._has_changed = True
            if alarm is Alarm.LOST_ACCEPTANCE:
                self._lost.add(place)
        self._metrics.alarms.labels(model_id, alarm.value).inc()
        log.warning("alarm", model_id=model_id, alias=alias, version=watch.version, why=why, done=done)

    def _before(self, place: Place, change: AliasChange) -> int | None:
        """The version that the alias named before its own."""
        history = self._registry.alias_history(*place)
        moves = (past.from_version for past in history if past.to_version == change.to_version != past.from_version)
        return next(moves, None)

    # The evidence, between processes.

    def _keep(self) -> None:
        if not self._lease.is_held:  # another one may have written since
            return
        now_s = elapsed_s()
        with self._lock:
            record = {
                "kept_s": time.time(),
                "trials": [[*place, trial.to_record(now_s)] for place, trial in self._trials.items()],
                "watches": [[*place, watch.to_record()] for place, watch in self._watches.items()],
                "suspended": [[*place, *suspended] for place, suspended in self._suspended.items()],
            }
            self._has_changed = False
        self._kept_s = now_s
        self._registry.keep_note(ACTOR, record)

    def _keep_speeds(self) -> None:
        if not self._lease.is_held:
            return
        self._speeds_kept_s = elapsed_s()
        with self._lock:
            unkept = {
                place: replace(self._speeds[place], sums=dict(self._speeds[place].sums)) for place in self._unkept
            }
            self._unkept.clear()
        for place, speeds in unkept.items():
            speeds.keep(self._registry, *place)

    def _load(self) -> None:
        """Without what cannot be read the evidence is gathered anew."""
        now_s = elapsed_s()
        try:
            record: Mapping[str, Any] = self._registry.note(ACTOR) or {"trials": (), "watches": (), "suspended": ()}
            trials = {(str(m), str(a)): Trial.from_record(trial, now_s) for m, a, trial in record["trials"]}
            watches = {(str(m), str(a)): Watch.from_record(watch, now_s) for m, a, watch in record["watches"]}
            suspended = {(str(m), str(a)): (int(version), str(why)) for m, a, version, why in record["suspended"]}
        except (Corrupt, ValueError, KeyError, TypeError, AttributeError) as error:
            log.warning("the judge's evidence cannot be read and is gathered anew", error=type(error).__name__)
            trials, watches, suspended = {}, {}, {}
        with self._lock:
            self._trials, self._watches, self._suspended = trials, watches, suspended
            self._book, self._speeds = ReportBook(), {}
            self._unkept.clear()


def on_trial(change: AliasChange) -> bool:
    """Whether an alias' canary is the judge's, and not an operator's."""
    return change.canary is not None and change.actor == ACTOR
