"""Tests of rl/run_folder."""
