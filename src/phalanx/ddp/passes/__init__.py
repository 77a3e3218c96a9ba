"""One backward that is reduced. Read `arming` (which one is), `backward` (its life, and what happens in it)."""
