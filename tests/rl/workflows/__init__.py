"""Tests of rl/workflows."""
