"""Sweeps: the runs of a run file with several values of some settings, side by side at one service."""
