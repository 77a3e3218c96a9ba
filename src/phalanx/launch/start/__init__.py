"""How a worker becomes a process: started plainly, or forked from one that has torch imported already."""
