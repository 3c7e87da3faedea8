"""Tests of rl/scoring."""
