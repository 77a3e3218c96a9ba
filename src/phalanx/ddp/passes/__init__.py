"""One backward that is reduced. Read `state` (its life), `arming` (which one is), `flight` (what happens in it)."""
