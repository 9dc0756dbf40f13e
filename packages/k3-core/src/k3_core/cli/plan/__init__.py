"""`k3 plan`: memory by part, what fits, which topologies, and the command lines to start them."""

from k3_core.cli.plan.command import plan

__all__ = ["plan"]
