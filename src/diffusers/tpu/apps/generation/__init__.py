"""Pictures from prompts, for commands and the server: arguments of a pipeline, several requests in one call, results as files."""
