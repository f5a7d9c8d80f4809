"""What became of an idiom that has no meaning on a TPU: said once, at a level that shows by default."""

import functools

from ..utils import logging


logger = logging.get_logger(__name__)


@functools.cache
def once(message: str):
    """Warn with this message, the first time that it is asked for."""
    logger.warning(message)
