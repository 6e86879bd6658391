"""The judge on simulated traffic with planted versions: how often it is right, and after how many tokens.

    python -m bench.judge [--runs 100] [--workers 4] [--spread 0.45]

Answers have the lengths and the spread of seconds per token that were measured of served requests (--spread: standard
deviation of the logarithm, of one load), and one in 30 takes up to ten times as long. Traffic rises and falls by the
hour, with it the number of requests that run together, and both slow workers down; no two workers are equally fast; a
slower version runs beside more others. Reports go through the same code as those of workers, every 10 seconds of
simulated time, and one in 50 is lost.
"""

import argparse
import math
import random
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from bench.table import head, row
from calibrator_service.judge.reports import ReportBook
from calibrator_service.judge.trial import Outcome, Trial
from shared.errors import InvalidInput
from shared.served import MOST_TOKENS, NOTHING, Served, ServedKey

OLD, NEW, ALIAS, MODEL = 7, 8, "latest", "simulated"
STEP_S, DAY_S = 10.0, 86_400.0
LONGEST_S = 10 * DAY_S
REQUESTS_PER_S = 0.5  # of one worker, on average
SECONDS_PER_TOKEN = 0.02
RIGHT = {1.15: Outcome.PROMOTE, 1.0: Outcome.NO_DIFFERENCE, 0.9: Outcome.ROLL_BACK}


@dataclass
class Worker:
    """One that reports. `claims` changes what it says of an answer of a version."""

    name: str
    speed: float
    claims: Callable[[int, float], float] = lambda version, seconds_per_token: seconds_per_token
    sequence: int = 0
    sums: dict[ServedKey, Served] = field(default_factory=dict)

    def serve(self, version: int, load: int, num_tokens: int, seconds_per_token: float) -> None:
        said, weight = self.claims(version, seconds_per_token), min(num_tokens, MOST_TOKENS)
        one = Served(1, num_tokens, num_tokens / 2, num_tokens, num_tokens * said, 0.0, weight, weight * math.log(said))
        key = ServedKey(ALIAS, version, load)
        self.sums[key] = self.sums.get(key, NOTHING).plus(one)


@dataclass(frozen=True)
class Ended:
    """Tokens of the canary and of both versions until the end. `lost`: the share of all time that the trial cost."""

    outcome: Outcome | None
    canary_tokens: int
    tokens: int
    hours: float
    lost: float


@dataclass
class Traffic:
    """Simulated traffic of workers with two versions, one of which is `speed_up` times as fast."""

    generator: random.Random
    workers: Sequence[Worker]
    speed_up: float
    spread: float
    canary_tokens: int = 0
    tokens: int = 0
    spent_s: float = 0.0
    instead_s: float = 0.0

    def serve(self, worker: Worker, now_s: float, share: int, *, is_deleted: bool) -> None:
        """What a worker serves in STEP_S."""
        generator, hour = self.generator, math.sin(2 * math.pi * now_s / DAY_S + worker.speed)
        expected = STEP_S * REQUESTS_PER_S * (1 + 0.8 * hour)
        for _ in range(int(expected + generator.random())):
            is_new = generator.random() * 1000 < share and not is_deleted
            version, speed_up = (NEW, self.speed_up) if is_new else (OLD, 1.0)
            # A request that takes longer meets more others.
            running = max(1.0, (2 + 1.5 * hour) * generator.uniform(0.5, 2.0) / speed_up)
            load = (math.ceil(running - 0.5) - 1).bit_length()
            took = SECONDS_PER_TOKEN * worker.speed * running**0.6 * (1 + 0.3 * hour)
            took *= math.exp(generator.gauss(0.0, self.spread))
            if generator.random() < 1 / 30:
                took *= 10 ** generator.random()
            num_tokens = max(8, min(int(generator.lognormvariate(math.log(80), 0.7)), 1000))
            worker.serve(version, load, num_tokens, took / speed_up)
            self.tokens += num_tokens
            self.canary_tokens += num_tokens * is_new
            self.spent_s += num_tokens * took / speed_up
            self.instead_s += num_tokens * took


