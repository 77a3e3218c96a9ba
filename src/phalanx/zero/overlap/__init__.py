"""Reducing, stepping and gathering during the backward pass of DistributedDataParallel."""
