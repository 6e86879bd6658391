"""The command line `neap`: one file per group of commands. It meets the services over gRPC only (`shared.rpc.client`)."""
