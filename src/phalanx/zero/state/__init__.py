"""The optimizer's state: held by its owners, moved to other owners, loaded and saved."""
