"""The process group `phalanx`: as a c10d backend, and directly for the reducer."""
