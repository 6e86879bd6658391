"""Timeouts of the registry, all in one place and in seconds.

docs/reliability.md lists the resulting bound for each call.
"""

# Waiting for another process that writes to the same SQLite file.
DATABASE_BUSY_S = 30.0
# Waiting for a file lock of another process.
FILE_LOCK_S = 30.0

# Connecting to Redis, and waiting for an answer. A command is sent at most twice, the second time over a new
# connection.
REDIS_CONNECT_S = 2.0
REDIS_ANSWER_S = 2.0
# Blocking reads of events in Redis. Must be shorter than the wait for an answer.
REDIS_WAIT_S = 1.0

# Requests to the object store: connecting (with the DNS lookup), a small record, and the whole transfer of contents. A
# transfer also fails if no data arrives for STALL_S. While contents are being sent no data arrives, so sending has its
# own limit. Reads are tried twice.
OBJECT_STORE_CONNECT_S = 3
OBJECT_STORE_RECORD_S = 5
OBJECT_STORE_CONTENT_S = 600
OBJECT_STORE_STALL_S = 10
OBJECT_STORE_SENDING_STALL_S = 60
# No further attempt begins after this time, which includes pauses.
OBJECT_STORE_RETRY_S = 10
# Pauses before a write is repeated that the store has refused because of a concurrent one, times 0.5 to 1.5.
OBJECT_STORE_CONFLICT_PAUSES_S = (0.05, 0.2, 0.8)

# How long a writer retries if others are faster.
COMMIT_S = 60.0
# After this time a publication or a sweep that has not ended counts as dead.
PUBLICATION_LASTS_S = 3600.0
SWEEP_LASTS_S = 900.0
# How long a sweep waits for publications to end.
PUBLICATIONS_WAIT_S = 60.0

# How long a call about routers waits for a free thread of the calibration service.
# While the registry hangs, all of them wait for it.
ROUTER_CALL_WAIT_S = 10.0

# How long a process that holds a lease of the registry may act after it began to take or renew it.
LEASE_LASTS_S = 30.0
