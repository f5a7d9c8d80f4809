"""Locks on prompts: the process that works on prompt n locks byte n of one file (POSIX record locks).

The locks work between processes of one machine and over NFS. They do not exclude threads of one process, and closing the file
anywhere in a process releases all of its locks. So a process has one `Claims` per directory.
"""

import errno
import fcntl
import os
from pathlib import Path


class Claims:
    """The locks of this process on one directory's prompts."""

    def __init__(self, directory: Path):
        self._file = os.open(directory / ".claims", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)

    def take(self, place: int) -> bool:
        """Lock the prompt; False if another process holds its lock."""
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise
            return False
        return True

    def wait(self, place: int):
        """Block until the process that holds the prompt's lock releases it or dies, then lock the prompt."""
        fcntl.lockf(self._file, fcntl.LOCK_EX, 1, place)

    def give_back(self, place: int):
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, place)
