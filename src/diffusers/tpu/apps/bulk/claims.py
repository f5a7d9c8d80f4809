"""Who works on which prompt: byte n of one file, locked by the process that has prompt n (POSIX record locks).

They work between processes of one machine and over NFS. Within one process they exclude nobody, and closing the file anywhere in
it gives all of them back: one `Claims` a process and directory.
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
        """Whether this process has the prompt now; False while another one has it."""
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise
            return False
        return True

    def wait(self, place: int):
        """Take the prompt when the process that has it gives it back, or dies."""
        fcntl.lockf(self._file, fcntl.LOCK_EX, 1, place)

    def give_back(self, place: int):
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, place)
