"""How long a call of the registry waits, at most, for whatever may not answer: all bounds in one place, in seconds.

What they add up to per call stands in docs/reliability.md.
"""

# Another process that writes to the same SQLite file.
DATABASE_BUSY_S = 30.0
# Another process that holds a file lock: one that sweeps, publishes, opens or rebuilds the same folder.
FILE_LOCK_S = 30.0
