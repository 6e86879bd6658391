"""Times the operations of a registry: `python -m bench.registry --registry URL [--records N]`.

It publishes to that registry, under the model "bench". Prints medians in milliseconds, and the time to make the index anew from the
journal, as a process does that opens a registry without Redis.
"""

import argparse
import statistics
import time
import uuid
from collections.abc import Callable

from shared.registry.factory import open_registry

MODEL = "bench"
BLOB_BYTES = 1 << 20


def median_ms(call: Callable[[int], object], count: int) -> float:
    """Median time of `count` calls, which get their number as argument."""
    times_s = []
    for number in range(count):
        started_s = time.perf_counter()
        call(number)
        times_s.append(time.perf_counter() - started_s)
    return statistics.median(times_s) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--registry", required=True, metavar="URL")
    parser.add_argument("--records", type=int, default=1000, help="journal records to restore")
    options = parser.parse_args()
    registry = open_registry(options.registry)
    run = uuid.uuid4().hex

    def publish(number: int) -> object:
        blob = f"{run}-{number}".encode().ljust(BLOB_BYTES)
        return registry.publish(MODEL, {"n": number}, {"x": blob}, request_id=f"{run}-{number}")

    print(f"publish 1 MiB    {median_ms(publish, 20):8.1f} ms")
    newest = registry.resolve(MODEL, "latest").version
    print(f"resolve an alias {median_ms(lambda _: registry.resolve(MODEL, 'latest'), 500):8.2f} ms")
    moves = median_ms(
        lambda number: registry.set_alias(MODEL, "stable", newest - number % 2),
        max(2, options.records - 20),
    )
    print(f"move an alias    {moves:8.1f} ms")
    num_events = registry.last_event(MODEL)
    started_s = time.perf_counter()
    if options.registry.startswith("redis"):
        registry.rebuild(MODEL)
    else:
        open_registry(options.registry).last_event(MODEL)
    print(f"index of {num_events} events {time.perf_counter() - started_s:.2f} s")
    registry.close()


if __name__ == "__main__":
    main()
