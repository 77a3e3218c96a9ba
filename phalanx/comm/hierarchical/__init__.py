"""Groups over several hosts: shared memory inside each, one lead a host between them."""
