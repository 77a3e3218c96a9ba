"""Benchmarks beside torch's own classes. One question a file; run one with `phalanx bench NAME`."""
