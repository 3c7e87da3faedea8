"""Tests of rl/run."""
