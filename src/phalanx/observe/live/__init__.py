"""What a run does now: told by its ranks while they train, and what can be seen of a script that tells nothing."""
