"""Watching the workers of one host: what is decided when one ends (pure), and the processes it is decided about."""
