"""Benchmarks. Their processes wait as those of the services do, and those of other engines as their users' do."""

import sys

from shared.cpus import wait_briefly

ENGINES, OURS = "bench.peers.engines.", "bench.peers.engines.neap"

if not any(module.startswith(ENGINES) and module != OURS for module in sys.orig_argv):
    wait_briefly()
