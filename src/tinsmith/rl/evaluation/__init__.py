"""Evaluation by name: benchmarks of lm-evaluation-harness and Inspect, against a server's OpenAI API."""
