"""The collectives of one host, made of steps and of memory that all ranks see."""
