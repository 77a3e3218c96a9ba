"""Long runs that draw faults at random, from a seed, and stop after a bounded time."""