def simulated(
    seed: int,
    speed_up: float,
    options: argparse.Namespace,
    *,
    poison: float = 0.0,
    away: bool = False,
    deleted: bool = False,
) -> Ended:
    """One trial. `poison`: a worker says that the canary is so many times as fast as it is, and sends nonsense between.
    `away`: the calibrator dies after an hour, for an hour. `deleted`: the canary cannot be served after ten minutes."""
    generator = random.Random(seed)
    workers = [Worker(f"{number:08}", math.exp(generator.gauss(0.0, 0.2))) for number in range(options.workers)]
    if poison:
        workers[0].claims = lambda version, took: took / poison if version == NEW else took
    traffic = Traffic(generator, workers, speed_up, options.spread)
    began_s = now_s = STEP_S * generator.randrange(int(DAY_S / STEP_S))
    trial, book, share, outcome = Trial(OLD, NEW, now_s), ReportBook(), 50, None
    while outcome is None and now_s - began_s < LONGEST_S:
        now_s += STEP_S
        is_away = away and 3600 <= now_s - began_s < 7200
        if away and now_s - began_s == 7200:
            trial, book = Trial.from_record(trial.to_record(began_s + 3600), now_s), ReportBook()
        for worker in workers:
            traffic.serve(worker, now_s, share, is_deleted=deleted and now_s - began_s > 600)
            worker.sequence += 1
            if not is_away and generator.random() > 1 / 50:
                _report(book, trial, worker, now_s, nonsense=bool(poison) and worker is workers[0])
        if not is_away and (verdict := trial.verdict(share, now_s)) is not None:
            if verdict.outcome is Outcome.GROW:
                share = verdict.share_per_mille
            else:
                outcome = verdict.outcome
    lost = traffic.spent_s / traffic.instead_s - 1
    return Ended(outcome, traffic.canary_tokens, traffic.tokens, (now_s - began_s) / 3600, lost)


def _report(book: ReportBook, trial: Trial, worker: Worker, now_s: float, *, nonsense: bool) -> None:
    if nonsense:
        wrong = NOTHING._replace(num_requests=1e9, seconds=math.nan)
        try:
            book.take("", worker.name, MODEL, worker.sequence, {ServedKey(ALIAS, NEW, 0): wrong}, now_s)
        except InvalidInput:
            pass
        else:
            raise AssertionError("nonsense was taken")
    for key, served in book.take("", worker.name, MODEL, worker.sequence, worker.sums, now_s) or ():
        trial.observe(worker.name, key.load, key.version, served, now_s)


def measured(name: str, speed_up: float, options: argparse.Namespace, **how: object) -> dict[str, float]:
    """Prints a row of the table. Returns its figures."""
    ended = [simulated(seed, speed_up, options, **how) for seed in range(options.runs)]  # type: ignore[arg-type]
    outcomes = Counter(each.outcome for each in ended)
    right = outcomes[Outcome.SILENT if how.get("deleted") else RIGHT[speed_up]]
    said = ", ".join(f"{count} {outcome or 'undecided'}" for outcome, count in outcomes.most_common())
    canary = [each.canary_tokens for each in ended]
    cells = [
        name,
        f"{right} of {options.runs}",
        said,
        f"{statistics.median(canary):,.0f}",
        f"{sorted(canary)[int(0.95 * len(canary))]:,}",
        f"{statistics.median(each.tokens for each in ended):,.0f}",
        f"{statistics.median(each.hours for each in ended):.1f}",
        f"{100 * statistics.fmean(each.lost for each in ended):+.2f} %",
    ]
    row(*cells)
    return {"right": right, "canary_tokens": statistics.median(canary)}


def main(arguments: Sequence[str] | None = None) -> dict[str, dict[str, float]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--spread", type=float, default=0.45)
    options = parser.parse_args(arguments)
    head("planted", "right", "ends", "median tokens of it", "95 %", "of both versions", "hours", "time, of all traffic")
    figures = {}
    for speed_up in RIGHT:
        figures[str(speed_up)] = measured(f"{speed_up}x", speed_up, options)
    for speed_up in RIGHT:
        poison = 0.6 if speed_up > 1 else 1.6
        name = f"{speed_up}x, a worker says {poison}x more"
        figures[f"{speed_up} poisoned"] = measured(name, speed_up, options, poison=poison)
    for speed_up in RIGHT:
        figures[f"{speed_up} away"] = measured(f"{speed_up}x, an hour without calibrator", speed_up, options, away=True)
    figures["deleted"] = measured("1.15x, deleted after 10 minutes", 1.15, options, deleted=True)
    return figures


if __name__ == "__main__":
    main()
