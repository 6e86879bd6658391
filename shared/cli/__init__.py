"""The command line `neap`, one file per group of commands. It talks to the services only over gRPC (`neap_client`)."""
