"""Export of a program as a Python package of plain tensors and `torch.distributed` calls."""

from autopart.extras.code_export.export_package import export_module, export_plan

__all__ = ["export_module", "export_plan"]
