"""The worker's thread pools. Each purpose has its own pool, so that a registry that hangs delays nothing else."""

from shared.blocking import BlockingPool
from shared.cpus import usable_cpus
from shared.rpc.callers import caller_name

# Resolving an alias is one short query. If the registry hangs, the query fails after seconds.
NUM_REGISTRY_THREADS = 4
MAX_PENDING_RESOLUTIONS = 64
NUM_PREPARATION_THREADS = 4
# They wait for the process that compiles (`shared.constraints.trials`), which has as many at once.
NUM_CONSTRAINT_THREADS = 2


class Pools:
    """`requests`: CPU work of requests, whose number admission bounds. `constraints`: compiling them, which takes
    seconds where a client means harm. `known_aliases` and `new_aliases`: registry
    queries for aliases that were resolved before and for new ones. `fetches`: downloads of routers. `preparations`:
    binding and testing routers in an engine. The first two are divided among authenticated callers: each has half of
    the threads at most."""

    def __init__(self) -> None:
        num_threads = max(4, 2 * usable_cpus())
        self.requests = BlockingPool(num_threads, 4096, name="neap-requests", client=caller_name)
        self.constraints = BlockingPool(NUM_CONSTRAINT_THREADS, 4096, name="neap-constraints", client=caller_name)
        self.known_aliases = _registry_pool("neap-known-aliases")
        self.new_aliases = _registry_pool("neap-new-aliases")
        self.fetches = _registry_pool("neap-fetches")
        self.preparations = BlockingPool(NUM_PREPARATION_THREADS, 256, name="neap-preparations")

    def close(self) -> None:
        """Does not wait for running work, because a call to the registry may hang."""
        for pool in vars(self).values():
            pool.close(wait=False)


def _registry_pool(name: str) -> BlockingPool:
    return BlockingPool(NUM_REGISTRY_THREADS, MAX_PENDING_RESOLUTIONS, name=name)
