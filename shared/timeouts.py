"""How long the registry waits for whatever may not answer: every bound in one place, in seconds.

What they add up to per call stands in docs/reliability.md.
"""

# Another process that writes to the same SQLite file.
DATABASE_BUSY_S = 30.0
# Another process that holds a file lock: one that sweeps, publishes, opens or rebuilds the same folder.
FILE_LOCK_S = 30.0

# Of Redis, a connection and an answer. A command is sent twice at most, over a new connection the second time.
REDIS_CONNECT_S = 2.0
REDIS_ANSWER_S = 2.0
# How long Redis is asked to wait for an event; shorter than for an answer.
REDIS_WAIT_S = 1.0

# Of the object store, a connection, which includes looking up its name; a small record; and content: its whole transfer, and how
# long nothing may come. While content is sent nothing comes, so that its sending has a bound of its own. Reading is tried twice.
OBJECT_STORE_CONNECT_S = 3
OBJECT_STORE_RECORD_S = 5
OBJECT_STORE_CONTENT_S = 600
OBJECT_STORE_STALL_S = 10
OBJECT_STORE_SENDING_STALL_S = 60
# No further attempt begins after this, pauses included.
OBJECT_STORE_RETRY_S = 10

# A publisher records within this of having looked for a sweep; also how long a writer tries when others are faster.
COMMIT_S = 60.0
# How long a publisher waits for a sweep to end.
SWEEP_WAIT_S = 600.0
