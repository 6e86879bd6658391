"""What neap is worth, shown in four minutes: `make demo`."""
