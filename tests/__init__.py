"""The tests mirror the tree: tests/<room>/test_<module>.py."""
