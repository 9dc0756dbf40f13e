"""Planted faults: what the conformance suite must catch, and the case that does.

Each mutant is the contract implementation with one mistake that a kernel or a layer was seen to make, or easily could.
A mutant is a function of the call's arguments by name and of ``run``, which calls the contract with some of them
replaced. ``caught_by`` names the case of the suite (without dtype) that fails, so a case that stops looking is noticed.
"""

from k3_core.testing.mutants import attn_res, kda, moe, state
from k3_core.testing.mutants.base import MUTANTS, Mutant, identity

__all__ = ["MUTANTS", "Mutant", "attn_res", "identity", "kda", "moe", "state"]
