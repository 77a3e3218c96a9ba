"""The other backends of a phalanx group: gloo for what is not accelerated, and those of other devices."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ...errors import ConfigError
from ..failure.cuttable import CuttableGloo

_CPU = torch.device("cpu")

# Backends that torch itself brings for a kind of device, by name, and their classes, which a build may lack.
_OWN = {"nccl": "ProcessGroupNCCL", "xccl": "ProcessGroupXCCL"}

# A c10d backend object; the class is private to torch's C extension.
Backend = Any


class DeviceBackends:
    """A group's backends by type of device. gloo is made at once, the others when first used.

    gloo has to be: two ranks may use it for a message between them, and it takes all to make it.
    """

    def __init__(
        self, group: dist.ProcessGroup, store: dist.Store, rank: int, world: int, timeout: timedelta
    ) -> None:
        self._group = weakref.ref(group)
        self._store = store
        self._rank = rank
        self._world = world
        self._cuttable = CuttableGloo(dist.PrefixStore("gloo", store), rank, world, timeout)
        self.gloo = self._cuttable.backend
        self._made: dict[str, Backend] = {"cpu": self.gloo}
        # For calls that reach the group from C++ under a name that Python cannot override.
        group._register_backend(_CPU, dist.ProcessGroup.BackendType.GLOO, self.gloo)
        group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        self.gloo._set_sequence_number_for_group()

    @property
    def timeout(self) -> timedelta:
        """The group's time limit. gloo keeps it, since c10d changes it there."""
        limit: timedelta = self.gloo.options._timeout
        return limit

    def set_timeout(self, timeout: timedelta) -> None:
        """Change the time limit."""
        for backend in self._made.values():
            backend.set_timeout(timeout)

    def of(self, tensors: Sequence[torch.Tensor]) -> Backend:
        """The backend for these tensors."""
        return self.of_device(tensors[0].device) if tensors else self.gloo

    def has(self, device: torch.device) -> bool:
        """Whether the group was configured with a backend of its own for this device."""
        return device.type != "cpu" and device.type in self._configured()

    def of_device(self, device: torch.device) -> Backend:
        """The backend for tensors of `device`; every rank of the group asks, if one does."""
        backend = self._made.get(device.type)
        if backend is None:
            backend = self._made[device.type] = self._make(device)
        return backend

    def abort(self) -> None:
        """Make every collective under way raise."""
        self._cuttable.cut()
        for backend in self._made.values():
            backend.abort()

    def shutdown(self) -> None:
        """Close every connection."""
        self._cuttable.cut()
        for backend in self._made.values():
            backend.shutdown()

    def _configured(self) -> dict[str, str]:
        # Asked of c10d when needed: it tells a backend's creator nothing of the other devices.
        group = self._group()
        config = dist.get_backend_config(group) if group is not None else ""
        return dict(part.split(":", 1) for part in config.split(",") if ":" in part)

    def _make(self, device: torch.device) -> Backend:
        name = self._configured().get(device.type, "gloo")
        store = dist.PrefixStore(f"{device.type}/{name}", self._store)
        if name == "gloo":
            return self.gloo
        if name in _OWN and hasattr(dist, _OWN[name]):
            made = getattr(dist, _OWN[name])
            options = made.Options()
            options._timeout = self.timeout
            backend = made(store, self._rank, self._world, options)
            kind = getattr(dist.ProcessGroup.BackendType, name.upper())
        elif (plugin := dist.Backend._plugins.get(name.upper())) is not None and not plugin.extended_api:
            # As c10d makes those that others have registered: a table of its own, and the only way to one by name.
            backend = plugin.creator_fn(store, self._rank, self._world, self.timeout)
            kind = dist.ProcessGroup.BackendType.CUSTOM
        else:
            raise ConfigError(
                f"rank {self._rank}: no backend {name!r} for {device.type} tensors beside phalanx. "
                f"Use cpu:phalanx,{device.type}:gloo, or make a group of its own for {device.type}."
            )
        group = self._group()
        # A whole group in place of a backend serves our own calls, which do not pass through c10d's table.
        if group is not None and not isinstance(backend, dist.ProcessGroup):
            group._register_backend(device, kind, backend)
        return backend
