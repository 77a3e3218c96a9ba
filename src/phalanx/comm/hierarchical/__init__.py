"""Groups over several hosts: shared memory inside each, one lead per host between them."""
