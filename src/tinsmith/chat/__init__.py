"""OpenAI chat messages, tool calls, templates and detokenization, shared by the service and the harness."""
