"""Agent flows: functions that call an OpenAI endpoint of their rollout, and functions that score them."""
