"""Values that outlive their process: `disk_cache` stores them, `keys` makes keys of executables, `sources` words for code."""
