"""Whether all ranks wrapped the same model, asked before any data moves.

Ranks compare digests; only when they differ do they exchange the whole description, to name the first
parameter that is different and the ranks that have it. Raises on every rank, or on none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from ..comm.collectives import Collectives
from ..comm.crossed import refuse_crossed
from ..comm.ranks import Ranks
from ..errors import MismatchError
from ..plan import BucketPlan

_COUNT_BYTES = 8


def device_for(group: dist.ProcessGroup, device: torch.device) -> torch.device:
    """Where messages of this group can be: on the CPU if it serves that, else on `device`, the parameters'.

    Not on a device without a number, which is the current one: where nobody has set it, all ranks would meet on the first.
    """
    types = {served.type for served in group._device_types}
    return torch.device("cpu") if "cpu" in types or not types else device


def _describe(spec: dict[str, Any] | None) -> str:
    if spec is None:
        return "no such parameter"
    layout = f"shape {spec['shape']}, {spec['dtype']}, stride {spec['stride']}"
    kinds = "".join(f", {kind}" for kind in ("sparse", "delayed") if spec[kind])
    return f"'{spec['name']}' ({layout}{kinds})"


def _first_difference(plans: list[dict[str, Any]], ranks: Ranks) -> str:
    me, first, mine = ranks.me, ranks.numbers[0], plans[0]
    for other, plan in zip(ranks.numbers, plans, strict=True):
        if plan == mine:
            continue
        ours, theirs = mine["specs"], plan["specs"]
        for index in range(max(len(ours), len(theirs))):
            left = ours[index] if index < len(ours) else None
            right = theirs[index] if index < len(theirs) else None
            if left != right:
                return (
                    f"{me}: DDP expects same model across all ranks, but the models of the ranks differ. "
                    f"Parameter {index}: rank {first} has {_describe(left)}, rank {other} has {_describe(right)} "
                    f"({len(ours)} and {len(theirs)} trainable parameters). "
                    "Wrap the same model, with parameters in the same order, on every rank."
                )
        return (
            f"{me}: the ranks' plans differ though their parameters are the same: rank {first} has bucket caps "
            f"{mine['caps_bytes']}, rank {other} has {plan['caps_bytes']}. Give every rank the same bucket_cap_mb."
        )
    return f"{me}: the ranks' settings differ. Give every rank the same arguments."


def _gather_texts(text: str, collectives: Collectives, device: torch.device) -> list[str]:
    """Every rank's text. By our own verbs: torch's gathering of objects knows only groups that it made."""
    mine = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    sizes = torch.empty(collectives.world, dtype=torch.int64, device=device)
    size = torch.tensor([mine.numel()], device=device)
    collectives.wait(collectives.all_gather(sizes, size), "comparing the models of the ranks")
    padded = torch.zeros(int(sizes.max()), dtype=torch.uint8, device="cpu")
    padded[: mine.numel()] = mine
    everyone = torch.empty(collectives.world * padded.numel(), dtype=torch.uint8, device=device)
    collectives.wait(collectives.all_gather(everyone, padded.to(device)), "comparing the models of the ranks")
    rows = everyone.cpu().view(collectives.world, -1)
    return [bytes(row[:length].tolist()).decode() for row, length in zip(rows, sizes.tolist(), strict=True)]


def agree_on_arguments(collectives: Collectives, words: Mapping[str, str]) -> None:
    """Raise MismatchError on every rank unless all wrap on the same group, with the same arguments."""
    refuse_crossed(collectives, "a DistributedDataParallel")
    collectives.agree("the arguments of DistributedDataParallel", words)


def verify_same(
    plan: BucketPlan, settings: str, collectives: Collectives, count: int, device: torch.device
) -> int:
    """Raise MismatchError on every rank unless all have the same plan and the same `settings`.

    `device` is that of the parameters. Returns the largest `count` of any rank.
    """
    told = count.to_bytes(_COUNT_BYTES, "big") + bytes.fromhex(plan.hash) + settings.encode().ljust(96)[:96]
    mine = torch.frombuffer(bytearray(told), dtype=torch.uint8)
    device = device_for(collectives.group, device)
    mine = mine.to(device)
    everyone = torch.empty(collectives.world * mine.numel(), dtype=torch.uint8, device=device)
    collectives.wait(collectives.all_gather(everyone, mine), "comparing the models of the ranks")
    counts, rows = everyone.view(collectives.world, -1).split([_COUNT_BYTES, mine.numel() - _COUNT_BYTES], dim=1)
    if bool((rows == rows[0]).all()):
        return max(int.from_bytes(bytes(row), "big") for row in counts.tolist())
    values = [json.loads(text) for text in _gather_texts(json.dumps(plan.to_json()), collectives, device)]
    if all(value == values[0] for value in values):
        said = [bytes(row[32:].tolist()).decode().strip() for row in rows.cpu()]
        table = "; ".join(f"rank {rank}: {words}" for rank, words in zip(collectives.ranks.numbers, said, strict=True))
        raise MismatchError(
            f"{collectives.me}: the ranks wrapped the same model with different settings ({table}). "
            "Give every rank the same arguments."
        )
    raise MismatchError(_first_difference(values, collectives.ranks))
