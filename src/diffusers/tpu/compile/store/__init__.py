"""Programs that outlive their process: `describing` says by which words they are found again, `files` keeps them."""

from .describing import NotPortable, StableKey, ours_in_words, sources_in_words
from .files import Key, Store, store_here


__all__ = ["Key", "NotPortable", "Store", "StableKey", "ours_in_words", "sources_in_words", "store_here"]
