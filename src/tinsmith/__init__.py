"""Tinsmith: RL post-training of language models on the Tinker API, whole."""
