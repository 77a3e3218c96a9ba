"""Starting workers, and telling a started worker who it is."""
