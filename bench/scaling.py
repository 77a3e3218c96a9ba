"""How does the cost of a step grow with ranks and with the size of the model?

1, 2, 4 and 8 ranks of the small GPT, each with one compute thread, and eight-layer perceptrons from 0.13 to 34
million parameters on two ranks; phalanx on shared memory beside torch on gloo, interleaved. Ranks beyond the number
of cores share them: what is seen there is how both sides behave when they have to wait for a core.
"""

from __future__ import annotations

import torch.distributed as dist

from bench.ddp import OURS_GLOO, OURS_SHM, TORCH, time_on_ranks
from bench.measure import ratio
from bench.models import SIZES
from bench.table import Result, Row, options, present

RANKS = (1, 2, 4, 8)


def compare(case: str, world: int, num_rounds: int) -> Row:
    """One row: the step of `case` on `world` ranks."""
    ours = OURS_SHM if "phalanx" in dist.Backend.backend_list else OURS_GLOO
    ms, agree = time_on_ranks(world, [TORCH, ours], case=case, num_rounds=num_rounds, bucket_view=False)
    found = ratio(ms[ours], ms[TORCH])
    return Row(
        f"{case} on {world} rank{'s' if world > 1 else ''}",
        ms[ours].median,
        ms[TORCH].median,
        found.median,
        found.low,
        found.high,
        target=1.0,
        note="" if agree else "parameters differ",
    )


def main() -> None:
    parsed = options("cost by ranks and by model size").parse_args()
    rounds = 3 if parsed.quick else 9
    result = Result("scaling", __doc__.splitlines()[0], "phalanx", TORCH)
    result.rows += [compare("gpt-5m", world, rounds) for world in (RANKS[:2] if parsed.quick else RANKS)]
    result.rows += [compare(name, 2, rounds) for name in (list(SIZES)[:1] if parsed.quick else SIZES)]
    present(result, parsed)


if __name__ == "__main__":
    main()
