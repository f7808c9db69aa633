"""Figures that are measured, not asserted: `make bench`, or `make bench ONLY=name`."""
