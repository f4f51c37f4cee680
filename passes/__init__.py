"""Make a plan and rewrite a graph by it.

Programs are written in operators of autopart's own (`torch.ops.autopart`), which the runtime defines: they are there
before any pass is.
"""

from autopart.runtime.comm import collectives

__all__ = ["collectives"]
