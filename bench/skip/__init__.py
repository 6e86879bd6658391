"""Policies that skip layers for good: early exits whose deeper keys and values are substituted, and uniform skipping."""
