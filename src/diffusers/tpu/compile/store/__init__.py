"""Values that outlive their process: `disk_cache` keeps them, `keys` names executables, `describing` writes keys as stable strings."""
