"""Advantages, losses and the `Algorithm` that combines them."""
