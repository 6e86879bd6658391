"""The command line `neap`, one file per group of commands. It talks to the services only over gRPC (`neap_client`)."""

import os

# gRPC's core would write lines of its own beside the errors. It reads this when it is loaded.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
