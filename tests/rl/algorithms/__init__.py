"""Tests of rl/algorithms."""
