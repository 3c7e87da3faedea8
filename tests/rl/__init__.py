"""Tests of tinsmith.rl."""
