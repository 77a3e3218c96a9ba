"""What travels. Read `slot` (the life of a gradient), `bucket` (its progress and its memory), `tail` (what is said)."""
