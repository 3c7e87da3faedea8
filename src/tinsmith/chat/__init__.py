"""What both wings know of OpenAI's dialect: fields, messages, tool calls. Pure: no web server, no model."""
