"""What neap is worth, shown in five minutes: `make demo`."""
