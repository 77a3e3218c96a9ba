"""The optimizers that must be bit-equal to local training, with the settings of torch's own test first."""

from __future__ import annotations

from typing import Any

from torch import optim

CASES: list[tuple[type[optim.Optimizer], dict[str, Any]]] = [
    (optim.Adagrad, {"lr": 0.05}),
    (optim.Adam, {"lr": 1e-2, "amsgrad": True}),
    (optim.AdamW, {"lr": 0.05, "amsgrad": True}),
    (optim.SGD, {"lr": 0.05}),
    (optim.SGD, {"lr": 1e-3, "momentum": 1, "weight_decay": 1, "nesterov": True}),
    (optim.Adadelta, {"rho": 0.95}),
    (optim.RMSprop, {"lr": 0.05}),
    (optim.Adamax, {"lr": 0.05}),
    (optim.Rprop, {"lr": 0.05}),
    (optim.NAdam, {"lr": 0.05, "weight_decay": 0.1}),
    (optim.RAdam, {"lr": 0.05}),
    (optim.ASGD, {"lr": 0.05, "t0": 2}),
    (optim.SGD, {"lr": 0.05, "maximize": True}),
    (optim.RMSprop, {"lr": 0.05, "momentum": 0.9, "centered": True}),
    (optim.Adam, {"lr": 1e-2, "weight_decay": 0.1, "foreach": True}),
    (optim.Adafactor, {"lr": 1e-2}),
]


def label(case: tuple[type[optim.Optimizer], dict[str, Any]]) -> str:
    kind, settings = case
    return "-".join([kind.__name__, *(f"{key}={value}" for key, value in settings.items())])
