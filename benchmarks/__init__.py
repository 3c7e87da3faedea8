"""Measurements against the common ways of doing the same work, side by side in one run."""
