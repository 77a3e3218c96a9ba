"""Makes `init_process_group("phalanx")` work in programs that import no phalanx.

Torch calls `autoload` at the end of its own import (entry point group "torch.backends"). A module of its own: importing the
package here would import all of it into every program that imports torch.
"""

from __future__ import annotations

from typing import Any


def autoload() -> None:
    """Tell c10d that there is a backend "phalanx". Whatever goes wrong must not keep torch from being imported."""
    try:
        import torch.distributed as dist

        if dist.is_available() and not hasattr(dist.Backend, "PHALANX"):
            dist.Backend.register_backend("phalanx", _create, extended_api=True, devices=["cpu"])
    except Exception:  # a torch of another kind: then `import phalanx` registers it, or says why not
        return


def _create(options: Any, backend_options: Any) -> Any:
    """The first group is asked for: now the package is needed."""
    from phalanx.comm.group.process_group import create

    return create(options, backend_options)
