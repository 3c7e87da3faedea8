"""A training run: its folder, its state, its parts, and the loop that trains it."""
