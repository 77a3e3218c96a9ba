"""Workers that come and go: who trains together, and how they are told."""
