"""The OpenAI dialect: texts and conversations in, samples of the same engines out."""
