"""Memory that training uses: of the C library, in pages of its own, and shared between processes."""
