"""The OpenAI API over the served engines: chat completions, completions, and vLLM's tokens-in, tokens-out generate."""
