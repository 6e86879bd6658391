"""Constraints of answers: grammars, compiled by llguidance, that say at every position which tokens may be chosen."""
