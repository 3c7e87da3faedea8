"""Tests of rl/monitors."""
