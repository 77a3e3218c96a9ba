"""How the launchers of several hosts meet: a secret first, then plain values; nothing here is ever unpickled."""
