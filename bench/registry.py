"""Times the operations of a registry: `python -m bench.registry --registry URL [--records N]`.

It publishes to that registry, under the model "bench". Prints medians in milliseconds, and the time to make the index
anew from the journal, as a process does that opens a registry without Redis.
"""

import uuid
from itertools import count

from bench.options import make_parser, parsed
from bench.stopwatch import medians_s, seconds_of
from bench.table import head, row
from bench.worker import MODEL_ID
from shared.registry.factory import open_registry

BLOB_BYTES = 1 << 20


def main() -> None:
    parser = make_parser(__doc__, model=False)
    parser.add_argument("--registry", required=True, metavar="URL")
    parser.add_argument("--records", type=int, default=1000, help="journal records to restore")
    options = parsed(parser)
    registry = open_registry(options.registry)
    name, numbers = uuid.uuid4().hex, count()

    def publish() -> object:
        key = f"{name}-{next(numbers)}"
        blobs = {"x": key.encode().ljust(BLOB_BYTES)}
        return registry.publish(MODEL_ID, {"n": key}, blobs, request_id=key)

    def resolve() -> int:
        return registry.resolve(MODEL_ID, "latest").version

    def move() -> object:
        return registry.set_alias(MODEL_ID, "stable", newest - next(numbers) % 2)

    head("operation", "median ms")
    row("publish 1 MiB", f"{1e3 * medians_s({0: publish}, 20, 0)[0]:.1f}")
    newest = resolve()
    row("resolve an alias", f"{1e3 * medians_s({0: resolve}, 500, 0)[0]:.2f}")
    row("move an alias", f"{1e3 * medians_s({0: move}, max(2, options.records - 20), 0)[0]:.1f}")
    num_events = registry.last_event(MODEL_ID)

    def restore() -> None:
        if options.registry.startswith("redis"):
            registry.rebuild(MODEL_ID)
        else:
            open_registry(options.registry).last_event(MODEL_ID)

    row(f"make an index of {num_events} events", f"{1e3 * seconds_of(restore):.0f}")
    registry.close()


if __name__ == "__main__":
    main()
