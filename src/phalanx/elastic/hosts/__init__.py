"""A state that is spread over several hosts: mirrors of it, and how whoever is left puts it together again."""
