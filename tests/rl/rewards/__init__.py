"""Tests of rl/rewards."""
