"""What people start: the command line, the server, many prompts, a run in stages, the self-check."""
