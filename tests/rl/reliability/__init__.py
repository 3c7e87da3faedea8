"""Runs under kills, outages, signals and hostile user code."""
