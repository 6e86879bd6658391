"""How many connections a server takes. Beyond the limit of open files its listener would stop for everybody."""

import resource

MAX_CONNECTIONS = 4096
# Open files that are no connections of clients: those to other services, for logs and metrics, of the interpreter.
OTHER_FILES = 128


def max_connections() -> int:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return max(2, min(MAX_CONNECTIONS, limit - OTHER_FILES))
