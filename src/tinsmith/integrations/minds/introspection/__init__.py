"""Environments whose rewards are computed from the policy's own probabilities, so that it learns to predict itself."""
