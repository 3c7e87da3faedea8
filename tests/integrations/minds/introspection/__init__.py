"""Tests of the introspection environments."""
