"""Prompts to pictures, whoever asks: requests as arguments of a pipeline, several in one call, the answers as files."""
