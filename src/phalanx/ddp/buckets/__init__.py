"""What travels. Read `slot` (the life of a gradient), `bucket` (its data), `memory` (whose it is), `tail` (what is said)."""
