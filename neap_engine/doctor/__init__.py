"""What this machine can do with these settings, and why not: the checks of `neap doctor`.

A check tries the thing itself and changes nothing that stays: it loads the kernels and runs one, opens the registry and
writes a probe, loads the model as a worker does.
"""
