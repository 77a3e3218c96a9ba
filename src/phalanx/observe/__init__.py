"""OBSERVE: what a run did, recorded while it trains (`trace`) and shown afterwards (`report`)."""
