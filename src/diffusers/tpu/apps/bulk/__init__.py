"""Makes a directory of outputs from a file of prompts: resumable, by any number of processes, exactly one output per prompt.

No timeouts decide: a prompt belongs to the process that holds its lock, and the system releases the locks of a process that dies.
A prompt is done if it has a record, which is written after its files have their names.
"""
