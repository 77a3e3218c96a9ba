"""All mutations, area by area: small mistakes of the kind that people make, each of which must be caught."""

from __future__ import annotations

from tests.mutants import (
    of_checkpoint,
    of_data,
    of_doors,
    of_elastic,
    of_engagement,
    of_failures,
    of_features,
    of_hosts,
    of_order,
    of_passes,
    of_slots,
    of_survival,
    of_undoing,
    of_zero,
)
from tests.mutants.mutation import Mutation

MUTATIONS: tuple[Mutation, ...] = (
    *of_slots.MUTATIONS,
    *of_passes.MUTATIONS,
    *of_order.MUTATIONS,
    *of_features.MUTATIONS,
    *of_zero.MUTATIONS,
    *of_engagement.MUTATIONS,
    *of_checkpoint.MUTATIONS,
    *of_data.MUTATIONS,
    *of_elastic.MUTATIONS,
    *of_survival.MUTATIONS,
    *of_undoing.MUTATIONS,
    *of_hosts.MUTATIONS,
    *of_failures.MUTATIONS,
    *of_doors.MUTATIONS,
)
