"""DECIDE: which gradients travel together, in which order, and which rank owns what.

Pure values and functions: no process group, no threads, no I/O.
"""

from .buckets import Bucket, BucketCaps, BucketPlan, Slot, build_plan, plan_of, replan
from .params import ParamSpec, specs_of

__all__ = ["Bucket", "BucketCaps", "BucketPlan", "ParamSpec", "Slot", "build_plan", "plan_of", "replan", "specs_of"]
