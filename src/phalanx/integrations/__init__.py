"""Phalanx under other people's training loops. Each module here needs its framework, and nothing imports it unasked.

    lightning     strategies for Trainer and Fabric, registered as "phalanx"
    huggingface   Accelerate and the Transformers Trainer
    ray           Ray Train's TorchTrainer

What was tried, with versions and results: docs/integrations.md.
"""
