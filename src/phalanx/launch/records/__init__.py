"""Run directories from outside: which runs there are, and what a running one says of itself."""
