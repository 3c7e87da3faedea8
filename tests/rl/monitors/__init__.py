"""Tests of the monitors."""
