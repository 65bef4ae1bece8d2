"""Text generation from a trained model, behind an HTTP API in OpenAI's form; start reading at `endpoint.py`."""
