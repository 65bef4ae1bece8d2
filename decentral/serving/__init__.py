"""Text from a model for programs that speak OpenAI's API, on the server of the live page."""
