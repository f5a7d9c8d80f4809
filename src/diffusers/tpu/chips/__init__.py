"""Which chips there are and every figure of a chip; mesh and sharding specs; several hosts; the lock around launches."""
