"""What a server takes, and for how long it keeps what it made."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Counts, bytes and seconds; each is at least 1.

    Attributes:
        queue: jobs that wait; one more is refused with 429.
        prompt_characters: of prompt and negative prompt each.
        body_bytes: of one request.
        images: of one request (`n`).
        steps: denoising steps of one job.
        side, frames: of one output, where any size is taken.
        kept_seconds, kept_bytes, kept_jobs: finished jobs and their files beyond these go, the oldest first.
        connections: open at once; one more gets 503.
    """

    queue: int = 64
    prompt_characters: int = 4000
    body_bytes: int = 16 * 2**20
    images: int = 4
    steps: int = 200
    side: int = 4096
    frames: int = 1000
    kept_seconds: int = 3600
    kept_bytes: int = 4 * 2**30
    kept_jobs: int = 1000
    connections: int = 512

    def __post_init__(self):
        for name, value in vars(self).items():
            if value < 1:
                raise ValueError(f"expected the limit {name} to be at least 1, got {value}")
