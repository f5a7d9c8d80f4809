"""A file of prompts to a directory of outputs: resumable, by any number of processes, exactly one output a prompt.

Nothing is decided by a clock: a prompt belongs to the process that holds its lock, and the system takes the lock from a process
that dies. What is done is what has a record, and a record is written when its files have their names.
"""
